"""Files of pieces: what is written is read, past the page cache, ahead of who reads it, and each piece answers for
itself."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from infinity.checkpoint.descriptors import Descriptors
from infinity.checkpoint.manifest import Piece
from infinity.checkpoint.pieces import PieceFile, PieceWriter
from infinity.checkpoint.read_ahead import ReadAhead, Wanted
from infinity.errors import CheckpointError
from infinity.files import direct
from infinity.files.direct import ALIGNMENT, BLOCK_BYTES, NUM_BLOCKS, BlockWriter, open_direct, read_block
from infinity.files.pieces import bytes_of

NUMELS = (3, 1, 5000, BLOCK_BYTES // 4, 7, 2 * BLOCK_BYTES // 4 + 11, 64)
DTYPES = (torch.bfloat16, torch.uint8, torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float64)


def _values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
        for numel, dtype in zip(NUMELS, DTYPES, strict=True)
    ]


def _written(path: Path, values: Sequence[torch.Tensor]) -> list[Piece]:
    with PieceWriter(path) as writer:
        for number, each in enumerate(values):
            writer.add(f"tensor{number}", "weight", 0, each)
        writer.finish()
    return writer.pieces


def _wanted(file: PieceFile, pieces: Sequence[Piece]) -> list[Wanted]:
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    return [Wanted(file, piece, name) for piece, name in zip(pieces, names, strict=True)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return tmp_path / "some.pieces"


@pytest.fixture
def descriptors() -> Iterator[Descriptors]:
    found = Descriptors()
    yield found
    found.close()


@pytest.mark.parametrize("num_blocks", [1, NUM_BLOCKS + 1])
def test_a_drive_that_takes_nothing_is_given_up_and_named(
    num_blocks: int, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes to the descriptor's number afterwards gets none of what it takes at last."""
    released, written = threading.Event(), threading.Event()
    write = direct.write

    def hang(path: Path, descriptor: int, data: torch.Tensor, offset: int) -> None:
        released.wait(60)
        write(path, descriptor, data, offset)
        written.set()

    monkeypatch.setattr(direct, "WRITE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(direct, "write", hang)

    def fill() -> None:
        with PieceWriter(stored) as writer:
            writer.add_all("tensor", "weight", torch.ones(num_blocks * BLOCK_BYTES, dtype=torch.uint8))
            writer.finish()

    with pytest.raises(
        CheckpointError, match=rf"{stored}: cannot be written: .*errno {errno.ETIMEDOUT}.*takes nothing"
    ):
        fill()
    another = os.open(stored.with_name("another"), os.O_RDWR | os.O_CREAT)
    released.set()
    assert written.wait(60)
    assert os.fstat(another).st_size == 0
    assert stored.stat().st_size == BLOCK_BYTES
    os.close(another)


def test_who_fails_waits_for_no_block_that_was_not_begun(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for the one that the drive has, and that is taken here."""
    begun, cancelled, released = threading.Event(), threading.Event(), threading.Event()
    written: list[int] = []

    def write(_path: Path, _descriptor: int, _data: torch.Tensor, offset: int) -> None:
        written.append(offset)
        begun.set()
        released.wait(60)

    monkeypatch.setattr(direct, "write", write)
    behind, descriptor = direct.WriteBehind(), os.open(stored, os.O_RDWR | os.O_CREAT)
    for offset in (0, BLOCK_BYTES):
        behind.write(stored, descriptor, behind.take(), BLOCK_BYTES, offset)
    assert begun.wait(60)
    behind._in_flight[1][0].add_done_callback(lambda _: cancelled.set())
    closing = threading.Thread(target=behind.close)
    closing.start()
    assert cancelled.wait(60)
    released.set()
    closing.join(direct.WRITE_TIMEOUT_S / 2)
    assert not closing.is_alive()
    assert written == [0]
    os.close(descriptor)


def test_pieces_of_any_size_and_dtype_come_back_alone_and_ahead(stored: Path, descriptors: Descriptors) -> None:
    values = _values()
    pieces = _written(stored, values)
    assert stored.stat().st_size == pieces[-1].offset + values[-1].nbytes
    file = PieceFile(stored, descriptors)
    order = _wanted(file, pieces)
    assert all(_same(file.read(piece, dtype), each) for (_, piece, dtype), each in zip(order, values, strict=True))
    backwards, backward_values = order[::-1], values[::-1]
    for wanted, expected in ((order, values), (backwards, backward_values), ([order[2]] * 2, [values[2]] * 2)):
        with ReadAhead(wanted) as ahead:
            assert all(_same(ahead.take(each), value) for each, value in zip(wanted, expected, strict=True))


def test_neighbours_are_one_read(stored: Path, descriptors: Descriptors, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = _written(stored, _values())
    file, reads = PieceFile(stored, descriptors), []
    fetch = PieceFile.fetch

    def counted(self: PieceFile, begin: int, end: int, memory: torch.Tensor | None = None) -> torch.Tensor:
        reads.append((begin, end))
        return fetch(self, begin, end, memory)

    monkeypatch.setattr(PieceFile, "fetch", counted)
    order = _wanted(file, pieces)
    with ReadAhead(order) as ahead:
        for wanted in order:
            ahead.take(wanted)
    ends = [piece.offset + numel * dtype.itemsize for piece, numel, dtype in zip(pieces, NUMELS, DTYPES, strict=True)]
    firsts = [pieces[0].offset, pieces[3].offset, pieces[4].offset, pieces[5].offset, pieces[6].offset]
    assert sorted(reads) == list(zip(firsts, [ends[2], ends[3], ends[4], ends[5], ends[6]], strict=True))


def test_a_damaged_piece_is_told_when_it_is_its_turn_and_the_others_come(
    stored: Path, descriptors: Descriptors
) -> None:
    values = _values()
    pieces = _written(stored, values)
    damaged = bytearray(stored.read_bytes())
    damaged[pieces[1].offset] = int(values[1].item()) ^ 1
    stored.write_bytes(damaged)
    file = PieceFile(stored, descriptors)
    order = _wanted(file, pieces)
    with ReadAhead(order) as ahead:
        assert _same(ahead.take(order[0]), values[0])
        with pytest.raises(CheckpointError, match=r"damaged at offset.*tensor1"):
            ahead.take(order[1])
        assert _same(ahead.take(order[2]), values[2])
        with pytest.raises(AssertionError, match="announced"):
            ahead.take(order[2])
    os.truncate(stored, pieces[-1].offset + 8)
    with ReadAhead(order) as ahead:
        for wanted in order[:-1]:
            if wanted is not order[1]:
                ahead.take(wanted)
                continue
            with pytest.raises(CheckpointError):
                ahead.take(wanted)
        with pytest.raises(CheckpointError, match=r"cut short.*tensor6.*512 bytes.*8 are there"):
            ahead.take(order[-1])


def test_files_are_open_for_direct_io_where_the_filesystem_has_it(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.write_bytes(b"")
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this filesystem has no direct I/O")
    for flags in (os.O_RDONLY, os.O_CREAT | os.O_EXCL | os.O_WRONLY):
        descriptor = open_direct(probe, flags)
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        os.close(descriptor)
        probe.unlink()


def test_a_filesystem_that_refuses_the_alignment_is_served_through_the_cache(
    stored: Path, descriptors: Descriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(call: object) -> object:
        def refused(descriptor: int, memory: object, offset: int) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return call(descriptor, memory, offset)  # type: ignore[operator,no-any-return]

        return refused

    values = _values()
    monkeypatch.setattr(os, "pwrite", refusing(os.pwrite))
    monkeypatch.setattr(os, "preadv", refusing(os.preadv))
    pieces = _written(stored, values)
    file = PieceFile(stored, descriptors)
    assert all(_same(w.file.read(w.piece, w.dtype), v) for w, v in zip(_wanted(file, pieces), values, strict=True))


def test_memory_is_a_few_blocks_and_every_write_is_aligned(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, writes, aligned, write = [], [], direct.aligned_memory, os.pwrite

    def counted(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return aligned(num_bytes)

    def seen(descriptor: int, memory: memoryview, offset: int) -> int:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        writes.append((address % ALIGNMENT, len(memory) % ALIGNMENT, offset % ALIGNMENT))
        return write(descriptor, memory, offset)

    monkeypatch.setattr(direct, "aligned_memory", counted)
    monkeypatch.setattr(os, "pwrite", seen)
    data = torch.arange(5 * BLOCK_BYTES + 12345, dtype=torch.int64).to(torch.uint8)
    writer = BlockWriter(stored)
    for first in range(0, data.numel(), 1_000_003):
        writer.append(bytes_of(data[first : first + 1_000_003]))
    writer.finish()
    writer.close()
    assert len(made) <= NUM_BLOCKS
    assert writes == [(0, 0, 0)] * 6
    descriptor = open_direct(stored, os.O_RDONLY)
    assert torch.equal(read_block(descriptor, 1, data.numel()), data[1:])
    assert read_block(descriptor, 7, 7).numel() == 0
    os.close(descriptor)


def test_what_the_drive_refuses_is_told_by_who_appends_or_ends(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with PieceWriter(stored) as writer:
        writer.add("small", "weight", 0, torch.zeros(10))
        with pytest.raises(CheckpointError, match=r"some\.pieces.*No space left") as raised:
            writer.finish()
    assert raised.value.errno == errno.ENOSPC
    stored.unlink()

    def add_blocks(writer: PieceWriter) -> None:
        for number in range(2 * NUM_BLOCKS):
            writer.add(f"block{number}", "weight", 0, torch.zeros(BLOCK_BYTES // 4))

    with PieceWriter(stored) as writer, pytest.raises(CheckpointError, match="No space left"):
        add_blocks(writer)
