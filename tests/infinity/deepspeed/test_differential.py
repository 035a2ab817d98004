"""Programs of some lines return here what they returned under a real DeepSpeed 0.19.8, whose answers are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.infinity.deepspeed.differential.decided import DECIDED, stale, undecided
from tests.infinity.deepspeed.differential.facts import read
from tests.support.ranks import REPOSITORY, quiet_environment

SAMPLE = 5
"""One case of so many is run by every change; the slow test runs all."""


def _differing(names: Sequence[str], directory: Path) -> dict[str, list[str]]:
    """Of each case, where it differs from the real one."""
    command = [sys.executable, "-m", "infinity", "as-deepspeed", sys.executable, "-m"]
    place = "tests.infinity.deepspeed.differential"
    out = directory / "found.json"
    for words in ([f"{place}.run", "--exact", "--out", str(out), *names], [f"{place}.facts", "compare", str(out)]):
        ended = subprocess.run(
            [*command, *words, *(["--json"] if "compare" in words else [])],
            cwd=REPOSITORY, env=quiet_environment(), capture_output=True, text=True, timeout=1200, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr[-4000:]
    answers: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert sorted(answers) == sorted(names)
    return answers


def _open(answers: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: rest for name, lines in answers.items() if (rest := undecided(name, lines))}


def test_a_sample_answers_as_the_real_one(tmp_path: Path) -> None:
    assert _open(_differing(sorted(read())[::SAMPLE], tmp_path)) == {}


@pytest.mark.slow
def test_all_answer_as_the_real_one(tmp_path: Path) -> None:
    answers = _differing(sorted(read()), tmp_path)
    assert _open(answers) == {}
    assert stale(answers) == []


def test_what_may_differ_is_of_cases_that_there_are() -> None:
    facts = read()
    assert [name for decision in DECIDED for name in decision.cases if name not in facts] == []


def test_a_decision_excuses_what_it_speaks_of_alone() -> None:
    name = "training.unused_parameters[2]"
    told = ["[0][1].unused.bias: 0.130674793 != 0.13087104726582766"]
    others = ["[0][1].head.bias: 0.1 != 0.2", "[0][0][1]: 1.0 != 1.5", "raised: RuntimeError: broken"]
    assert undecided(name, [*told, *others]) == others
    assert undecided("training.tied_weights[2]", told) == told
    name = "backwards.gradients_of_inputs_asked_for_apart[3-2]"
    assert undecided(name, ["[0][0]: 0.5 != 1.0", "[0][1]: 0.5 != 1.1"]) == ["[0][1]: 0.5 != 1.1"]
