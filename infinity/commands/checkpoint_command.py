"""``infinity checkpoint``: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table

from infinity.checkpoint.manifest import TensorEntry
from infinity.checkpoint.progress import Progress
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.errors import CheckpointError
from io_daemon.command.console import open_console
from io_daemon.command.outcome import EXIT_FAULT, EXIT_OK


def info(parsed: argparse.Namespace) -> int:
    """Print what is there, without reading it."""
    with StoredCheckpoint.open(parsed.directory, parsed.tag) as stored:
        if parsed.json:
            print(json.dumps(_as_json(stored), indent=2))
        else:
            _show(stored)
    return EXIT_OK


def verify(parsed: argparse.Namespace) -> int:
    """Read all of it. Exit code 1 if anything is wrong, with every file and place."""
    problems: list[CheckpointError] = []
    read_bytes = 0
    try:
        with StoredCheckpoint.open(parsed.directory, parsed.tag) as stored:
            path, total = stored.path, stored.manifest.num_bytes
            with Progress("verifying", total, shown=not parsed.json) as progress:

                def tell(num_bytes: int) -> None:
                    nonlocal read_bytes
                    read_bytes += num_bytes
                    progress.advance(num_bytes)

                problems += stored.verify(tell)
    except CheckpointError as error:
        path, problems = parsed.directory, [error]
    if parsed.json:
        found = [{"path": each.path, "problem": each.problem, "remedy": each.remedy} for each in problems]
        print(json.dumps({"checkpoint": str(path), "read_bytes": read_bytes, "problems": found}, indent=2))
    else:
        for each in problems:
            print(each)
        print(
            f"{path}: {'whole' if not problems else f'{len(problems)} damaged'}, {read_bytes:,} bytes of tensors read"
        )
    return EXIT_FAULT if problems else EXIT_OK


def _as_json(stored: StoredCheckpoint) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "checkpoint": str(stored.path),
        "tag": manifest.tag,
        "written_by": manifest.written_by,
        "world_size": manifest.world_size,
        "bytes": manifest.num_bytes,
        **manifest.facts,
        "tensors": [
            {"name": e.name, "shape": e.shape, "trained": e.trainable, "buffer": e.is_buffer, "kinds": e.kinds}
            for e in manifest.tensors
        ],
        "left_out": manifest.left_out,
        "files": {name: {"bytes": file.num_bytes, "crc32c": file.checksum} for name, file in manifest.files.items()},
    }


def _show(stored: StoredCheckpoint) -> None:
    manifest, console = stored.manifest, open_console()
    facts = ", ".join(f"{name} {value}" for name, value in manifest.facts.items())
    console.print(
        f"{stored.path}: {manifest.num_bytes:,} bytes by {manifest.world_size} ranks; {facts}",
        soft_wrap=True,
    )
    tensors = Table(box=None)
    for column in ("tensor", "shape", "", "bytes", "kinds"):
        tensors.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for entry in manifest.tensors:
        kinds = ", ".join(f"{kind} {dtype}" for kind, dtype in entry.kinds.items() if not entry.is_buffer)
        shape = "x".join(map(str, entry.shape)) or "()"
        kinds = kinds or entry.kinds["buffer"]
        tensors.add_row(entry.name, shape, _role(entry), f"{entry.num_bytes:,}", kinds)
    console.print(tensors)
    files = Table(box=None)
    for column in ("file", "bytes", "crc32c"):
        files.add_column(column, justify="left" if column == "file" else "right")
    for name, file in manifest.files.items():
        files.add_row(name, f"{file.num_bytes:,}", "within it" if file.checksum is None else f"{file.checksum:08x}")
    console.print(files)


def _role(entry: TensorEntry) -> str:
    if entry.is_buffer:
        return "buffer"
    return "trained" if entry.trainable else "frozen"
