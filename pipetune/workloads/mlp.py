"""A plain multi-layer perceptron."""

from torch import nn


def make_mlp(*, inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    """Return `layers` hidden layers of `width` units: float [n, inputs] -> [n, outputs]."""
    modules: list[nn.Module] = []
    for layer in range(layers):
        modules += [nn.Linear(inputs if layer == 0 else width, width), nn.ReLU(inplace=True)]
    return nn.Sequential(*modules, nn.Linear(width, outputs))
