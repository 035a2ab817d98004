"""Scripts in forks of one process that has imported torch and infinity: most of what a short script takes is imports.

``python -m tests.support.warm_scripts`` reads a line of JSON for each script, forks once a rank, and tells their exit
codes when all have ended. It never runs autograd, which a fork would not survive. ``run`` is its client. Ranks that are
started so have one hash seed, and one state of NumPy's random numbers; those of launchers have their own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tests.support.forked import warm_up
from tests.support.warm_daemons import use_if_told

REPOSITORY: Final = Path(__file__).resolve().parents[2]
KILL_TIMEOUT_S: Final = 10.0


class _Server:
    """In a process group of its own: Ctrl-C at the terminal is for the tests, which end it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_scripts"],
            cwd=REPOSITORY, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,
        )  # fmt: skip
        self._unread = b""
        self._owner_pid = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """The end of its input ends it."""
        if os.getpid() != self._owner_pid:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it with all ranks that it has started."""
        with contextlib.suppress(ProcessLookupError):  # they may outlive it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILL_TIMEOUT_S)

    def ask(self, request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, deadline: float) -> Any:
        """Raises TimeoutError if there is none in time, RuntimeError if the server has ended."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            if not (part := os.read(fd, 1 << 16)):
                raise RuntimeError("the server of scripts has ended")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


_servers: dict[int, _Server] = {}
"""One for this process; a fork of it gets its own."""


def run(
    script: Path, words: Sequence[str], environments: Sequence[Mapping[str, str]], directory: Path, timeout_s: float
) -> list[tuple[int, str, str]]:
    """Run ``python script words`` once in each environment, side by side, and wait for all; (exit code, output, errors)
    of each. Raises TimeoutError with what they have said if they have not all ended after ``timeout_s``; they are
    killed, and so they are whatever else ends the waiting.

    Args:
        directory: where their output is kept meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    server = _servers.get(os.getpid())
    if server is None:
        common = set.intersection(*(set(env.items()) for env in environments))
        server = _servers[os.getpid()] = _Server(dict(common))
    files = [[str(directory / f"{rank}.{name}") for name in ("out", "err")] for rank in range(len(environments))]
    try:
        server.ask(
            {"script": str(script), "words": [*words], "envs": [dict(env) for env in environments], "files": files}
        )
        codes = server.answer(deadline)
    except BaseException as error:
        del _servers[os.getpid()]
        server.kill()
        if isinstance(error, TimeoutError):
            said = [_text(path) for pair in files for path in pair]
            raise TimeoutError(f"ranks have not ended within {timeout_s:g} s: {said}") from error
        raise
    texts = [[_text(path) for path in pair] for pair in files]
    return [(code, output, errors) for code, (output, errors) in zip(codes, texts, strict=True)]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except FileNotFoundError:  # its rank was never started
        return ""


def become(words: Sequence[str], env: Mapping[str, str], output: int, errors: int) -> None:
    """This process, a fork, has the standard files, arguments and environment of a new one."""
    for fd, name in ((1, output), (2, errors)):
        os.dup2(name, fd)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(words)


def main() -> tuple[Path, ModuleType] | None:
    """Serve. In a fork: the script that it is to run, and the module that it is to be."""
    warm_up()
    gc.freeze()
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for env, files in zip(request["envs"], request["files"], strict=True):
            if (pid := os.fork()) == 0:
                os.close(answers)
                output, errors = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for path in files)
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                become([request["script"], *request["words"]], env, output, errors)
                for fd in (nothing, output, errors):
                    os.close(fd)
                use_if_told()
                return _as_script(Path(request["script"]))
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os.write(answers, json.dumps(codes).encode() + b"\n")
    return None


def _as_script(script: Path) -> tuple[Path, ModuleType]:
    sys.path[0] = str(script.parent)
    sys.stdin = os.fdopen(0, closefd=False)
    module = ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    return script, module


if __name__ == "__main__":
    this = sys.modules["__main__"]
    if (found := main()) is not None:  # and then the interpreter ends as after any script
        exec(compile(found[0].read_text(), str(found[0]), "exec"), vars(found[1]))
