"""Requests that name each of their blocks, over every engine, and the latencies that are counted of all blocks."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from io_daemon.shared.protocol import PAGE_BYTES, Status
from tests.csrc.conftest import MakeBench
from tests.support.reactor import ARENA_BYTES, BLOCK_BYTES, QUEUE_DEPTH, ReactorBench, make_region

HALF_BYTES = ARENA_BYTES // 2
NUM_BLOCKS = 48


def as_writes(*values: int) -> NDArray[np.uint8]:
    return np.array(values, dtype=np.uint8)


def as_offsets(*values: int) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


def shuffled(num_bytes: int, seed: int) -> NDArray[np.uint64]:
    """Places of NUM_BLOCKS blocks in one half of the arena, or in the file, in random order."""
    places = np.random.default_rng(seed).permutation(HALF_BYTES // num_bytes)[:NUM_BLOCKS]
    return (places * num_bytes).astype(np.uint64)


def submit(
    bench: ReactorBench,
    writes: NDArray[np.uint8],
    offsets: NDArray[np.uint64],
    places: NDArray[np.uint64],
    num_bytes: int,
    tag: int = 5,
) -> None:
    bench.reactor.submit_blocks(tag, bench.file, writes, offsets, bench.buffer, places, num_bytes)


def block_of(data: NDArray[np.uint8], at: int, num_bytes: int) -> bytes:
    return data[at : at + num_bytes].tobytes()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("num_bytes", [PAGE_BYTES, 5 * PAGE_BYTES, BLOCK_BYTES])
def test_each_block_goes_its_own_way(make_bench: MakeBench, direct: bool, num_bytes: int) -> None:
    """Half of the blocks are written, the other half read, in one request and in no order."""
    bench = make_bench(direct=direct)
    bench.write(0, 0, HALF_BYTES)
    before = bench.to_write.copy()
    bench.to_write[:] = np.random.default_rng(1).integers(0, 256, HALF_BYTES, dtype=np.uint8)
    writes = (np.arange(NUM_BLOCKS) % 3 == 0).astype(np.uint8)
    offsets, places = shuffled(num_bytes, 2), shuffled(num_bytes, 3)
    targets = places + np.where(writes, 0, HALF_BYTES).astype(np.uint64)
    submit(bench, writes, offsets, targets, num_bytes)
    total = NUM_BLOCKS * num_bytes
    assert bench.finish() == [(5, Status.OK, 0, offsets[0], total, total)]
    assert bench.read(0, 0, HALF_BYTES, verify=False).status == Status.OK
    on_disk = bench.found.copy()
    submit(bench, np.zeros_like(writes), offsets, places + np.uint64(HALF_BYTES), num_bytes)
    bench.finish()
    for write, offset, place in zip(writes.tolist(), offsets.tolist(), places.tolist(), strict=True):
        expected = block_of(bench.to_write, place, num_bytes) if write else block_of(before, offset, num_bytes)
        assert block_of(on_disk, offset, num_bytes) == expected
        assert block_of(bench.found, place, num_bytes) == expected


@pytest.mark.parametrize("num_bytes", [1, 511, PAGE_BYTES + 1])
def test_any_number_of_bytes_without_direct_io(make_bench: MakeBench, num_bytes: int) -> None:
    bench = make_bench()
    offsets, places = shuffled(num_bytes, 4), shuffled(num_bytes, 5)
    submit(bench, np.ones(NUM_BLOCKS, dtype=np.uint8), offsets, places, num_bytes)
    submit(bench, np.zeros(NUM_BLOCKS, dtype=np.uint8), offsets, places + np.uint64(HALF_BYTES), num_bytes)
    assert {done.status for done in bench.finish(2)} == {Status.OK}
    submit(bench, np.zeros(NUM_BLOCKS, dtype=np.uint8), offsets, places + np.uint64(HALF_BYTES), num_bytes)
    bench.finish()
    for place in places.tolist():
        assert block_of(bench.found, place, num_bytes) == block_of(bench.to_write, place, num_bytes)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_short_and_interrupted_blocks_go_on(make_bench: MakeBench, operation: str) -> None:
    faults = [
        (f"short_{operation}", 0, PAGE_BYTES),
        (f"short_{operation}", 5, 3 * PAGE_BYTES + 17),
        (f"errno_{operation}", 7, errno.EINTR),
        (f"errno_{operation}", 9, errno.EAGAIN),
    ]
    bench = make_bench(direct=True, faults=faults)
    offsets, places = shuffled(BLOCK_BYTES, 6), shuffled(BLOCK_BYTES, 7)
    submit(bench, np.ones(NUM_BLOCKS, dtype=np.uint8), offsets, places, BLOCK_BYTES)
    assert bench.finish()[0].status == Status.OK
    submit(bench, np.zeros(NUM_BLOCKS, dtype=np.uint8), offsets, places + np.uint64(HALF_BYTES), BLOCK_BYTES)
    assert bench.finish()[0].status == Status.OK
    for place in places.tolist():
        assert block_of(bench.found, place, BLOCK_BYTES) == block_of(bench.to_write, place, BLOCK_BYTES)
    assert bench.reactor.stats()["num_short"] == 2
    latencies = bench.reactor.latencies()
    assert latencies["read"]["clat"]["num"] == latencies["write"]["clat"]["num"] == NUM_BLOCKS


def test_the_first_failed_block_in_the_order_given_is_reported(make_bench: MakeBench) -> None:
    """With its own offset, though blocks that failed after it lie before it in the file."""
    bench = make_bench(faults=[("errno_write", nth, nth) for nth in (1, 2)] + [("delay", 1, 50_000)])
    offsets = as_offsets(9 * BLOCK_BYTES, 8 * BLOCK_BYTES, BLOCK_BYTES, 0)
    submit(bench, as_writes(1, 1, 1, 1), offsets, as_offsets(0, 0, 0, 0), BLOCK_BYTES)
    assert bench.finish() == [(5, Status.IO_ERROR, 1, 8 * BLOCK_BYTES, BLOCK_BYTES, 0)]


def test_a_failed_block_leaves_the_rest_out_and_other_requests_alone(make_bench: MakeBench) -> None:
    bench = make_bench(faults=[("errno_read", 0, errno.EIO)])
    offsets = as_offsets(*range(0, HALF_BYTES, PAGE_BYTES))
    submit(bench, np.zeros(offsets.size, dtype=np.uint8), offsets, offsets, PAGE_BYTES, tag=1)
    submit(bench, as_writes(1), as_offsets(0), as_offsets(0), PAGE_BYTES, tag=2)
    done = {completion.tag: completion for completion in bench.finish(2)}
    assert done[1] == (1, Status.IO_ERROR, errno.EIO, 0, PAGE_BYTES, 0)
    assert done[2].status == Status.OK
    assert bench.reactor.stats()["num_reads"] < offsets.size - 1


def test_a_block_beyond_the_end_is_short(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(direct=True)
    os.truncate(tmp_path / "file", 3 * BLOCK_BYTES + PAGE_BYTES)
    offsets = as_offsets(0, 3 * BLOCK_BYTES, BLOCK_BYTES)
    submit(bench, as_writes(0, 0, 0), offsets, as_offsets(0, 0, 0), BLOCK_BYTES)
    assert bench.finish() == [(5, Status.SHORT_IO, 0, 3 * BLOCK_BYTES, BLOCK_BYTES, PAGE_BYTES)]


SHORT_AND_INTERRUPTED = [
    ("short_write", 0, PAGE_BYTES),
    ("short_write", 2 * QUEUE_DEPTH, 2 * PAGE_BYTES + 17),
    ("errno_write", 3, errno.EINTR),
    ("errno_write", 3 * QUEUE_DEPTH, errno.EAGAIN),
    ("short_read", 1, PAGE_BYTES),
]


@pytest.mark.parametrize("faults", [[], SHORT_AND_INTERRUPTED], ids=["whole", "short and interrupted"])
def test_blocks_without_places_go_through_a_piece_for_each_in_flight(
    make_bench: MakeBench, tmp_path: Path, faults: list[tuple[str, int, int]]
) -> None:
    """Many more blocks than pieces: each write is found with its header over every page of one of the pieces, which
    stay as they were behind their headers, whatever is read in between, and however often a write has to go on."""
    bench = make_bench(direct=True, faults=faults)
    header_bytes = 16
    num_bytes = 5 * PAGE_BYTES
    pieces = bench.region.array()[: QUEUE_DEPTH * num_bytes].reshape(QUEUE_DEPTH, -1, PAGE_BYTES)
    bodies = {bytes(piece[:, header_bytes:]) for piece in pieces}
    writes = (np.arange(2 * NUM_BLOCKS) % 2).astype(np.uint8)
    offsets = np.arange(NUM_BLOCKS, dtype=np.uint64).repeat(2) * np.uint64(num_bytes)
    headers = np.random.default_rng(7).integers(0, 256, (2 * NUM_BLOCKS, header_bytes), dtype=np.uint8)
    for _ in range(2):
        bench.reactor.submit_blocks(5, bench.file, writes, offsets, bench.buffer, None, num_bytes, headers)
        assert bench.finish() == [(5, Status.OK, 0, 0, 2 * NUM_BLOCKS * num_bytes, 2 * NUM_BLOCKS * num_bytes)]
        found = np.fromfile(tmp_path / "file", np.uint8)[: NUM_BLOCKS * num_bytes].reshape(NUM_BLOCKS, -1, PAGE_BYTES)
        assert (found[:, :, :header_bytes] == headers[writes == 1, None]).all()
        assert {bytes(block[:, header_bytes:]) for block in found} <= bodies
    assert {bytes(piece[:, header_bytes:]) for piece in pieces} == bodies
    assert bench.reactor.stats()["num_short"] == sum(what.startswith("short") for what, _, _ in faults)


def test_reads_without_places_land_behind_the_pieces_for_writes(tmp_path: Path) -> None:
    with ReactorBench(tmp_path / "file", "posix") as bench:
        bench.write(0, 0, PAGE_BYTES)
        bench.reactor.submit_blocks(5, bench.file, as_writes(0), as_offsets(0), bench.buffer, None, PAGE_BYTES)
        assert bench.finish()[0].status == Status.OK
        small = bench.reactor.add_buffer(make_region(2 * QUEUE_DEPTH * PAGE_BYTES - 1))
        with pytest.raises(ValueError, match="do not lie in a region"):
            bench.reactor.submit_blocks(5, bench.file, as_writes(0), as_offsets(0), small, None, PAGE_BYTES)
        pieces = bench.region.array()[QUEUE_DEPTH * PAGE_BYTES : 2 * QUEUE_DEPTH * PAGE_BYTES].reshape(QUEUE_DEPTH, -1)
        assert (pieces == bench.to_write[:PAGE_BYTES]).all(axis=1).sum() == 1


WHOLE: dict[str, Any] = {
    "tag": 1,
    "file": 0,
    "writes": as_writes(1, 0),
    "offsets": as_offsets(0, 0),
    "buffer": 0,
    "buffer_offsets": as_offsets(0, 0),
    "num_bytes": PAGE_BYTES,
}


@pytest.mark.parametrize(
    "change",
    [
        {"file": 1},
        {"buffer": -1},
        {"num_bytes": 0},
        {"num_bytes": -1},
        {"num_bytes": BLOCK_BYTES + 1},
        {"writes": as_writes(1)},
        {"writes": as_writes(1, 2)},
        {"offsets": as_offsets(0, 2**63)},
        {"offsets": as_offsets(0, 2**64 - 1)},
        {"offsets": as_offsets(0, 0, 0)},
        {"buffer_offsets": as_offsets(0)},
        {"buffer_offsets": as_offsets(0, ARENA_BYTES - PAGE_BYTES + 1)},
        {"buffer_offsets": as_offsets(2**64 - 1, 0)},
        {"writes": as_writes(), "offsets": as_offsets(), "buffer_offsets": as_offsets()},
        {"headers": np.zeros((2, 8), np.uint8)},
        {"buffer_offsets": None, "headers": np.zeros((1, 8), np.uint8)},
        {"buffer_offsets": None, "headers": np.zeros((2, PAGE_BYTES + 1), np.uint8)},
    ],
)
def test_blocks_out_of_bounds_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with ReactorBench(tmp_path / "file", "posix") as bench:
        with pytest.raises(ValueError):
            bench.reactor.submit_blocks(**WHOLE | change)
        assert bench.reactor.stats()["num_in_flight"] == 0
        bench.reactor.submit_blocks(**WHOLE)
        assert bench.finish()[0].status == Status.OK


@pytest.mark.parametrize(
    "change",
    [
        {"writes": as_writes(1)},
        {"writes": as_writes(1), "buffer_offsets": None},
        {"buffer_offsets": as_offsets(0)},
        {"offsets": as_offsets(0, 0, 0)},
    ],
)
def test_lists_of_several_lengths_are_refused_before_one_is_read(tmp_path: Path, change: dict[str, Any]) -> None:
    with ReactorBench(tmp_path / "file", "posix") as bench, pytest.raises(ValueError, match="not of one length"):
        bench.reactor.submit_blocks(**WHOLE | change)


def test_other_types_are_refused(tmp_path: Path) -> None:
    with ReactorBench(tmp_path / "file", "posix") as bench:
        for change in (
            {"writes": np.array([True, False])},
            {"offsets": np.array([0, 1])},
            {"offsets": as_offsets(0, 0, 0, 0)[::2]},
            {"buffer_offsets": None, "headers": np.zeros(2, np.uint8)},
        ):
            with pytest.raises(TypeError):
                bench.reactor.submit_blocks(**WHOLE | change)


def test_the_number_of_blocks_has_a_limit(tmp_path: Path) -> None:
    with ReactorBench(tmp_path / "file", "posix") as bench:
        zeros, none = np.zeros(65537, dtype=np.uint64), np.zeros(65537, dtype=np.uint8)
        with pytest.raises(ValueError, match="65536"):
            submit(bench, none, zeros, zeros, 1)
        submit(bench, none[1:], zeros[1:], zeros[1:], 1)
        assert bench.finish()[0].status == Status.OK
        assert bench.reactor.latencies()["read"]["clat"]["num"] == 65536


def test_blocks_into_a_read_only_region_are_refused(tmp_path: Path) -> None:
    with ReactorBench(tmp_path / "file", "posix") as bench:
        buffer = bench.reactor.add_buffer(make_region(PAGE_BYTES, writable=False))
        with pytest.raises(ValueError, match="read-only"):
            bench.reactor.submit_blocks(**WHOLE | {"buffer": buffer})


def test_every_block_is_timed_once(make_bench: MakeBench) -> None:
    """Of contiguous and of scattered requests; failed blocks are not."""
    bench = make_bench(faults=[("short_write", 1, PAGE_BYTES), ("errno_read", 3, errno.EIO)])
    start_ns = time.perf_counter_ns()
    bench.write(0, 0, 10 * BLOCK_BYTES)
    bench.submit_read(1, 0, 0, 3 * BLOCK_BYTES, verify=False)
    bench.finish()
    submit(bench, as_writes(0), as_offsets(0), as_offsets(0), BLOCK_BYTES)
    assert bench.finish()[0].status == Status.IO_ERROR
    elapsed_ns = time.perf_counter_ns() - start_ns
    latencies = bench.reactor.latencies()
    for stages, num in ((latencies["write"], 10), (latencies["read"], 3)):
        for histogram in (stages["slat"], stages["clat"], stages["lat"]):
            assert histogram["num"] == histogram["counts"].sum() == num
            assert 0 < histogram["min_ns"] <= histogram["max_ns"] <= elapsed_ns
            assert num * histogram["min_ns"] <= histogram["sum_ns"] <= num * histogram["max_ns"]
        assert stages["lat"]["sum_ns"] == stages["slat"]["sum_ns"] + stages["clat"]["sum_ns"]
    clat = bench.reactor.clat()
    assert (clat["num"], clat["counts"].sum()) == (13, 13)
    assert clat["sum_ns"] == latencies["write"]["clat"]["sum_ns"] + latencies["read"]["clat"]["sum_ns"]
    assert clat["max_ns"] == max(latencies[way]["clat"]["max_ns"] for way in ("write", "read"))
    bench.reactor.reset_latencies()
    empty = bench.reactor.latencies()["write"]["lat"]
    assert (empty["num"], empty["sum_ns"], empty["min_ns"], empty["max_ns"], empty["counts"].sum()) == (0, 0, 0, 0, 0)
    assert latencies["write"]["lat"]["num"] == 10  # a copy


def test_latency_is_counted_from_the_first_round_to_the_last(make_bench: MakeBench) -> None:
    """A block that is continued after a delayed short round has waited for that too."""
    delay_ns = 30_000_000
    bench = make_bench(faults=[("short_write", 0, PAGE_BYTES), ("delay", 0, delay_ns // 1000)])
    bench.write(0, 0, BLOCK_BYTES)
    clat = bench.reactor.latencies()["write"]["clat"]
    assert clat["num"] == 1
    assert clat["min_ns"] >= delay_ns


@pytest.mark.parametrize("slow", ["write", "read"])
def test_latencies_of_both_ways_have_the_least_and_the_most_of_either(make_bench: MakeBench, slow: str) -> None:
    bench = make_bench(faults=[("delay", ("write", "read").index(slow), 30_000)])
    bench.write(0, 0, BLOCK_BYTES)
    bench.submit_read(1, 0, 0, BLOCK_BYTES, verify=False)
    bench.finish()
    both, latencies = bench.reactor.clat(), bench.reactor.latencies()
    each = [latencies[way]["clat"] for way in ("write", "read")]
    assert both["min_ns"] == min(found["min_ns"] for found in each)
    assert both["max_ns"] == max(found["max_ns"] for found in each)
    assert both["min_ns"] < both["max_ns"]


def test_closed_reactors_take_no_blocks(tmp_path: Path) -> None:
    with ReactorBench(tmp_path / "file", "posix") as bench:
        assert bench.reactor.close()
        with pytest.raises(RuntimeError, match="closed"):
            bench.reactor.submit_blocks(**WHOLE)
