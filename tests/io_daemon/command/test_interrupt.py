"""Ctrl-C while nothing is there to clean up: quiet on the main thread, and no business of any other. And the exit codes
of children, which are heard whatever is inherited."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from io_daemon.__main__ import main
from io_daemon.command.interrupt import EXIT_INTERRUPTED, quiet_interrupt
from io_daemon.shared.protocol import Access
from tests.support.daemon import WEIGHT, ServedDaemon, eventually, specs
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


@pytest.mark.parametrize("module", ["io_daemon", "infinity"])
def test_a_child_that_fails_is_heard_of_where_its_signal_was_ignored(module: str) -> None:
    """Which is inherited from whoever started the command."""
    program = f"from {module} import __main__; import subprocess, sys; sys.argv[1:] = ['--help']\n"
    program += "try: __main__.main()\nexcept SystemExit: sys.exit(subprocess.run(['false']).returncode)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert done.returncode == 1, done.stderr


def test_a_plan_is_made_where_the_signal_of_children_was_ignored(swap_dir: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        daemon = ServedDaemon([swap_dir])
    finally:
        signal.signal(signal.SIGCHLD, before)
    try:
        with daemon.attached() as client:
            client.upload_trace(0, [Access(chunk, WEIGHT, 0, 0) for chunk in client.register(specs(4))])
            eventually(lambda: client.stats().num_plans == 1, "the plan is followed")
    finally:
        daemon.close()
