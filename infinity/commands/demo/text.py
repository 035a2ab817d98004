"""The demo's text: the sources of Python's standard library, real text that is present on every machine."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

TEXT_BYTES_MAX = 16 * 1024 * 1024
NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


def standard_library_text() -> Tensor:
    """Every module of the standard library in path order, as 1-D uint8; at most ``TEXT_BYTES_MAX`` bytes.

    Raises FileNotFoundError where Python is installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if NOT_SOURCES.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= TEXT_BYTES_MAX:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources under {root}: the demo trains on the standard library's text")
    return torch.frombuffer(text[:TEXT_BYTES_MAX], dtype=torch.uint8)


def unigram_entropy_nats(text: Tensor) -> float:
    """The loss of the best model that ignores context: the entropy of the bytes' frequencies, in nats."""
    counts = torch.bincount(text.int(), minlength=256).double()
    frequencies = counts[counts > 0] / counts.sum()
    return -float((frequencies * frequencies.log()).sum())


def windows(text: Tensor, *, batch: int, sequence: int, seed: int) -> Iterator[Tensor]:
    """Endless random ``(batch, sequence + 1)`` int64 windows of the text, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(sequence + 1, device="cpu")
    while True:
        starts = torch.randint(len(text) - sequence, (batch, 1), generator=generator, device="cpu")
        yield text[starts + offsets].long()
