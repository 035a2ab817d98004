"""What every engine must do in the same way: the io_uring, libaio and posix engines pass these tests unchanged."""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest

from io_daemon._native import Reactor, checksum
from io_daemon.shared.protocol import PAGE_BYTES, Status
from tests.conftest import MountTmpfs
from tests.csrc.conftest import MakeBench
from tests.support.reactor import BLOCK_BYTES, QUEUE_DEPTH, ReactorBench, finish

PAGES_PER_BLOCK = BLOCK_BYTES // PAGE_BYTES
PAGE_COUNTS = [1, 3, PAGES_PER_BLOCK, PAGES_PER_BLOCK + 1, 7 * PAGES_PER_BLOCK - 1, 20 * PAGES_PER_BLOCK]
BLOCK_3 = 3 * BLOCK_BYTES
REQUEST_BYTES = 10 * BLOCK_BYTES


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("num_pages", PAGE_COUNTS)
def test_round_trip_of_whole_pages(make_bench: MakeBench, direct: bool, num_pages: int) -> None:
    bench = make_bench(direct=direct)
    num_bytes, num_blocks = num_pages * PAGE_BYTES, -(-num_pages // PAGES_PER_BLOCK)
    offset, at = 5 * PAGE_BYTES, 2 * PAGE_BYTES
    assert bench.write(offset, at, num_bytes) == (1, Status.OK, 0, offset, num_bytes, num_bytes)
    assert bench.read(offset, at, num_bytes) == (2, Status.OK, 0, offset, num_bytes, num_bytes)
    assert (bench.found[at : at + num_bytes] == bench.to_write[at : at + num_bytes]).all()
    assert bench.stored_checksums(num_blocks).tolist() == [
        checksum(bench.to_write[begin : min(begin + BLOCK_BYTES, at + num_bytes)])
        for begin in range(at, at + num_bytes, BLOCK_BYTES)
    ]
    stats = bench.reactor.stats()
    assert (stats["bytes_read"], stats["bytes_written"]) == (num_bytes, num_bytes)
    assert (stats["num_reads"], stats["num_writes"], stats["num_short"]) == (num_blocks, num_blocks, 0)
    assert stats["num_in_flight"] == 0


@pytest.mark.parametrize("num_bytes", [1, 511, 4097, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 12345])
def test_round_trip_of_any_bytes_without_direct_io(make_bench: MakeBench, num_bytes: int) -> None:
    bench = make_bench()
    assert bench.write(77, 13, num_bytes).status == Status.OK
    assert bench.read(77, 5, num_bytes).status == Status.OK
    assert (bench.found[5 : 5 + num_bytes] == bench.to_write[13 : 13 + num_bytes]).all()


@pytest.mark.parametrize("direct", [False, True])
def test_many_requests_beyond_the_queue_depth(make_bench: MakeBench, direct: bool) -> None:
    bench = make_bench(direct=direct)
    num_pages = bench.half_bytes // PAGE_BYTES
    cuts = [0, *sorted(random.Random(0).sample(range(1, num_pages), 30 * QUEUE_DEPTH)), num_pages]
    pieces = [(PAGE_BYTES * begin, PAGE_BYTES * (end - begin)) for begin, end in itertools.pairwise(cuts)]
    random.Random(1).shuffle(pieces)
    for tag, (begin, num_bytes) in enumerate(pieces):
        bench.submit_write(tag, begin, begin, num_bytes, first_checksum=tag * 16)
    done = bench.finish(len(pieces))
    assert sorted(completion.tag for completion in done) == list(range(len(pieces)))
    assert {completion.status for completion in done} == {Status.OK}
    for tag, (begin, num_bytes) in enumerate(pieces):
        bench.submit_read(tag, begin, begin, num_bytes, first_checksum=tag * 16)
    assert {completion.status for completion in bench.finish(len(pieces))} == {Status.OK}
    assert (bench.found == bench.to_write).all()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("num_transferred", [PAGE_BYTES, PAGE_BYTES + 512, BLOCK_BYTES - 1, 100])
def test_short_transfers_go_on(make_bench: MakeBench, direct: bool, num_transferred: int) -> None:
    num_ios = REQUEST_BYTES // BLOCK_BYTES + 1  # of a request with one short block
    faults = [
        (f"short_{operation}", nth, num_transferred) for operation in ("read", "write") for nth in (0, num_ios + 3)
    ]
    bench = make_bench(direct=direct, faults=faults)
    for begin in (0, REQUEST_BYTES):
        assert bench.write(begin, begin, REQUEST_BYTES).status == Status.OK
        assert bench.read(begin, begin, REQUEST_BYTES).status == Status.OK
    assert (bench.found[: 2 * REQUEST_BYTES] == bench.to_write[: 2 * REQUEST_BYTES]).all()
    assert bench.reactor.stats()["num_short"] == len(faults)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("error_number", [errno.EIO, errno.ENOSPC, errno.EINVAL])
def test_errno_of_a_block_ends_its_request_alone(make_bench: MakeBench, operation: str, error_number: int) -> None:
    bench = make_bench(direct=True, faults=[(f"errno_{operation}", 3, error_number)])
    submit = bench.submit_write if operation == "write" else bench.submit_read
    bench.submit_write(0, 0, 0, PAGE_BYTES)
    bench.finish()
    nth = 3 if operation == "read" else 2  # of this request's own blocks
    begin = PAGE_BYTES
    if operation == "write":
        submit(1, begin, 0, REQUEST_BYTES)
        submit(2, begin + REQUEST_BYTES, 0, REQUEST_BYTES)
    else:
        bench.submit_read(1, begin, 0, REQUEST_BYTES, verify=False)
        bench.submit_read(2, begin + REQUEST_BYTES, 0, REQUEST_BYTES, verify=False)
    done = {completion.tag: completion for completion in bench.finish(2)}
    assert done[1] == (1, Status.IO_ERROR, error_number, begin + nth * BLOCK_BYTES, BLOCK_BYTES, 0)
    assert done[2].status == Status.OK


def test_error_at_the_lowest_offset_is_reported(make_bench: MakeBench) -> None:
    """Blocks end in any order, but the report does not depend on it."""
    bench = make_bench(faults=[("errno_write", nth, nth) for nth in (2, 3, 4)] + [("delay", 2, 50_000)])
    assert bench.write(0, 0, REQUEST_BYTES)[1:5] == (Status.IO_ERROR, 2, 2 * BLOCK_BYTES, BLOCK_BYTES)


def test_first_error_stops_the_rest_of_the_request(make_bench: MakeBench) -> None:
    bench = make_bench(faults=[("errno_write", 0, errno.EIO)])
    num_blocks = bench.half_bytes // BLOCK_BYTES
    assert bench.write(0, 0, bench.half_bytes).status == Status.IO_ERROR
    assert bench.reactor.stats()["num_writes"] < num_blocks - 1


@pytest.mark.parametrize("error_number", [errno.EINTR, errno.EAGAIN])
def test_interrupted_blocks_are_tried_again(make_bench: MakeBench, error_number: int) -> None:
    bench = make_bench(faults=[("errno_write", 0, error_number), ("errno_read", 2, error_number)])
    assert bench.write(0, 0, REQUEST_BYTES).status == Status.OK
    assert bench.read(0, 0, REQUEST_BYTES).status == Status.OK
    assert (bench.found[:REQUEST_BYTES] == bench.to_write[:REQUEST_BYTES]).all()


def test_endless_eagain_ends(make_bench: MakeBench) -> None:
    bench = make_bench(faults=[("errno_write", nth, errno.EAGAIN) for nth in range(1000)])
    assert bench.write(0, 0, PAGE_BYTES) == (1, Status.IO_ERROR, errno.EAGAIN, 0, PAGE_BYTES, 0)


@pytest.mark.parametrize("short_bytes", [None, PAGE_BYTES])
def test_flipped_bit_is_found_on_read(make_bench: MakeBench, short_bytes: int | None) -> None:
    """Also in a block that is put together from two short reads."""
    faults = [("flip_read", 3, 1234)] + ([("short_read", 3, short_bytes)] if short_bytes else [])
    bench = make_bench(direct=True, faults=faults)
    bench.write(0, 0, BLOCK_BYTES * 4)
    for block in range(4):
        bench.submit_read(block, block * BLOCK_BYTES, block * BLOCK_BYTES, BLOCK_BYTES, first_checksum=block)
        (done,) = bench.finish()
        if block < 3:
            assert done.status == Status.OK
    expected = checksum(bench.to_write[BLOCK_3 : BLOCK_3 + BLOCK_BYTES])
    actual = checksum(bench.found[BLOCK_3 : BLOCK_3 + BLOCK_BYTES])
    assert done == (3, Status.INTEGRITY, 0, BLOCK_3, expected, actual)
    assert expected != actual


def test_bit_flipped_on_its_way_to_disk_is_found(make_bench: MakeBench) -> None:
    bench = make_bench(direct=True, faults=[("flip_write", 1, 0)])
    written = bench.to_write[:REQUEST_BYTES].copy()
    assert bench.write(0, 0, REQUEST_BYTES).status == Status.OK
    assert (bench.to_write[:REQUEST_BYTES] == written).all()
    done = bench.read(0, 0, REQUEST_BYTES)
    assert (done.status, done.offset % BLOCK_BYTES) == (Status.INTEGRITY, 0)
    assert bench.read(0, 0, REQUEST_BYTES, verify=False).status == Status.OK
    assert np.flatnonzero(bench.found[:REQUEST_BYTES] != written).size == 1


def test_misdirected_read_is_found(make_bench: MakeBench) -> None:
    bench = make_bench(direct=True)
    bench.write(0, 0, REQUEST_BYTES)
    done = bench.read(BLOCK_BYTES, 0, REQUEST_BYTES - BLOCK_BYTES)
    assert (done.status, done.expected) == (Status.INTEGRITY, checksum(bench.to_write[:BLOCK_BYTES]))


@pytest.mark.parametrize("direct", [False, True])
def test_read_beyond_the_end_is_short(make_bench: MakeBench, tmp_path: Path, direct: bool) -> None:
    bench = make_bench(direct=direct)
    end = bench.half_bytes - BLOCK_BYTES + PAGE_BYTES
    os.truncate(tmp_path / "file", end)
    begin = end - 2 * BLOCK_BYTES
    done = bench.read(begin, 0, 3 * BLOCK_BYTES, verify=False)
    assert done == (2, Status.SHORT_IO, 0, end, BLOCK_BYTES, 0)
    done = bench.read(begin + PAGE_BYTES, 0, 3 * BLOCK_BYTES, verify=False)
    assert done == (2, Status.SHORT_IO, 0, end - BLOCK_BYTES + PAGE_BYTES, BLOCK_BYTES, BLOCK_BYTES - PAGE_BYTES)


def test_read_up_to_an_unaligned_end_is_short(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(direct=True)
    os.truncate(tmp_path / "file", 1000)
    assert bench.read(0, 0, PAGE_BYTES, verify=False) == (2, Status.SHORT_IO, 0, 0, PAGE_BYTES, 1000)


def test_kernel_refusals_are_results(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(direct=True)
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    file = bench.reactor.add_file(read_only)
    os.close(read_only)
    bench.reactor.submit(9, Reactor.WRITE, file, 0, bench.buffer, 0, 3 * BLOCK_BYTES)
    (done,) = bench.finish()
    assert (done.tag, done.status, done.error_number) == (9, Status.IO_ERROR, errno.EBADF)
    assert bench.write(0, 0, PAGE_BYTES).status == Status.OK  # the reactor goes on


@pytest.fixture
def small_filesystem(mount_tmpfs: MountTmpfs) -> Path:
    return mount_tmpfs(1 << 20)


def test_full_filesystem_is_an_error(engine: str, small_filesystem: Path) -> None:
    with ReactorBench(small_filesystem / "file", engine) as bench:
        done = bench.write(0, 0, bench.half_bytes)
        assert (done.status, done.error_number) == (Status.IO_ERROR, errno.ENOSPC)
        assert done.offset in range(0, bench.half_bytes, BLOCK_BYTES)  # which block came too late is the kernel's
        assert done.actual == 0
        assert bench.write(0, 0, BLOCK_BYTES).status == Status.OK


def test_two_reactors_share_a_file(engine: str, make_bench: MakeBench) -> None:
    writer, reader = make_bench(direct=True), make_bench(direct=True)
    assert writer.write(0, 0, REQUEST_BYTES).status == Status.OK
    reader.checksums.array()[:] = writer.checksums.array()
    assert reader.read(0, 0, REQUEST_BYTES).status == Status.OK
    assert (reader.found[:REQUEST_BYTES] == writer.to_write[:REQUEST_BYTES]).all()


def test_files_and_buffers_come_and_go(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench()
    for turn in range(20):
        fd = os.open(tmp_path / f"other-{turn}", os.O_RDWR | os.O_CREAT)
        file = bench.reactor.add_file(fd)
        os.close(fd)  # the reactor has a descriptor of its own
        buffer = bench.reactor.add_buffer(bench.region)
        assert (file, buffer) == (1, 1)
        bench.reactor.submit(turn, Reactor.WRITE, file, 0, buffer, turn, BLOCK_BYTES + turn)
        assert finish(bench.reactor, 1)[0].status == Status.OK
        bench.reactor.remove_file(file)
        bench.reactor.remove_buffer(buffer)
        written = (tmp_path / f"other-{turn}").read_bytes()
        assert written == bench.to_write[turn : BLOCK_BYTES + 2 * turn].tobytes()


@pytest.mark.parametrize("queue_depth", [1, 3])
def test_posix_has_a_thread_for_each_io_in_flight(queue_depth: int) -> None:
    def threads() -> int:
        names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        return sum(name == "io-posix" for name in names)

    before = threads()
    reactor = Reactor("posix", queue_depth, BLOCK_BYTES)
    started = threads() - before
    reactor.close(1000)
    assert started == queue_depth
