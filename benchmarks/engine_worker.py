"""Our side of the side-by-side runs: one rank with NVMe offload, driven over standard streams."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.step_loop import claim_stdout, serve_steps

SUB_GROUP_NUMEL = 20_000_000
LAYER_NUMEL = 13_000_000
"""A little more than one layer. Param groups are layers; one is in use, one gathered ahead, one kept for reuse: memory
does not depend on how many there are."""


def engine_config(swap_dir: str, *, host_budget_bytes: int, learning_rate: float, device: str) -> dict[str, Any]:
    """``device``: "nvme", or "none" for the same engine with everything in memory."""
    offload = {"device": device, "nvme_path": swap_dir} if device == "nvme" else {"device": device}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP_NUMEL,
            "stage3_prefetch_bucket_size": LAYER_NUMEL,
            "stage3_max_live_parameters": 3 * LAYER_NUMEL,
            "stage3_max_reuse_distance": 2 * LAYER_NUMEL,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": {"host_budget_bytes": host_budget_bytes},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap-dir", required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--host-budget-bytes", type=int, required=True)
    parser.add_argument("--device", choices=("nvme", "none"), default="nvme")
    parser.add_argument("--update", choices=("on_use", "in_step"), default="on_use")
    arguments = parser.parse_args()
    answers_fd = claim_stdout()

    import torch

    import infinity
    from benchmarks.gpt import GPT, GPTShape, token_batch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    shape = GPTShape(num_layers=arguments.num_layers)
    config = engine_config(
        arguments.swap_dir,
        host_budget_bytes=arguments.host_budget_bytes,
        learning_rate=arguments.learning_rate,
        device=arguments.device,
    )
    config["io_daemon"]["update"] = arguments.update
    with infinity.Init(config_dict_or_path=config):
        model = GPT(shape)
    engine, *_ = infinity.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(index: int) -> float:
        loss = engine(token_batch(shape, step=index, seed=arguments.seed))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    try:
        serve_steps(answers_fd, step, lambda: {"io_report": engine.io_report().as_dict()})
    finally:
        engine.destroy()


if __name__ == "__main__":
    main()
