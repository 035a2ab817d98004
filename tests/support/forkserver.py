"""Judges cases in processes of their own, at the price of a fork: a crash or a hang is one case's verdict.

``python -m tests.support.forkserver MODULE...`` imports torch, infinity and the modules of cases once, and for every
line of JSON on its standard input forks a child that judges one case under one setting. The server itself never runs
autograd, which a fork would not survive. ``Judges`` is its client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.cases import Case, cases_of
from tests.support.forked import Child, Say, warm_up
from tests.support.judge import Verdict, judge
from tests.support.judged_on_ranks import judged_on_ranks
from tests.support.warm_daemons import use_if_told
from tests.support.world import Setting

REPOSITORY = Path(__file__).resolve().parents[2]
CASE_TIMEOUT_S = 120.0


class Judges:
    """A server of forked judges; a context manager."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()  # the end of its input ends the server
        self._process.wait(timeout=CASE_TIMEOUT_S)

    def verdict(self, module: str, case: Case, setting: Setting, *, num_ranks: int = 1) -> Verdict:
        """``num_ranks``: of more than one the first that failed, or rank 0's."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forkserver", *self._modules],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("the server has pipes")
        request = {"module": module, "case": case.name, "setting": asdict(setting), "num_ranks": num_ranks}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the server of judges has ended")
        return _as_judged(case, Verdict(**json.loads(answer)))


def _as_judged(case: Case, verdict: Verdict) -> Verdict:
    """What the case demands beyond "equal or refused"."""
    if verdict.outcome == "failed" or case.must in ("either", verdict.outcome):
        return verdict
    if verdict.outcome == "equal" and verdict.message:
        return verdict  # plain torch refuses it as well
    found = "refused" if verdict.outcome == "refused" else "not refused"
    return Verdict(**verdict.as_json() | {"outcome": "failed", "message": f"{found}, must not be: {verdict.message}"})


def judged_in_child(module: str, case: Case, setting: Setting) -> Verdict:
    """Fork, judge in the child, and wait for its verdict with a deadline."""

    def work(say: Say) -> None:
        verdict = judge(
            case.script, setting, name=case.name, about=case.about, by_torch=case.by_torch, writes=case.writes
        )
        say(json.dumps(verdict.as_json()))

    child = Child(work)
    text = child.read_line(CASE_TIMEOUT_S)
    end = child.end()
    if text is not None:
        return Verdict(**json.loads(text))
    return Verdict(script=case.name, setting=str(setting), outcome="failed", message=end)


def main() -> None:
    warm_up()
    use_if_told()
    for module in sys.argv[1:]:
        cases_of(module)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        case = cases_of(request["module"]).by_name[request["case"]]
        setting, num_ranks = Setting(**request["setting"]), int(request["num_ranks"])
        if num_ranks > 1:
            verdict = judged_on_ranks(case, setting, num_ranks=num_ranks)
        else:
            verdict = judged_in_child(request["module"], case, setting)
        answers.write(json.dumps(verdict.as_json()) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
