"""Some random walks against plain torch; `python -m tests.walks` takes as many as one likes."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.forkserver import REPOSITORY
from tests.walks.remedies import unknown_calls
from tests.walks.walk import walk


def test_a_seed_always_gives_the_same_walk() -> None:
    first, again = ([repr(walk(seed)) for seed in range(50)] for _ in range(2))  # a NaN is not equal to itself
    assert first == again


def test_calls_that_are_nowhere_are_seen() -> None:
    engine: Any = SimpleNamespace(module=torch.nn.Linear(1, 1), optimizer=None, step=print)
    words = "call engine.step() or step(), in infinity.zero.GatheredParameters(param); not engine.leap() or fly()"
    assert unknown_calls(words, engine) == ["engine.leap", "fly"]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("num_ranks", "first", "num_walks"), [(1, 0, 20), (1, 7057, 2), (2, 3001, 5)])
def test_walks(num_ranks: int, first: int, num_walks: int) -> None:
    """In a process that has run no autograd yet, so that it may fork. 7057 leaves a world of one rank to 7058."""
    options = ["--seed", str(first), "--walks", str(num_walks), "--num-ranks", str(num_ranks)]
    command = [sys.executable, "-m", "tests.walks", *options, "--json", "--no-shrink"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    print({key: found[key] for key in ("walks", "equal", "refused", "failed")})
    failures = [f"{failure['message']}\n{failure['source']}" for failure in found["failures"]]
    assert not failures, "\n\n".join(failures)
    assert found["walks"] == num_walks
