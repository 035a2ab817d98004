"""LoRA over a base larger than memory may be, by an unmodified script: its memory, and what is written of the base.

``python -m benchmarks.lora --dir DIR``: a Llama of 1.2 billion parameters is made on the spot as a directory of bf16
safetensors, and ``examples/peft_lora.py`` trains adapters for it with Transformers' Trainer, under ``infinity
as-deepspeed``, at a host budget of 1 GiB. Printed are the peak of the sum of PSS over script and daemon, and the bytes
of weights that the daemon has written between the first step and the last, beyond those of the adapters themselves.
Exit code 0 if that is nothing, and the memory stays within the budget, the live weights that the configuration allows,
and 1 GB for the interpreter, Transformers and activations.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import free_port
from benchmarks.place import add_directory
from benchmarks.side import keep_results
from infinity.commands.demo.footprint import FootprintSampler, process_tree, pss_bytes
from infinity.files.entry import Entry
from infinity.files.export import Export
from io_daemon.command.scratch import scratch_directory

MIB: Final = 1 << 20
ROOT: Final = Path(__file__).resolve().parents[1]
LIVE_NUMEL: Final = 100_000_000
BESIDES_BYTES: Final = 1_000_000_000
WEIGHT: Final = 0
"""The kind of objects whose writes are counted."""
SHAPE: Final = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16}


def make_model(directory: Path, num_layers: int) -> int:
    """The directory, each parameter made alone; the number of parameters."""
    shape: dict[str, Any] = {**SHAPE, "num_hidden_layers": num_layers, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(vocab_size=256, dtype="bfloat16", tie_word_embeddings=False, **shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    entries = {name: Entry(dtype=torch.bfloat16, shape=shape) for name, shape in shapes.items()}
    with Export(directory, entries, max_shard_bytes=500_000_000) as export:
        for number, (name, entry) in enumerate(entries.items()):
            generator = torch.Generator().manual_seed(number)
            values = torch.randn(entry.numel, generator=generator) * 0.02 if len(entry.shape) > 1 else None
            export.write(name, 0, torch.ones(entry.numel).bfloat16() if values is None else values.bfloat16())
        export.publish()
    config.save_pretrained(directory)
    return sum(entry.numel for entry in entries.values())


def settings(directory: Path, budget_mib: int) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(directory / "swap")}
    return {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": nvme,
            "offload_optimizer": nvme,
            "stage3_max_live_parameters": LIVE_NUMEL,
            "stage3_max_reuse_distance": LIVE_NUMEL,
            "stage3_prefetch_bucket_size": LIVE_NUMEL // 2,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "io_daemon": {"host_budget_bytes": budget_mib * MIB},
    }


def weights_written(daemon: Path) -> dict[str, int]:
    """Job -> bytes of weights that were swapped out so far, of what is attached."""
    words = [sys.executable, "-P", "-m", "io_daemon", "status", "--socket", str(daemon), "--json"]
    found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    return {tenant["job"]: tenant["total"]["bytes_written"][WEIGHT] for tenant in found["tenants"]}


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    (directory / "swap").mkdir()
    num_params = make_model(directory / "model", arguments.num_layers)
    (directory / "ds.json").write_text(json.dumps(settings(directory, arguments.host_budget_mib)))
    daemon = directory / "io.sock"
    serve = ["-m", "io_daemon", "serve", "--socket", str(daemon), "--swap-dir", str(directory / "swap")]
    script = ROOT / "examples" / "peft_lora.py"
    train = ["-m", "infinity", "as-deepspeed", sys.executable, "-u", str(script), "--model", str(directory / "model")]
    train += ["--deepspeed", str(directory / "ds.json"), "--output_dir", str(directory / "out"), "--bf16", "--use_cpu"]
    train += ["--max_steps", str(arguments.steps), "--per_device_train_batch_size", "1", "--logging_steps", "1"]
    train += ["--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true", "--learning_rate", "1e-4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "INFINITY_IO_SOCKET": str(daemon), "RANK": "0"}
    environment |= {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (directory / "log").open("w") as log, subprocess.Popen([sys.executable, "-P", *serve], stdout=log, stderr=log):
        sampler = FootprintSampler(os.getpid(), directory / "swap").start()
        own_bytes = pss_bytes(os.getpid())
        begun, written, losses, seconds = time.monotonic(), [], [], []
        with subprocess.Popen(
            [sys.executable, "-P", *train], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as child:
            for line in child.stdout or ():
                print(line, end="", flush=True)
                if line.startswith("{'loss'"):
                    written.append(weights_written(daemon))
                    seconds.append(time.monotonic() - begun)
                elif line.startswith('{"losses"'):
                    losses = json.loads(line)["losses"]
            code = child.wait()
        peak_bytes = sampler.stop().peak_pss
        for pid in process_tree(os.getpid()):
            if pid != os.getpid():
                os.kill(pid, 15)
    if code or not losses:
        raise SystemExit(f"the script failed:\n{(directory / 'log').read_text()[-4000:]}")
    written = [each for each in written if each]  # the last line may be read when the engine has gone
    rows = 2 * 8 * 2 * SHAPE["hidden_size"] * arguments.num_layers  # two targets, rank 8, two matrices
    of_adapters = 2 * rows * (len(written) - 1)
    job = max(written[-1], key=lambda name: written[-1][name])
    return {
        "parameters": num_params,
        "losses": losses,
        "seconds_at_step": seconds,
        "loaded_bytes": written[0][job],
        "adapters_written_bytes": of_adapters,
        "base_written_bytes": max(0, written[-1][job] - written[0][job] - of_adapters),
        "peak_pss_bytes": peak_bytes - own_bytes,
        "allowed_bytes": arguments.host_budget_mib * MIB + 2 * LIVE_NUMEL + BESIDES_BYTES,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_directory(parser, "--dir")
    parser.add_argument("--host-budget-mib", type=int, default=1024)
    parser.add_argument("--num-layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    with scratch_directory("infinity-bench-", arguments.dir) as directory:
        found = measure(arguments, directory)
    keep_results("lora", {"host_budget_mib": arguments.host_budget_mib, **found})
    print(f"{found['parameters']:,} parameters, host budget {arguments.host_budget_mib} MiB, losses {found['losses']}")
    print(f"  peak PSS {found['peak_pss_bytes'] / 1e6:.0f} MB, allowed {found['allowed_bytes'] / 1e6:.0f}")
    print(f"  weights written: {found['loaded_bytes']:,} bytes by loading")
    print(f"  {found['base_written_bytes']:,} bytes of the base after it")
    return int(found["peak_pss_bytes"] > found["allowed_bytes"] or found["base_written_bytes"] > 0)


if __name__ == "__main__":
    sys.exit(main())
