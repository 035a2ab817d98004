"""What the reactor itself promises, whichever engine is below: bounds, closing, ownership."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from io_daemon._native import ENGINES, Reactor, probe_engine
from io_daemon.shared.protocol import PAGE_BYTES, Status
from tests.csrc.conftest import MakeBench
from tests.support.reactor import ARENA_BYTES, BLOCK_BYTES, DEADLINE_S, ReactorBench, finish, make_region

CLOSE_MS = int(DEADLINE_S * 1000)


def await_condition(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition does not come true")
        time.sleep(0.001)


def open_fds() -> Counter[str]:
    """How often each file is open."""
    targets: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return Counter(targets)


def num_threads_named(name: str) -> int:
    names: list[str] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended since it was listed
            names.append(Path("/proc/self/task", thread, "comm").read_text().strip())
    return names.count(name)


def blocked_signals(name: str) -> list[set[int]]:
    """Of each thread of that name."""
    masks = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = Path("/proc/self/task", thread, "status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            if fields["Name"].strip() == name:
                mask = int(fields["SigBlk"], 16)
                masks.append({number for number in range(1, 65) if mask >> (number - 1) & 1})
    return masks


@pytest.mark.parametrize("engine", ENGINES)
def test_its_threads_are_named_and_take_no_signals(engine: str, tmp_path: Path) -> None:
    """They are the program's, which has its handlers on its own threads."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    made = ReactorBench(tmp_path / "file", engine)
    blocked = [*blocked_signals("io-reactor"), *(blocked_signals("io-posix") if engine == "posix" else ())]
    assert len(blocked) >= (2 if engine == "posix" else 1)
    to_take = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
    assert all(to_take <= each for each in blocked)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert made.reactor.close(CLOSE_MS)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may become somebody who has too many threads already")
@pytest.mark.parametrize("engine", ["posix", "libaio"])
def test_a_thread_that_cannot_be_had_is_told_with_its_limit(engine: str) -> None:
    script = """
import os, resource, sys
from io_daemon._native import Reactor
os.setuid(23456)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    Reactor(sys.argv[1], 4, 4096)
except OSError as error:
    sys.exit(str(error))
"""
    run = run_script(script, engine)
    assert "start a thread (raise ulimit -u" in run.stderr


@pytest.fixture
def bench(tmp_path: Path) -> ReactorBench:
    return ReactorBench(tmp_path / "file", "posix")


WHOLE: dict[str, Any] = {"op": Reactor.READ, "file": 0, "offset": 0, "buffer": 0, "buffer_offset": 0, "num_bytes": 4096}


@pytest.mark.parametrize(
    "change",
    [
        {"op": 2},
        {"op": -1},
        {"file": 1},
        {"file": -1},
        {"buffer": 1},
        {"buffer": -1},
        {"num_bytes": 0},
        {"num_bytes": -1},
        {"num_bytes": ARENA_BYTES + 1},
        {"num_bytes": 2**63 - 1},
        {"buffer_offset": ARENA_BYTES - 4095},
        {"buffer_offset": 2**63 - 1},
        {"buffer_offset": -1},
        {"offset": -1},
        {"offset": 2**63 - 4096},
        {"verify": True},
        {"op": Reactor.WRITE, "verify": True},
    ],
)
def test_requests_out_of_bounds_are_refused(bench: ReactorBench, change: dict[str, Any]) -> None:
    with bench, pytest.raises(ValueError):
        bench.reactor.submit(1, **WHOLE | change)


@pytest.mark.parametrize("first_checksum_offset", [PAGE_BYTES - 4, PAGE_BYTES, 2, -4, 2**62])
def test_checksums_out_of_bounds_are_refused(bench: ReactorBench, first_checksum_offset: int) -> None:
    checksums = make_region(PAGE_BYTES)
    with bench, pytest.raises(ValueError):
        bench.reactor.submit(1, Reactor.WRITE, 0, 0, 0, 0, BLOCK_BYTES + 1, checksums, first_checksum_offset)


