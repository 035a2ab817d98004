"""What is typed: empty names, sizes, and words that are no numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.commands.cli import main as infinity_command
from io_daemon.__main__ import main as daemon_command
from io_daemon.errors import ConfigError
from io_daemon.rank.process import DaemonProcess
from io_daemon.rank.socket_lock import lock_path
from tests.support.signals import handlers_kept

EMPTY = [
    ["doctor", ""],
    ["demo", "--swap-dir", ""],
    ["run", "--swap-dir", "", "script.py"],
    ["run", "--swap-dir", ".", "--socket", "", "script.py"],
    ["plan", "--config", "c", "--model", "a:b", "--host-budget-bytes", "1G", "--swap-dir", ""],
    ["checkpoint", "info", ""],
    ["export", "", "out"],
]


@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_an_empty_name_is_no_directory(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        infinity_command(words)
    assert ended.value.code == 2
    assert "is empty: name a path" in capsys.readouterr().err


def test_nor_does_a_daemon_take_one() -> None:
    with pytest.raises(ConfigError, match=r"swap_dirs.*is empty"):
        DaemonProcess(swap_dirs=["here", ""])


@pytest.mark.parametrize("path", [".", "/"])
def test_a_socket_has_a_name(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"socket.*is a directory: name a file in one"):
        lock_path(Path(path))
    with handlers_kept():
        assert daemon_command(["serve", "--swap-dir", str(tmp_path), "--socket", path]) == 2
    assert "--socket" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "word", "told"),
    [
        ("--queue-depth", "x", "'x' is neither a number nor auto"),
        ("--block-size", "9" * 5000, f"'{'9' * 60}…' is no number of bytes"),
    ],
)
def test_what_is_no_number_is_said_in_few_words(
    option: str, word: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        daemon_command(["serve", "--swap-dir", str(tmp_path), option, word])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "status"])
def test_a_default_is_shown_as_it_is(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFINITY_IO_SOCKET", "/100%/%(x)s")
    with pytest.raises(SystemExit) as ended:
        daemon_command([command, "--help"])
    assert ended.value.code == 0
    assert "default: /100%/%(x)s" in capsys.readouterr().out
