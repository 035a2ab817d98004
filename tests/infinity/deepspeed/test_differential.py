"""Programs of some lines return here what they returned under a real DeepSpeed 0.19.8, whose answers are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.infinity.deepspeed.differential.decided import DECIDED, reason
from tests.infinity.deepspeed.differential.facts import read
from tests.support.ranks import REPOSITORY, quiet_environment

SAMPLE = 5
"""One case of so many is run by every change; the slow test runs all."""


def _differing(names: Sequence[str], directory: Path) -> dict[str, list[str]]:
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
    return {name: lines for name, lines in answers.items() if lines and reason(name) is None}


def test_a_sample_answers_as_the_real_one(tmp_path: Path) -> None:
    assert _differing(sorted(read())[::SAMPLE], tmp_path) == {}


@pytest.mark.slow
def test_all_answer_as_the_real_one(tmp_path: Path) -> None:
    assert _differing(sorted(read()), tmp_path) == {}


def test_what_may_differ_is_of_cases_that_there_are() -> None:
    assert [start for start in DECIDED if not any(name.startswith(start) for name in read())] == []
