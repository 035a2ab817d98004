"""The scripts under ``examples/``, unmodified, on a real DeepSpeed and on infinity: their losses side by side.

``python -m benchmarks.same_scripts --deepspeed-venv DIR`` runs each on both, on one rank and on two, and prints the
first loss, the last, and the largest relative difference of all. The real one has a virtual environment of its own with
this one's versions of torch, Transformers, Accelerate and PEFT; a script that fails on it is named with its error. What
also trains in memory, without DeepSpeed, is run so on one rank: infinity's losses must be these, bit by bit. Exit code
0 if they are, and if every other pair that ran on both is equal within 1e-6 in fp32, or 1e-3 in fp16.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.deepspeed_venv import prepare_venv
from benchmarks.machine import free_port
from benchmarks.side import REPOSITORY, RESULTS, keep_results

EXAMPLES: Final = REPOSITORY / "examples"
TIMEOUT_S: Final = 600
TRAINING: Final = (
    "--use_cpu", "--max_steps", "6", "--logging_steps", "1", "--learning_rate", "1e-3",
    "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--report_to", "none",
    "--disable_tqdm", "true", "--lr_scheduler_type", "linear", "--warmup_steps", "2", "--save_steps", "3",
    "--output_dir", "out", "--model", "model",
)  # fmt: skip
LOSSES: Final = ("losses", "resumed", "following", "again", "eval_loss", "tokens")
"""What the scripts print, or the loop's report has; of tokens 0 differ, or it does not hold."""
OUT: Final = "out"
LOOP: Final = REPOSITORY / "tests" / "infinity" / "deepspeed" / "script.py"
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


@dataclass(frozen=True)
class Row:
    """A script with its arguments; ``relative`` is how close its losses must be."""

    name: str
    words: tuple[str, ...]
    relative: float = 1e-6
    forgotten: tuple[str, ...] = ()
    """What is not compared: under NVMe offload the real one resumes from fresh weights, and under ``Init`` it loses
    what a constructor writes to its weights (``_init_weights``), each without a word."""
    resumed: bool = False
    """It is run again from the checkpoint of its third step."""

    @property
    def in_memory(self) -> tuple[str, ...] | None:
        """Its words without DeepSpeed; None where it would not train, or not the same."""
        if "--deepspeed" not in self.words or "--output_dir" not in self.words or "--fp16" in self.words:
            return None
        at = self.words.index("--deepspeed")
        return (*self.words[:at], *self.words[at + 2 :])


def rows() -> list[Row]:
    """What is run, each in a directory that has a model and the configurations ``*.json``."""
    trainer = (str(EXAMPLES / "trainer.py"), *TRAINING, "--deepspeed")
    best = ("--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", "3", "--learning_rate", "1e-2")
    lora = (str(EXAMPLES / "peft_lora.py"), *TRAINING, "--deepspeed")
    generate = (str(EXAMPLES / "generate.py"), "--model", "model", "--deepspeed")
    accelerate = (str(EXAMPLES / "accelerate_loop.py"), "--model", "model", "--output", OUT, "--plugin")
    loop = (str(LOOP), "--out", OUT, "--deepspeed_config")
    own = (str(EXAMPLES / "loop.py"), "--deepspeed_config", "loop.json")
    return [
        *(
            Row(
                f"deepspeed.initialize, {name}, saved and loaded",
                (*loop, f"{name}.json"),
                forgotten=("resumed",) if "nvme" in name else (),
            )
            for name in LOOPS
        ),
        Row("deepspeed.initialize, z3 nvme, made under Init", own, forgotten=("losses", "again")),
        Row("Trainer, z3", (*trainer, "zero3.json")),
        Row("Trainer, z3, resumed", (*trainer, "zero3.json"), resumed=True),
        Row("Trainer, z3 nvme", (*trainer, "zero3_nvme.json")),
        Row(
            "Trainer, z3 nvme, resumed", (*trainer, "zero3_nvme.json"), resumed=True, forgotten=("losses", "eval_loss")
        ),
        Row("Trainer, z2 fp16 cpu", (*trainer, "zero2_fp16_cpu.json", "--fp16"), relative=1e-3),
        Row("Trainer, z3, best model at the end", (*trainer, "zero3.json", *best)),
        Row("PEFT LoRA, z3", (*lora, "zero3.json")),
        Row("PEFT LoRA, z3, resumed", (*lora, "zero3.json"), resumed=True),
        Row("PEFT LoRA, z3 nvme", (*lora, "zero3_nvme.json")),
        Row("from_pretrained and generate, z3", (*generate, "zero3.json")),
        Row("from_pretrained and generate, z3 nvme", (*generate, "zero3_nvme.json")),
        Row("Accelerate by plugin, z3", (*accelerate, "zero3.json")),
        Row("Accelerate by plugin, z3 nvme", (*accelerate, "zero3_nvme.json"), forgotten=("again",)),
    ]


def furnish(directory: Path, model: Path) -> None:
    """What scripts find in the directory that they run in."""
    (directory / "model").symlink_to(model)
    for name in ("swap", OUT):
        (directory / name).mkdir()
    for name in ("zero3_nvme.json", "zero2_fp16_cpu.json", "loop.json"):
        (directory / name).write_text((EXAMPLES / name).read_text())
    config: dict[str, Any] = json.loads((EXAMPLES / "zero3_nvme.json").read_text())
    zero = {name: value for name, value in config["zero_optimization"].items() if not name.startswith("offload")}
    (directory / "zero3.json").write_text(json.dumps({**config, "zero_optimization": zero}))
    for name, zero in LOOPS.items():
        (directory / f"{name}.json").write_text(json.dumps({**LOOP_CONFIG, "zero_optimization": zero}))


