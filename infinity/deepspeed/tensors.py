"""Functions on tensors, numbers and memory that DeepSpeed's users import from ``runtime.utils``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from infinity.deepspeed.model_parallel import refuse_split
from infinity.zero import ZeroParamStatus
from io_daemon.disk.kernel_text import read_text


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested lists, tuples and dicts whose tensors have just their own memory, on ``device``."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list):
        return [clone_tensors_for_torch_save(each, device) for each in item]
    if isinstance(item, tuple):
        return tuple(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)({name: clone_tensors_for_torch_save(each, device) for name, each in item.items()})
    return item


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Nested lists, tuples and dicts whose tensors are on ``device``: those that ``criterion_func`` chooses, or all."""
    if isinstance(item, torch.Tensor) and (criterion_func is None or criterion_func(item)):
        return item.to(device)
    if isinstance(item, list):
        return [move_to_device(each, device, criterion_func) for each in item]
    if isinstance(item, tuple):
        return tuple(move_to_device(each, device, criterion_func) for each in item)
    if isinstance(item, dict):
        return {name: move_to_device(each, device, criterion_func) for name, each in item.items()}
    return item


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """Do as ``move_to_device``, but what is there already is copied, too."""
    return move_to_device(clone_tensors_for_torch_save(item, device), device, criterion_func)


def clip_grad_norm_(
    parameters: nn.Parameter | Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0, mpu: Any = None
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of gradients that are in memory; the engine's own are its configuration's.

    Ranks may have other gradients each: all are clipped by the mean of their norms, which is given back."""
    refuse_split(mpu)
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], norm_type)
    if dist.is_available() and dist.is_initialized():
        norm = norm / dist.get_world_size()
        dist.all_reduce(norm)
    nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2.0, mpu: Any = None
) -> torch.Tensor:
    """The norm of all elements of all tensors, 0-D."""
    refuse_split(mpu)
    return nn.utils.get_total_norm(input_tensors, norm_type)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print what the device and this process hold, on rank 0. Only with ``force``, as in DeepSpeed."""
    if not force or (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        return
    allocated = torch.accelerator.memory_allocated() if torch.accelerator.is_available() else 0
    status = (read_text(Path("/proc/self/status")) or "").splitlines()
    resident = next((line.split()[1] for line in status if line.startswith("VmRSS")), "0")
    print(f"{message}: device {allocated / 2**30:.2f} GB, process {int(resident) / 2**20:.2f} GB", flush=True)


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """Those sharded parameters whose weights are not in memory."""
    return [each for each in param_list if getattr(each, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]


def split_half_float_double(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The dense ones of each floating dtype, in the order fp16, fp32, fp64, bf16; none of other dtypes."""
    tensors = list(tensors)
    dtypes = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    found = ([each for each in tensors if each.dtype is dtype and each.layout is torch.strided] for dtype in dtypes)
    return [several for several in found if several]


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def empty_cache() -> None:
    """Give the device's unused memory back."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def ensure_directory_exists(filename: str) -> None:
    """Make the directory that the file will stand in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """How a call reads: ``base(1, name=2)``."""
    parts = [*(repr(each) for each in args), *(f"{name}={each!r}" for name, each in kwargs.items())]
    return f"{base}({', '.join(parts)})"
