"""A daemon of one's own: it ends with whoever started it, whenever that is, and leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from io_daemon.__main__ import main
from io_daemon.command import cli
from io_daemon.errors import ConfigError, LimitError, WorldError
from io_daemon.rank.private_dir import PREFIX, PrivateDir, remove_abandoned
from io_daemon.rank.process import DAEMON_COMMAND, DaemonProcess
from io_daemon.rank.socket_lock import SocketLock
from tests.support.daemon import DEADLINE_S, eventually

RANK = """
import os, sys
from pathlib import Path
from io_daemon.rank.process import DAEMON_COMMAND, DaemonProcess
directory, command = sys.argv[1], sys.argv[2:] or DAEMON_COMMAND
daemon = DaemonProcess(swap_dirs=[directory], command=command, directories=[Path(directory)])
print(daemon.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def rank(directory: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a daemon by ``command``, and is killed at the latest at the end."""
    words = [sys.executable, "-c", RANK, str(directory), *command]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ends(pidfd: int) -> bool:
    """Whether a process ends; it is killed if it does not."""
    ended = bool(select.select([pidfd], [], [], DEADLINE_S)[0])
    if not ended:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    return ended


def test_a_daemon_whose_rank_was_killed_while_it_started_ends(tmp_path: Path) -> None:
    """The daemon's first instruction is executed when its parent is long gone, and nobody knows who that was."""
    seen = tmp_path / "pid"
    script = f"echo $$ > {seen}.new; mv {seen}.new {seen}; while kill -0 $PPID 2>/dev/null; do sleep 0.01; done; "
    with rank(tmp_path, "sh", "-c", script + 'exec "$@"', "sh", *DAEMON_COMMAND) as process:
        eventually(seen.exists, "the daemon's process has started")
        pidfd = os.pidfd_open(int(seen.read_text()))
        process.kill()
        process.wait(DEADLINE_S)
        assert ends(pidfd)
    assert sorted(tmp_path.iterdir()) == [seen]


def test_a_daemon_whose_rank_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with rank(tmp_path) as process:
        assert process.stdout is not None
        pidfd = os.pidfd_open(int(process.stdout.readline()))
        assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 1
        process.kill()
        assert ends(pidfd)
    assert list(tmp_path.iterdir()) == []


def test_gc_removes_the_directory_of_a_rank_and_a_daemon_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "socket_parents", lambda: [tmp_path])
    with rank(tmp_path) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        (directory,) = tmp_path.glob(f"{PREFIX}*")
        assert main(["gc"]) == 0
        assert capsys.readouterr().out == ""
        assert (directory / "io.sock").is_socket()  # in use
        os.kill(process.pid, signal.SIGSTOP)  # so that it does not clean up
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert ends(pidfd)
        assert main(["gc"]) == 0
        assert directory.exists()  # its maker lives
    assert main(["gc"]) == 0
    assert capsys.readouterr().out == f"{directory}\n"
    assert list(tmp_path.iterdir()) == []


def test_gc_leaves_what_is_not_a_leftover_of_ours(tmp_path: Path) -> None:
    ours = PrivateDir.make([tmp_path])
    draining = tmp_path / f"{PREFIX}draining"
    draining.mkdir(mode=0o700)
    with_more = tmp_path / f"{PREFIX}withmore"
    with_more.mkdir(mode=0o700)
    (with_more / "notes").touch()
    open_to_all = tmp_path / f"{PREFIX}opentoal"
    open_to_all.mkdir(mode=0o755)
    (tmp_path / f"{PREFIX}afile").touch()
    (tmp_path / f"{PREFIX}alink").symlink_to(with_more)
    before = sorted(tmp_path.rglob("*"))
    lock = SocketLock.take(draining / "io.sock")  # a daemon that lives a little longer than its maker
    assert lock is not None
    with lock:
        assert remove_abandoned([tmp_path]) == []
    assert sorted(tmp_path.rglob("*")) == before
    ours.remove()
    ours.remove()
    assert not ours.path.exists()
    assert remove_abandoned([tmp_path, tmp_path]) == [draining]


def test_a_daemon_that_cannot_be_started_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DaemonProcess(swap_dirs=[tmp_path], command=["/nonexistent"], directories=[tmp_path])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EPERM, WorldError, r"pidfd_open: Operation not permitted \(errno 1\): .*seccomp"),
        (errno.ENOSYS, WorldError, r"pidfd_open: Function not implemented \(errno 38\): .*Linux 5\.3"),
        (errno.EMFILE, LimitError, "by a pidfd: Too many open files .*`ulimit -n`"),
    ],
)
def test_where_no_pidfd_is_to_be_had_the_user_is_told(
    number: int, kind: type[WorldError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(kind, match=words):
        DaemonProcess(swap_dirs=[tmp_path], directories=[tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_where_no_directory_can_be_locked_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network filesystem may know no locks."""
    other = tmp_path / "other"
    other.mkdir()
    locked_at = {other}

    def flock(fd: int, _operation: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).parent not in locked_at:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    made = PrivateDir.make([tmp_path, other])
    assert made.path.parent == other
    made.remove()
    locked_at.clear()
    with pytest.raises(ConfigError, match="no writable directory for a socket"):
        PrivateDir.make([tmp_path, other])
    assert list(tmp_path.iterdir()) == [other]
    assert list(other.iterdir()) == []


def test_a_daemon_ends_when_it_is_told_to_whatever_its_rank_does_with_signals(tmp_path: Path) -> None:
    """A rank that waits for SIGTERM in a thread of its own has blocked it, and its children inherit that."""
    stopping = (signal.SIGTERM, signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    try:
        daemon = DaemonProcess(swap_dirs=[tmp_path], directories=[tmp_path])
        assert daemon.terminate(timeout_s=DEADLINE_S) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert list(tmp_path.iterdir()) == []


class GoneTerminal(io.StringIO):
    def write(self, _text: str) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.parametrize("stderr", [None, GoneTerminal()], ids=["none", "gone"])
def test_what_a_daemon_says_ends_no_job_whose_terminal_has_gone(
    stderr: GoneTerminal | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sh", "-c", 'echo careful >&2; exec "$@"', "sh", *DAEMON_COMMAND]
    monkeypatch.setattr(sys, "stderr", stderr)
    with DaemonProcess(swap_dirs=[tmp_path], directories=[tmp_path], command=words) as daemon:
        assert daemon.ready["ready"]
    assert capsys.readouterr().out == ""


def test_a_number_that_is_no_inherited_pidfd_is_refused(
    tmp_path: Path, swap_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--socket", str(tmp_path / "s"), "--swap-dir", str(swap_dir), "--parent-pidfd", "999"]
    assert subprocess.run([*DAEMON_COMMAND, *words], timeout=DEADLINE_S, check=False).returncode == 2
    assert "--parent-pidfd = 999: is no inherited pidfd" in capfd.readouterr().err
