"""What commands end with: io-daemon's and infinity's alike."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from io_daemon.command.outcome import EXIT_FAULT, EXIT_NO_DAEMON, EXIT_OK, EXIT_USAGE, outcome
from io_daemon.errors import ConfigError, DaemonLostError, WorldError

MANY = "print('line\\n' * 100_000)"
PROGRAM = "import sys; from io_daemon.command.outcome import outcome; sys.exit(outcome('program', lambda: {work} or 0))"


def _raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("key", 1, "two"), EXIT_USAGE),
        (DaemonLostError("gone"), EXIT_NO_DAEMON),
        (WorldError("the disk"), EXIT_FAULT),
        (OSError(28, "No space left on device"), EXIT_FAULT),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_a_line_and_a_code(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("program", lambda: _raising(error)) == code
    said = capsys.readouterr().err
    assert said.startswith("program: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("code", [EXIT_OK, EXIT_FAULT, 77])
def test_without_one_it_is_the_commands_own(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("program", lambda: code) == code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("work", ["print('short')", MANY])
def test_an_output_that_is_full(work: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PROGRAM.format(work=work)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (EXIT_FAULT, "program: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-c", PROGRAM.format(work=MANY)],
        [sys.executable, "-m", "infinity", "config", "keys", "--json"],
    ],
)
def test_nobody_reads_on(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (EXIT_FAULT, "")
