"""The DeepSpeed side of ``benchmarks.checkpoint``: its even steps save, its odd ones load what the one before saved."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.files_on_disk import drop_cache, sync
from benchmarks.step_loop import claim_stdout, serve_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    arguments = parser.parse_args()
    answers_fd = claim_stdout()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
    os.environ.update(place)

    import deepspeed  # type: ignore[import-not-found]  # lives in an environment of its own
    import torch
    from torch import nn

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 10**9,
    }
    model = nn.Sequential(*(nn.Linear(arguments.width, arguments.width) for _ in range(arguments.num_layers)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, arguments.width)).square().mean())
    engine.step()
    directory = arguments.directory

    def step(index: int) -> float:
        if index % 2:
            engine.load_checkpoint(str(directory), "x")
        else:
            engine.save_checkpoint(str(directory), "x")
            sync(directory)
        return 0.0

    def report() -> dict[str, object]:
        """Between the steps: what was saved leaves the page cache."""
        drop_cache(directory)
        return {"version": deepspeed.__version__}

    serve_steps(answers_fd, step, report)


if __name__ == "__main__":
    main()
