"""The scripts under examples/, which know of DeepSpeed alone, run as they are, on one rank and on two.

Each is run by the launchers of its own documentation. Where plain torch can run the same script, the losses are equal
to 1e-6, whatever ranks and tiers; what is resumed goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.script_rows import ENVIRONMENT
from tests.support.ranks import REPOSITORY, free_port, quiet_environment

EXAMPLES: Final = REPOSITORY / "examples"
BIN: Final = Path(sys.executable).parent
RELATIVE: Final = 1e-6
TIMEOUT_S: Final = 270
TRAINING: Final = [
    "--use_cpu", "--max_steps", "6", "--logging_steps", "1", "--learning_rate", "1e-3",
    "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--report_to", "none",
    "--disable_tqdm", "true", "--lr_scheduler_type", "linear", "--warmup_steps", "2",
]  # fmt: skip
BOTH = pytest.mark.parametrize("num_ranks", [1, 2])
ONE_SLOWLY = pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
TWO_SLOWLY = pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pretrained") / "model"
    subprocess.run([sys.executable, EXAMPLES / "text.py", directory], check=True, capture_output=True)
    return directory


def run(
    directory: Path, words: Sequence[object], *, unmodified: bool = True, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the script prints last. ``unmodified``: what it takes for DeepSpeed is infinity; else it needs none."""
    (directory / "swap").mkdir(exist_ok=True)
    given = ["infinity", "as-deepspeed", *words] if unmodified else words
    ended = subprocess.run(
        [str(BIN / str(given[0])), *map(str, given[1:])],
        cwd=directory,
        env={**quiet_environment(PATH=f"{BIN}:/usr/bin:/bin"), "PYTHONPATH": "", **(variables or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    answers = [line for line in ended.stdout.splitlines() if line.startswith('{"')]
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    assert answers, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def torchrun(num_ranks: int) -> list[str]:
    return ["torchrun", "--nproc-per-node", str(num_ranks), "--master-port", str(free_port())]


def plainly(num_ranks: int) -> list[str]:
    """One rank needs no launcher."""
    return torchrun(num_ranks) if num_ranks > 1 else ["python"]


def assert_close(mine: Sequence[float], theirs: Sequence[float]) -> None:
    assert len(mine) == len(theirs) > 0
    assert mine == pytest.approx(theirs, rel=RELATIVE, abs=0)


@ONE_SLOWLY
def test_the_trainer_with_everything_on_nvme_equals_memory_and_resumes(
    num_ranks: int, model: Path, tmp_path: Path
) -> None:
    words = [EXAMPLES / "trainer.py", "--model", model, *TRAINING, "--save_steps", 3]
    sharded = [*torchrun(num_ranks), *words, "--output_dir", "out", "--deepspeed", EXAMPLES / "zero3_nvme.json"]
    whole = run(tmp_path, sharded)
    in_memory = run(tmp_path, [*plainly(num_ranks), *words, "--output_dir", "plain"], unmodified=False)
    assert_close(whole["losses"], in_memory["losses"])
    assert_close([whole["eval_loss"]], [in_memory["eval_loss"]])
    resumed = run(tmp_path, [*sharded, "--resume_from_checkpoint", "out/checkpoint-3"])
    assert resumed == whole, "the first loss after resuming is the fourth, bit for bit, and so is what follows"
    mine, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("out", "plain"))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@BOTH
def test_the_trainer_goes_back_to_its_best_model(num_ranks: int, model: Path, tmp_path: Path) -> None:
    """At a learning rate that ruins the model after its first evaluation."""
    words = [*torchrun(num_ranks), EXAMPLES / "trainer.py", "--model", model, *TRAINING, "--learning_rate", 0.1]
    words += ["--eval_strategy", "steps", "--eval_steps", 2, "--save_steps", 2, "--output_dir", "out"]
    words += ["--load_best_model_at_end", "--deepspeed", EXAMPLES / "zero3_nvme.json"]
    answer = run(tmp_path, words)
    best = tmp_path / answer["best"]
    history = json.loads((best.parent / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    evaluated = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    assert len(set(evaluated.values())) == 3
    assert answer["eval_loss"] == min(evaluated.values()), "what it evaluates at last is the best"
    assert best.name == f"checkpoint-{min(evaluated, key=lambda step: evaluated[step])}"


@pytest.mark.slow
@BOTH
def test_the_trainer_in_fp16_with_its_optimizer_on_the_host(num_ranks: int, model: Path, tmp_path: Path) -> None:
    words = [*torchrun(num_ranks), EXAMPLES / "trainer.py", "--model", model, *TRAINING, "--output_dir", "out"]
    words += ["--save_steps", 3, "--fp16", "--deepspeed", EXAMPLES / "zero2_fp16_cpu.json"]
    whole = run(tmp_path, words)
    assert whole["losses"][-1] < whole["losses"][0] - 0.2
    resumed = run(tmp_path, [*words, "--resume_from_checkpoint", "out/checkpoint-3"])
    assert resumed == whole


@TWO_SLOWLY
def test_accelerate_by_its_plugin_and_by_its_launcher(num_ranks: int, model: Path, tmp_path: Path) -> None:
    words = [EXAMPLES / "accelerate_loop.py", "--model", model, "--output", "out"]
    launch = ["accelerate", "launch", "--num_processes", num_ranks, "--main_process_port", free_port()]
    by_plugin = run(tmp_path, [*torchrun(num_ranks), *words, "--plugin", EXAMPLES / "accelerate_nvme.json"])
    by_launcher = run(tmp_path, [*launch, "--config_file", EXAMPLES / "accelerate.yaml", *words], variables=ENVIRONMENT)
    assert by_plugin["by"] == "DEEPSPEED", "Accelerate leaves the plugin out without a word where cpu=True"
    assert by_plugin == by_launcher
    assert by_plugin["again"] == by_plugin["following"], "what load_state brings back is what save_state saw"
    if num_ranks == 1:
        in_memory = run(tmp_path, ["python", *words], unmodified=False)
        assert in_memory.pop("by") == "NO"
        for part in in_memory:
            assert_close(by_plugin[part], in_memory[part])


@TWO_SLOWLY
def test_lora_by_peft_and_the_trainer(num_ranks: int, model: Path, tmp_path: Path) -> None:
    words = [EXAMPLES / "peft_lora.py", "--model", model, *TRAINING, "--save_steps", 3]
    sharded = [*torchrun(num_ranks), *words, "--output_dir", "out", "--deepspeed", EXAMPLES / "zero3_nvme.json"]
    whole = run(tmp_path, sharded)
    in_memory = run(tmp_path, [*plainly(num_ranks), *words, "--output_dir", "plain"], unmodified=False)
    assert_close(whole["losses"], in_memory["losses"])
    assert run(tmp_path, [*sharded, "--resume_from_checkpoint", "out/checkpoint-3"]) == whole
    mine, theirs = (load_file(tmp_path / out / "adapter_model.safetensors") for out in ("out", "plain"))
    assert mine.keys() == theirs.keys()
    assert all("lora_" in name for name in mine)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)


@TWO_SLOWLY
def test_text_is_generated_from_nvme(num_ranks: int, model: Path, tmp_path: Path) -> None:
    words = [EXAMPLES / "generate.py", "--model", model]
    sharded = run(tmp_path, [*torchrun(num_ranks), *words, "--deepspeed", EXAMPLES / "zero3_nvme.json"])
    assert sharded == run(tmp_path, ["python", *words], unmodified=False)


@TWO_SLOWLY
def test_a_loop_of_deepspeeds_own_documentation(num_ranks: int, tmp_path: Path) -> None:
    launch = ["deepspeed", "--num_gpus", num_ranks, "--master_port", free_port()]
    words = [EXAMPLES / "loop.py", "--deepspeed_config", EXAMPLES / "loop.json"]
    answer = run(tmp_path, [*launch, *words])
    assert answer["losses"][-1] < answer["losses"][0]
    assert answer["again"] == answer["losses"][4:]
