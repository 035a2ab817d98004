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


def _run(names: Sequence[str], settings: Sequence[str], timeout_s: float) -> str:
    words = [sys.executable, "-m", "tests.infinity.deepspeed.unmodified.run", *names, "--settings", *settings]
    ended = subprocess.run(
        [sys.executable, "-m", "infinity", "as-deepspeed", *words],
        cwd=REPOSITORY, env=quiet_environment(), capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    return ended.stdout.splitlines()[-1]


def test_a_sample_has_the_same_bits() -> None:
    assert _run(SAMPLE, ["z3-nvme"], 280) == "5 runs: 3 equal, 2 as decided, 0 open"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_have_the_same_bits_or_differ_as_decided() -> None:
    assert _run([], ["z2", "z2-cpu", "z3", "z3-cpu", "z3-nvme"], 3600).endswith(" 0 open")
