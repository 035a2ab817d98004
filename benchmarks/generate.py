"""Tokens a second from a model whose weights stay on the disk, beside accelerate's ``disk_offload`` of the same model.

``python -m benchmarks.generate --dir DIR``: a Llama made on the spot as bf16 safetensors; both sides generate the same
greedy tokens by turns. Ours reads with O_DIRECT into its host budget. accelerate reads mapped files through the page
cache, which would hold the whole model here, so its files are dropped from the cache before every forward: as on a
machine that has no memory left for them. Exit code 0 if the tokens are equal to the in-memory model's and ours are at
least 1.5 times as many a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from accelerate import disk_offload  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

import infinity
from benchmarks.lora import make_model
from benchmarks.place import add_directory
from benchmarks.pretrained import pss_now
from benchmarks.side import keep_results
from infinity.commands.demo.footprint import process_tree
from io_daemon.command.scratch import scratch_directory

MIB: Final = 1 << 20
RATIO_MIN: Final = 1.5
SIDES: Final = ("memory", "infinity", "disk_offload")


class DropCache(LogitsProcessor):
    """Before every next forward: the files of the directory leave the page cache. Changes no score."""

    def __init__(self, directory: Path) -> None:
        self._files = [path for path in directory.rglob("*") if path.is_file()]
        self()

    def __call__(self, input_ids: Any = None, scores: Any = None) -> Any:
        for path in self._files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return scores


def load(side: str, directory: Path, budget_mib: int) -> tuple[Any, LogitsProcessorList, Callable[[], None]]:
    """The model as the side has it, what runs after each forward, and what ends it."""
    if side == "infinity":
        nvme = {"device": "nvme", "nvme_path": str(directory / "swap")}
        zero = {"stage": 3, "offload_param": nvme, "stage3_max_live_parameters": 10**8}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {**zero, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 5 * 10**7},
            "io_daemon": {"host_budget_bytes": budget_mib * MIB},
        }
        with infinity.Init(config_dict_or_path=config):
            model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.bfloat16)
        engine = infinity.initialize(model=model.requires_grad_(False), config=config)[0]
        return engine.module, LogitsProcessorList(), engine.destroy
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.bfloat16)
    if side == "memory":
        return model, LogitsProcessorList(), lambda: None
    disk_offload(model, str(directory / "offloaded"), execution_device=torch.device("cpu"))
    return model, LogitsProcessorList([DropCache(directory / "offloaded")]), lambda: None


def read_bytes() -> int:
    """What this process and its children have read of the disk."""
    texts = [Path(f"/proc/{pid}/io").read_text() for pid in process_tree(os.getpid())]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("read_bytes"))


def cpu_seconds() -> float:
    """What this process and its children have used of the processor."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in process_tree(os.getpid())]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def worker(side: str, arguments: argparse.Namespace) -> None:
    """A line of standard input is a turn, a line of standard output its figures."""
    model, after_forward, end = load(side, arguments.dir, arguments.host_budget_mib)
    model.eval()
    device = next(model.parameters()).device  # of what accelerate has on the disk it is meta
    prompt = torch.arange(1, 33, device="cpu" if device.type == "meta" else device)[None]
    print(json.dumps({"ready": side}), flush=True)
    for _ in sys.stdin:
        begun, read_before, cpu_before = time.monotonic(), read_bytes(), cpu_seconds()
        tokens = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=arguments.tokens,
            do_sample=False,
            logits_processor=after_forward,
        )
        seconds = time.monotonic() - begun
        pss = sum(pss_now())
        figures = {
            "seconds": seconds,
            "tokens": tokens[0].tolist(),
            "pss_bytes": pss,
            "read_bytes": read_bytes() - read_before,
            "cpu_seconds": cpu_seconds() - cpu_before,
        }
        print(json.dumps(figures), flush=True)
    end()


class Turns:
    """One side, in a process of its own."""

    def __init__(self, side: str, arguments: argparse.Namespace, directory: Path) -> None:
        words = [sys.executable, "-P", "-m", "benchmarks.generate", "--side", side, "--dir", str(directory)]
        words += ["--tokens", str(arguments.tokens), "--host-budget-mib", str(arguments.host_budget_mib)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        self._child = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )
        self._answer()

    def take(self) -> dict[str, Any]:
        if self._child.stdin is None:
            raise AssertionError("started with a pipe")
        self._child.stdin.write("\n")
        return self._answer()

    def end(self) -> None:
        self._child.communicate()

    def _answer(self) -> dict[str, Any]:
        for line in self._child.stdout or ():
            if line.startswith('{"'):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"a side ended with {self._child.wait()}")


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    for name in ("swap", "offloaded"):
        (directory / name).mkdir()
    num_params = make_model(directory / "model", arguments.num_layers)
    sides: dict[str, Turns] = {}
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for side in SIDES:
        sides[side] = Turns(side, arguments, directory)
        turns[side].append(sides[side].take())  # the first forward, of which nothing is known ahead
        if side == "memory":
            sides.pop(side).end()
    for _ in range(arguments.turns):
        for side, running in sides.items():
            turns[side].append(running.take())
    for running in sides.values():
        running.end()
    rates = {side: [arguments.tokens / turn["seconds"] for turn in turns[side][1:]] for side in sides}
    return {
        "parameters": num_params,
        "tokens_per_second": rates,
        "pss_bytes": {side: turns[side][-1]["pss_bytes"] for side in SIDES},
        "per_token": {
            name: {side: median(turn[name] / arguments.tokens for turn in turns[side][1:]) for side in sides}
            for name in ("read_bytes", "cpu_seconds")
        },
        "ratios": [mine / theirs for mine, theirs in zip(rates["infinity"], rates["disk_offload"], strict=True)],
        "same_tokens": len({tuple(turn["tokens"]) for side in SIDES for turn in turns[side]}) == 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_directory(parser, "--dir")
    parser.add_argument("--host-budget-mib", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        worker(arguments.side, arguments)
        return 0
    with scratch_directory("infinity-bench-", arguments.dir) as directory:
        found = measure(arguments, directory)
    keep_results("generate", {"host_budget_mib": arguments.host_budget_mib, **found})
    print(f"{found['parameters']:,} parameters in bf16, host budget {arguments.host_budget_mib} MiB")
    for side, rates in found["tokens_per_second"].items():
        read, cpu = (found["per_token"][name][side] for name in ("read_bytes", "cpu_seconds"))
        costs = f"{read / 1e6:.0f} MB read and {cpu:.2f} s of CPU a token"
        print(f"  {side:14} {median(rates):6.2f} tokens/s, {found['pss_bytes'][side] / 1e6:.0f} MB, {costs}")
    print(f"  ratio {median(found['ratios']):.2f}, tokens {'equal' if found['same_tokens'] else 'DIFFER'}")
    return int(median(found["ratios"]) < RATIO_MIN or not found["same_tokens"])


if __name__ == "__main__":
    sys.exit(main())
