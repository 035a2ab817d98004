"""Ctrl-C while nothing is there to clean up: quiet on the main thread, and no business of any other."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from io_daemon.__main__ import main
from io_daemon.command.interrupt import EXIT_INTERRUPTED, quiet_interrupt
from tests.support.signals import heed_signals

INTERRUPTED = """
import signal
from io_daemon.command.interrupt import quiet_interrupt
with quiet_interrupt():
    signal.raise_signal(signal.SIGINT)
"""


def test_it_ends_at_once_and_says_nothing() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, preexec_fn=heed_signals)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_INTERRUPTED, b"", b"")


def test_afterwards_it_is_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with quiet_interrupt():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_a_command_may_run_on_any_thread(tmp_path: Path) -> None:
    words = [
        "bench",
        "io",
        str(tmp_path),
        "--size",
        "1M",
        "--bs",
        "4K",
        "--engine",
        "posix",
        "--runtime",
        "0.1",
        "--quiet",
    ]
    with ThreadPoolExecutor(max_workers=1) as thread:
        assert thread.submit(main, words).result(timeout=60) == 0
