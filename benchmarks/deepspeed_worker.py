"""The DeepSpeed side of ``deepspeed_step``: runs in DeepSpeed's own environment, driven over standard streams."""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.step_loop import claim_stdout, serve_steps

SUB_GROUP_NUMEL = 20_000_000
BUFFER_COUNT = 16


def deepspeed_config(swap_dir: str, *, learning_rate: float) -> dict[str, Any]:
    """DeepSpeed's NVMe offload of parameters and optimizer, as its documentation recommends to pipeline it."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP_NUMEL,
            "offload_param": {
                "device": "nvme",
                "nvme_path": swap_dir,
                "buffer_count": BUFFER_COUNT,
                "buffer_size": SUB_GROUP_NUMEL,
                "pin_memory": False,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": swap_dir,
                "buffer_count": BUFFER_COUNT,
                "pin_memory": False,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap-dir", required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    arguments = parser.parse_args()
    answers_fd = claim_stdout()
    os.environ.update(
        {
            "DS_ACCELERATOR": "cpu",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": os.environ.get("MASTER_PORT", "29611"),
        }
    )

    import deepspeed  # type: ignore[import-not-found]  # lives in an environment of its own
    import torch

    from benchmarks.gpt import GPT, GPTShape, token_batch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    deepspeed.init_distributed("gloo")
    shape = GPTShape(num_layers=arguments.num_layers)
    config = deepspeed_config(arguments.swap_dir, learning_rate=arguments.learning_rate)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(index: int) -> float:
        loss = engine(token_batch(shape, step=index, seed=arguments.seed))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    serve_steps(answers_fd, step, lambda: {"version": deepspeed.__version__})


if __name__ == "__main__":
    main()
