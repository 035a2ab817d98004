"""Some random walks against plain torch; `python -m tests.walks` takes as many as one likes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.forkserver import REPOSITORY
from tests.walks.walk import walk

NUM_WALKS = 40


def test_a_seed_always_gives_the_same_walk() -> None:
    first, again = ([repr(walk(seed)) for seed in range(50)] for _ in range(2))  # a NaN is not equal to itself
    assert first == again


@pytest.mark.timeout(280)
def test_walks() -> None:
    """In a process that has run no autograd yet, so that it may fork."""
    command = [sys.executable, "-m", "tests.walks", "--walks", str(NUM_WALKS), "--json", "--no-shrink"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    print({key: found[key] for key in ("walks", "equal", "refused", "failed")})
    failures = [f"{failure['message']}\n{failure['source']}" for failure in found["failures"]]
    assert not failures, "\n\n".join(failures)
    assert found["walks"] == NUM_WALKS
