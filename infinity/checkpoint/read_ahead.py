"""Pieces read before they are asked for, in the order in which they will be, by threads that also check them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, NamedTuple

import torch

from infinity.checkpoint.manifest import Piece
from infinity.checkpoint.pieces import PieceFile, end_of
from infinity.errors import CheckpointError
from infinity.files.direct import ALIGNMENT, BLOCK_BYTES, aligned_memory

NUM_AHEAD: Final = 2
"""Reads at a time; one block more is what their reader is at."""


class Wanted(NamedTuple):
    """A piece, where it lies, and its dtype."""

    file: PieceFile
    piece: Piece
    dtype: str


_Found = torch.Tensor | CheckpointError


class ReadAhead:
    """A context manager. Pieces that lie one behind another are one read."""

    def __init__(self, order: Iterable[Wanted]) -> None:
        """``order``: what ``take`` will be asked for, one by one."""
        self._runs = _runs(order)
        self._threads = ThreadPoolExecutor(NUM_AHEAD, "infinity-read")
        self._issued: deque[tuple[list[Wanted], torch.Tensor, Future[list[_Found]]]] = deque()
        self._at: deque[tuple[Wanted, _Found]] = deque()
        for _ in range(NUM_AHEAD):
            self._issue(aligned_memory(BLOCK_BYTES + 2 * ALIGNMENT))
        self._memory = aligned_memory(BLOCK_BYTES + 2 * ALIGNMENT)
        """What ``_at`` lies in."""

    def take(self, wanted: Wanted) -> torch.Tensor:
        """The next piece's elements, of use until the next call. Raises its CheckpointError; the others come then."""
        if not self._at:
            self._issue(self._memory)
            pieces, self._memory, read = self._issued.popleft()
            self._at.extend(zip(pieces, read.result(), strict=True))
        expected, found = self._at.popleft()
        if expected != wanted:
            raise AssertionError(f"{wanted.piece} was asked for, and {expected.piece} announced")
        if isinstance(found, CheckpointError):
            raise found
        return found

    def _issue(self, memory: torch.Tensor) -> None:
        run = next(self._runs, None)
        if run is not None:
            self._issued.append((run, memory, self._threads.submit(_read, run, memory)))

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.shutdown(cancel_futures=True)


def _runs(order: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    """What one read each gets: neighbours, a block in all, or one piece however long."""
    run: list[Wanted] = []
    for wanted in order:
        if run:
            first, last = run[0], run[-1]
            gap = wanted.piece.offset - end_of(last.piece, last.dtype)
            size = end_of(wanted.piece, wanted.dtype) - first.piece.offset
            if wanted.file is not last.file or not 0 <= gap < ALIGNMENT or size > BLOCK_BYTES:
                yield run
                run = []
        run.append(wanted)
    if run:
        yield run


def _read(run: list[Wanted], memory: torch.Tensor) -> list[_Found]:
    """The elements of each, or why there are none."""
    begin = run[0].piece.offset
    found: list[_Found] = []
    try:
        data = run[0].file.fetch(begin, end_of(run[-1].piece, run[-1].dtype), memory)
    except CheckpointError as error:
        return [error for _ in run]
    for file, piece, dtype in run:
        part = data[piece.offset - begin : end_of(piece, dtype) - begin]
        try:
            found.append(file.check(piece, dtype, part))
        except CheckpointError as error:
            found.append(error)
    return found
