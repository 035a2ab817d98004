"""The rows of ``benchmarks.same_scripts``: which scripts are run, by which launcher, and how close they must be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.side import REPOSITORY

EXAMPLES: Final = REPOSITORY / "examples"
OUT: Final = "out"
LOOP: Final = REPOSITORY / "tests" / "infinity" / "deepspeed" / "script.py"
PLAIN_LOOP: Final = LOOP.with_name("plain_script.py")
TRAINING: Final = (
    "--use_cpu", "--max_steps", "6", "--logging_steps", "1", "--learning_rate", "1e-3",
    "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--report_to", "none",
    "--disable_tqdm", "true", "--lr_scheduler_type", "linear", "--warmup_steps", "2", "--save_steps", "3",
    "--output_dir", OUT, "--model", "model",
)  # fmt: skip
LOOP_CONFIG: Final = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
_NVME: Final = {"device": "nvme", "nvme_path": "swap"}
_CPU: Final = {"device": "cpu"}
LOOPS: Final[dict[str, dict[str, Any]]] = {
    "z1": {"stage": 1},
    "z2 cpu": {"stage": 2, "offload_optimizer": _CPU},
    "z3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "z3 nvme": {"stage": 3, "offload_optimizer": _NVME, "offload_param": _NVME},
}
FRESH: Final = "under NVMe offload the real one resumes from fresh weights, without a word"
KEPT: Final = "under NVMe offload the real one goes on from the weights that it has, not those it loads, without a word"
LOST: Final = "under Init the real one loses what a constructor writes to its weights (_init_weights), without a word"
HALVES: Final = "the real one's masters are the rounded weights, and it adds up micro-batches' gradients in fp16"
BY_FLAGS: Final = (
    "--use_deepspeed", "--zero_stage", "3", "--offload_optimizer_device", "nvme",
    "--offload_optimizer_nvme_path", "swap", "--offload_param_device", "nvme", "--offload_param_nvme_path", "swap",
    "--gradient_accumulation_steps", "2", "--gradient_clipping", "1.0", "--zero3_init_flag", "true",
    "--zero3_save_16bit_model", "true", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
)  # fmt: skip
ENVIRONMENT: Final = {f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_NVME_PATH": "swap" for what in ("PARAM", "OPTIMIZER")}
"""Of all scripts: Accelerate's launcher drops the paths that it is given."""


@dataclass(frozen=True)
class Row:
    """A script with its words; ``relative`` is how close its losses must be to the real one's."""

    name: str
    words: tuple[str, ...]
    relative: float = 1e-6
    forgotten: tuple[str, ...] = ()
    """What of it is not compared with the real one, for the reason ``why``."""
    why: str = ""
    resumed: bool = False
    """It is run again from the checkpoint of its third step, as if it had ended before the next one."""
    launcher: tuple[str, ...] | None = None
    """Words of ``accelerate launch``; None: torchrun."""
    in_memory: tuple[str, ...] | None = None
    """Its words without DeepSpeed, under torchrun; None where it would not train, or not the same."""
    meets: bool = False
    """On several ranks the real one needs ``init_distributed`` before the script: its Trainer sees one rank else."""