def test_last_checksum_that_fits_is_taken(bench: ReactorBench) -> None:
    checksums = make_region(PAGE_BYTES)
    with bench:
        bench.reactor.submit(1, Reactor.WRITE, 0, 0, 0, 0, BLOCK_BYTES, checksums, PAGE_BYTES - 4)
        assert bench.finish()[0].status == Status.OK
    assert checksums.array()[-4:].any()


def test_read_only_regions_take_no_bytes(bench: ReactorBench) -> None:
    read_only = make_region(PAGE_BYTES, writable=False)
    with bench:
        buffer = bench.reactor.add_buffer(read_only)
        with pytest.raises(ValueError, match="read-only"):
            bench.reactor.submit(1, Reactor.READ, 0, 0, buffer, 0, PAGE_BYTES)
        with pytest.raises(ValueError, match="read-only"):
            bench.reactor.submit(1, Reactor.WRITE, 0, 0, 0, 0, PAGE_BYTES, read_only, 0)
        bench.reactor.submit(1, Reactor.WRITE, 0, 0, buffer, 0, PAGE_BYTES)
        assert bench.finish()[0].status == Status.OK


@pytest.mark.parametrize(
    ("queue_depth", "block_bytes"),
    [(0, 4096), (-1, 4096), (4097, 4096), (1, 0), (1, -4096), (1, 4095), (1, 2**30 + 4096)],
)
def test_geometry_out_of_bounds_is_refused(queue_depth: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"queue_depth|block_bytes"):
        Reactor("posix", queue_depth, block_bytes)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'aio'"):
        Reactor("aio", 1, 4096)
    with pytest.raises(ValueError, match="'aio'"):
        probe_engine("aio")
    with pytest.raises(ValueError, match="'typo'"):
        Reactor("posix", 1, 4096, faults=[("typo", 0, 0)])


def test_engines_are_listed_best_first() -> None:
    assert [name for name in ("io_uring", "libaio", "posix") if name in ENGINES] == list(ENGINES)
    assert ENGINES[-1] == "posix"


@pytest.mark.parametrize("name", ENGINES)
def test_a_probe_finds_what_a_reactor_finds(name: str, tmp_path: Path) -> None:
    """Every time: tests of an engine are skipped on its word. The posix engine's result comes before or after the first
    look for it."""
    try:
        with ReactorBench(tmp_path / "file", name) as bench:
            assert bench.write(0, 0, PAGE_BYTES).status == Status.OK
    except OSError as error:
        assert str(error.strerror) in str(probe_engine(name))
    else:
        assert {probe_engine(name) for _ in range(50)} == {None}


def test_what_is_in_use_is_not_removed(make_bench: MakeBench) -> None:
    bench = make_bench(faults=[("delay", 0, 50_000)])
    bench.submit_write(1, 0, 0, PAGE_BYTES)
    with pytest.raises(RuntimeError, match="file 0 is in use by 1"):
        bench.reactor.remove_file(0)
    with pytest.raises(RuntimeError, match="buffer 0 is in use by 1"):
        bench.reactor.remove_buffer(0)
    bench.finish()
    bench.reactor.remove_file(0)
    bench.reactor.remove_buffer(0)
    with pytest.raises(ValueError, match="no file 0"):
        bench.submit_write(1, 0, 0, PAGE_BYTES)
    with pytest.raises(ValueError, match="no file 0"):
        bench.reactor.remove_file(0)


def test_closing_while_in_flight(make_bench: MakeBench) -> None:
    bench = make_bench(faults=[("delay", 0, 200_000)])
    for tag in range(10):
        bench.submit_write(tag, 0, 0, BLOCK_BYTES)
    assert not bench.reactor.close(0)
    with pytest.raises(RuntimeError, match="closed"):
        bench.submit_write(10, 0, 0, BLOCK_BYTES)
    assert bench.reactor.close(CLOSE_MS)
    assert bench.reactor.close(0)
    done = bench.finish(10)
    assert {completion.status for completion in done} == {Status.OK}
    bench.reactor.remove_file(0)  # nothing is left to remove, and that is no error
    with pytest.raises(RuntimeError, match="closed"):
        bench.reactor.add_file(0)


