"""Functions on numbers and norms that DeepSpeed's users import from ``runtime.utils``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import _get_grad_fn_or_grad_acc

from infinity.deepspeed.experts import is_moe_param
from infinity.deepspeed.model_parallel import refuse_split

Item = TypeVar("Item")
Norm = torch.Tensor | float


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """The sum up to and with each."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where each of ``num_parts`` runs of items begins, and the end; the first runs take what does not divide."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    each, left = divmod(num_items, num_parts)
    return [part * each + min(part, left) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Where runs of items begin whose weights differ little, and the end. As many as ``num_parts``.

    Runs are added one after the other, each ending where heaviest and lightest run so far differ least, the latest such
    place."""
    num_items = len(weights)
    if num_items <= num_parts:
        return partition_uniform(num_items, num_parts)
    sums = [0.0, *accumulate(weights)]
    # by the number of items that the runs so far hold: heaviest and lightest run, and where each begins
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, math.inf, [])}
    for _ in range(num_parts):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(1, num_items + 1):
            tried = (
                (max(most, sums[end] - sums[begin]), min(least, sums[end] - sums[begin]), [*starts, begin])
                for begin, (most, least, starts) in best.items()
                if begin < end
            )
            found = min(tried, key=lambda run: (run[0] - run[1], -run[2][-1]), default=None)
            if found is not None:
                longer[end] = found
        best = longer
    return [*best[num_items][2], num_items]


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def get_only_unique_item(items: Iterable[Item]) -> Item:
    """The one that all of them are. Raises RuntimeError if they are not alike."""
    unique = set(items)
    if len(unique) != 1:
        raise RuntimeError(f"expected one value, found {sorted(map(str, unique))}")
    return unique.pop()


def is_invalid_grad_norm(norm: Norm) -> bool:
    """Whether the norm, or any in a tensor, is of gradients that are not finite, of which DeepSpeed's is -1."""
    values = torch.as_tensor(norm)
    return bool((~torch.isfinite(values) | (values < 0)).any())


def get_global_norm(norm_list: Iterable[Norm]) -> Norm:
    """The 2-norm of what has these 2-norms; inf if one of them is invalid."""
    norms = list(norm_list)
    return math.inf if any(map(is_invalid_grad_norm, norms)) else sum(norm**2.0 for norm in norms) ** 0.5


def combine_grad_norm_groups(norm_groups: Iterable[Norm], norm_type: float = 2) -> torch.Tensor:
    """The norm of what has these norms, 0-d; inf if one of them is invalid."""
    norms = torch.stack([torch.as_tensor(norm) for norm in norm_groups])
    combined = torch.linalg.vector_norm(norms, ord=norm_type)
    return torch.full_like(combined, math.inf) if is_invalid_grad_norm(norms) else combined


def get_weight_norm(parameters: nn.Parameter | Iterable[nn.Parameter], norm_type: float = 2.0, mpu: Any = None) -> Norm:
    """The norm of all weights, which must be in memory."""
    refuse_split(mpu)
    return nn.utils.get_total_norm(list(_each(parameters)), norm_type)


def get_flattened_grad_norm(
    parameters: nn.Parameter | Iterable[nn.Parameter],
    norm_type: float = 2.0,
    mpu: Any = None,
    grad_norm_mask: Any = None,
) -> Norm:
    """The norm of all gradients that are in memory."""
    refuse_split(mpu)
    return nn.utils.get_total_norm([p.grad for p in _each(parameters) if p.grad is not None], norm_type)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: Norm | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> Norm:
    """Multiply all by what brings their common norm down to ``max_norm``; the norm before."""
    refuse_split(mpu)
    norm = nn.utils.get_total_norm(input_tensors) if global_norm is None else global_norm
    factor = max_norm / (norm + eps)
    if factor < 1:
        for each in input_tensors:
            each.detach().mul_(factor)
    return norm


def align_dense_tensors(tensor_list: Sequence[torch.Tensor], alignment: int) -> list[torch.Tensor]:
    """The tensors, and a 1-D one of zeros behind them that makes their elements a multiple of ``alignment``."""
    missing = -sum(each.numel() for each in tensor_list) % alignment
    if not missing:
        return list(tensor_list)
    last = tensor_list[-1]
    return [*tensor_list, torch.zeros(missing, dtype=last.dtype, device=last.device)]


def mask_nan_or_inf_with_val_inplace(
    input: torch.Tensor,  # noqa: A002 -- DeepSpeed's name
    device: torch.device | None = None,
    val: float = -1.0,
) -> None:
    """Write ``val`` where the tensor is not finite."""
    input.masked_fill_(~torch.isfinite(input), val)


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """How many of the parameters the running backward gives a gradient to, tied ones once.

    Raises RuntimeError outside of a backward.
    """
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError("count_used_parameters_in_backward must be called during backward execution")
    trained = (param for param in parameters if isinstance(param, torch.Tensor) and param.requires_grad)
    with torch.enable_grad():  # without it torch gives leaves no node
        nodes = {_get_grad_fn_or_grad_acc(param) for param in trained}
    return sum(torch._C._will_engine_execute_node(node) for node in nodes)


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Whether ranks of a model-parallel group have different parts of it, as Megatron marks them."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself."""
    return func


@contextmanager
def noop_context() -> Iterator[None]:
    """Nothing."""
    yield


class CheckOverflow:
    """Looks for gradients that are not finite. An engine's are not in ``param.grad``: see ``optimizer.overflow``."""

    def __init__(
        self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None
    ) -> None:
        refuse_split(mpu)
        self.params = [param for group in param_groups or () for param in group]

    def check_using_norm(self, norm_group: Iterable[Norm], reduce_overflow: bool = True) -> bool:
        """Whether any of the norms is invalid; with ``reduce_overflow``, and where parameters are of experts, on any
        rank. Collective."""
        is_shared = reduce_overflow or any(is_moe_param(param) for param in self.params)
        return _anywhere(any(map(is_invalid_grad_norm, norm_group)), is_shared=is_shared)

    def check(self, param_groups: Any = None) -> bool:
        """Whether any gradient of the groups is not finite, on any rank."""
        groups = [self.params] if param_groups is None else param_groups
        return self.has_overflow([param for group in groups for param in group])

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether any gradient is not finite, on this rank."""
        return any(param.grad is not None and self._has_inf_or_nan(param.grad) for param in params)

    def has_overflow(self, params: Iterable[nn.Parameter], has_moe_params: bool | None = None) -> bool:
        """Whether any gradient is not finite, on any rank. Collective."""
        return _anywhere(self.has_overflow_serial(params))

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor, i: int | None = None) -> bool:
        return not bool(torch.isfinite(x).all())


def _anywhere(found: bool, *, is_shared: bool = True) -> bool:
    """Whether it was found on any rank; not ``is_shared``: on this one."""
    flag = torch.tensor(float(found), device="cpu")
    if is_shared and dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _each(parameters: nn.Parameter | Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    return [parameters] if isinstance(parameters, nn.Parameter) else parameters
