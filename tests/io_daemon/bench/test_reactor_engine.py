"""The daemon's reactor as a benchmark engine, over every engine that this machine has."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from io_daemon._native import Region
from io_daemon.bench.engines.engine import BlockEngine
from io_daemon.bench.engines.factory import REACTOR_ENGINES, engine_problem, open_engine
from io_daemon.errors import ConfigError, DeviceIOError
from tests.support.block_io import BS, NUM_SLOTS, batch, check_own_slots, make_file, reap_all
from tests.support.reactor import DEADLINE_S, Fault, make_region

IODEPTH = 8

Open = Callable[..., BlockEngine]


@pytest.fixture(params=REACTOR_ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    engine: str = request.param
    if (problem := engine_problem(engine)) is not None:
        pytest.skip(problem)
    return engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_file(tmp_path / "file")


@pytest.fixture
def arena() -> Region:
    return make_region(NUM_SLOTS * BS)


@pytest.fixture
def start(name: str, path: Path, arena: Region) -> Iterator[Open]:
    with ExitStack() as stack:

        def start(bs: int = BS, faults: tuple[Fault, ...] = ()) -> BlockEngine:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
            stack.callback(os.close, fd)
            engine = open_engine(name, fd, arena, bs, IODEPTH, str(path), faults=faults)
            stack.callback(engine.close)
            return engine

        yield start


def test_a_load_needs_no_more_slots_than_are_in_flight(start: Open, path: Path, arena: Region) -> None:
    check_own_slots(start(), path, arena, IODEPTH)


def test_batches_move_bytes_both_ways(start: Open, name: str, path: Path, arena: Region) -> None:
    engine = start()
    assert engine.name == name
    content = np.fromfile(path, dtype=np.uint8)
    for tag in range(4):
        engine.submit(tag, *batch(16 * tag, 16))
    assert sorted(reap_all(engine, 4)) == [0, 1, 2, 3]
    assert (arena.array() == content).all()
    arena.array()[:] = ~content
    for tag in range(4):
        engine.submit(10 + tag, *batch(16 * tag, 16, write=1))
    assert sorted(reap_all(engine, 4)) == [10, 11, 12, 13]
    engine.sync()
    assert (np.fromfile(path, dtype=np.uint8) == ~content).all()
    whole = NUM_SLOTS * BS
    assert engine.counters() == (whole, whole, NUM_SLOTS, NUM_SLOTS, 0)


def test_latencies_are_counted_per_io_and_from_the_reset(start: Open) -> None:
    engine = start()
    engine.submit(1, *batch(0, 16))
    reap_all(engine, 1)
    engine.reset_latencies()
    begin = time.monotonic_ns()
    engine.submit(2, *batch(0, 5, write=1))
    reap_all(engine, 1)
    passed_ns = time.monotonic_ns() - begin
    latencies = engine.latencies()
    assert (latencies.read.lat.num, latencies.write.lat.num) == (0, 5)
    assert (
        0 < latencies.write.clat.min_ns <= latencies.write.lat.percentile(50) <= latencies.write.lat.max_ns <= passed_ns
    )


def test_waiting_has_a_deadline(start: Open) -> None:
    engine = start(faults=(("delay", 0, 200_000),))
    assert engine.reap(0.0) == []
    engine.submit(1, *batch(0, 1))
    assert engine.reap(0.001) == []
    with pytest.raises(RuntimeError, match="1 batches are in flight"):
        engine.sync()
    assert reap_all(engine, 1) == [1]
    assert engine.reap(0.0) == []


def test_a_descriptor_that_is_readable_for_nothing_ends_no_wait(start: Open) -> None:
    """What is reaped without a wait leaves the event behind: the next wait must sleep on, and find its own batch."""
    engine = start(faults=(("delay", 1, 100_000),))
    engine.submit(1, *batch(0, 1))
    deadline = time.monotonic() + DEADLINE_S
    while not engine.reap(0.0):
        assert time.monotonic() < deadline
    engine.submit(2, *batch(1, 1))
    assert engine.reap(DEADLINE_S) == [2]


@pytest.mark.parametrize(("fault", "write"), [("errno_read", 0), ("errno_write", 1)])
def test_errors_name_file_place_and_direction(start: Open, path: Path, fault: str, write: int) -> None:
    engine = start(faults=((fault, 2, errno.EIO),))
    engine.submit(1, *batch(4, 8, write=write))
    with pytest.raises(DeviceIOError, match="write of" if write else "read of") as caught:
        engine.reap(DEADLINE_S)
    error = caught.value
    assert (error.errno, error.path, error.offset) == (errno.EIO, str(path), 6 * BS)
    assert (error.expected_bytes, error.actual_bytes) == (BS, 0)


def test_fsync_is_not_fdatasync_and_its_error_is_told(start: Open, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()

    def refuse(_: int) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DeviceIOError, match="fsync of") as caught:
        engine.sync()
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(path))


def test_the_end_of_the_file_is_a_short_transfer(start: Open, path: Path) -> None:
    engine = start()
    os.truncate(path, 5 * BS)
    engine.submit(1, *batch(3, 4))
    with pytest.raises(DeviceIOError, match="short transfer") as caught:
        engine.reap(DEADLINE_S)
    assert (caught.value.offset, caught.value.actual_bytes) == (5 * BS, 0)


def test_short_ios_go_on_and_are_counted(start: Open, path: Path, arena: Region) -> None:
    engine = start(faults=(("short_read", 1, 4096), ("errno_read", 3, errno.EAGAIN)))
    engine.submit(1, *batch(0, 8))
    assert reap_all(engine, 1) == [1]
    assert engine.counters().num_short == 1
    assert arena.array()[: 8 * BS].tobytes() == path.read_bytes()[: 8 * BS]


def test_block_sizes_that_are_no_whole_pages(start: Open, path: Path, arena: Region) -> None:
    """bs need only be what the device takes: 512 here."""
    if (problem := _refuses_sectors(path)) is not None:
        pytest.skip(problem)
    engine = start(bs=512)
    slots = np.arange(20, dtype=np.uint64)
    engine.submit(1, np.zeros(20, dtype=np.uint8), slots * np.uint64(512), slots)
    assert reap_all(engine, 1) == [1]
    assert arena.array()[: 20 * 512].tobytes() == path.read_bytes()[: 20 * 512]


def _refuses_sectors(path: Path) -> str | None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(fd, [make_region(512).array().data], 0)
    except OSError as error:
        return f"the device takes no 512 bytes: {error.strerror}"
    finally:
        os.close(fd)
    return None


def test_closing_waits_and_may_be_repeated(start: Open) -> None:
    engine = start(faults=(("delay", 0, 50_000),))
    engine.submit(1, *batch(0, 4))
    engine.close()
    assert reap_all(engine, 1) == [1]
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(2, *batch(0, 4))


def test_unknown_engines_are_refused_with_the_known_ones(path: Path, arena: Region) -> None:
    with pytest.raises(ConfigError, match="io_uring, libaio, posix"):
        engine_problem("spdk")
    with pytest.raises(ConfigError, match="'spdk'"):
        open_engine("spdk", 0, arena, BS, IODEPTH, str(path))
