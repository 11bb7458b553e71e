"""Residual networks for images (He et al. 2015), of selectable depth and width."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

BLOCKS: Mapping[int, tuple[int, int, int, int]] = MappingProxyType(
    {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
)
"""Depth -> residual blocks in each of the four stages; 50 has bottleneck blocks, the others basic ones."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: [n, inputs, h, w] -> [n, width, h/stride, w/stride]."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, width, kernel=3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(width, width, kernel=3),
        )
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map one feature map to the next."""
        total: Tensor = self.body(x) + self.shortcut(x)
        return torch.relu_(total)


class BottleneckBlock(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: [n, inputs, h, w] -> [n, 4 width, h/stride, w/stride].

    The stride is in the 3x3 convolution, which loses less than striding in the first 1x1.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, width, kernel=1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, kernel=3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(width, width * self.expansion, kernel=1),
        )
        self.shortcut = _shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map one feature map to the next."""
        total: Tensor = self.body(x) + self.shortcut(x)
        return torch.relu_(total)


class ResNet(nn.Module):
    """Image classifier: float [n, 3, h, w] -> logits [n, classes].

    `small_stem` is the stem for images of about 32 pixels: one 3x3 convolution that keeps the size.
    """

    def __init__(self, *, depth: int, classes: int, width: int = 64, small_stem: bool = False) -> None:
        super().__init__()
        block = BottleneckBlock if depth >= 50 else BasicBlock
        channels = width
        stages: list[nn.Module] = []
        for stage, blocks in enumerate(BLOCKS[depth]):
            stage_width = width * 2**stage
            for position in range(blocks):
                stride = 2 if stage > 0 and position == 0 else 1
                stages.append(block(channels, stage_width, stride))
                channels = stage_width * block.expansion
        self.stem = _small_stem(width) if small_stem else _large_stem(width)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        features: Tensor = self.stages(self.stem(images))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def _convolution(inputs: int, outputs: int, *, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution that keeps the size at stride 1, and its batch norm, which has the bias."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(*_convolution(inputs, outputs, kernel=1, stride=stride))


def _large_stem(width: int) -> nn.Module:
    return nn.Sequential(
        *_convolution(3, width, kernel=7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def _small_stem(width: int) -> nn.Module:
    return nn.Sequential(*_convolution(3, width, kernel=3), nn.ReLU(inplace=True))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