class Contender:
    """Runs scripts: ``prefix`` is what stands before the launcher's words."""

    def __init__(
        self, prefix: Sequence[str], directory: Path, model: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._prefix, self._directory, self._model, self._environment = prefix, directory, model, environment or {}

    def run(self, row: Row, num_ranks: int, words: Sequence[str] | None = None) -> dict[str, Any]:
        """What the script printed with its words, or with ``words``, or ``{"error": its last line}``."""
        words = row.words if words is None else words
        with tempfile.TemporaryDirectory(dir=self._directory) as name:
            furnish(Path(name), self._model)
            answer = self._once(words, num_ranks, Path(name))
            if row.resumed and "error" not in answer:
                answer = self._once((*words, "--resume_from_checkpoint", "out/checkpoint-3"), num_ranks, Path(name))
            return answer

    def _once(self, words: Sequence[str], num_ranks: int, directory: Path) -> dict[str, Any]:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--master-port", str(free_port())]
        try:
            ended = subprocess.run(
                [*self._prefix, *launch, *words],
                cwd=directory,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no end within {TIMEOUT_S} s"}
        answers = [line for line in ended.stdout.splitlines() if line.startswith(('{"losses', '{"tokens'))]
        report = directory / OUT / "report-0.json"
        answers += [report.read_text()] if report.exists() else []
        if ended.returncode or not answers:
            errors = [line for line in ended.stderr.splitlines() if "Error" in line and "ChildFailed" not in line]
            return {"error": (errors or ["it said nothing"])[0].strip()[-200:]}
        found: dict[str, Any] = json.loads(answers[-1])
        return found


def parts_of(answer: Mapping[str, Any]) -> dict[str, list[float]]:
    """The losses that a script printed, by what it calls them."""
    found = {name: answer[name] for name in LOSSES if name in answer}
    return {name: value if isinstance(value, list) else [value] for name, value in found.items()}


def compare(
    row: Row, num_ranks: int, theirs: Mapping[str, Any], ours: Mapping[str, Any], plain: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One line of the table: the largest relative difference of each part, also from what trained in memory."""
    line: dict[str, Any] = {"script": row.name, "ranks": num_ranks, "deepspeed": theirs, "infinity": ours}
    if "error" not in ours and "error" not in theirs:
        mine, others = parts_of(ours), parts_of(theirs)
        line["relative"] = {name: _relative(others[name], mine[name]) for name in others}
        compared = line["relative"].keys() - set(row.forgotten)
        if compared:  # where nothing is, nothing holds either
            line["holds"] = all(line["relative"][name] <= row.relative for name in compared)
    if plain is not None:
        line["plain"] = plain
        if "error" not in ours and "error" not in plain:
            mine, others = parts_of(ours), parts_of(plain)
            line["relative_to_plain"] = {name: _relative(others[name], mine[name]) for name in others}
            line["holds"] = not any(line["relative_to_plain"].values())
    return line


def _relative(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(theirs, ours, strict=True))


def shown(answer: Mapping[str, Any]) -> str:
    """The first loss and the last of each part, or the error."""
    if "error" in answer:
        return str(answer["error"])[:80]
    return ", ".join(f"{name} {part[0]:.7f} … {part[-1]:.7f}" for name, part in parts_of(answer).items())


def keep_line(line: Mapping[str, Any]) -> None:
    """Write the row in the place of an older one of the same script and number of ranks."""
    path = RESULTS / "same_scripts.json"
    older = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(each["script"], each["ranks"]): each for each in [*older, line]}
    keep_results("same_scripts", {"rows": [rows[key] for key in sorted(rows)]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed-venv", type=Path, required=True, help="made where it is not there")
    parser.add_argument("--packages", type=Path, help="Transformers and what it needs, where the venv has none")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="a part of the names of scripts")
    options = parser.parse_args()
    extras = [f"{name}=={importlib.metadata.version(name)}" for name in ("transformers", "accelerate", "peft")]
    python = prepare_venv(options.deepspeed_venv, () if options.packages else extras)
    path = {"PATH": f"{options.deepspeed_venv / 'bin'}:{os.environ['PATH']}"}
    packages = {"PYTHONPATH": str(options.packages)} if options.packages else {}
    as_deepspeed = [sys.executable, "-m", "infinity", "as-deepspeed", sys.executable]
    lines = []
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=options.dir) as name:
        directory, model = Path(name), Path(name) / "model"
        subprocess.run([sys.executable, EXAMPLES / "text.py", model], check=True, capture_output=True)
        real = Contender([python], directory, model, {"DS_ACCELERATOR": "cpu", **path, **packages})
        ours, in_memory = Contender(as_deepspeed, directory, model), Contender([sys.executable], directory, model)
        for row in rows():
            for num_ranks in options.ranks if options.only in row.name else ():
                words = row.in_memory if num_ranks == 1 else None
                plain = None if words is None else in_memory.run(row, 1, words)
                line = compare(row, num_ranks, real.run(row, num_ranks), ours.run(row, num_ranks), plain)
                lines.append(line)
                keep_line(line)
                print(f"{row.name}, {num_ranks} rank{'s' * (num_ranks > 1)}")
                print(f"  DeepSpeed {shown(line['deepspeed'])}\n  infinity  {shown(line['infinity'])}")
                for of, key in (("", "relative"), (" from plain torch", "relative_to_plain")):
                    if key in line:
                        found = ", ".join(f"{name} {value:.1e}" for name, value in line[key].items())
                        print(f"  relative difference{of} {found}")
                sys.stdout.flush()
    return int(any("error" in line["infinity"] or not line.get("holds", True) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
