"""A process that the system allows too little (``ulimit``): its error names the limit, the value and the remedy."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from io_daemon.command.outcome import EXIT_FAULT, EXIT_NO_DAEMON, outcome
from io_daemon.errors import ConfigError, LimitError, WorldError
from io_daemon.machine.limits import COMMAND_BYTES, check_open_files, naming_limits
from io_daemon.rank import process
from io_daemon.rank.process import DAEMON_COMMAND, DaemonProcess
from tests.support.daemon import DEADLINE_S

LIBRARY = """
import os, resource, sys
from io_daemon.errors import LimitError
from io_daemon.rank.process import DaemonProcess
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    DaemonProcess(swap_dirs=[sys.argv[1]], socket=os.path.join(sys.argv[1], "s"))
except LimitError as error:
    print(error)
"""


def _limited(number: int, value: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        preexec_fn=lambda: resource.setrlimit(number, (value, value)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize("num_files", [5, 8, 11])
def test_a_daemon_that_may_open_too_few_files_says_so_at_its_start(num_files: int, tmp_path: Path) -> None:
    words = [*DAEMON_COMMAND, "serve", "--swap-dir", str(tmp_path), "--socket", str(tmp_path / "s")]
    ended = _limited(resource.RLIMIT_NOFILE, num_files, *words)
    assert ended.returncode == EXIT_FAULT
    assert f"`ulimit -n` is {num_files}: raise it" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_files", [5, 8, 10])
def test_a_rank_that_may_open_too_few_files_to_start_a_daemon_is_told(num_files: int, tmp_path: Path) -> None:
    ended = _limited(resource.RLIMIT_CORE, 0, sys.executable, "-c", LIBRARY, str(tmp_path), str(num_files))
    assert ended.stderr == ""
    assert f"cannot start the I/O daemon: Too many open files (errno 24): `ulimit -n` is {num_files}" in ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.8, 0.99])
def test_a_command_with_too_few_addresses_to_be_loaded_says_so(share: float, tmp_path: Path) -> None:
    num_bytes = int(COMMAND_BYTES * share)
    ended = _limited(resource.RLIMIT_AS, num_bytes, *DAEMON_COMMAND, "status", "--socket", str(tmp_path / "s"))
    assert ended.returncode == EXIT_FAULT
    assert f"`ulimit -v` is {num_bytes >> 10}: raise it" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_command_is_loaded_with_few_addresses_on_any_number_of_cores(tmp_path: Path) -> None:
    words = [*DAEMON_COMMAND, "status", "--socket", str(tmp_path / "s")]
    ended = _limited(resource.RLIMIT_AS, COMMAND_BYTES + (16 << 20), *words)
    assert ended.returncode == EXIT_NO_DAEMON, ended.stderr
    assert ended.stderr.count("\n") == 1


def _limits_of(value: int) -> Callable[[int], tuple[int, int]]:
    return lambda _: (value, value)


def test_no_daemon_is_started_where_it_could_not_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", _limits_of(100_000 << 10))
    with pytest.raises(LimitError, match=r"`ulimit -v` is 100000: raise it"):
        DaemonProcess(swap_dirs=[tmp_path], socket=tmp_path / "s")


def test_a_rank_without_a_thread_for_its_daemon_ends_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = process._start

    def noted(command: Sequence[str]) -> subprocess.Popen[bytes]:
        started.append(start(command))
        return started[-1]

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(process, "_start", noted)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(WorldError, match=r"raise ulimit -u, or the container's pids.max"):
        DaemonProcess(swap_dirs=[tmp_path], directories=[tmp_path])
    assert [popen.poll() is not None for popen in started] == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_may_have_no_more_processes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(process, "_start", refuse)
    with pytest.raises(WorldError, match=r"raise ulimit -u, .*needed to start the I/O daemon"):
        DaemonProcess(swap_dirs=[tmp_path], directories=[tmp_path])
    assert list(tmp_path.iterdir()) == []


FULL = """
import os, resource, sys
from io_daemon.errors import LimitError
from io_daemon.rank.process import DaemonProcess
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
try:
    DaemonProcess(swap_dirs=[sys.argv[1]], directories=[sys.argv[1]])
except LimitError as error:
    print(error)
"""


def test_a_rank_without_any_descriptor_left_is_told(tmp_path: Path) -> None:
    ended = _limited(resource.RLIMIT_CORE, 0, sys.executable, "-c", FULL, str(tmp_path))
    assert ended.stderr == ""
    assert "cannot make a directory for the I/O daemon's socket: Too many open files" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def _refused(number: int) -> NoReturn:
    try:
        raise OSError(number, os.strerror(number))
    except OSError as error:
        raise ConfigError("socket", "s", f"cannot be made ({error.strerror})") from error


def _too_much() -> NoReturn:
    raise MemoryError


def _own_cause() -> NoReturn:
    error = ConfigError("socket", "s", "name another")
    raise error from error


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: _refused(errno.EMFILE), "(Too many open files); raise `ulimit -n` (it is 7168)\n"),
        (lambda: _refused(errno.ENOMEM), "(Cannot allocate memory); raise `ulimit -v` (it is 7)\n"),
        (lambda: _refused(errno.EACCES), "(Permission denied)\n"),
        (lambda: _refused(errno.EAGAIN), "(Resource temporarily unavailable)\n"),
        (_too_much, "program: out of memory; raise `ulimit -v` (it is 7)\n"),
        (_own_cause, "program: socket = 's': name another\n"),
    ],
)
def test_what_a_command_ends_with_names_the_limit_behind_it(
    work: Callable[[], int], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", _limits_of(7168))
    assert outcome("program", work) != 0
    assert capsys.readouterr().err.endswith(said)


def test_no_limit_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(resource, "getrlimit", _limits_of(resource.RLIM_INFINITY))
    check_open_files()
    assert outcome("program", _too_much) == EXIT_FAULT
    assert capsys.readouterr().err == "program: out of memory\n"


def test_a_table_longer_than_files_may_be_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100 << 20, resource.RLIM_INFINITY))
    with (
        pytest.raises(LimitError, match="ulimit -f` is 102400: raise it to `unlimited`"),
        naming_limits("make a table"),
    ):
        raise OSError(errno.EFBIG, "File too large")


def test_a_rank_without_addresses_for_the_daemons_table_is_told(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from io_daemon.rank.client import Client
client = Client.connect(sys.argv[1], job="job", rank=0)
(used,) = [int(line.split()[1]) << 10 for line in Path("/proc/self/status").open() if line.startswith("VmSize:")]
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
client.attach(num_frames=1, frame_bytes=4096, swap_dirs=client.swap_dirs, lock_memory="off")
"""
    with DaemonProcess(swap_dirs=[tmp_path]) as daemon:
        words = [sys.executable, "-c", script, str(daemon.socket)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (
        "LimitError: cannot map what the daemon shares: Cannot allocate memory (errno 12): `ulimit -v` is"
        in ended.stderr
    )
