"""Files laid out as DeepSpeed's ZeRO lays them out, written without it, and what is in them."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

GROUPS = ({"embed.weight": (40, 24), "mid.weight": (31, 24)}, {"mid.bias": (31,), "scale": ()})
STATES = ("exp_avg", "exp_avg_sq")


@contextmanager
def foreign_classes(*, by_name: bool = False) -> Iterator[tuple[Any, Any]]:
    """(a scaler's class, an enumeration) of a package that is not there when the files are read.

    ``by_name``: members of the enumeration are pickled as Python 3.11.0 to 3.11.3 do it, not by their value.
    """
    package = ModuleType("deepspeed_of_this_test")

    class DynamicLossScaler:
        def __init__(self) -> None:
            self.dynamic, self.cur_scale, self.cur_hysteresis = True, 512.0, 2
            self.cur_iter, self.last_overflow_iter = 9, 4

    class ZeroStage(IntEnum):
        gradients = 2
        weights = 3

        def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
            return (getattr, (type(self), self.name)) if by_name else (type(self), (self.value,))

    for each in (DynamicLossScaler, ZeroStage):
        each.__module__, each.__qualname__ = package.__name__, each.__name__
        setattr(package, each.__name__, each)
    sys.modules[package.__name__] = package
    try:
        yield DynamicLossScaler, ZeroStage
    finally:
        del sys.modules[package.__name__]


def values() -> dict[str, dict[str, Tensor]]:
    """Name -> kind -> what was trained."""
    generator = torch.Generator().manual_seed(4)
    return {
        name: {kind: torch.randn(shape, generator=generator) for kind in ("weight", *STATES)}
        for group in GROUPS
        for name, shape in group.items()
    }


def frozen() -> dict[str, Tensor]:
    return {"frozen.weight": torch.arange(35.0).view(5, 7).bfloat16()}


def write(directory: Path, *, stage: int, world_size: int, by_name: bool = False) -> None:
    """A checkpoint of stage 2 or 3 in ``directory``/global_step3, and ``latest``."""
    place = directory / "global_step3"
    place.mkdir(parents=True)
    (directory / "latest").write_text("global_step3")
    vectors = _of_stage_3(world_size) if stage == 3 else _of_stage_2(world_size)
    with foreign_classes(by_name=by_name) as (scaler, stages):
        for rank in range(world_size):
            torch.save(_optimizer(vectors, rank, stages(stage), scaler(), world_size), place / _optim_name(rank))
            if stage == 3 or rank == 0:
                torch.save(_model(rank, stage, world_size), place / _model_name(rank, stage))


def _optim_name(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _model_name(rank: int, stage: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"


def _of_stage_2(world_size: int) -> list[dict[str, list[Tensor]]]:
    """For each group kind -> each rank's vector: parameters joined, padded, cut into equal parts."""
    found = []
    for group in GROUPS:
        joined = {kind: torch.cat([values()[name][kind].view(-1) for name in group]) for kind in ("weight", *STATES)}
        numel = next(iter(joined.values())).numel()
        part = ceil(numel / (2 * world_size)) * 2
        padded = {kind: torch.cat([each, torch.zeros(part * world_size - numel)]) for kind, each in joined.items()}
        cut = {kind: [part_.clone() for part_ in torch.split(each, part)] for kind, each in padded.items()}
        cut["weight"][-1] = cut["weight"][-1][: numel - part * (world_size - 1)].clone()  # without its padding
        found.append(cut)
    return found


def _of_stage_3(world_size: int) -> list[dict[str, list[Tensor]]]:
    """As above, each parameter cut by itself; the first group is two sub-groups."""
    subs = [{name: shape} for name, shape in GROUPS[0].items()] + [dict(GROUPS[1])]
    found = []
    for sub in subs:
        by_kind: dict[str, list[Tensor]] = {}
        for kind in ("weight", *STATES):
            ranks: list[list[Tensor]] = [[] for _ in range(world_size)]
            for name in sub:
                flat = values()[name][kind].view(-1)
                part = ceil(flat.numel() / world_size)
                padded = torch.cat([flat, torch.zeros(part * world_size - flat.numel())])
                for rank, own in enumerate(torch.split(padded, part)):
                    ranks[rank].append(own)
            by_kind[kind] = [torch.cat(own) for own in ranks]
        found.append(by_kind)
    return found


def _optimizer(
    vectors: list[dict[str, list[Tensor]]], rank: int, stage: Any, scaler: Any, world_size: int
) -> dict[str, Any]:
    weights = [each["weight"][rank] for each in vectors]
    state = {
        number: {"step": torch.tensor(3.0), **{kind: each[kind][rank] for kind in STATES}}
        for number, each in enumerate(vectors)
    }
    groups = [{"lr": 0.01 * n, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [n]} for n in (1, 2)]
    own = {"state": state, "param_groups": groups}
    common = {"zero_stage": stage, "loss_scaler": scaler}
    if stage == 3:
        inner = {**common, "partition_count": world_size, "optimizer_state_dict": own, "fp32_flat_groups": weights}
    else:
        inner = {
            **common,
            "partition_count": [world_size] * 2,
            "base_optimizer_state": own,
            "single_partition_of_fp32_groups": weights,
        }
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
    return {"optimizer_state_dict": inner, "ds_config": schedule, "ds_version": "0.16.0"}


def _model(rank: int, stage: int, world_size: int) -> dict[str, Any]:
    weight = frozen()["frozen.weight"]
    module = OrderedDict({"count": torch.tensor(7), **frozen()} if stage < 3 else {"count": torch.tensor(7)})
    part = ceil(weight.numel() / world_size)
    padded = torch.cat([weight.view(-1), torch.zeros(part * world_size - weight.numel(), dtype=weight.dtype)])
    return {
        "module": module,
        "buffer_names": ["count"],
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in GROUPS],
        "frozen_param_shapes": {"frozen.weight": weight.shape},
        "frozen_param_fragments": {"frozen.weight": torch.split(padded, part)[rank].clone() if stage == 3 else weight},
        "shared_params": {"head.weight": "embed.weight"},
        "lr_scheduler": {"last_batch_iteration": 2},
        "global_steps": 3,
        "global_samples": 12,
        "skipped_steps": 1,
        "ds_version": "0.16.0",
        "epoch": 4,
        "lambda": _no_plain_data,
    }


def _no_plain_data() -> None:
    """A function: client state that is not kept."""
