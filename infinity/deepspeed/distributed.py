"""DeepSpeed's calls of torch.distributed. All ranks share the model: there is one group, the data-parallel one."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infinity.config import read_environment
from infinity.deepspeed.accelerators import get_accelerator
from infinity.deepspeed.callers import locals_of
from infinity.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from infinity.errors import ConfigError
from infinity.tiers.world import start_for_user

has_all_gather_into_tensor = has_reduce_scatter_tensor = dist.is_available
_log = logging.getLogger(__name__)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed, unless somebody has. It stays the caller's: engines do not end it.

    Without RANK and WORLD_SIZE in the environment, and without ``rank`` and ``world_size``, this process is alone.

    Args:
        dist_backend: by default gloo on CPUs, and beside it what torch takes on the accelerator (NCCL on NVIDIA's).
        auto_mpi_discovery: taken for the dialect's sake: ranks are found by the environment.
        distributed_port: where ranks meet if MASTER_PORT is not set.
        verbose: log what is done.
        timeout: how long ranks wait for one another in every collective.
        init_method: as torch's; by default the environment's MASTER_ADDR and MASTER_PORT.
        dist_init_required: False: nothing is started.
        config: taken for the dialect's sake: ``comms_logger`` is read by ``initialize``.
        rank, world_size: instead of the environment's.

    Raises:
        ConfigError: a backend that cannot run here, an environment that does not say where ranks meet, or one whose
            DS_ACCELERATOR names another device than the one that is used.
    """
    get_accelerator()  # refuses a DS_ACCELERATOR that names another
    if dist_init_required is False or dist.is_initialized():
        return
    if dist_backend is not None and not dist.is_backend_available(dist_backend):
        raise ConfigError("dist_backend", dist_backend, "this torch does not have it: leave it out")
    if dist_backend == "nccl" and not torch.accelerator.is_available():
        raise ConfigError("dist_backend", dist_backend, 'there is no GPU here: leave it out, or write "gloo"')
    start_for_user(
        read_environment(),
        backend=dist_backend,
        init_method=init_method,
        port=distributed_port,
        rank=rank if rank >= 0 else None,
        world_size=world_size if world_size >= 0 else None,
        timeout=timeout,
    )
    if verbose:
        _log.info("torch.distributed runs %s on %d ranks", dist.get_backend(), dist.get_world_size())
    _name_backend()


def is_initialized() -> bool:
    """Whether torch.distributed runs."""
    runs = dist.is_initialized()
    if runs:
        _name_backend()
    return runs


def _name_backend() -> None:
    """Accelerate names none where it sees no GPU, and counts one process then: if it is who asks, it is told ours."""
    asking = locals_of("accelerate.state", "__init__").get("self")
    if asking is not None and getattr(asking, "backend", "") is None and dist.get_world_size() > 1:
        asking.backend = dist.get_backend()


def refuse_uncounted_ranks() -> None:
    """Accelerate is about to have an engine made.

    Raises:
        ConfigError: it counts other processes than there are: each would take all of the data, and save.
    """
    counted = getattr(locals_of("accelerate.accelerator", "_prepare_deepspeed").get("self"), "num_processes", None)
    if counted is not None and counted != dist.get_world_size():
        raise ConfigError(
            "accelerator.num_processes",
            counted,
            f"there are {dist.get_world_size()} ranks, and Accelerate, to which nobody has named a backend, would give "
            "all of the data to each: name it, "
            f'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="{dist.get_backend()}")])',
        )


def get_local_rank() -> int:
    """This rank's number on its node, as the launcher says."""
    return read_environment().local_rank


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """The ranks of ``group``, by default all, by their numbers in the world."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    debug: object = None,
) -> Any:
    """``torch.distributed.all_gather_into_tensor``."""
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    debug: object = None,
) -> Any:
    """``torch.distributed.reduce_scatter_tensor``."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def inference_all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> Any:
    """``torch.distributed.all_reduce``."""
    return dist.all_reduce(tensor, op=op, group=group)


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that share the model: all."""
    return dist.group.WORLD


def get_data_parallel_rank() -> int:
    """This rank among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_data_parallel_world_size() -> int:
    """How many they are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_model_parallel_world_size() -> int:
    """1: no two ranks hold parts of one layer's computation."""
    return 1


def get_model_parallel_rank() -> int:
    """0, the only one."""
    return 0


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