def rows() -> list[Row]:
    """What is run, each in a directory that has a model and the configurations ``*.json``."""
    best = ("--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", "3", "--learning_rate", "1e-2")
    generate = (str(EXAMPLES / "generate.py"), "--model", "model")
    fresh: dict[str, Any] = {"forgotten": ("losses", "eval_loss"), "why": FRESH}
    return [
        *(_loop(name) for name in LOOPS),
        Row(
            "deepspeed.initialize, z3 nvme, made under Init",
            (str(EXAMPLES / "loop.py"), "--deepspeed_config", "loop.json"),
            forgotten=("losses", "again"),
            why=LOST,
        ),
        _trainer("Trainer, z3", "zero3.json"),
        _trainer("Trainer, z3, resumed", "zero3.json", resumed=True),
        _trainer("Trainer, z3 nvme", "zero3_nvme.json"),
        _trainer("Trainer, z3 nvme, resumed", "zero3_nvme.json", resumed=True, **fresh),
        _trainer("Trainer, z2 fp16 cpu", "zero2_fp16_cpu.json", "--fp16", relative=1e-3, why=HALVES),
        _trainer("Trainer, z3, best model at the end", "zero3.json", *best),
        _trainer("PEFT LoRA, z3", "zero3.json", script="peft_lora.py"),
        _trainer("PEFT LoRA, z3, resumed", "zero3.json", script="peft_lora.py", resumed=True),
        _trainer("PEFT LoRA, z3 nvme", "zero3_nvme.json", script="peft_lora.py"),
        *(
            Row(f"from_pretrained and generate, {name}", (*generate, "--deepspeed", file), in_memory=generate)
            for name, file in (("z3", "zero3.json"), ("z3 nvme", "zero3_nvme.json"))
        ),
        _accelerate("Accelerate by plugin, z3", "--plugin", "accelerate_z3.json"),
        _accelerate("Accelerate by plugin, z3 nvme", "--plugin", "accelerate_nvme.json"),
        _accelerate("Accelerate by yaml, z3 nvme", launcher=("--config_file", str(EXAMPLES / "accelerate.yaml"))),
        _accelerate("Accelerate by flags of accelerate launch, z3 nvme", launcher=BY_FLAGS),
        _accelerate(
            "Accelerate by accelerate launch and a configuration, z3 nvme",
            launcher=("--use_deepspeed", "--deepspeed_config_file", "accelerate_nvme.json"),
        ),
    ]


def _loop(name: str) -> Row:
    forgotten: dict[str, Any] = {"forgotten": ("resumed",), "why": FRESH} if "nvme" in name else {}
    return Row(
        f"deepspeed.initialize, {name}, saved and loaded",
        (str(LOOP), "--out", OUT, "--deepspeed_config", f"{name}.json"),
        in_memory=(str(PLAIN_LOOP), "--clip", "1.0", "--weight_decay", "0.0"),
        **forgotten,
    )


def _trainer(name: str, file: str, *more: str, script: str = "trainer.py", **options: Any) -> Row:
    words = (str(EXAMPLES / script), *TRAINING, *more)
    in_memory = None if "--fp16" in more else words
    return Row(name, (*words, "--deepspeed", file), in_memory=in_memory, meets=True, **options)


def _accelerate(name: str, *more: str, **options: Any) -> Row:
    words = (str(EXAMPLES / "accelerate_loop.py"), "--model", "model", "--output", OUT)
    kept: dict[str, Any] = {"forgotten": ("again",), "why": KEPT} if "nvme" in name else {}
    return Row(name, (*words, *more), in_memory=words, **kept, **options)


def furnish(directory: Path, model: Path) -> None:
    """What scripts find in the directory that they run in."""
    (directory / "model").symlink_to(model)
    for name in ("swap", OUT):
        (directory / name).mkdir()
    for name in ("zero3_nvme.json", "accelerate_nvme.json", "zero2_fp16_cpu.json", "loop.json"):
        (directory / name).write_text((EXAMPLES / name).read_text())
    for name, in_memory in (("zero3_nvme.json", "zero3.json"), ("accelerate_nvme.json", "accelerate_z3.json")):
        config: dict[str, Any] = json.loads((EXAMPLES / name).read_text())
        zero = {key: value for key, value in config["zero_optimization"].items() if not key.startswith("offload")}
        (directory / in_memory).write_text(json.dumps({**config, "zero_optimization": zero}))
    for name, zero in LOOPS.items():
        (directory / f"{name}.json").write_text(json.dumps({**LOOP_CONFIG, "zero_optimization": zero}))
    (directory / "meet.py").write_text(MEET)


MEET: Final = """\
import os, runpy, sys
import deepspeed
deepspeed.init_distributed("gloo")
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
