"""A daemon as a child: its first word, its last words, and that it never outlives what started it."""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from io_daemon.config import SOCKET_PATH_BYTES_MAX, DaemonSettings
from io_daemon.errors import ConfigError, DaemonLostError
from io_daemon.rank.process import DaemonProcess

ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 60.0
READY = "print('{\"ready\": true}', flush=True)"

pytestmark = pytest.mark.cold_daemons

StandIn = Callable[[str], Sequence[str]]


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    """Makes a script to take the daemon's place: its command."""

    def write(code: str) -> Sequence[str]:
        script = tmp_path / "stand_in.py"
        script.write_text("import os, signal, sys, time\n" + textwrap.dedent(code))
        return sys.executable, str(script)

    return write


def _start(tmp_path: Path, **settings: object) -> DaemonProcess:
    return DaemonProcess(
        swap_dirs=[tmp_path],
        directories=[tmp_path],
        **settings,  # type: ignore[arg-type]
    )


def _ended(pid: int, timeout_s: float = 30.0) -> bool:
    """Whether the process is gone, or goes within ``timeout_s``."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


# --- the daemon itself


def test_a_private_daemon_serves_and_leaves_nothing(tmp_path: Path) -> None:
    swap_dir = tmp_path / "swap"
    swap_dir.mkdir()
    settings = DaemonSettings(engine="require:posix", block_size=65536, queue_depth=4, verify_checksums=False)
    options = settings.options()
    assert "--no-verify-checksums" in options
    with DaemonProcess(swap_dirs=[swap_dir], options=options) as daemon:
        directory = daemon.socket.parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert daemon.ready["engine"] == "posix"
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(daemon.socket))
        assert daemon.poll() is None
    assert daemon.poll() == 0
    assert not directory.exists()
    assert list(swap_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--engine", "bogus"], "bogus"), (["--block-size", "1000"], "4096"), (["--unheard-of"], "--unheard-of")],
)
def test_what_the_daemon_refuses_is_a_config_error_with_its_own_words(
    options: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        _start(tmp_path, options=options)
    assert list(tmp_path.iterdir()) == []


def test_a_swap_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        DaemonProcess(swap_dirs=[tmp_path / "missing"])
    with pytest.raises(ConfigError, match="at least one directory"):
        DaemonProcess(swap_dirs=[])


def test_a_killed_daemon_is_seen(tmp_path: Path) -> None:
    with _start(tmp_path) as daemon:
        os.kill(daemon.pid, signal.SIGKILL)
        assert _ended(daemon.pid)
        assert daemon.terminate() == -signal.SIGKILL


def test_a_socket_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "named.sock"
    with DaemonProcess(swap_dirs=[tmp_path], socket=path) as daemon:
        assert daemon.socket == path
        assert path.is_socket()
    assert tmp_path.is_dir()


# --- a stand-in that misbehaves


def test_last_words_of_a_daemon_that_dies(stand_in: StandIn, tmp_path: Path) -> None:
    command = stand_in("print('out of luck', file=sys.stderr); sys.exit(5)")
    with pytest.raises(DaemonLostError, match=r"status 5 .*\n  out of luck"):
        _start(tmp_path, command=command)


def test_a_silent_daemon_meets_the_deadline_and_is_ended(stand_in: StandIn, tmp_path: Path) -> None:
    command = stand_in(
        f"""
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        print("still looking", file=sys.stderr, flush=True)
        signal.pause()
        """
    )
    with pytest.raises(DaemonLostError, match=r"not ready within 2 s:\n  still looking"):
        _start(tmp_path, command=command, start_timeout_s=2.0)
    assert _ended(int((tmp_path / "pid").read_text()), timeout_s=0.0)


@pytest.mark.parametrize("line", ["not JSON", "[]", "3"])
def test_a_first_line_that_is_no_object(line: str, stand_in: StandIn, tmp_path: Path) -> None:
    command = stand_in(f"print({line!r}, flush=True); signal.pause()")
    with pytest.raises(DaemonLostError, match="not a JSON object"):
        _start(tmp_path, command=command)


def test_a_daemon_that_does_not_drain_is_killed(
    stand_in: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = stand_in(f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}\nwhile True: signal.pause()")
    daemon = _start(tmp_path, command=command)
    assert daemon.terminate(timeout_s=0.2) == -signal.SIGKILL
    assert daemon.terminate() == -signal.SIGKILL
    assert "did not drain" in caplog.text


def test_a_talkative_daemon_never_blocks_on_its_stderr(
    stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = stand_in(
        f"""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        {READY}
        for i in range(20000):
            print("x" * 70, file=sys.stderr)
        print("after", file=sys.stderr, flush=True)
        open({str(tmp_path / "said")!r}, "w").close()
        while True: signal.pause()
        """
    )
    with _start(tmp_path, command=command):
        assert _appears(tmp_path / "said")
    assert capsys.readouterr().err.splitlines()[-1] == "after"


def _appears(path: Path, timeout_s: float = 60.0) -> bool:
    """Whether a file comes to be within ``timeout_s``."""
    return (
        subprocess.run(
            ["sh", "-c", f"until [ -e '{path}' ]; do sleep 0.05; done"], timeout=timeout_s, check=False
        ).returncode
        == 0
    )


def test_a_ctrl_c_at_the_terminal_does_not_reach_the_daemon(stand_in: StandIn, tmp_path: Path) -> None:
    command = stand_in(f"{READY}\nsignal.pause()")
    with _start(tmp_path, command=command) as daemon:
        assert os.getpgid(daemon.pid) == daemon.pid != os.getpgrp()


# --- where the socket goes


def test_a_runtime_directory_comes_first(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = stand_in(f"{READY}\nsignal.pause()")
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with DaemonProcess(swap_dirs=[tmp_path], command=command) as daemon:
        assert daemon.socket.parent.parent == runtime
    assert list(runtime.iterdir()) == []


def test_a_socket_path_that_would_not_fit_goes_elsewhere(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = stand_in(f"{READY}\nsignal.pause()")
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setenv("TMPDIR", str(deep))
    with DaemonProcess(swap_dirs=[tmp_path], command=command) as daemon:
        assert daemon.socket.parent.parent == Path("/tmp")
        assert len(os.fsencode(daemon.socket)) <= SOCKET_PATH_BYTES_MAX


# --- the end of whoever started it


def _run_script(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(f"import signal\n{READY}\nsignal.pause()\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys
            from io_daemon.rank.process import DaemonProcess
            daemon = DaemonProcess(swap_dirs=[{str(tmp_path)!r}], command=(sys.executable, {str(stand_in)!r}))
            """
        )
        + textwrap.dedent(code)
    )
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )


def test_at_exit_of_the_interpreter_the_daemon_ends_too(tmp_path: Path) -> None:
    result = _run_script(tmp_path, "print(daemon.pid, daemon.socket.parent)")
    assert result.returncode == 0, result.stderr
    pid, directory = result.stdout.split()
    assert _ended(int(pid))
    assert not Path(directory).exists()


def test_a_forked_child_does_not_end_its_parents_daemon(tmp_path: Path) -> None:
    code = """
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        print(daemon.poll(), daemon.socket.parent.exists())
        """
    result = _run_script(tmp_path, code)
    assert result.stdout.split() == ["None", "True"], result.stderr
