"""What users of the Trainer, Accelerate, PEFT and DeepSpeed write has the bits that it has without DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.support.ranks import REPOSITORY, quiet_environment

SAMPLE = (
    "trainers.with_the_optim_itself[sgd]", "adapters.merged_and_unloaded", "trainers.with_optim[adagrad]",
    "trainers.an_optimizer_that_is_passed", "accelerated.two_models_one_accelerator[the_second]",
)  # fmt: skip


def _run(names: Sequence[str], settings: Sequence[str], timeout_s: float, *, num_ranks: int = 1) -> str:
    words = [sys.executable, "-m", "tests.infinity.deepspeed.unmodified.run", *names, "--settings", *settings]
    ended = subprocess.run(
        [sys.executable, "-m", "infinity", "as-deepspeed", *words, "--num-ranks", str(num_ranks)],
        cwd=REPOSITORY, env=quiet_environment(), capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    return ended.stdout.splitlines()[-1]


def test_a_sample_has_the_same_bits() -> None:
    assert _run(SAMPLE, ["z3-nvme"], 280) == "5 runs: 3 equal, 2 as decided, 0 open"


def test_a_sample_on_two_ranks_is_as_distributed_data_parallel() -> None:
    names = ("adapters.trained_as[lora]", "accelerated.clipped_to[the_same]", "trainers.the_best_is_loaded")
    assert _run(names, ["z3"], 280, num_ranks=2) == "3 runs: 3 equal, 0 as decided, 0 open"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_have_the_same_bits_or_differ_as_decided() -> None:
    assert _run([], ["z2", "z2-cpu", "z3", "z3-cpu", "z3-nvme"], 3600).endswith(" 0 open")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", ["z2-cpu", "z3", "z3-nvme"])
def test_all_on_two_ranks_are_as_distributed_data_parallel_or_differ_as_decided(setting: str) -> None:
    names = ["trainers", "accelerated", "adapters", "loaded"]  # plain loops are of one process
    assert _run(names, [setting], 3600, num_ranks=2).endswith(" 0 open")
