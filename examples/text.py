"""What the examples train: a model of 0.1 million parameters, on Python's own documentation, byte by byte.

    python examples/text.py DIRECTORY

makes the model's directory, as ``save_pretrained`` writes it.
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

LENGTH = 64


class Text(Dataset):
    """Pieces of ``LENGTH`` bytes, each of which is a token."""

    def __init__(self, first: int, stop: int) -> None:
        text = "".join(topics[name] for name in sorted(topics)).encode()
        self.rows = torch.tensor(list(text[first * LENGTH : stop * LENGTH])).view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2 * LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )


if __name__ == "__main__":
    set_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(sys.argv[1])
