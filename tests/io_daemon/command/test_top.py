"""``io-daemon top``: rates of one look after another, at a terminal, in a pipe and as JSON."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from io_daemon.__main__ import main
from io_daemon.command.outcome import EXIT_NO_DAEMON, EXIT_OK, EXIT_USAGE
from io_daemon.command.rates import rates
from io_daemon.command.top import watch
from io_daemon.shared.metrics import DaemonStatus, DeviceStatus, IoTotals, TenantStats
from tests.support.daemon import DEADLINE_S, WEIGHT, ServedDaemon, eventually, specs, write_chunk

COMMAND = [sys.executable, "-m", "io_daemon", "top"]


def device(num_bytes: int = 0, num_ios: int = 0) -> DeviceStatus:
    return DeviceStatus(
        path="/nvme0",
        engine="io_uring",
        direct=True,
        filesystem="ext4",
        free_bytes=7,
        bytes_read=num_bytes,
        bytes_written=2 * num_bytes,
        num_reads=num_ios,
        num_writes=3 * num_ios,
        num_short=0,
        num_in_flight=1,
        num_queued=2,
    )


def tenant(*, rank: int = 0, num_bytes: int = 0, ready: int = 0, misses: int = 0, io_s: float = 0) -> TenantStats:
    total = IoTotals(
        bytes_read=(num_bytes, num_bytes, 0, 0, 0),
        bytes_written=(0, 0, 0, 0, num_bytes),
        hits=ready,
        prefetch_hits=2 * ready,
        misses=misses,
        evictions=0,
        waits=0,
        rejected=0,
        io_errors=0,
        io_s=io_s,
    )
    return TenantStats(
        job="job",
        rank=rank,
        pid=11,
        page_locked=True,
        arena_bytes=100,
        num_frames=10,
        frames_free=0,
        resident_bytes=(40, 20, 0, 0, 0),
        num_chunks=3,
        num_plans=0,
        num_leases=4,
        num_in_flight=0,
        swap_bytes=5,
        swap_files=(f"/nvme0/infinity-job-r{rank}-0.swap",),
        total=total,
    )


def status(uptime_s: float, devices: list[DeviceStatus], tenants: list[TenantStats], *, pid: int = 9) -> DaemonStatus:
    return DaemonStatus(
        protocol_version=4,
        pid=pid,
        socket_path="/s",
        uptime_s=uptime_s,
        block_bytes=4096,
        queue_depth=8,
        verify_checksums=True,
        private=False,
        devices=tuple(devices),
        tenants=tuple(tenants),
    )


@dataclass(frozen=True)
class Seen:
    seconds: float
    read: float
    reads: float
    tenant_read: float
    acquired: float
    ready: float | None
    io: float


@pytest.mark.parametrize(
    ("before", "seen"),
    [
        (
            status(8, [device(400, 20)], [tenant(num_bytes=50, ready=10, misses=5, io_s=1)]),
            Seen(2, 300, 15, 150, 35, 6 / 7, 0.5),
        ),
        (status(8, [device(400, 20)], []), Seen(2, 300, 15, 200, 52.5, 6 / 7, 1.0)),  # the tenant came in between
        (status(8, [], []), Seen(2, 500, 25, 200, 52.5, 6 / 7, 1.0)),
        (
            status(8, [device(2000, 99)], [tenant(num_bytes=900, ready=30, misses=15, io_s=2)]),
            Seen(2, 500, 25, 200, 0, None, 0),  # counted anew
        ),
        (
            status(8, [device(400, 20)], [tenant(num_bytes=50)], pid=10),
            Seen(10, 100, 5, 40, 10.5, 6 / 7, 0.2),  # another daemon
        ),
        (
            status(90, [device(400, 20)], [tenant(num_bytes=50)]),
            Seen(10, 100, 5, 40, 10.5, 6 / 7, 0.2),  # the same pid, after a reboot
        ),
    ],
)
def test_rates_are_what_came_between_two_looks(before: DaemonStatus, seen: Seen) -> None:
    found = rates(before, status(10, [device(1000, 50)], [tenant(num_bytes=200, ready=30, misses=15, io_s=2)]))
    (one,), (other,) = found.devices, found.tenants
    assert found.seconds == seen.seconds
    assert (one.bytes_read_per_s, one.bytes_written_per_s) == (seen.read, 2 * seen.read)
    assert (one.reads_per_s, one.writes_per_s) == (seen.reads, 3 * seen.reads)
    assert (other.bytes_read_per_s, other.bytes_written_per_s) == (seen.tenant_read, seen.tenant_read / 2)
    assert other.acquired_per_s == seen.acquired
    assert other.ready_share == (None if seen.ready is None else pytest.approx(seen.ready))
    assert other.io_share == seen.io
    assert (one.num_in_flight, one.num_queued, one.free_bytes) == (1, 2, 7)
    assert (other.resident_bytes, other.arena_bytes, other.swap_bytes, other.num_leases) == (60, 100, 5, 4)


def test_two_engines_of_one_rank_are_told_apart() -> None:
    again = tenant(num_bytes=30).model_copy(update={"swap_files": ("/nvme0/infinity-job-r0-1.swap",)})
    before = status(1, [], [tenant(num_bytes=10), again])
    found = rates(before, status(2, [], [tenant(num_bytes=15), again]))
    assert [each.bytes_read_per_s for each in found.tenants] == [10, 0]


def test_looks_follow_one_another(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    looks = iter([status(1, [device(0)], []), status(3, [device(200)], []), status(4, [device(500)], [])])
    watch(lambda: next(looks), 2.5, 2, as_json=True)
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["seconds"], each["devices"][0]["bytes_read_per_s"]) for each in shown] == [(2, 100), (1, 300)]
    assert slept == [2.5, 2.5]


def test_what_a_tenant_does_is_seen(daemon: ServedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    """Writes go on while it is looked at, so that the look meets some."""
    ended = threading.Event()

    def work() -> None:
        with daemon.attached(num_frames=2, job="demo", rank=5) as client:
            chunks = client.register(specs(8))
            while not ended.is_set():
                for chunk in chunks:
                    write_chunk(client, chunk, WEIGHT)

    words = ["top", "--socket", daemon.socket, "--interval", "0.2"]

    def is_seen_to_write() -> bool:
        assert main([*words, "--count", "1", "--json"]) == EXIT_OK
        tenants = json.loads(capsys.readouterr().out)["tenants"]
        return any(each["bytes_written_per_s"] for each in tenants if (each["job"], each["rank"]) == ("demo", 5))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        eventually(is_seen_to_write, "the tenant is seen to write")
        assert main([*words, "--count", "2"]) == EXIT_OK
    finally:
        ended.set()
        worker.join(DEADLINE_S)
    text = capsys.readouterr().out
    assert text.count(f"io-daemon pid {daemon.pid}") == 2
    assert text.count("demo rank 5") == 2
    assert text.count(daemon.swap_dirs[0]) == 2, "a name is whole, however long"


def test_a_daemon_that_goes_meanwhile_ends_it(daemon: ServedDaemon) -> None:
    words = [*COMMAND, "--socket", daemon.socket, "--interval", "0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline().startswith("io-daemon pid")
        daemon.kill()
        _, stderr = watcher.communicate(timeout=DEADLINE_S)
    assert watcher.returncode == EXIT_NO_DAEMON
    assert "no I/O daemon answers" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(("term", "goes_up"), [("xterm", True), ("dumb", False)])
def test_at_a_terminal_one_page_takes_the_place_of_the_other_until_ctrl_c(
    daemon: ServedDaemon, term: str, goes_up: bool
) -> None:
    ours, its = pty.openpty()
    shown = b""
    words = [*COMMAND, "--socket", daemon.socket, "--interval", "0.1"]
    with subprocess.Popen(
        words,
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": term, "COLUMNS": "100"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a script's background ignores it
    ) as watcher:
        os.close(its)
        while shown.count(b"no tenants") < 3 and select.select([ours], [], [], DEADLINE_S)[0]:
            shown += os.read(ours, 65536)
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(DEADLINE_S) == EXIT_OK
    os.close(ours)
    assert (b"\x1b[1A" in shown) is goes_up, "to write over what it wrote, where the terminal can"
    assert b"iops" in shown


@pytest.mark.parametrize(
    ("option", "value"),
    [*(("--count", value) for value in ("0", "-1", "x", "9" * 99)), ("--interval", "0"), ("--interval", "x")],
)
def test_numbers_that_are_none_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", f"{option}={value}"])
    assert ended.value.code == EXIT_USAGE
    assert option in capsys.readouterr().err
