"""A Llama-like decoder of about as many parameters as asked for: the shape that ``infinity trace`` assumes.

Published shapes of Llama 2 and 3 give the width for a size; the depth follows from the number of parameters. The
feed-forward part is 3.5 times as wide as the model, there are 8 key-value heads of 128 (fewer in narrow models), and
embedding and head are not tied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

from infinity.errors import ConfigError

HEAD_NUMEL: Final = 128
KV_HEADS_MAX: Final = 8
DEEP_LAYERS: Final = 16
DEPTH_STEP: Final = 4
"""Above ``DEEP_LAYERS``, depths are multiples of this, as those published are."""
WIDTHS: Final = (
    (300e6, 1024, 32_000),
    (2e9, 2048, 32_000),
    (5e9, 3072, 128_256),
    (10e9, 4096, 128_256),
    (25e9, 5120, 128_256),
    (50e9, 6144, 128_256),
    (150e9, 8192, 128_256),
    (300e9, 12_288, 128_256),
    (2e12, 16_384, 128_256),
)
"""(parameters up to, width, vocabulary)."""


@dataclass(frozen=True, kw_only=True)
class StandardShape:
    d_model: int
    num_layers: int
    vocabulary: int

    @property
    def num_heads(self) -> int:
        return self.d_model // HEAD_NUMEL

    @property
    def num_kv_heads(self) -> int:
        return min(KV_HEADS_MAX, self.num_heads)

    @property
    def d_feed_forward(self) -> int:
        return self.d_model * 7 // 2

    @property
    def layer_numel(self) -> int:
        d = self.d_model
        return 2 * d * d + 2 * d * self.num_kv_heads * HEAD_NUMEL + 3 * d * self.d_feed_forward + 2 * d

    @property
    def numel(self) -> int:
        return self.num_layers * self.layer_numel + 2 * self.vocabulary * self.d_model + self.d_model


def standard_shape(num_params: int) -> StandardShape:
    """The shape whose number of parameters comes close. Raises ConfigError beyond the table."""
    fitting = next(((d, v) for limit, d, v in WIDTHS if num_params <= limit), None)
    if fitting is None:
        raise ConfigError("model_params", num_params, f"is above {WIDTHS[-1][0]:.0e}: no shape is known")
    d_model, vocabulary = fitting
    one = StandardShape(d_model=d_model, num_layers=1, vocabulary=vocabulary)
    rest = num_params - 2 * vocabulary * d_model - d_model
    num_layers = round(rest / one.layer_numel)
    if num_layers > DEEP_LAYERS:
        num_layers = DEPTH_STEP * round(rest / one.layer_numel / DEPTH_STEP)
    if num_layers < 1:
        raise ConfigError("model_params", num_params, f"a single layer has {one.numel} parameters: ask for as many")
    return StandardShape(d_model=d_model, num_layers=num_layers, vocabulary=vocabulary)


def standard_model(shape: StandardShape) -> nn.Module:
    """``(batch, sequence + 1)`` int64 tokens in, mean cross entropy (fp32 scalar) out. On the default device."""
    return Decoder(shape)


class Layer(nn.Module):
    def __init__(self, shape: StandardShape) -> None:
        super().__init__()
        d, d_kv, d_wide = shape.d_model, shape.num_kv_heads * HEAD_NUMEL, shape.d_feed_forward
        self.norm_attention = nn.RMSNorm(d)
        self.query = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d_kv, bias=False)
        self.value = nn.Linear(d, d_kv, bias=False)
        self.project = nn.Linear(d, d, bias=False)
        self.norm_feed_forward = nn.RMSNorm(d)
        self.gate = nn.Linear(d, d_wide, bias=False)
        self.expand = nn.Linear(d, d_wide, bias=False)
        self.contract = nn.Linear(d_wide, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, d = x.shape
        normed = self.norm_attention(x)
        query, key, value = (
            part(normed).view(batch, sequence, -1, HEAD_NUMEL).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, sequence, d))
        normed = self.norm_feed_forward(x)
        out: Tensor = x + self.contract(F.silu(self.gate(normed)) * self.expand(normed))
        return out


class Decoder(nn.Module):
    def __init__(self, shape: StandardShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.d_model)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.d_model)
        self.head = nn.Linear(shape.d_model, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
