"""``infinity import-deepspeed``: a checkpoint of DeepSpeed's to one that ``engine.load_checkpoint`` takes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from infinity.checkpoint.from_deepspeed import Import


def import_deepspeed(parsed: argparse.Namespace) -> int:
    """The command. Raises CheckpointError."""
    begun = time.monotonic()
    found = Import(Path(parsed.directory), parsed.tag)
    manifest = found.write(Path(parsed.out))
    seconds = time.monotonic() - begun
    report = {
        "source": str(found.source),
        "out": str(Path(parsed.out) / found.tag),
        "stage": found.files.stage,
        "ranks": found.files.world_size,
        "tensors": len(manifest.tensors),
        "bytes": manifest.num_bytes,
        "seconds": round(seconds, 3),
        "left_out": [*manifest.left_out, *found.left_out],
    }
    if parsed.json:
        print(json.dumps(report))
        return 0
    print(
        f"{report['out']}: {report['tensors']} tensors of {report['ranks']} ranks of stage {report['stage']}, "
        f"{manifest.num_bytes / 1e9:.2f} GB in {seconds:.1f} s"
    )
    if manifest.left_out:
        print(f"without frozen parameters that DeepSpeed had left out: {', '.join(manifest.left_out)}")
    if found.left_out:
        print(f"without client state that is no plain data: {', '.join(found.left_out)}")
    return 0
