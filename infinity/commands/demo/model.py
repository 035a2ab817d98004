"""The demo's model: a byte-level GPT of a little over 100M parameters, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""One token a byte."""


class Linear(nn.Linear):
    """A matrix without bias, initialised inside its own constructor, as sharding at construction asks for."""

    def __init__(self, in_features: int, out_features: int, *, std: float = 0.02) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """Initialised like ``Linear``. Rows of unit variance: next to them a first update of any layer is small."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float = 1.0) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


RESIDUAL_STD = 0.005
"""The spread of the matrices that write to the residual stream."""


class Attention(nn.Module):
    """Causal self-attention, ``(batch, sequence, d)`` to the same shape."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(d_model, 3 * d_model)
        self.out = Linear(d_model, d_model, std=RESIDUAL_STD)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention and a four times wider MLP, each on a normalised residual stream."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, num_heads)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            Linear(d_model, 4 * d_model), nn.GELU(), Linear(4 * d_model, d_model, std=RESIDUAL_STD)
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.attention(self.attention_norm(x))
        out: Tensor = mixed + self.mlp(self.mlp_norm(mixed))
        return out


class ByteGPT(nn.Module):
    """``(batch, sequence + 1)`` bytes as int64 in, mean next-byte cross entropy in nats (fp32 scalar) out."""

    def __init__(self, *, d_model: int = 1024, num_layers: int = 8, num_heads: int = 16, sequence: int = 128) -> None:
        super().__init__()
        self.tokens = Embedding(VOCABULARY, d_model)
        self.positions = Embedding(sequence, d_model, std=0.25)
        self.layers = nn.ModuleList(Layer(d_model, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = Linear(d_model, VOCABULARY)

    def forward(self, window: Tensor) -> Tensor:
        inputs, targets = window[:, :-1], window[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
