"""The DeepSpeed side of ``benchmarks.compare``: runs in DeepSpeed's own environment, driven over standard streams."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.step_loop import claim_stdout, serve_steps
from benchmarks.worker_options import worker_parser


def deepspeed_config(
    swap_dir: str,
    *,
    learning_rate: float,
    device: str,
    batch: int,
    clipping: float,
    dtype: str,
    sub_group_numel: int,
    buffer_count: int,
    largest_numel: int,
) -> dict[str, Any]:
    """DeepSpeed's offload of parameters and optimizer; to NVMe as its documentation recommends to pipeline it."""
    if device == "cpu":
        offload: dict[str, Any] = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    else:
        place = {"device": "nvme", "nvme_path": swap_dir, "buffer_count": buffer_count, "pin_memory": False}
        offload = {
            "offload_param": {**place, "buffer_size": largest_numel},
            "offload_optimizer": {**place, "pipeline_read": True, "pipeline_write": True},
        }
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate}},
        "gradient_clipping": clipping,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group_numel,
            **offload,
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
    parser = worker_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "nvme"), required=True)
    parser.add_argument("--sub-group-numel", type=int, required=True)
    parser.add_argument("--buffer-count", type=int, required=True)
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
    shape = GPTShape(d_model=arguments.d_model, num_layers=arguments.num_layers, sequence=arguments.sequence)
    config = deepspeed_config(
        arguments.swap_dir,
        learning_rate=arguments.learning_rate,
        device=arguments.device,
        batch=arguments.batch,
        clipping=arguments.clipping,
        dtype=arguments.dtype,
        sub_group_numel=arguments.sub_group_numel,
        buffer_count=arguments.buffer_count,
        largest_numel=shape.largest_numel,
    )
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(index: int) -> float:
        loss = engine(token_batch(shape, step=index, batch=arguments.batch, seed=arguments.seed))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    serve_steps(answers_fd, step, lambda: {"version": deepspeed.__version__})


if __name__ == "__main__":
    main()
