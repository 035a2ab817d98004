"""Scripts on several ranks: started as a launcher would, with no word of torch.distributed in between."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support import warm_scripts

REPOSITORY: Final = Path(__file__).resolve().parents[2]
TIMEOUT_S: Final = 240.0
LAUNCHER_VARIABLES: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "INFINITY_IO_SOCKET",
)  # fmt: skip
_LEAKS: Final = re.compile(r"nanobind: leaked .*?refleaks\.html\n?", re.DOTALL)
"""What triton, where torch has one, says at the end of a process that is a fork of one that imported it."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What is left of one rank."""

    code: int
    output: str
    errors: str

    @property
    def answer(self) -> Any:
        """Its last line, which is JSON."""
        if self.code != 0 or not self.output:
            raise AssertionError(f"exit code {self.code}\n{self.output}\n{self.errors}")
        return json.loads(self.output.splitlines()[-1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def quiet_environment(**variables: str) -> dict[str, str]:
    """This process's own, without what a launcher around the tests may have set."""
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**own, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}


def run_ranks(
    code: str, directory: Path, *, num_ranks: int, words: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run ``code`` as a script on ``num_ranks`` processes of this machine; each one's end, in rank order.

    Args:
        variables: more of the environment, which nothing reads while it is imported.
    """
    common = quiet_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **(variables or {}))
    environments = []
    for rank in range(num_ranks):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        environments.append(common | {name: str(value) for name, value in places.items()})
    return _run(code, directory, words, environments)


def run_script(code: str, directory: Path, *words: str) -> Ended:
    """Run ``code`` as a script that no launcher has started; its end."""
    (ended,) = _run(code, directory, words, [quiet_environment()])
    return ended


def call_on_ranks(function: Callable[[int, str], None], directory: Path, *, num_ranks: int) -> None:
    """``function(rank, directory)``, which a module of the tests has, on each rank, in processes of their own."""
    code = f"""
        import os, sys
        from {function.__module__} import {function.__name__} as called
        called(int(os.environ["RANK"]), sys.argv[1])
    """
    ended = run_ranks(code, directory, num_ranks=num_ranks, words=[str(directory)])
    assert [rank.code for rank in ended] == [0] * num_ranks, ended


def _run(code: str, directory: Path, words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[Ended]:
    script = directory / "script.py"
    script.write_text(textwrap.dedent(code))
    with tempfile.TemporaryDirectory() as kept:
        ended = warm_scripts.run(script, words, environments, Path(kept), TIMEOUT_S)
    return [Ended(code=code, output=output, errors=_LEAKS.sub("", errors)) for code, output, errors in ended]


def start_launcher(*words: str | Path, **variables: str) -> subprocess.Popen[str]:
    """``infinity run WORDS`` on one node."""
    return subprocess.Popen(
        [sys.executable, "-m", "infinity", "run", *map(str, words)],
        env=quiet_environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(process: subprocess.Popen[str]) -> Ended:
    output, errors = process.communicate(timeout=TIMEOUT_S)
    return Ended(code=process.returncode, output=output, errors=errors)


def end_of(launcher: subprocess.Popen[str]) -> Ended:
    try:
        return _ended(launcher)
    finally:
        launcher.kill()
