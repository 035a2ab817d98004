"""Running another command as a child: its environment, its signals, its exit code; torchrun is one.

A process ended by signal n counts as 128 + n, as in a shell.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from infinity.deepspeed.delivery import COMMANDS, DIRECTORY

TORCHRUN_COMMAND = (sys.executable, "-P", "-m", "torch.distributed.run")
EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127


def environment_of(more: Mapping[str, str] | None = None, *, as_deepspeed: bool = False) -> dict[str, str]:
    """This process's environment, for a child.

    Args:
        more: variables that are set, too.
        as_deepspeed: ``import deepspeed`` is infinity, the command ``deepspeed`` its launcher, and ``python`` this one.
    """
    variables = {**os.environ, **(more or {})}
    if as_deepspeed:
        interpreters = os.path.dirname(sys.executable)
        variables["PYTHONPATH"] = _first(str(DIRECTORY), variables.get("PYTHONPATH", ""))
        variables["PATH"] = _first(str(COMMANDS), _first(interpreters, variables.get("PATH", os.defpath)))
        variables["INFINITY_PYTHON"] = sys.executable
    return variables


def _first(directory: str, path: str) -> str:
    """``path`` with the directory in front, and there alone."""
    others = [each for each in path.split(os.pathsep) if each and each != directory]
    return os.pathsep.join([directory, *others])


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run it to its end, hand on signals, and return its exit code. The command is looked for on the child's PATH."""
    try:
        child = subprocess.Popen(command, env=environment)
    except OSError as error:
        print(f"infinity: {command[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
    with _forwarded_signals(child):
        code = child.wait()
    return 128 - code if code < 0 else code


def torchrun(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run torchrun with these words."""
    variables = dict(environment)
    if not any(map(_names_a_meeting_place, words, [*words[1:], ""])):
        variables.setdefault("PET_STANDALONE", "1")  # --standalone: else two jobs on a machine want port 29500
    if "PET_MAX_RESTARTS" in variables or any(word.replace("_", "-").startswith("--max-r") for word in words):
        # ranks that are started again would find the addresses of those before them in a store that the agent keeps
        variables.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # idle compute threads that spin take the cores that the daemon needs: 1.3 instead of 7.3 CPU seconds a step
    variables.setdefault("OMP_WAIT_POLICY", "passive")
    if "PET_LOG_DIR" in variables:
        return run_child([*TORCHRUN_COMMAND, *words], variables)
    variables["PET_LOG_DIR"] = logs = tempfile.mkdtemp(prefix="torchelastic_")  # --log-dir goes before it
    try:
        return run_child([*TORCHRUN_COMMAND, *words], variables)
    finally:
        _remove_empty(logs)


def _remove_empty(directory: str) -> None:
    """Torchrun leaves a tree of directories for logs, which holds none unless somebody asked for them."""
    for root, _, _ in os.walk(directory, topdown=False):
        with suppress(OSError):  # there is something in it
            os.rmdir(root)


def _names_a_meeting_place(word: str, following: str) -> bool:
    """An option of torchrun by which ranks of several launchers meet (or one that a script may have, to no harm)."""
    name, _, value = word.replace("_", "-").partition("=")
    if name == "--nnodes" and (value or following) in ("1", "1:1"):
        return False
    return name.startswith(("--nnodes", "--node-rank", "--master-", "--rdzv-", "--standalone"))


@contextmanager
def _forwarded_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals to us go to the child, whose end then ends us."""

    def forward(number: int, _frame: FrameType | None) -> None:
        if not (number == signal.SIGINT and _in_foreground()):
            child.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether a Ctrl-C at the terminal reaches the child by itself: it is in our process group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
