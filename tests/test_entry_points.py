"""The installed commands: Ctrl-C ends them quietly from their first line on."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity.commands.cli import main as infinity_main
from infinity.commands.running import TORCHRUN_COMMAND
from io_daemon.__main__ import main as io_daemon_main
from io_daemon.rank.client import Client
from io_daemon.rank.process import DaemonProcess
from io_daemon.shared.protocol import Access
from tests.support.daemon import FRAME_BYTES, WEIGHT, eventually, specs
from tests.support.signals import heed_signals

pytestmark = pytest.mark.cold_daemons

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
INTERRUPTED = """
import os, signal
class Meta(type):
    def __set_name__(self, owner, name):  # where an exception would come out as a RuntimeError
        os.kill(os.getpid(), signal.SIGINT)
class Inner(metaclass=Meta): pass
class Outer: inner = Inner
"""


@pytest.mark.parametrize(
    ("script", "words", "module"),
    [
        ("io-daemon", ["status"], "argparse"),
        ("io-daemon", ["status"], "pydantic"),
        ("io-daemon", ["bench", "--help"], "rich"),
        ("infinity", ["--help"], "argparse"),
        ("infinity", ["trace", "--config", "none", "--model-params", "1e6"], "torch"),
    ],
)
def test_an_interrupted_import_ends_quietly(script: str, words: list[str], module: str, tmp_path: Path) -> None:
    """A module of that name, found before the real one, sends the signal to itself."""
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    home, function = SCRIPTS[script].split(":")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {home} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=heed_signals,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


STRANGER = "import os; os.write(2, b'a stranger runs here'); os._exit(42)"


@pytest.mark.parametrize("package", ["io_daemon", "infinity"])
def test_modules_in_the_working_directory_are_never_run(package: str, tmp_path: Path) -> None:
    """Not those that stand in for libraries, nor for the standard one's modules."""
    for module in ("pydantic", "numpy", "argparse", "asyncio", "logging"):
        (tmp_path / f"{module}.py").write_text(STRANGER)
    done = subprocess.run(
        [sys.executable, "-m", package, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_daemon_and_its_planner_run_nothing_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_dir = tmp_path / "swap"
    swap_dir.mkdir()
    for module in ("pydantic", "numpy", "pickle", "io_daemon"):
        (tmp_path / f"{module}.py").write_text(STRANGER)
    monkeypatch.chdir(tmp_path)
    with DaemonProcess(swap_dirs=[swap_dir]) as daemon, Client.connect(str(daemon.socket), job="job", rank=0) as client:
        client.attach(num_frames=4, frame_bytes=FRAME_BYTES, swap_dirs=client.swap_dirs, lock_memory="off")
        chunks = client.register(specs(8))
        client.upload_trace(1, [Access(chunk, WEIGHT, 0, 0) for chunk in chunks])
        eventually(lambda: client.stats().num_plans == 1, "one plan is made")


def test_the_launcher_of_ranks_runs_nothing_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(STRANGER)
    done = subprocess.run(
        [*TORCHRUN_COMMAND, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("main", "command"),
    [
        *((infinity_main, words) for words in ("", "run", "demo", "doctor", "trace", "config", "config check",
                                               "config keys", "config schema")),
        *((io_daemon_main, words) for words in ("", "serve", "status", "top", "fsck", "gc", "bench", "bench io",
                                                "bench sweep", "bench step", "bench compare")),
    ],
)  # fmt: skip
def test_every_help_screen_says_what_the_command_does_in_words_for_its_user(
    main: Callable[[list[str]], int], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    usage, what, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith("usage: ")
    assert what[0].isupper()
    assert what.endswith(".")
    assert "``" not in what, "a docstring is for who reads the code"
