"""What moments in fewer bits cost in training: the demo's loss under each of ``io_daemon.moments``, in one run.

``python -m benchmarks.moments --steps 600 --json out.json --plot out.svg``: a smaller ByteGPT than the demo's reads the
same text, in bf16 with AdamW as it comes (betas 0.9 and 0.999), each form the same batches from the same weights. All
is in memory, since no tier changes a bit. Printed are mean losses by hundreds of steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any, Final

import torch

import infinity
from infinity.commands.demo.model import ByteGPT
from infinity.commands.demo.text import standard_library_text, windows

FORMS: Final = ("fp32", "bf16", "8bit")
WARM_UP_STEPS: Final = 20
MEAN_OF: Final = 100


def losses_of(form: str, text: torch.Tensor, arguments: argparse.Namespace) -> list[float]:
    torch.manual_seed(arguments.seed)
    model = ByteGPT(d_model=arguments.d_model, num_layers=arguments.num_layers, sequence=arguments.sequence)
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": arguments.learning_rate}},
        "zero_optimization": {"stage": 3},
        "io_daemon": {"moments": form},
    }
    engine, optimizer, *_ = infinity.initialize(model=model, model_parameters=model.parameters(), config=config)
    if optimizer is None:
        raise RuntimeError("nothing trains")
    losses = []
    batches = windows(text, batch=arguments.batch, sequence=arguments.sequence, seed=arguments.seed)
    try:
        for step, batch in enumerate(itertools.islice(batches, arguments.steps)):
            optimizer.param_groups[0]["lr"] = arguments.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS)
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    finally:
        engine.destroy()
    return losses


def means(losses: list[float]) -> list[float]:
    parts = [losses[start : start + MEAN_OF] for start in range(0, len(losses), MEAN_OF)]
    return [sum(part) / len(part) for part in parts]


def plot(found: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    whole, apart = figure.subplots(2, sharex=True)
    for form, losses in found.items():
        smooth = torch.tensor(losses).unfold(0, 20, 1).mean(1)
        whole.plot(smooth, label=form, linewidth=1)
        apart.plot(smooth - torch.tensor(found["fp32"]).unfold(0, 20, 1).mean(1), linewidth=1)
    whole.set_ylabel("loss, nats a byte")
    whole.legend()
    apart.set_ylabel("less that of fp32")
    apart.set_xlabel("step (means of 20)")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 600), ("d-model", 256), ("num-layers", 4), ("batch", 8), ("sequence", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text, found = standard_library_text(), {}
    for form in FORMS:
        found[form] = losses_of(form, text, arguments)
        print(f"{form:5}", *(f"{mean:.4f}" for mean in means(found[form])), flush=True)
    if arguments.json:
        settings: dict[str, Any] = {
            name: value for name, value in vars(arguments).items() if name not in ("json", "plot")
        }
        result = {"settings": settings, "means_of": MEAN_OF, "means": {f: means(each) for f, each in found.items()}}
        arguments.json.write_text(json.dumps({**result, "losses": found}, indent=1) + "\n")
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
