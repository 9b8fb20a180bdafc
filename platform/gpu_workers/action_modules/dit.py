"""The diffusion transformer of GR00T-style heads: action tokens that look at the backbone.

Blocks alternate (even: cross-attention to the backbone's hidden states, odd: self-attention) and
are modulated by the noise level: AdaLN, attention, feed-forward with 4 x width (StarVLA's
`cross_attention_dit`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

TIME_WIDTH = 256


def sinusoid(positions: Tensor, width: int) -> Tensor:
    """Cosines, then sines, of `positions` (B,) at `width` / 2 frequencies 10000^(-2 i / width)."""
    half = width // 2
    frequency = torch.exp(
        torch.arange(half, device=positions.device, dtype=torch.float32)
        * (-math.log(10000.0) / half)
    )
    angle = positions.float()[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class Attention(nn.Module):
    """Multi-head attention of (B, Q, W) over (B, K, C), with bias; self-attention where C = W."""

    def __init__(self, width: int, context_width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(context_width, width)
        self.value = nn.Linear(context_width, width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` (B, K) is true where the context holds a token."""

        def heads(tensor: Tensor) -> Tensor:
            num, length, width = tensor.shape
            return tensor.view(num, length, self.num_heads, width // self.num_heads).transpose(1, 2)

        attended = functional.scaled_dot_product_attention(
            heads(self.query(x)),
            heads(self.key(context)),
            heads(self.value(context)),
            attn_mask=None if mask is None else mask[:, None, None, :],
        )
        result: Tensor = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return result


class Block(nn.Module):
    def __init__(
        self, width: int, context_width: int | None, num_heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.crosses = context_width is not None
        self.modulation = nn.Linear(width, 2 * width)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, context_width or width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, time: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        scale, shift = self.modulation(functional.silu(time))[:, None].chunk(2, dim=-1)
        normed = self.norm1(x) * (1 + scale) + shift
        if self.crosses:
            x = x + self.attention(normed, context, mask)
        else:
            x = x + self.attention(normed, normed, None)
        result: Tensor = x + self.ffn(self.norm2(x))
        return result


class DiT(nn.Module):
    """Tokens (B, Q, W) at noise level `bucket` (B,), context (B, L, D), to (B, Q, W)."""

    def __init__(
        self, width: int, context_width: int, num_layers: int, num_heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(TIME_WIDTH, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            [
                Block(width, context_width if layer % 2 == 0 else None, num_heads, dropout)
                for layer in range(num_layers)
            ]
        )
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bucket: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        time = self.time(sinusoid(bucket, TIME_WIDTH))
        for block in self.blocks:
            x = block(x, time, context, mask)
        shift, scale = self.modulation(functional.silu(time))[:, None].chunk(2, dim=-1)
        result: Tensor = self.out(self.norm(x) * (1 + scale) + shift)
        return result
