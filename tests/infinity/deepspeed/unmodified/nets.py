"""Small models, their data and what is compared of them."""

# mypy: ignore-errors
from __future__ import annotations

import os
import time
from typing import Any

import deepspeed
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

LENGTH, VOCABULARY = 16, 64


class Rows(Dataset):
    """Random tokens; ``ragged``: of several lengths."""

    def __init__(self, count: int = 16, *, ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(4, LENGTH + 1, (count,), generator=generator).tolist()
        self.rows = [
            torch.randint(1, VOCABULARY, (length if ragged else LENGTH,), generator=generator) for length in lengths
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


def llama_config(**others: Any) -> LlamaConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
    return LlamaConfig(**{**sizes, **heads, "attention_dropout": 0.0, **others})


def saved_llama(directory: str = "model", **others: Any) -> str:
    """A directory, as save_pretrained writes it."""
    set_seed(0)
    return saved(LlamaForCausalLM(llama_config(**others)), directory)


def saved(model: Any, directory: str, **options: Any) -> str:
    """The model in a directory, whole, which rank 0 writes. Nothing connects the ranks before they load it."""
    if os.environ["RANK"] == "0" and not os.path.exists(directory):
        model.save_pretrained(f"{directory}.new", **options)
        os.rename(f"{directory}.new", directory)
    until = time.monotonic() + 60
    while not os.path.exists(directory) and time.monotonic() < until:
        time.sleep(0.01)
    return directory


def read(path: str) -> dict[str, torch.Tensor]:
    """What rank 0 has saved."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return load_file(path)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All of them, whole; also of an engine's module."""
    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            found[name] = param.detach().clone()
    return found
