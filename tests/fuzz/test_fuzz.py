"""Some random programs against plain torch, on two ranks as well; `python -m tests.fuzz` runs as many as one likes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.fuzz.program import program
from tests.support.forkserver import REPOSITORY


def test_a_seed_always_gives_the_same_program() -> None:
    assert [program(seed).source for seed in range(50)] == [program(seed).source for seed in range(50)]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("num_ranks", "number"), [(1, 100), (2, 16)])
def test_random_programs(num_ranks: int, number: int) -> None:
    """In a process that has run no autograd yet, so that it may fork."""
    command = [sys.executable, "-m", "tests.fuzz", "--programs", str(number), "--num-ranks", str(num_ranks)]
    command += ["--json", "--no-shrink"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    print({key: found[key] for key in ("programs", "equal", "refused", "failed", "refusal_rate")})
    failures = [f"{failure['message']}\n{failure['source']}" for failure in found["failures"]]
    assert not failures, "\n\n".join(failures)
    assert found["programs"] == number
