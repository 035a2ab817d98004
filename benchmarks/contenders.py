"""Who takes part in ``benchmarks.compare``, named by a word, and the process that each one is.

``torch``                 the plain loop: bf16 weights, fp32 master weights (or fp32 alone), fused AdamW, all in memory
``deepspeed-cpu``         DeepSpeed 0.19.8, ZeRO-3, parameters and optimizer in host memory
``deepspeed-nvme``        the same, both on NVMe
``none``, ``cpu``         this engine, everything in memory; parameters and optimizer in host memory
``nvme-512``              this engine, both on NVMe, at a host budget of 512 MiB
``nvme-512+KEY=VALUE``    the same with a key of the section ``io_daemon``, as ``update=in_step`` or
                          ``master_weights=split``, or one of ``zero_optimization``, as
                          ``stage3_max_live_parameters=1000000000``; several may follow
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.deepspeed_venv import environment_of, prepare_venv
from benchmarks.gpt import GPTShape
from benchmarks.machine import free_port
from benchmarks.side import Side

MIB: Final = 1 << 20
PLAIN: Final = "torch"
_OURS: Final = re.compile(r"(none|cpu|nvme-(?P<budget>[1-9][0-9]*))(?P<keys>(\+[a-z0-9_]+=[^+]+)*)")
WORDS: Final = (PLAIN, "deepspeed-cpu", "deepspeed-nvme", "none", "cpu", "nvme-MIB", "nvme-MIB+KEY=VALUE")


@dataclass(frozen=True)
class DeepSpeedSetting:
    """What its NVMe speed depends on."""

    sub_group_numel: int = 20_000_000
    buffer_count: int = 16

    @property
    def words(self) -> list[str]:
        return ["--sub-group-numel", str(self.sub_group_numel), "--buffer-count", str(self.buffer_count)]


SEARCHED: Final = tuple(
    DeepSpeedSetting(numel, count)
    for numel, count in ((20_000_000, 16), (40_000_000, 8), (80_000_000, 6), (10_000_000, 32))
)


def contender(word: str) -> str:
    """The word, if it names somebody. Raises ArgumentTypeError."""
    if word in WORDS[:3] or _OURS.fullmatch(word):
        return word
    raise argparse.ArgumentTypeError(f"{word!r} is nobody; known: {', '.join(WORDS)}")


def is_lossless(word: str) -> bool:
    """A contender of this engine's whose store has moments as they are."""
    return is_ours(word) and not any(f"+moments={form}" in word for form in ("bf16", "8bit"))


def is_ours(word: str) -> bool:
    return _OURS.fullmatch(word) is not None


def is_on_nvme_here(word: str) -> bool:
    return word.startswith("nvme-")


def start(
    word: str, arguments: argparse.Namespace, directory: Path, setting: DeepSpeedSetting, *, sampled: bool
) -> Side:
    """The contender's process, with a swap directory of its own under ``directory``. ``sampled``: its memory is."""
    swap_dir = directory / word
    swap_dir.mkdir(exist_ok=True)
    python, module, own, environment = sys.executable, "benchmarks.engine_worker", _ours(word, arguments), {}
    threads = arguments.threads
    if word == PLAIN:
        module, own = "benchmarks.torch_worker", []
        threads = arguments.plain_threads
    elif word.startswith("deepspeed-"):
        python = str(arguments.deepspeed_python or prepare_venv(arguments.deepspeed_venv))
        module, own = "benchmarks.deepspeed_worker", ["--device", word.partition("-")[2], *setting.words]
        environment = {**environment_of(python), "MASTER_PORT": str(free_port())}
        threads = arguments.plain_threads
    return Side(
        word,
        python=python,
        module=module,
        arguments=[*_common(arguments, swap_dir), "--threads", str(threads), *own],
        swap_dir=swap_dir,
        log=directory / f"{word}.log",
        environment=environment,
        sampled=sampled,
    )


def _common(arguments: argparse.Namespace, swap_dir: Path) -> Sequence[str]:
    names = ("d_model", "num_layers", "sequence", "batch", "clipping", "dtype", "seed")
    pairs = [("--swap-dir", swap_dir), ("--learning-rate", 1e-4)]
    pairs += [(f"--{name.replace('_', '-')}", getattr(arguments, name)) for name in names]
    return [str(word) for pair in pairs for word in pair]


def _ours(word: str, arguments: argparse.Namespace) -> list[str]:
    found = _OURS.fullmatch(word)
    if found is None:
        return []
    device = "nvme" if found["budget"] else word.partition("+")[0].partition("-")[0]
    words = ["--device", device]
    if device == "nvme":
        words += ["--host-budget-bytes", str(int(found["budget"]) * MIB)]
    elif device == "cpu":  # with gradients, and room for frames that are not full
        shape = GPTShape(d_model=arguments.d_model, num_layers=arguments.num_layers, sequence=arguments.sequence)
        words += ["--host-budget-bytes", str(20 * shape.numel)]
    for pair in found["keys"].split("+")[1:]:
        words += ["--zero" if pair.startswith("stage3_") else "--io-daemon", pair]
    return words
