"""The files that one rank writes of a checkpoint: pieces, the index that says where they lie, Python values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infinity.checkpoint.disk import write_whole
from infinity.checkpoint.manifest import FileEntry, index_as_json, index_name, pieces_name, rank_state_name
from infinity.checkpoint.pieces import PieceWriter
from infinity.checkpoint.sealed import checksum_of, write_sealed

Files = dict[str, FileEntry]


def write_state(path: Path, state: bytes) -> Files:
    """A file of Python values, on the disk."""
    write_whole(path, state)
    return {path.name: FileEntry(num_bytes=len(state), checksum=checksum_of(state))}


def write_rank(aside: Path, rank: int, write: Callable[[PieceWriter], None], state: bytes) -> Files:
    """All files of a rank, on the disk: the pieces that ``write`` adds, and ``state``, what only that rank had."""
    with PieceWriter(aside / pieces_name(rank)) as writer:
        write(writer)
        writer.finish()
    index = aside / index_name(rank)
    seal = write_sealed(index, index_as_json(writer.pieces))
    return {
        pieces_name(rank): FileEntry(num_bytes=writer.num_bytes),
        index_name(rank): FileEntry(num_bytes=index.stat().st_size, checksum=seal),
        **write_state(aside / rank_state_name(rank), state),
    }
