"""Runs tests in forks of itself, one order at a time: what every run imports has been imported already."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Final

import pytest

OPTIONS: Final = (
    "-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not slow",
    "-p", "tests.mutations.slot.forks",
)  # fmt: skip


def run_forked(test: str, timeout_s: float) -> int | None:
    """The exit code of pytest, stopped at the first failure; None if it did not end in time."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
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
    pidfd = os.pidfd_open(pid)
    ended = bool(select.select([pidfd], [], [], timeout_s)[0])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the tests have started goes with them
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    return os.waitstatus_to_exitcode(status) if ended else None


def _settle_hypothesis() -> None:
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
        _settle_hypothesis()
    for line in sys.stdin:
        order = json.loads(line)
        started_s = time.monotonic()
        code = run_forked(order["test"], order["timeout_s"])
        print(json.dumps({"code": code, "seconds": time.monotonic() - started_s}), flush=True)


if __name__ == "__main__":
    main()
