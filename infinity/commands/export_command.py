"""``infinity export``: a checkpoint to files of weights, without an engine and a piece at a time."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import torch

from infinity.checkpoint.manifest import BUFFER, DTYPES, WEIGHT, TensorEntry
from infinity.checkpoint.progress import Progress
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.files.entry import Entry
from infinity.files.export import Export
from infinity.files.pieces import pieces
from infinity.files.shards import parse_size

EXPORTED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(parsed: argparse.Namespace) -> int:
    """The command. Raises CheckpointError and WeightsFileError."""
    begun = time.monotonic()
    max_bytes = parse_size("--max-shard-size", parsed.max_shard_size)
    with StoredCheckpoint.open(parsed.checkpoint, parsed.tag) as checkpoint:
        tensors = [entry for entry in checkpoint.manifest.tensors if entry.persistent and _kind(entry)]
        entries = {each.name: _entry(each, EXPORTED[parsed.dtype]) for each in tensors}
        total_bytes = sum(entry.nbytes for entry in entries.values())
        aliases = {alias: each.name for each in tensors for alias in each.aliases}
        with (
            Export(
                parsed.out,
                entries,
                aliases=aliases,
                safe=parsed.format == "safetensors",
                max_shard_bytes=max_bytes,
            ) as out,
            Progress("exporting", total_bytes, shown=not parsed.json) as progress,
        ):
            for each in tensors:
                for first, values in _pieces(checkpoint, each):
                    values = values.to(entries[each.name].dtype)
                    out.write(each.name, first, values)
                    progress.advance(values.nbytes)
            out.publish()
        left_out = list(checkpoint.manifest.left_out)
    seconds = time.monotonic() - begun
    report = {
        "checkpoint": str(checkpoint.path),
        "out": str(parsed.out),
        "dtype": parsed.dtype,
        "tensors": len(entries),
        "bytes": total_bytes,
        "seconds": round(seconds, 3),
        "left_out": left_out,
    }
    if parsed.json:
        print(json.dumps(report))
        return 0
    print(f"{parsed.out}: {len(entries)} tensors, {total_bytes / 1e9:.2f} GB in {seconds:.1f} s")
    if left_out:
        print(f"without {len(left_out)} frozen parameters that the checkpoint was saved without")
    return 0


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
