"""``deepspeed.comm`` as ``torch.distributed``, and process groups begun by hand."""

# mypy: ignore-errors
from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import deepspeed.comm as dist  # type: ignore[import-not-found]
import torch

from tests.infinity.deepspeed.differential.case import case
from tests.infinity.deepspeed.differential.nets import config, stack, start, train


@case(ranks=2)
def of_tensors(_directory: Path) -> Any:
    rank = dist.get_rank()
    out = []
    summed = torch.full((3,), float(rank + 1))
    dist.all_reduce(summed)
    out.append(summed)
    largest = torch.tensor([float(rank)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    out.append(largest)
    told = torch.full((2,), float(rank))
    dist.broadcast(told, 1)
    out.append(told)
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    out.append(parts)
    flat = torch.zeros(4)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)))
    out.append(flat)
    shard = torch.zeros(2)
    dist.reduce_scatter_tensor(shard, torch.arange(4.0))
    out.append(shard)
    handle = dist.all_reduce(torch.ones(1), async_op=True)
    handle.wait()
    dist.barrier()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    return [*out, objects, dist.get_world_size(), dist.get_rank(), dist.is_initialized()]


@case(ranks=2)
def sent_and_received(_directory: Path) -> Any:
    tensor = torch.full((2,), float(dist.get_rank()))
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return tensor


@case(ranks=2)
def groups(_directory: Path) -> Any:
    alone = [dist.new_group([rank]) for rank in range(2)]
    mine = alone[dist.get_rank()]
    world = dist.get_world_group()
    return [
        dist.get_world_size(mine), dist.get_world_size(world), dist.get_rank(group=mine), dist.get_global_rank(mine, 0),
        dist.get_local_rank(),
        dist.get_all_ranks_from_group(world),
    ]  # fmt: skip


@case(ranks=2)
def begun_before(_directory: Path) -> Any:
    """The process group is there already: it is used, whatever ``dist_init_required`` says, and stays."""
    deepspeed.init_distributed()
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=None)
    out = []
    for required in (None, False):
        model = stack()
        engine = start(model, config(2), dist_init_required=required)
        out.append(train(engine, 1))
        engine.destroy()
    return out, dist.is_initialized()


@case()
def operations_by_name(_directory: Path) -> Any:
    names = [
        "init_distributed",
        "is_initialized",
        "get_rank",
        "get_world_size",
        "get_local_rank",
        "barrier",
        "all_reduce",
        "all_gather",
        "broadcast",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "send",
        "recv",
        "isend",
        "irecv",
        "gather",
        "scatter",
        "reduce",
        "new_group",
        "destroy_process_group",
        "ReduceOp",
        "log_summary",
        "get_world_group",
        "all_gather_object",
        "monitored_barrier",
        "allgather_fn",
        "reduce_scatter_fn",
        "has_all_gather_into_tensor",
        "broadcast_object_list",
        "is_available",
        "initialize_mesh_device",
        "inference_all_reduce",
    ]
    return {name: hasattr(dist, name) for name in names}
