"""One side of a side-by-side run: a worker process that takes steps on request, with its footprint sampled."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infinity.commands.demo.footprint import Footprint, FootprintSampler

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
_PLACE = re.compile(r"/(?!dev/|sys/|proc/)[^/\n ]+/[^\n ]+")
"""An absolute path below a directory of the root."""
ANSWER_TIMEOUT_S = 900
"""DeepSpeed compiles its extensions before its first answer."""


class Side:
    """A context manager around ``python -m <module> <arguments>``; standard error goes to ``log``."""

    def __init__(
        self,
        name: str,
        *,
        python: str,
        module: str,
        arguments: Sequence[str],
        swap_dir: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        sampled: bool = True,
    ) -> None:
        """``sampled``: memory is, ten times a second, which slows the process while the kernel walks its pages."""
        self.name, self.swap_dir, self.log = name, swap_dir, log
        self.seconds: list[float] = []
        """Of every measured step."""
        self.losses: list[float] = []
        """Of every step."""
        self.answers: list[dict[str, Any]] = []
        self.footprint = Footprint()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                cwd=REPOSITORY,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self._sampler = FootprintSampler(self._process.pid, swap_dir).start() if sampled else None

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sampler is not None:
            self.footprint = self._sampler.stop()
        with self._process:
            if kind is None:
                self._send({"steps": 0})
                self._receive()
                self._process.wait(timeout=60)
                return
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=30)
            self._process.kill()

    def ready(self) -> dict[str, Any]:
        return self._receive()

    def take_steps(self, num_steps: int, *, measured: bool) -> dict[str, Any]:
        """Run steps; their times count only if ``measured``."""
        self.begin_steps(num_steps)
        return self.end_steps(measured=measured)

    def begin_steps(self, num_steps: int) -> None:
        """Have steps taken while the caller does something else; ``end_steps`` must follow."""
        self._send({"steps": num_steps})

    def end_steps(self, *, measured: bool) -> dict[str, Any]:
        answer = self._receive()
        self.losses += answer["losses"]
        if measured:
            self.seconds += answer["seconds"]
            self.answers.append(answer)
        return answer

    def _send(self, order: dict[str, int]) -> None:
        if self._process.stdin is None:
            raise RuntimeError("the worker has no standard input")
        self._process.stdin.write(json.dumps(order) + "\n")

    def _receive(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("the worker has no standard output")
        readable, _, _ = select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"{self.name} gave no answer; the end of {self.log}:\n{self.log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and range, seconds."""
    ordered = sorted(seconds)
    return {
        "median_s": statistics.median(ordered),
        "min_s": ordered[0],
        "p90_s": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "max_s": ordered[-1],
        "num_steps": len(ordered),
    }


def keep_results(name: str, results: Mapping[str, Any]) -> Path:
    """Write the raw figures under ``benchmarks/results``, without the places that this machine has them in."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(without_places(json.loads(json.dumps(results, default=str))), indent=2) + "\n")
    return path


def without_places(value: Any) -> Any:
    """JSON whose absolute paths of files and directories are their last parts; devices and mount points stay."""
    if isinstance(value, dict):
        return {key: without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_places(each) for each in value]
    if isinstance(value, str) and _PLACE.fullmatch(value):
        path = Path(value)
        return str(Path(*path.parts[-3:])) if path.suffix == ".py" else path.name
    return value