def test_close_gives_everything_back(engine: str, tmp_path: Path) -> None:
    fds_before = open_fds()
    with ReactorBench(tmp_path / "file", engine) as bench:
        bench.write(0, 0, BLOCK_BYTES)
        assert num_threads_named("io-reactor") == 1
    assert str(tmp_path / "file") not in open_fds()
    del bench
    gc.collect()
    await_condition(lambda: num_threads_named("io-reactor") == 0)
    assert not open_fds() - fds_before
    assert "test-region" not in Path("/proc/self/maps").read_text()


def test_dropped_reactor_finishes_by_itself(engine: str, tmp_path: Path) -> None:
    bench = ReactorBench(tmp_path / "file", engine, faults=[("delay", 0, 100_000)])
    written = bench.to_write[:BLOCK_BYTES].tobytes()
    bench.submit_write(1, 0, 0, BLOCK_BYTES)
    del bench  # reactor, arena and checksums: the thread holds what the write needs
    gc.collect()
    await_condition(lambda: num_threads_named("io-reactor") == 0)
    await_condition(lambda: "test-region" not in Path("/proc/self/maps").read_text())
    assert (tmp_path / "file").read_bytes()[:BLOCK_BYTES] == written


def test_a_broken_engine_lets_go_of_nothing(engine: str, tmp_path: Path) -> None:
    """What had ended is reported; what is in flight is not, and its memory and file stay until the process ends."""
    script = """
import gc, os, select, sys
from pathlib import Path
from tests.support.reactor import BLOCK_BYTES, ReactorBench
path = Path(sys.argv[1])
bench = ReactorBench(path, sys.argv[2], faults=[("delay", 1, 3_600_000_000), ("break", 2, 19)])
assert bench.write(0, 0, BLOCK_BYTES).status == 0
assert bench.reactor.reap(9) == [] and not select.select([bench.reactor.event_fd], [], [], 0)[0]
bench.submit_write(2, 0, 0, BLOCK_BYTES)
bench.submit_write(3, 0, 0, BLOCK_BYTES)
assert select.select([bench.reactor.event_fd], [], [], 60)[0]  # who waits for completions is told
assert not bench.reactor.close(60_000)  # at once
for verb in (lambda: bench.reactor.reap(9), lambda: bench.submit_write(4, 0, 0, 4096)):
    try:
        print(verb())
    except OSError as error:
        assert error.errno == 19, error
for remove in (bench.reactor.remove_file, bench.reactor.remove_buffer):
    try:
        print(remove(0))
    except RuntimeError as error:
        assert "in use" in str(error)
del bench, verb, remove
gc.collect()
assert "test-region" in Path("/proc/self/maps").read_text()
assert str(path) in [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
                     and os.path.lexists(f"/proc/self/fd/{fd}")]
"""
    run = run_script(script, tmp_path / "file", engine)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_reactor_for_requests_is_no_bench(tmp_path: Path) -> None:
    """And moves bytes all the same."""
    reactor = Reactor("posix", 2, BLOCK_BYTES)
    assert not {"latencies", "clat", "reset_latencies", "submit_blocks"} & set(dir(reactor))
    memory = os.memfd_create("file")
    file, buffer = reactor.add_file(memory), reactor.add_buffer(make_region(BLOCK_BYTES))
    reactor.submit(1, Reactor.WRITE, file, 0, buffer, 0, BLOCK_BYTES)
    assert finish(reactor, 1)[0].status == Status.OK
    assert reactor.close()
    os.close(memory)


def test_a_forked_child_does_not_inherit_the_rings(engine: str, tmp_path: Path) -> None:
    """What the kernel and the engine share is the parent's alone: a child that exits tears nothing down."""
    script = """
import os, sys
from pathlib import Path
from tests.support.reactor import ReactorBench
bench = ReactorBench(Path(sys.argv[1]), sys.argv[2])
def rings():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "io_uring" in line or "[aio]" in line]
assert bool(rings()) == (sys.argv[2] != "posix")
child = os.fork()
if child == 0:
    os._exit(len(rings()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bench.write(0, 0, 4096).status == 0
assert bench.reactor.close()
"""
    run = run_script(script, tmp_path / "file", engine)
    assert (run.returncode, run.stderr) == (0, "")


