"""Engines over other people's libraries: aiofiles, and kvikio with its blocks in host or GPU memory.

kvikio needs the CUDA driver's library even for host memory. Where there is none, the last test runs those of kvikio
once more in a process that finds a stub of it, which also plays the part of a GPU."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from io_daemon._native import Region
from io_daemon.bench.engines.cuda_memory import CudaMemory, device_problem, driver_problem
from io_daemon.bench.engines.engine import BlockEngine, Memory
from io_daemon.bench.engines.factory import engine_problem, open_engine
from io_daemon.bench.engines.ledger import Ledger, errno_of
from io_daemon.errors import ConfigError, DeviceIOError
from tests.support.block_io import BS, NUM_SLOTS, batch, check_own_slots, make_file, reap_all
from tests.support.descriptors import open_fds
from tests.support.reactor import DEADLINE_S, make_region

ROOT = Path(__file__).resolve().parents[3]
IODEPTH = 4


class Kind(NamedTuple):
    name: str
    memory: Memory = "host"


@pytest.fixture(
    params=[
        pytest.param(Kind("aiofiles"), id="aiofiles"),
        pytest.param(Kind("kvikio"), id="kvikio-host"),
        pytest.param(Kind("kvikio", "gpu"), id="kvikio-gpu", marks=pytest.mark.gpu),
    ]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    if (problem := engine_problem(kind.name, kind.memory)) is not None:
        pytest.skip(problem)
    return kind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_file(tmp_path / "file")


@pytest.fixture
def arena() -> Region:
    return make_region(NUM_SLOTS * BS)


@pytest.fixture
def start(kind: Kind, path: Path, arena: Region) -> Iterator[Callable[..., BlockEngine]]:
    with ExitStack() as stack:

        def start(*, flags: int = os.O_RDWR | os.O_DIRECT) -> BlockEngine:
            fd = os.open(path, flags)
            try:
                engine = open_engine(kind.name, fd, arena, BS, IODEPTH, str(path), memory=kind.memory)
            finally:
                os.close(fd)
            stack.callback(engine.close)
            return engine

        yield start


Start = Callable[..., BlockEngine]


def test_a_load_needs_no_more_slots_than_are_in_flight(start: Start, path: Path, arena: Region) -> None:
    check_own_slots(start(), path, arena, IODEPTH)


@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
def test_batches_move_bytes_both_ways(start: Start, kind: Kind, path: Path, arena: Region, direct: int) -> None:
    engine = start(flags=os.O_RDWR | direct)
    assert engine.name == kind.name
    content = np.fromfile(path, dtype=np.uint8)
    for tag in range(4):
        engine.submit(tag, *batch(16 * tag, 16))
    assert sorted(reap_all(engine, 4)) == [0, 1, 2, 3]
    assert (arena.array() == content).all()
    arena.array()[:] = ~content
    writes, offsets, slots = batch(0, NUM_SLOTS, write=1)
    engine.submit(9, writes, offsets[::-1].copy(), slots)
    assert reap_all(engine, 1) == [9]
    engine.sync()
    turned = ~content.reshape(NUM_SLOTS, BS)[::-1].reshape(-1)
    assert (np.fromfile(path, dtype=np.uint8) == turned).all()
    whole = NUM_SLOTS * BS
    assert engine.counters() == (whole, whole, NUM_SLOTS, NUM_SLOTS, 0)


def test_latencies_are_counted_per_io_and_from_the_reset(start: Start) -> None:
    engine = start()
    engine.submit(1, *batch(0, 16))
    reap_all(engine, 1)
    engine.reset_latencies()
    begin = time.perf_counter_ns()
    engine.submit(2, *batch(0, 5, write=1))
    reap_all(engine, 1)
    passed_ns = time.perf_counter_ns() - begin
    latencies = engine.latencies()
    assert (latencies.read.lat.num, latencies.write.lat.num) == (0, 5)
    write = latencies.write
    assert 0 < write.clat.min_ns <= write.lat.percentile(50) <= write.lat.max_ns <= passed_ns
    assert write.lat.sum_ns == write.slat.sum_ns + write.clat.sum_ns


def test_the_end_of_the_file_is_a_short_transfer(start: Start, path: Path) -> None:
    engine = start()
    os.truncate(path, 5 * BS)
    engine.submit(1, *batch(5, 1))
    with pytest.raises(DeviceIOError, match=r"read of .* short transfer") as caught:
        engine.reap(DEADLINE_S)
    assert (caught.value.errno, caught.value.path, caught.value.offset) == (0, str(path), 5 * BS)
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (BS, 0)


def test_a_failed_io_leaves_other_batches_alone(start: Start, path: Path) -> None:
    engine = start()
    writes, offsets, slots = batch(0, 3, write=1)
    offsets[1] = 2**63 - BS  # it would end where no offset reaches
    engine.submit(1, writes, offsets, slots)
    engine.submit(2, *batch(8, 3))
    tags: list[int] = []
    errors: list[DeviceIOError] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(tags) + len(errors) < 2:
        assert time.monotonic() < deadline
        try:
            tags += engine.reap(DEADLINE_S)
        except DeviceIOError as error:
            errors.append(error)
    assert tags == [2]
    assert (errors[0].errno, errors[0].path, errors[0].offset) == (errno.EINVAL, str(path), 2**63 - BS)
    assert "write of" in str(errors[0])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_every_batch_is_reported_whatever_failed_beside_it(order: tuple[int, ...]) -> None:
    """All have ended before anybody looks; the middle one failed."""
    ledger = Ledger("a file", BS)
    ios = [ledger.begin(tag, *batch(tag, 1), None)[0] for tag in range(3)]
    for tag in order:
        if tag == 1:
            ledger.fail(ios[tag], OSError(errno.EIO, os.strerror(errno.EIO)), 0)
        else:
            ledger.end(ios[tag], 1, 1)
    reported: list[int] = []
    while len(reported) < 3:
        try:
            tags = ledger.reap(0.0)
            assert tags
            reported += tags
        except DeviceIOError as error:
            assert (error.errno, error.offset) == (errno.EIO, BS)
            reported.append(1)
    assert tuple(reported) == order


def test_waiting_has_a_deadline_and_closing_ends_everything(start: Start) -> None:
    fds_before = open_fds()
    threads_before = set(threading.enumerate())
    engine = start()
    assert engine.reap(0.0) == []
    assert engine.reap(0.001) == []
    engine.submit(1, *batch(0, NUM_SLOTS))
    engine.close()
    assert reap_all(engine, 1) == [1]
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(2, *batch(0, 1))
    assert set(threading.enumerate()) == threads_before
    assert open_fds() <= fds_before


def test_sync_covers_only_what_has_ended(start: Start) -> None:
    engine = start()
    engine.submit(1, *batch(0, 4, write=1))
    with pytest.raises(RuntimeError, match="1 batches are in flight"):
        engine.sync()
    reap_all(engine, 1)
    engine.sync()


def test_batches_of_unequal_lengths_are_refused(start: Start) -> None:
    writes, offsets, slots = batch(0, 4)
    with pytest.raises(ValueError, match=r"lengths \[4, 3, 4\]"):
        start().submit(1, writes, offsets[:3], slots)


@pytest.mark.gpu
def test_gpu_memory_holds_what_is_copied() -> None:
    if (problem := device_problem()) is not None:
        pytest.skip(problem)
    memory = CudaMemory(3 * BS)
    put, got = np.random.default_rng(1).integers(0, 256, BS, dtype=np.uint8), np.zeros(BS, dtype=np.uint8)
    view = memory.view(BS, BS)
    memory.copy_in(view, put.ctypes.data)
    memory.copy_out(view, got.ctypes.data)
    assert (got == put).all()
    assert view.__cuda_array_interface__["data"] == (memory.address + BS, False)
    with pytest.raises(ValueError, match="do not lie"):
        memory.view(2 * BS + 1, BS)
    with pytest.raises(RuntimeError, match="cuMemcpyHtoD_v2: CUDA_ERROR"):
        memory.copy_in(type(view)(0, BS), put.ctypes.data)
    memory.close()
    memory.close()


def test_what_is_missing_is_said_with_its_remedy(arena: Region) -> None:
    problem = engine_problem("kvikio")
    if importlib.util.find_spec("kvikio") is None:
        assert problem == "kvikio is not installed: pip install 'infinity[kvikio]'"
    elif driver_problem() is not None:
        assert problem is not None
        assert "libcuda.so.1 is missing: install the driver" in problem
    else:
        pytest.skip("kvikio and the driver's library are here")
    with pytest.raises(ConfigError, match="engine = 'kvikio'"):
        open_engine("kvikio", 0, arena, BS, IODEPTH, "file")


def test_gpu_memory_is_for_kvikio_alone(arena: Region) -> None:
    for name in ("posix", "aiofiles"):
        with pytest.raises(ConfigError, match="kvikio is the engine for GPU memory"):
            open_engine(name, 0, arena, BS, IODEPTH, "file", memory="gpu")


def test_faults_are_for_the_reactor_alone(arena: Region) -> None:
    with pytest.raises(ConfigError, match="takes no faults"):
        open_engine("aiofiles", 0, arena, BS, IODEPTH, "file", faults=[("errno_read", 0, errno.EIO)])


def test_errno_is_found_in_words() -> None:
    assert errno_of(OSError(errno.ENOSPC, "full")) == errno.ENOSPC
    assert errno_of(RuntimeError(f"POSIX pwrite: {os.strerror(errno.EFBIG)}")) == errno.EFBIG
    assert errno_of(RuntimeError("something else")) == errno.EIO


@pytest.fixture
def stub_directory(tmp_path: Path) -> Path:
    """Holds a libcuda.so.1 that has every symbol kvikio looks up."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler for the stub of libcuda")
    source = ROOT / "tests" / "support" / "stub_libcuda.c"
    directory = tmp_path / "stub"
    directory.mkdir()
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", str(directory / "libcuda.so.1"), str(source)], check=True, timeout=DEADLINE_S)
    return directory


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_kvikio_works_over_a_stub_of_the_driver(stub_directory: Path, num_gpus: int) -> None:
    """Host memory with a driver that finds no GPU; host and GPU memory with one. The same tests as above."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed: pip install 'infinity[kvikio]'")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stub_directory), "KVIKIO_COMPAT_MODE": "ON"}
    if num_gpus:
        environment["STUB_CUDA_DEVICES"] = str(num_gpus)
    # Of this file, what runs on kvikio and needs no further stub.
    selection = "(kvikio and not stub) or gpu_memory_holds" if num_gpus else "kvikio-host"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection, __file__]
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=4 * DEADLINE_S, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout.splitlines()[-1], run.stdout
