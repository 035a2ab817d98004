"""The weights of a checkpoint as files that others load, without an engine and a piece at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from infinity.checkpoint.manifest import BUFFER, DTYPES, WEIGHT, TensorEntry
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.files.entry import Entry
from infinity.files.export import Export
from infinity.files.pieces import pieces


class ExportedWeights:
    """What is exported of ``checkpoint``: parameters and lasting buffers. ``total_bytes``: of the files' tensors."""

    def __init__(self, checkpoint: StoredCheckpoint, dtype: torch.dtype, *, exclude_frozen: bool = False) -> None:
        """
        Args:
            dtype: of floating-point tensors; others keep theirs.
            exclude_frozen: leave out parameters that were not trained.
        """
        self._checkpoint = checkpoint
        self._tensors = [
            entry
            for entry in checkpoint.manifest.tensors
            if entry.persistent
            and _kind(entry)
            and not (exclude_frozen and WEIGHT in entry.kinds and not entry.trainable)
        ]
        self.entries = {each.name: _entry(each, dtype) for each in self._tensors}
        self.aliases = {alias: each.name for each in self._tensors for alias in each.aliases}
        self.total_bytes = sum(entry.nbytes for entry in self.entries.values())

    def in_memory(self) -> dict[str, torch.Tensor]:
        """Name -> tensor on the CPU; shared ones stand under each of their names."""
        found = {
            each.name: self._checkpoint.read_whole(each.name, _kind(each)).to(self.entries[each.name].dtype)
            for each in self._tensors
        }
        return found | {alias: found[name] for alias, name in self.aliases.items()}

    def write(
        self,
        out: str | os.PathLike[str],
        *,
        safe: bool,
        max_shard_bytes: int,
        file: str | None = None,
        tell: Callable[[int], None] = lambda _bytes: None,
    ) -> None:
        """Write and publish the files.

        Args:
            out: a directory, made where it is not there.
            safe: safetensors, else files of ``torch.save``.
            max_shard_bytes: of one file.
            file: what the one file is called, or the shards after.
            tell: called with the bytes of each piece that was written.
        """
        with Export(
            out, self.entries, aliases=self.aliases, file=file, safe=safe, max_shard_bytes=max_shard_bytes
        ) as files:
            for each in self._tensors:
                for first, values in _pieces(self._checkpoint, each):
                    values = values.to(self.entries[each.name].dtype)
                    files.write(each.name, first, values)
                    tell(values.nbytes)
            files.publish()


def _kind(entry: TensorEntry) -> str:
    """What is exported of a tensor; empty where the checkpoint has no values of it."""
    return next((kind for kind in (WEIGHT, BUFFER) if kind in entry.kinds), "")


def _entry(tensor: TensorEntry, dtype: torch.dtype) -> Entry:
    kept = DTYPES[tensor.kinds[_kind(tensor)]]
    return Entry(dtype=dtype if kept.is_floating_point else kept, shape=tuple(tensor.shape))


def _pieces(checkpoint: StoredCheckpoint, tensor: TensorEntry) -> Iterator[tuple[int, torch.Tensor]]:
    """(first element, values), row-major."""
    if list(tensor.order) != sorted(tensor.order):  # rows lie apart in memory
        yield 0, checkpoint.read_whole(tensor.name, _kind(tensor)).reshape(-1)
        return
    for first, numel in pieces(tensor.numel):
        yield first, checkpoint.read(tensor.name, _kind(tensor), first, numel)
