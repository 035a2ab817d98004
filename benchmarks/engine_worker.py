"""Our side of the side-by-side runs: one rank with NVMe offload, driven over standard streams."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.step_loop import claim_stdout, serve_steps
from benchmarks.worker_options import worker_parser

SUB_GROUP_NUMEL = 20_000_000
LAYER_NUMEL = 13_000_000
"""A little more than one layer of the 168M model. Param groups are layers; one is in use, one gathered ahead, one kept
for reuse: memory does not depend on how many there are."""


def engine_config(
    swap_dir: str,
    *,
    host_budget_bytes: int | None,
    learning_rate: float,
    device: str,
    layer_numel: int = LAYER_NUMEL,
    batch: int = 1,
    clipping: float = 0.0,
    dtype: str = "bf16",
    io_daemon: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """``device``: "nvme"; or "none" for the same engine with everything in memory, "cpu" with it in host memory.
    ``zero``: keys of that section, instead of those that keep few layers live."""
    offload = {"device": device, "nvme_path": swap_dir} if device == "nvme" else {"device": device}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate}},
        "gradient_clipping": clipping,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP_NUMEL,
            "stage3_prefetch_bucket_size": layer_numel,
            "stage3_max_live_parameters": 3 * layer_numel,
            "stage3_max_reuse_distance": 2 * layer_numel,
            "offload_param": offload,
            "offload_optimizer": offload,
            **(zero or {}),
        },
        "io_daemon": {**({"host_budget_bytes": host_budget_bytes} if host_budget_bytes else {}), **(io_daemon or {})},
    }


def _value(text: str) -> object:
    """``true`` and numbers as JSON has them, other words as they are."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _section(pairs: list[str]) -> dict[str, object]:
    return {key: _value(text) for key, _, text in (pair.partition("=") for pair in pairs)}


def main() -> None:
    parser = worker_parser(__doc__)
    parser.add_argument("--host-budget-bytes", type=int, help="(default: the engine's)")
    parser.add_argument("--device", choices=("nvme", "cpu", "none"), default="nvme")
    parser.add_argument("--io-daemon", action="append", default=[], metavar="KEY=VALUE", help="of that section")
    parser.add_argument("--zero", action="append", default=[], metavar="KEY=VALUE", help="of zero_optimization")
    arguments = parser.parse_args()
    answers_fd = claim_stdout()

    import torch

    import infinity
    from benchmarks.gpt import GPT, GPTShape, token_batch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    shape = GPTShape(d_model=arguments.d_model, num_layers=arguments.num_layers, sequence=arguments.sequence)
    config = engine_config(
        arguments.swap_dir,
        host_budget_bytes=arguments.host_budget_bytes,
        learning_rate=arguments.learning_rate,
        device=arguments.device,
        layer_numel=max(LAYER_NUMEL, round(1.03 * shape.layer_numel)),
        batch=arguments.batch,
        clipping=arguments.clipping,
        dtype=arguments.dtype,
        io_daemon=_section(arguments.io_daemon),
        zero=_section(arguments.zero),
    )
    with infinity.Init(config_dict_or_path=config):
        model = GPT(shape)
    engine, *_ = infinity.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(index: int) -> float:
        loss = engine(token_batch(shape, step=index, batch=arguments.batch, seed=arguments.seed).to(engine.device))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    try:
        serve_steps(answers_fd, step, lambda: {"io_report": engine.io_report().as_dict()})
    finally:
        engine.destroy()


if __name__ == "__main__":
    main()
