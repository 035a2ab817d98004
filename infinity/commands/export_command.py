"""``infinity export``: a checkpoint to files of weights, without an engine and a piece at a time."""

from __future__ import annotations

import argparse
import json
import time

from infinity.checkpoint.exported import ExportedWeights
from infinity.checkpoint.progress import Progress
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.files.shards import parse_size
from infinity.plan.precision import DTYPES


def export(parsed: argparse.Namespace) -> int:
    """The command. Raises CheckpointError and WeightsFileError."""
    begun = time.monotonic()
    max_bytes = parse_size("--max-shard-size", parsed.max_shard_size)
    with StoredCheckpoint.open(parsed.checkpoint, parsed.tag) as checkpoint:
        weights = ExportedWeights(checkpoint, DTYPES[parsed.dtype])
        with Progress("exporting", weights.total_bytes, shown=not parsed.json) as progress:
            weights.write(
                parsed.out, safe=parsed.format == "safetensors", max_shard_bytes=max_bytes, tell=progress.advance
            )
        left_out = list(checkpoint.manifest.left_out)
    seconds = time.monotonic() - begun
    report = {
        "checkpoint": str(checkpoint.path),
        "out": str(parsed.out),
        "dtype": parsed.dtype,
        "tensors": len(weights.entries),
        "bytes": weights.total_bytes,
        "seconds": round(seconds, 3),
        "left_out": left_out,
    }
    if parsed.json:
        print(json.dumps(report))
        return 0
    print(f"{parsed.out}: {len(weights.entries)} tensors, {weights.total_bytes / 1e9:.2f} GB in {seconds:.1f} s")
    if left_out:
        print(f"without {len(left_out)} frozen parameters that the checkpoint was saved without")
    return 0
