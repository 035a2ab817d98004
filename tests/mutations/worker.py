"""Runs tests in forks of itself, one order at a time: what every run imports has been imported already."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Final

import pytest

OPTIONS: Final = (
    "-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not slow",
    "-p", "tests.mutations.slot.forks",
)  # fmt: skip


ASLEEP_S: Final = 20
"""Nobody has run for so long: it hangs."""


def run_forked(test: str, cpu_limit_s: float) -> tuple[int | None, float]:
    """The exit code of pytest, stopped at the first failure, and the CPU time that it took.

    None if it hung or took more than the limit. The wall clock says nothing on a machine that others use."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        hard = math.ceil(cpu_limit_s)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard + 1))
        log = os.open(os.environ["MUTATION_LOG"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for fd in (1, 2):
            os.dup2(log, fd)
        code = 70
        try:
            code = int(pytest.main([*OPTIONS, test]))
        except BaseException:  # noqa: BLE001 -- whatever it is, this fork ends here
            traceback.print_exc()
        finally:
            os._exit(code)
    return watched(pid)


def watched(pid: int) -> tuple[int | None, float]:
    """Exit code and CPU seconds of a child that leads a process group; None: it hung, or took more than its limit."""
    pidfd = os.pidfd_open(pid)
    asleep_s, ended = 0, False
    while not ended and asleep_s < ASLEEP_S:
        ended = bool(select.select([pidfd], [], [], 1.0)[0])
        asleep_s = 0 if _is_awake(pid) else asleep_s + 1
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the tests have started goes with them
    _, status, used = os.wait4(pid, 0)
    os.close(pidfd)
    code = os.waitstatus_to_exitcode(status)
    cpu_s = used.ru_utime + used.ru_stime
    return (code if ended and code not in (-signal.SIGXCPU, -signal.SIGKILL) else None), cpu_s


def _is_awake(pid: int) -> bool:
    """Whether any thread of the process, or of one below it, runs or would if it had a core."""
    below: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            below.setdefault(int(_fields(process)[1]), []).append(int(process.name))
    family = [pid]
    for member in family:
        family += below.get(member, ())
        with contextlib.suppress(OSError):
            if any(_fields(task)[0] in "RD" for task in Path(f"/proc/{member}/task").iterdir()):
                return True
    return False


def _fields(process: Path) -> list[str]:
    """State, parent, ... from its stat file."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def settle_hypothesis() -> None:
    """The same examples for each mutant: none that another one's failure has left, and none made smaller."""
    hypothesis = sys.modules["hypothesis"]
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutations", database=None, derandomize=True, phases=phases)
    hypothesis.settings.load_profile("mutations")


def main() -> None:
    sys.path.insert(0, os.environ["MUTATION_TREE"])
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "hypothesis" in sys.modules:
        settle_hypothesis()
    for line in sys.stdin:
        order = json.loads(line)
        code, cpu_s = run_forked(order["test"], order["cpu_limit_s"])
        print(json.dumps({"code": code, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    main()
