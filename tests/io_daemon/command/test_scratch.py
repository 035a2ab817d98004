"""A command's directory is gone whichever signals come, and how often."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from io_daemon.command.scratch import scratch_directory
from tests.support.signals import heed_signals

ENDED = """
import shutil, signal, sys
from pathlib import Path
from io_daemon.command.scratch import scratch_directory

first, second = (signal.Signals(int(word)) for word in sys.argv[2:])
remove = shutil.rmtree

def disturbed(*directory, **how):
    signal.raise_signal(second)
    remove(*directory, **how)

shutil.rmtree = disturbed
with scratch_directory("test-", sys.argv[1]) as directory:
    (directory / "file").write_text("x")
    signal.raise_signal(first)
"""
MADE = """
import os, signal, sys
from io_daemon.command.scratch import scratch_directory

mkdir = os.mkdir

def disturbed(*directory, **how):
    mkdir(*directory, **how)
    signal.raise_signal(int(sys.argv[2]))

os.mkdir = disturbed
with scratch_directory("test-", sys.argv[1]):
    print("it went on")
"""
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_waits_until_the_directory_is_gone(
    first: signal.Signals, second: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path), str(int(first)), str(int(second))]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, preexec_fn=heed_signals)
    assert done.returncode == (-signal.SIGINT if second == signal.SIGINT else 128 + second)
    assert list(tmp_path.iterdir()) == []


def test_handlers_of_the_program_around_stay(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with scratch_directory("test-", tmp_path):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM, signal.SIGTERM]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_it_is_made_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MADE, str(tmp_path), str(int(number))]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, preexec_fn=heed_signals)
    assert done.returncode == (-signal.SIGINT if number == signal.SIGINT else 128 + number)
    assert done.stdout == b""
    assert list(tmp_path.iterdir()) == []
