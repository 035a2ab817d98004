"""A plugin of pytest: what tests start as a Python of its own, with all that it imports, is a fork of the worker.

Judges of cases and ranks of a script. Nothing may have run autograd in the process that forks, so that both come before
any test that trains in this process: a file of tests that has them trains nowhere else.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import select
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def pytest_configure() -> None:
    if "torch" in sys.modules:
        from tests.support import forkserver, ranks

        forkserver.Judges.verdict = _verdict  # type: ignore[method-assign, assignment]
        ranks.run_ranks = _run_ranks


def _verdict(_judges: Any, module: str, case: Any, setting: Any) -> Any:
    from tests.support import forkserver

    return forkserver._as_judged(case, forkserver.judged_in_child(module, case, setting))


def _run_ranks(
    code: str, directory: Path, *, num_ranks: int, words: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> list[Any]:
    from tests.support import ranks

    script = directory / "script.py"
    script.write_text(textwrap.dedent(code))
    port = str(ranks.free_port())
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(num_ranks):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            env = ranks.quiet_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **(variables or {}))
            env |= {name: str(value) for name, value in places.items()}
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            pid = os.fork()
            if pid == 0:
                _run_script(str(script), words, env, files)
            stack.callback(_kill, pid)
            started.append((pid, files))
        deadline = time.monotonic() + ranks.TIMEOUT_S
        return [_ended(ranks.Ended, pid, files, deadline) for pid, files in started]


def _run_script(script: str, words: Sequence[str], env: Mapping[str, str], files: Sequence[IO[str]]) -> None:
    """As ``python script words``; never returns."""
    from tests.support import warm_scripts

    code = 1
    try:
        warm_scripts.become([script, *words], env, *(file.fileno() for file in files))
        atexit._clear()
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 -- as Python itself prints it
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _ended(kind: Any, pid: int, files: Sequence[IO[str]], deadline: float) -> Any:
    pidfd = os.pidfd_open(pid)
    if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for file in files:
        file.seek(0)
    return kind(code=code, output=files[0].read(), errors=files[1].read())


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
