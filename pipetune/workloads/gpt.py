"""A decoder-only transformer for token ids (Radford et al. 2019), with torch's own causal attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

_DEVIATION = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSize:
    """How deep and wide a model is; `width` is that of the residual stream, a multiple of `heads`."""

    layers: int
    heads: int
    width: int


SIZES: Mapping[str, GptSize] = MappingProxyType(
    {
        "nano": GptSize(layers=3, heads=3, width=48),
        "small": GptSize(layers=12, heads=12, width=768),
    }
)
"""Sizes by name; `small` has 124 million parameters with 50,304 ids and 1,024 positions."""


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised before and added after: [n, t, width] -> the same."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map the residual stream through one layer."""
        x = x + self._attend(self.attention_norm(x))
        mixed: Tensor = x + self.feed_forward(x)
        return mixed

    def _attend(self, x: Tensor) -> Tensor:
        samples, positions, width = x.shape
        shaped = self.query_key_value(x).view(samples, positions, 3, self.heads, width // self.heads)
        query, key, value = shaped.permute(2, 0, 3, 1, 4).unbind(0)  # each [n, heads, t, width / heads]
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(attended.transpose(1, 2).reshape(samples, positions, width))
        return out


class Gpt(nn.Module):
    """Language model: int64 ids [n, t], t up to block_size -> logits [n, t, vocabulary].

    The embedding is also the output layer.
    """

    def __init__(self, size: GptSize, *, vocabulary: int, block_size: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, size.width)
        self.position_embedding = nn.Embedding(block_size, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.apply(_initialise)
        for block in self.blocks.children():
            _shrink_residuals(block, size.layers)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the id that follows each position."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        return functional.linear(self.norm(self.blocks(x)), self.token_embedding.weight)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_DEVIATION)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _shrink_residuals(block: nn.Module, layers: int) -> None:
    """Scale what a layer adds by 1 / sqrt(2 layers), so that the stream keeps its size through the depth."""
    for name, parameter in block.named_parameters():
        if name in {"attention_out.weight", "feed_forward.3.weight"}:
            nn.init.normal_(parameter, std=_DEVIATION / (2 * layers) ** 0.5)
