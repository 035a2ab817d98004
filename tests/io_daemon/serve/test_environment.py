"""What a daemon, or a command, is started with: by batch systems, containers and services that leave things out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from io_daemon.errors import ConfigError
from io_daemon.rank import client as door
from io_daemon.rank.client import Client
from io_daemon.shared.arena import Arena, create_arena
from io_daemon.shared.protocol import PAGE_BYTES
from tests.io_daemon.conftest import Serve
from tests.support.daemon import DEADLINE_S, ServedDaemon, eventually

COMMAND = [sys.executable, "-P", "-m", "io_daemon"]
NOBODYS_UID = 23456
"""No passwd file knows it."""


def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_missing_standard_file_is_no_other_file(closed: Sequence[int], swap_dir: Path, tmp_path: Path) -> None:
    """Its number would be that of a socket, or of a swap file, into which the next message goes."""
    words = [*COMMAND, "serve", "--socket", str(tmp_path / "s"), "--swap-dir", str(swap_dir)]
    script = "exec " + " ".join(f"{fd}>&-" for fd in closed) + '; exec "$@"'
    with subprocess.Popen(["sh", "-c", script, "sh", *words], stdout=subprocess.DEVNULL) as process:
        try:
            eventually((tmp_path / "s").exists, "it listens")
            eventually(lambda: run(["status", "--socket", str(tmp_path / "s")]).returncode == 0, "it serves")
            files = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in closed]
            assert files == [os.devnull] * len(closed)
        finally:
            process.terminate()
        assert process.wait(DEADLINE_S) == 0


def test_a_command_without_standard_output_ends_as_with_one(daemon: ServedDaemon) -> None:
    script = 'exec 1>&-; exec "$@"'
    words = ["sh", "-c", script, "sh", *COMMAND, "status", "--socket", daemon.socket]
    assert subprocess.run(words, timeout=DEADLINE_S, check=False).returncode == 0


AS_NOBODY = """
import os, sys
import io_daemon.command.cli, multiprocessing.resource_tracker, shutil
from io_daemon.__main__ import main
os.environ.clear()
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
sys.exit(main(sys.argv[2:]))
"""
"""Python itself may lie where only root may read."""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's identity needs root")
def test_a_user_without_name_or_home_is_served(tmp_path: Path) -> None:
    """As a container has it that is started under any uid."""
    own = Path(tempfile.mkdtemp())
    os.chown(own, NOBODYS_UID, NOBODYS_UID)

    def run_as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", AS_NOBODY, str(NOBODYS_UID), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    try:
        told = run_as_nobody("gc", "--swap-dir", str(own))
        assert (told.returncode, told.stdout, told.stderr) == (0, "", "")
        told = run_as_nobody("status")
        assert (told.returncode, "Traceback" in told.stderr) == (3, False), told.stderr
    finally:
        own.rmdir()


@pytest.mark.parametrize(
    "odd",
    [
        {"PYTHONOPTIMIZE": "2"},
        {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"},
        {"PYTHONWARNINGS": "error"},
        {"PYTHONDEVMODE": "1"},
        {"PYTHONASYNCIODEBUG": "1"},
        {"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
        {"TMPDIR": "/nonexistent", "HOME": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent"},
    ],
    ids=lambda odd: next(iter(odd)) + "=" + next(iter(odd.values())),
)
def test_what_a_shell_says_to_python_changes_no_daemon(
    odd: Mapping[str, str], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in odd.items():
        monkeypatch.setenv(name, value)
    daemon = serve()
    with daemon.attached() as client:
        assert client.echo() < DEADLINE_S
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.stderr()
    assert "Warning" not in daemon.stderr()


@pytest.mark.parametrize("odd", ["socket", "swap-dir"])
def test_a_path_that_is_no_text_is_refused_before_anything_starts(odd: str, swap_dir: Path, tmp_path: Path) -> None:
    """To the kernel a path is bytes, to messages it is not."""
    path = tmp_path / os.fsdecode(b"odd-\xff")
    path.mkdir()
    paths = {"socket": tmp_path / "s", "swap-dir": swap_dir} | {odd: path / "s" if odd == "socket" else path}
    told = run(["serve", *(word for name, each in paths.items() for word in (f"--{name}", str(each)))])
    assert told.returncode == 2
    key = {"socket": "io_daemon.socket", "swap-dir": "--swap-dir"}[odd]
    assert re.search(rf"{key} = .*odd-.*udcff.*is no UTF-8", told.stderr)
    assert "Traceback" not in told.stderr


def test_an_arena_that_the_memory_cannot_hold_is_refused_before_a_page_of_it_is_taken(
    daemon: ServedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that has no more memory ends its processes without a word."""
    made = []

    def make(*arguments: Any) -> Arena:
        made.append(arguments)
        return create_arena(*arguments)

    monkeypatch.setattr(door, "arenas_bytes_max", lambda: 3 * PAGE_BYTES)
    monkeypatch.setattr(door, "create_arena", make)
    with daemon.connect() as client:
        with pytest.raises(ConfigError, match=r"host_budget_bytes = 16384: .* 12288 bytes of arenas: lower it"):
            attach(client, num_frames=3)
        assert made == []
        attach(client, num_frames=2)


def attach(client: Client, num_frames: int) -> None:
    client.attach(num_frames=num_frames, frame_bytes=PAGE_BYTES, swap_dirs=client.swap_dirs, lock_memory="off")
