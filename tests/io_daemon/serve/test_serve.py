"""Starting and ending a daemon: what it refuses and with which words, what it says, when it ends by itself."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from io_daemon.__main__ import main
from io_daemon._native import POSIX_THREADS_MAX, Reactor
from io_daemon.command.options import parse_fault
from io_daemon.command.outcome import EXIT_FAULT, EXIT_NO_DAEMON, EXIT_USAGE
from io_daemon.config import SOCKET_PATH_BYTES_MAX, FaultKind
from io_daemon.errors import ConfigError, DaemonLostError, ProtocolError, SwapSpaceError
from io_daemon.rank.client import Client
from io_daemon.rank.connection import Connection
from io_daemon.serve import startup
from io_daemon.shared.control import Channel, Ended
from io_daemon.shared.protocol import PROTOCOL_VERSION
from tests.io_daemon.conftest import Serve
from tests.io_daemon.serve.test_reclaim import dead_owner, leave
from tests.support.daemon import DEADLINE_S, WEIGHT, ServedDaemon, chunk_is_intact, eventually, specs, write_chunk
from tests.support.signals import heed_signals


def refusal(*arguments: str) -> tuple[int, str]:
    """Exit code and words of a command that is expected to fail."""
    command = [sys.executable, "-m", "io_daemon", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_the_ready_line_says_what_is_served(daemon: ServedDaemon, swap_dir: Path) -> None:
    assert daemon.ready == {
        "ready": True,
        "pid": daemon.pid,
        "protocol_version": PROTOCOL_VERSION,
        "socket": daemon.socket,
        "engine": daemon.ready["engine"],
        "swap_dirs": [{"path": str(swap_dir), "direct": True}],
    }
    assert os.stat(daemon.socket).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--swap-dir", "{missing}"], "does not exist: mkdir -p"),
        (["--swap-dir", "/proc"], "is not writable"),
        (["--swap-dir", "{dir}", "--swap-dir", "{dir}/."], "the same directory is named twice"),
        (["--swap-dir", "{dir}", "--engine", "aio"], "engine"),
        (["--swap-dir", "{dir}", "--block-size", "5000"], "must be a multiple of 4096"),
        (["--swap-dir", "{dir}", "--block-size", "huge"], "write 4096, 512K, 2G or 64e9"),
        (["--swap-dir", "{dir}", "--queue-depth", "0"], "greater than or equal to 1"),
        (["--swap-dir", "{dir}", "--socket", "/proc/none/s"], "its directory cannot be made"),
        (["--swap-dir", "{dir}", "--socket", "/tmp/" + "x" * SOCKET_PATH_BYTES_MAX], "name a shorter one"),
        (["--swap-dir", "{dir}", "--inject-fault", "explode:0:5"], "errno_read, errno_write"),
        (["--swap-dir", "{dir}", "--inject-fault", "errno_read:0:99999999999999999999"], "what:nth:value"),
        (["--swap-dir", "{dir}", "--inject-fault", "errno_read:-1:5"], "what:nth:value"),
        (["--swap-dir", "{dir}", "--inject-fault", "errno_read"], "what:nth:value"),
        (["--swap-dir", "{dir}", "--queue-depth", "9" * 30], "--queue-depth"),
        (["--swap-dir", "{dir}", "--block-size", "9" * 30], "--block-size"),
        (["--swap-dir", "{dir}", "--host-budget-bytes", "9" * 30], "--host-budget-bytes"),
        (["--swap-dir", "{dir}", "--swap-budget-bytes", "9" * 30], "--swap-budget-bytes"),
        (["--swap-dir", "{dir}", "--parent-pidfd", "9" * 30], "--parent-pidfd"),
        (["--swap-dir", "{dir}", "--parent-pidfd", "-1"], "--parent-pidfd"),
        ([], "--swap-dir"),
    ],
)
def test_what_cannot_work_is_refused_at_start(tmp_path: Path, arguments: list[str], words: str) -> None:
    filled = [text.format(dir=tmp_path, missing=tmp_path / "missing") for text in arguments]
    exit_code, stderr = refusal("serve", "--socket", str(tmp_path / "s"), *filled)
    assert exit_code == EXIT_USAGE
    assert words in stderr


def test_an_engine_that_does_not_work_is_replaced_aloud_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "probe_engine", lambda engine: "not permitted" if engine == "io_uring" else None)
    engine, notes = startup.choose_engine("auto")
    assert engine == "libaio"
    assert notes == ["engine io_uring does not work here (not permitted); falling back to libaio"]
    with pytest.raises(ConfigError, match="io_uring does not work here"):
        startup.choose_engine("require:io_uring")
    monkeypatch.setattr(startup, "ENGINES", ("posix",))
    assert startup.choose_engine("auto")[0] == "posix"
    with pytest.raises(ConfigError, match="not compiled in"):
        startup.choose_engine("require:libaio")


def test_a_depth_that_the_engine_does_not_have_is_not_reckoned_with(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = serve("--engine", "require:posix", "--queue-depth", str(POSIX_THREADS_MAX + 1))
    assert main(["status", "--socket", daemon.socket, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["queue_depth"] == POSIX_THREADS_MAX
    assert f"a queue depth of {POSIX_THREADS_MAX + 1}" in daemon.stderr()


@pytest.fixture
def no_direct(tmp_path: Path) -> Iterator[Path]:
    """A filesystem that refuses O_DIRECT."""
    path = tmp_path / "ramfs"
    path.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "ramfs", "none", path], check=False).returncode:
        pytest.skip("mounting a filesystem without direct I/O needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.root
def test_without_direct_io_it_falls_back_and_says_so(serve: Serve, no_direct: Path) -> None:
    daemon = serve(swap_dirs=[no_direct])
    assert daemon.ready["swap_dirs"] == [{"path": str(no_direct), "direct": False}]
    assert "no direct I/O" in daemon.stderr()
    assert "falling back to buffered" in daemon.stderr()
    assert "ramfs lies in memory" in daemon.stderr()
    with daemon.attached(num_frames=2) as client:
        chunks = client.register(specs(6))
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT)
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in chunks)
        assert not any(flags & os.O_DIRECT for flags in daemon.swap_fds())


def test_a_second_daemon_on_the_socket_is_refused_and_a_dead_ones_socket_is_taken_over(
    serve: Serve, tmp_path: Path
) -> None:
    first = serve()
    exit_code, stderr = refusal("serve", "--socket", first.socket, "--swap-dir", str(tmp_path))
    assert exit_code == EXIT_USAGE
    assert "another daemon listens there" in stderr
    first.kill()
    assert os.path.exists(first.socket)
    second = serve("--socket", first.socket)  # the last --socket counts
    assert second.ready["socket"] == first.socket
    assert second.terminate() == 0
    assert not os.path.exists(first.socket)


@pytest.mark.parametrize("beside", ["", ".lock"])
def test_a_file_in_the_sockets_place_is_never_deleted(beside: str, tmp_path: Path, swap_dir: Path) -> None:
    path = tmp_path / f"notes{beside}"
    path.write_text("dear diary")
    exit_code, stderr = refusal("serve", "--socket", str(tmp_path / "notes"), "--swap-dir", str(swap_dir))
    assert exit_code == EXIT_USAGE
    assert "--socket" in stderr
    assert str(path) in stderr
    assert path.read_text() == "dear diary"
    assert sorted(tmp_path.iterdir()) == [path, swap_dir]


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_what_is_no_socket_is_refused(kind: str, tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "s", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "link":
        path.symlink_to(elsewhere)
    else:
        {"directory": os.mkdir, "fifo": os.mkfifo}[kind](path)
    before = os.stat(path, follow_symlinks=False)
    with pytest.raises(ConfigError, match="is no socket"), startup.listening(path):
        pass
    assert os.path.samestat(before, os.stat(path, follow_symlinks=False))


def test_a_daemon_that_has_bound_and_does_not_listen_yet_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In between, the socket refuses connections, exactly as one that a killed daemon left."""
    path = tmp_path / "s"
    stat_of = os.stat

    def second_starts(target: Path, **options: bool) -> os.stat_result:
        """The first daemon calls this after bind, before listen."""
        found = stat_of(target, **options)
        if target == path and "follow_symlinks" not in options:
            monkeypatch.undo()
            exit_code, stderr = refusal("serve", "--socket", str(path), "--swap-dir", str(tmp_path))
            assert exit_code == EXIT_USAGE
            assert "another daemon listens there" in stderr
        return found

    monkeypatch.setattr(os, "stat", second_starts)
    with startup.listening(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
        assert os.stat is stat_of
        rank.connect(str(path))
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_daemon_is_told_with_the_remedy(tmp_path: Path) -> None:
    path = str(tmp_path / "nobody")
    with pytest.raises(DaemonLostError) as caught:
        Client.connect(path, job="job", rank=0)
    assert path in str(caught.value)
    assert "io-daemon serve --socket" in str(caught.value)
    exit_code, stderr = refusal("status", "--socket", path)
    assert exit_code == EXIT_NO_DAEMON
    assert path in stderr


def test_status_in_three_shapes(daemon: ServedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    with daemon.attached(num_frames=4, job="demo", rank=5) as client:
        for chunk in client.register(specs(8)):
            write_chunk(client, chunk, WEIGHT)

        def status() -> Any:
            assert main(["status", "--socket", daemon.socket, "--json"]) == 0
            return json.loads(capsys.readouterr().out)

        (tenant,) = status()["tenants"]
        assert (tenant["job"], tenant["rank"], tenant["pid"], tenant["num_chunks"]) == ("demo", 5, os.getpid(), 8)

        def is_written() -> bool:  # a write in flight is the device's already, and not yet the tenant's
            now = status()
            written = sum(now["tenants"][0]["total"]["bytes_written"])
            return bool(written > 0 and now["devices"][0]["bytes_written"] == written)

        eventually(is_written, "the device has written what the tenant has")
        assert main(["status", "--socket", daemon.socket]) == 0
        text = capsys.readouterr().out
        assert "demo rank 5" in text
        assert "direct" in text
        assert main(["status", "--socket", daemon.socket, "--prometheus"]) == 0
        exposition = capsys.readouterr().out
        assert f'io_daemon_tenant_resident_bytes{{job="demo",kind="weight",pid="{os.getpid()}",rank="5"}}' in exposition


def test_gc_removes_what_a_killed_daemon_left(serve: Serve, swap_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = serve()
    with daemon.attached() as client:
        client.register(specs(4))
        assert main(["gc", "--swap-dir", str(swap_dir)]) == 0  # its owner lives
        assert len(daemon.files()) == 1
        daemon.kill()
        (path,) = swap_dir.iterdir()
        capsys.readouterr()
        assert main(["gc", "--swap-dir", str(swap_dir)]) == 0
        assert str(path) in capsys.readouterr().out.splitlines()
        assert daemon.files() == []


def test_gc_says_what_is_still_locked(swap_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = leave(swap_dir, dead_owner())
    with path.open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert main(["gc", "--swap-dir", str(swap_dir), "--lock-timeout", "0.05"]) == EXIT_FAULT
    assert str(path) in capsys.readouterr().err
    assert path.exists()


@pytest.mark.parametrize("command", ["serve", "gc"])
@pytest.mark.parametrize("second", ["", "/.", "-link"])
def test_a_directory_that_is_named_twice_is_refused(
    command: str, second: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """gc would wait for a lock of its own."""
    directory = tmp_path / "swap"
    directory.mkdir()
    (tmp_path / "swap-link").symlink_to(directory)
    leave(directory, dead_owner())
    assert main([command, "--swap-dir", str(directory), "--swap-dir", f"{directory}{second}"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("io-daemon: --swap-dir = ")
    assert "the same directory is named twice" in error


@pytest.mark.parametrize("words", ["gc --swap-dir .", "serve --swap-dir . --socket s", "bench io .", "bench compare ."])
def test_a_current_directory_that_is_gone_is_told(
    words: str, gone_directory: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == EXIT_USAGE
    assert "= '.': the current directory is gone: cd to one that is there" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["gc --swap-dir", "serve --swap-dir", "bench io", "bench compare"])
def test_links_that_lead_around_in_a_circle_are_told(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert main([*words.split(), str(tmp_path / "a")]) == EXIT_USAGE
    assert "Too many levels of symbolic links" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["serve --lock-timeout", "serve --drain-timeout", "gc --lock-timeout"])
@pytest.mark.parametrize("text", ["nan", "inf", "-5", "0", "soon", "600h", "86401"])
def test_a_wait_that_never_ends_or_was_over_before_is_refused(
    option: str, text: str, swap_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, name = option.split()
    with pytest.raises(SystemExit) as ended:
        main([command, "--swap-dir", str(swap_dir), name, text])
    assert ended.value.code == EXIT_USAGE
    assert f"argument {name}: '{text}' is no time" in capsys.readouterr().err


def test_the_longest_drain_is_one_that_the_daemon_survives(serve: Serve) -> None:
    daemon = serve("--drain-timeout", "24h", "--lock-timeout", "24h")
    with daemon.attached():
        assert daemon.terminate() == 0
    assert "Traceback" not in daemon.stderr()


def test_a_terminal_that_closes_ends_it_well_and_under_nohup_not(swap_dir: Path, tmp_path: Path) -> None:
    """It died of SIGHUP and left its socket and swap files."""
    serve = [sys.executable, "-m", "io_daemon", "serve", "--swap-dir", str(swap_dir), "--socket", str(tmp_path / "s")]
    for words, signals in ((serve, [signal.SIGHUP]), (["nohup", *serve], [signal.SIGHUP, signal.SIGTERM])):
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_signals) as daemon:
            try:
                assert daemon.stdout is not None
                assert json.loads(daemon.stdout.readline())["ready"]
                for number in signals[:-1]:
                    daemon.send_signal(number)
                    Connection.open(str(tmp_path / "s"), timeout_s=DEADLINE_S)[0].close()
                daemon.send_signal(signals[-1])
                daemon.communicate(timeout=DEADLINE_S)
            finally:
                daemon.kill()
        assert daemon.returncode == 0
        assert not (tmp_path / "s").exists()


def test_who_finds_no_room_waits_and_is_told_that_the_daemon_is_there(tmp_path: Path) -> None:
    """At once it was said that none answers, and to start one."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(path)
        listener.listen(0)
        for _ in range(8):
            sock = waiting.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(path)
        with pytest.raises(DaemonLostError, match=r"is there, and has taken no connection within 0\.2 s"):
            Connection.open(path, timeout_s=0.2)
    with pytest.raises(DaemonLostError, match="no I/O daemon answers"):
        Connection.open(path, timeout_s=0.2)


TOLD_AGAIN = """
import asyncio, os, signal, sys
from io_daemon.__main__ import main

close_wakeup_fd = asyncio.SelectorEventLoop._close_self_pipe

def told_again(loop):
    close_wakeup_fd(loop)
    os.kill(os.getpid(), signal.SIGTERM)

asyncio.SelectorEventLoop._close_self_pipe = told_again
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_daemon_that_is_told_again_while_it_leaves_says_nothing(
    first: signal.Signals, swap_dir: Path, tmp_path: Path
) -> None:
    """A private daemon ends when its last tenant goes, and whoever started it asks it to end as well."""
    command = [sys.executable, "-c", TOLD_AGAIN, "serve", "--swap-dir", str(swap_dir), "--socket", str(tmp_path / "s")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_signals) as daemon:
        try:
            assert daemon.stdout is not None
            assert json.loads(daemon.stdout.readline())["ready"]
            daemon.send_signal(first)
            _, errors = daemon.communicate(timeout=DEADLINE_S)
        finally:
            daemon.kill()
    assert daemon.returncode == 0
    assert [line for line in errors.splitlines() if "INFO" not in line] == []


@pytest.mark.parametrize("kind", get_args(FaultKind))
def test_every_fault_that_parses_is_one_that_the_engine_knows(kind: str) -> None:
    Reactor("posix", 1, 4096, faults=[parse_fault(f"{kind}:0:5")]).close(int(DEADLINE_S * 1000))


def test_systemd_hears_that_it_is_ready(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "n"))
        systemd.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        serve()
        assert systemd.recv(64) == b"READY=1"


def test_a_private_daemon_does_not_speak_for_the_service_that_its_rank_may_be(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as systemd:
        systemd.bind(str(tmp_path / "n"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        serve("--private")
        with pytest.raises(BlockingIOError):
            systemd.recv(64)


def test_a_private_daemon_ends_with_its_last_tenant(serve: Serve) -> None:
    daemon = serve("--private")
    with daemon.attached(rank=0) as one:
        with daemon.attached(rank=1):
            pass
        assert one.echo() < DEADLINE_S
        assert daemon.process.poll() is None
    assert daemon.process.wait(DEADLINE_S) == 0
    assert not os.path.exists(daemon.socket)


PARENT = """
import os, subprocess, sys
own = os.pidfd_open(os.getpid())
words = [sys.executable, "-m", "io_daemon", "serve", *sys.argv[1:], "--private", "--parent-pidfd", str(own)]
daemon = subprocess.Popen(words, pass_fds=(own,))
print(daemon.pid, flush=True)
sys.stdin.read()
"""


def test_a_private_daemon_ends_with_its_parent(tmp_path: Path, swap_dir: Path) -> None:
    socket_path = str(tmp_path / "s")
    command = [sys.executable, "-c", PARENT, "--socket", socket_path, "--swap-dir", str(swap_dir)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert json.loads(parent.stdout.readline())["ready"]
    pidfd = os.pidfd_open(pid)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    eventually(lambda: not os.path.exists(socket_path), "the daemon has ended")
    os.close(pidfd)
    assert list(swap_dir.iterdir()) == []


def test_it_takes_precedence_where_it_may_and_respects_a_chosen_niceness(daemon: ServedDaemon) -> None:
    may = os.geteuid() == 0 and os.getpriority(os.PRIO_PROCESS, 0) == 0
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, daemon.pid) == (startup.NICENESS if may else ours)


def test_interrupt_ends_it_like_sigterm(daemon: ServedDaemon) -> None:
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(DEADLINE_S) == 0


@pytest.mark.root
def test_a_full_disk_is_found_at_register_and_every_directory_is_as_before(
    serve: Serve, swap_dir: Path, small_disk: Path
) -> None:
    daemon = serve(swap_dirs=[swap_dir, small_disk])
    with daemon.attached(num_frames=4) as client:
        first = client.register(specs(2))
        reserved = client.stats().swap_bytes
        with pytest.raises(SwapSpaceError) as caught:
            client.register(specs(1000))
        assert caught.value.path == str(small_disk)
        assert caught.value.needed_bytes > caught.value.free_bytes > 0
        assert "No space left on device" in str(caught.value)
        assert client.stats().swap_bytes == reserved
        assert sum(path.stat().st_size for each in (swap_dir, small_disk) for path in each.glob("*.swap")) == reserved
        second = client.register(specs(16))
        for chunk in (*first, *second):
            write_chunk(client, chunk, WEIGHT)
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in (*first, *second))


NOBODY = 65534


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_users_process_is_turned_away(daemon: ServedDaemon) -> None:
    daemon.directory.chmod(0o755)
    os.chmod(daemon.socket, 0o666)  # as if the file's mode did not protect it
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(DEADLINE_S)
            stranger.connect(daemon.socket)
            told = Channel(stranger).receive(timeout_s=DEADLINE_S)
            os._exit(0 if told and isinstance(told[0], Ended) and f"user {NOBODY} is not" in told[0].reason else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "is not allowed here" in daemon.stderr()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_no_arena_is_handed_to_another_users_daemon(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    listening, told = os.pipe()
    child = os.fork()
    if child == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impostor:
            impostor.bind(path)
            os.setuid(NOBODY)
            impostor.listen()
            os.write(told, b"x")
            impostor.accept()
            signal.pause()
    os.read(listening, 1)
    with pytest.raises(ProtocolError, match="belongs to user 65534"):
        Client.connect(path, job="job", rank=0, timeout_s=DEADLINE_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(listening)
    os.close(told)
