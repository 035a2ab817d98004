"""A checkpoint that is there, open for reading: no engine, no process group, any part of any tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from infinity.checkpoint import plain
from infinity.checkpoint.descriptors import Descriptors
from infinity.checkpoint.directory import chosen, tags_of
from infinity.checkpoint.disk import disk_errors
from infinity.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    SHARED_STATE,
    Manifest,
    Piece,
    TensorEntry,
    index_name,
    pieces_name,
    pieces_of_json,
    rank_state_name,
)
from infinity.checkpoint.model_states import MODEL_STATES, verify_model_states
from infinity.checkpoint.pieces import PieceFile
from infinity.checkpoint.read_ahead import ReadAhead, Wanted
from infinity.checkpoint.sealed import checksum_of, read_sealed
from infinity.errors import CheckpointError
from infinity.plan.sharding import ALIGNMENT
from io_daemon.shared.protocol import align_up

_Placed = tuple[int, Piece]
"""The rank whose file has a piece, and the piece."""
_Key = tuple[str, str]
"""A tensor and a kind of it."""


class StoredCheckpoint:
    """``entries`` says what is there; ``read`` gives elements, each checked against its checksum.

    Opening it looks at every file's size and at the coverage of every tensor, not at the bytes. A context manager.
    """

    def __init__(self, path: Path, *, reader: int = 0, num_readers: int = 1) -> None:
        """One of several readers looks at its share of the files' sizes, and reads the indexes of what it is to
        ``look`` at: a rank needs those of the ranks that had its part, one or two of thousands."""
        self.path = path
        self._directory = self._found()
        """What ``path`` was the name of."""
        content, self.checksum = read_sealed(path / MANIFEST)
        try:
            self.manifest = Manifest.of_json(content)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(path / MANIFEST, str(error), "name a checkpoint that this version wrote") from error
        self.entries: Mapping[str, TensorEntry] = {entry.name: entry for entry in self.manifest.tensors}
        self._keys = {f"{name} {kind}": (name, kind) for name, entry in self.entries.items() for kind in entry.kinds}
        """(tensor, kind) of all that there is, as indexes call it."""
        self._pieces: dict[_Key, list[_Placed]] = {key: [] for key in self._keys.values()}
        """Those of the indexes that were read, in order, none of them within others."""
        self._firsts: dict[_Key, list[int]] = {}
        """The first element of each."""
        self._read: set[int] = set()
        """The ranks whose indexes were read."""
        with self._replaced_told():
            self._check_files(list(self.manifest.files)[reader::num_readers])
            if num_readers == 1:
                self._read_indexes(range(self.manifest.world_size))
                for name, kind in self._pieces:
                    self._overlapping(name, kind, 0, self.entries[name].numel)
        self._descriptors = Descriptors()
        self._files: dict[int, PieceFile] = {}
        self._last: tuple[_Placed, torch.Tensor] | None = None
        self._ahead: ReadAhead | None = None

    @classmethod
    def open(cls, directory: str | Path, tag: str | None = None) -> StoredCheckpoint:
        """Open a checkpoint: the one of ``tag`` in ``directory``, by default its latest; or ``directory`` itself."""
        directory = Path(directory)
        path = chosen(directory, tag)
        if path is None and not directory.exists():
            raise CheckpointError(directory, "is not there", "name a directory of checkpoints, or one of them")
        if path is None:
            there = ", ".join(tags_of(directory)[-8:]) or "none"
            raise CheckpointError(
                directory, "holds no checkpoint that is called latest", f"name a tag; there are: {there}"
            )
        return cls(path)

    def look(self, name: str, kind: str, first: int, numel: int) -> None:
        """Raises CheckpointError if some of the elements are nowhere."""
        with self._replaced_told():
            self._overlapping(name, kind, first, numel)

    def read(self, name: str, kind: str, first: int, numel: int) -> torch.Tensor:
        """Elements [first, first + numel) in the order of memory, 1-D, in the dtype that they were kept in: to be read,
        not written."""
        placed = self._overlapping(name, kind, first, numel)
        with self._replaced_told():
            if len(placed) == 1:
                return self._load(*placed[0])[first - placed[0][1].first :][:numel]
            values = torch.empty(numel, dtype=DTYPES[self.entries[name].kinds[kind]], device="cpu")
            for rank, piece in placed:
                begin, end = max(first, piece.first), min(first + numel, piece.first + piece.numel)
                values[begin - first : end - first] = self._load(rank, piece)[begin - piece.first : end - piece.first]
            return values

    @contextmanager
    def reading(self, order: Iterable[tuple[str, str, int, int]]) -> Iterator[None]:
        """Inside, ``read`` is called with these arguments in this order, and the drive is ahead of it. What it gives is
        of use until the next call."""
        placed = groupby(each for arguments in order for each in self._overlapping(*arguments))
        with ReadAhead(self._wanted(*each) for each, _ in placed) as self._ahead:
            try:
                yield
            finally:
                self._ahead = self._last = None

    def read_whole(self, name: str, kind: str) -> torch.Tensor:
        """The tensor in its shape."""
        entry = self.entries[name]
        return entry.lies(self.read(name, kind, 0, entry.numel))

    def shared_state(self) -> dict[str, Any]:
        """Python values that all ranks have alike."""
        with self._replaced_told():
            return self._read_state(SHARED_STATE)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Python values of one of the ranks that wrote."""
        with self._replaced_told():
            return self._read_state(rank_state_name(rank))

    def verify(self, tell: Callable[[int], None] = lambda _bytes: None) -> Iterator[CheckpointError]:
        """Read everything; what is wrong. ``tell``: called with the bytes of each piece that was read.

        Raises CheckpointError if another save takes its place meanwhile."""
        for error in self._faults(tell):
            with self._replaced_told():
                if self._found() != self._directory:
                    raise error
            yield error

    def _faults(self, tell: Callable[[int], None]) -> Iterator[CheckpointError]:
        states = (SHARED_STATE, *map(rank_state_name, range(self.manifest.world_size)))
        checks: list[Callable[[], object]] = [partial(self._read_state, name) for name in states]
        if MODEL_STATES in self.manifest.files:
            checks.append(partial(verify_model_states, self.path))
        for check in checks:
            try:
                check()
            except CheckpointError as error:
                yield error
        order = [self._wanted(*placed) for tensor in self._pieces.values() for placed in tensor]
        with ReadAhead(order) as ahead:
            for wanted in order:
                try:
                    tell(ahead.take(wanted).nbytes)
                except CheckpointError as error:
                    yield error

    def close(self) -> None:
        self._descriptors.close()
        self._last = None

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _found(self) -> tuple[int, int] | None:
        """What directory is there now, if any."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @contextmanager
    def _replaced_told(self) -> Iterator[None]:
        """What is wrong with files of another directory than the one that was opened says nothing about this one."""
        try:
            yield
        except CheckpointError as error:
            if self._found() == self._directory:
                raise
            raise CheckpointError(
                self.path, "was replaced, or removed, while it was read: another save has its tag", "read it again"
            ) from error

    def _check_files(self, names: Iterable[str]) -> None:
        for name in names:
            file = self.manifest.files[name]
            with disk_errors(self.path / name, "read"):
                found = (self.path / name).stat().st_size
            if found != file.num_bytes:
                raise CheckpointError(
                    self.path / name,
                    f"has {found} bytes, written were {file.num_bytes}",
                    "load another checkpoint, or copy this file anew",
                )

    def _read_indexes(self, ranks: Iterable[int]) -> None:
        """Those that were not read yet."""
        changed: set[_Key] = set()
        for rank in ranks:
            if rank in self._read or not 0 <= rank < self.manifest.world_size:
                continue
            path = self.path / index_name(rank)
            content, checksum = read_sealed(path)
            if checksum != self.manifest.files[path.name].checksum:
                raise CheckpointError(path, "belongs to another checkpoint", "copy this file anew")
            self._read.add(rank)
            for piece in pieces_of_json(content, self._keys):
                self._pieces[piece.tensor, piece.kind].append((rank, piece))
                changed.add((piece.tensor, piece.kind))
        for key in changed:
            self._pieces[key] = kept = _not_within_others(self._pieces[key])
            self._firsts[key] = [piece.first for _, piece in kept]

    def _overlapping(self, name: str, kind: str, first: int, numel: int) -> list[_Placed]:
        """The pieces that have elements [first, first + numel), in order. Raises CheckpointError where they are
        nowhere."""
        if not numel:
            return []
        found, stop = self._known(name, kind, first, numel)
        for ranks in self._who_may_have(self.entries[name].numel, first, numel) if stop < first + numel else ():
            self._read_indexes(ranks)
            found, stop = self._known(name, kind, first, numel)
            if stop >= first + numel:
                break
        if stop < first + numel:
            raise CheckpointError(
                self.path, f"lacks elements of {name} ({kind}) from {stop} on", "load another checkpoint"
            )
        return found

    def _known(self, name: str, kind: str, first: int, numel: int) -> tuple[list[_Placed], int]:
        """What the indexes say that were read: the pieces with some of these elements, and up to where they have them
        all."""
        placed, firsts = self._pieces[name, kind], self._firsts.get((name, kind), ())
        found = placed[max(0, bisect_right(firsts, first) - 1) : bisect_left(firsts, first + numel)]
        stop = first
        for _, piece in found:
            if piece.first > stop:
                break
            stop = max(stop, piece.first + piece.numel)
        return found, stop

    def _who_may_have(self, whole: int, first: int, numel: int) -> Iterator[Iterable[int]]:
        """Ranks that may have written elements of a tensor of ``whole``, the likely ones before the others: where all
        have a part, those whose it is; rank 0, which has buffers, and everything where nothing was sharded; all."""
        num_ranks = self.manifest.world_size
        shard_numel = align_up(-(-whole // num_ranks), ALIGNMENT)
        yield range(first // shard_numel, (first + numel - 1) // shard_numel + 1)
        yield [0]
        yield range(num_ranks)

    def _load(self, rank: int, piece: Piece) -> torch.Tensor:
        """The piece, whole; the last one is kept, since what asks next goes on there."""
        if self._last is None or self._last[0] != (rank, piece):
            self._last = None
            wanted = self._wanted(rank, piece)
            values = self._ahead.take(wanted) if self._ahead is not None else wanted.file.read(piece, wanted.dtype)
            self._last = ((rank, piece), values)
        return self._last[1]

    def _wanted(self, rank: int, piece: Piece) -> Wanted:
        return Wanted(self._file(rank), piece, self.entries[piece.tensor].kinds[piece.kind])

    def _file(self, rank: int) -> PieceFile:
        if rank not in self._files:
            self._files[rank] = PieceFile(self.path / pieces_name(rank), self._descriptors)
        return self._files[rank]

    def _read_state(self, name: str) -> dict[str, Any]:
        path = self.path / name
        with disk_errors(path, "read"):
            data = path.read_bytes()
        if checksum_of(data) != self.manifest.files[name].checksum:
            raise CheckpointError(path, "is damaged: its checksum is another", "load another checkpoint")
        try:
            state: dict[str, Any] = plain.from_bytes(data)
        except Exception as error:
            raise CheckpointError(
                path,
                f"cannot be read back here ({plain.reason_of(error)})",
                "who saved it had vouched for a class: do so again, by torch.serialization.add_safe_globals()",
            ) from error
        return state


def _not_within_others(placed: Iterable[_Placed]) -> list[_Placed]:
    """In order, without those whose elements the ones before have."""
    kept: list[_Placed] = []
    position = -1
    for rank, piece in sorted(placed, key=lambda each: (each[1].first, -each[1].numel)):
        if piece.first + piece.numel > position:
            kept.append((rank, piece))
            position = piece.first + piece.numel
    return kept