def test_reap_takes_no_more_than_asked_for_and_forgets_nothing(bench: ReactorBench) -> None:
    with bench:
        for tag in range(5):
            bench.submit_write(tag, 0, 0, PAGE_BYTES)
        await_condition(lambda: bench.reactor.stats()["num_in_flight"] == 0)
        os.eventfd_read(bench.reactor.event_fd)
        first = bench.reactor.reap(2)
        assert os.eventfd_read(bench.reactor.event_fd) == 1  # readable again: more are there
        assert len(first) == 2
        assert sorted(done[0] for done in first + bench.reactor.reap(9)) == list(range(5))
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bench.reactor.event_fd)


def test_requests_not_reaped_are_limited(bench: ReactorBench) -> None:
    with bench:
        for tag in range(65536):
            bench.reactor.submit(tag, **WHOLE)
        with pytest.raises(RuntimeError, match="65536 requests"):
            bench.reactor.submit(0, **WHOLE)


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    quiet = "ignore:This process:DeprecationWarning"  # Python 3.12 warns of forks beside threads, which are the point
    command = [sys.executable, "-W", quiet, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_forked_child_neither_hangs_nor_does_io(engine: str, tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from tests.support.reactor import ReactorBench
bench = ReactorBench(Path(sys.argv[1]), sys.argv[2])
child = os.fork()
if child == 0:
    try:
        bench.submit_write(1, 0, 0, 4096)
    except RuntimeError as error:
        assert "another process" in str(error)
        assert bench.reactor.close(0)
        del bench
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert bench.write(0, 0, 4096).status == 0
assert bench.reactor.close()
"""
    run = run_script(script, tmp_path / "file", engine)
    assert (run.returncode, run.stderr) == (0, "")


def test_buffers_beyond_the_memlock_limit_work_unregistered(engine: str, tmp_path: Path) -> None:
    script = """
import os, resource, sys
from io_daemon._native import Reactor
from tests.support.reactor import finish, make_region
NUM_BYTES = 1 << 20
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setuid(65534)  # root is exempt from the limit
region = make_region(2 * NUM_BYTES)
region.array()[:NUM_BYTES] = 7
reactor = Reactor(sys.argv[2], 4, 65536)
file, buffer = reactor.add_file(fd), reactor.add_buffer(region)
for operation, at in ((Reactor.WRITE, 0), (Reactor.READ, NUM_BYTES)):
    reactor.submit(1, operation, file, 0, buffer, at, NUM_BYTES)
    assert finish(reactor, 1)[0].status == 0
assert (region.array() == 7).all()
reactor.remove_buffer(buffer)
assert reactor.close()
"""
    run = run_script(script, tmp_path / "file", engine)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter names x86-64 system calls")
def test_forbidden_io_uring_is_said_and_the_others_work(tmp_path: Path) -> None:
    """As in most containers: a seccomp filter answers io_uring_setup with EPERM."""
    if "io_uring" not in ENGINES:
        pytest.skip("io_uring is not built in")
    script = """
import errno, sys
from pathlib import Path
from io_daemon._native import ENGINES, Reactor, probe_engine
from tests.support.reactor import ReactorBench
from tests.support.seccomp import NR_IO_URING_SETUP, forbid
forbid(NR_IO_URING_SETUP, errno.EPERM)
print(probe_engine("io_uring"))
try:
    Reactor("io_uring", 4, 4096)
except OSError as error:
    print(error.errno)
for engine in ENGINES[1:]:
    with ReactorBench(Path(sys.argv[1]), engine) as bench:
        assert bench.write(0, 0, 4096).status == 0
"""
    run = run_script(script, tmp_path / "file")
    why_not, error_number = run.stdout.splitlines()
    assert "io_uring_queue_init" in why_not
    assert "seccomp" in why_not
    assert (int(error_number), run.returncode, run.stderr) == (errno.EPERM, 0, "")
