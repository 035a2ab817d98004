"""What models are built with: ``Init``, ``OnDevice``, and small questions about modules, parameters and versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from infinity import zero
from infinity.deepspeed.distributed import init_distributed
from infinity.deepspeed.model_parallel import refuse_split
from infinity.deepspeed.raw_config import raw_config
from infinity.deepspeed.swap_dirs import make_swap_dirs
from infinity.plan.precision import Precision
from infinity.weights.ds_names import GatheredParameter
from infinity.weights.owners import owner_of

Call = TypeVar("Call", bound=Callable[..., Any])


class Init(zero.Init):
    """``infinity.Init``, which starts torch.distributed if nobody has, for a rank that is alone, too: Transformers asks
    for its rank while it loads. Parameters in 16 bits, which ``from_pretrained`` makes by its file, get the dtype that
    the configuration enables: fp32 without ``bf16`` and ``fp16``. By ``mpu`` every rank must have the whole model."""

    def __init__(self, *args: Any, mpu: Any = None, **kwargs: Any) -> None:
        self._mpu = mpu
        super().__init__(*args, **kwargs)

    def __enter__(self) -> Init:
        init_distributed()
        refuse_split(self._mpu)
        if self._enabled and self._has_config:
            make_swap_dirs(raw_config(self._config_source))
        super().__enter__()
        return self

    def _dtype_of(self, param: nn.Parameter) -> torch.dtype | None:
        if self._dtype is None and self._has_config and param.dtype in (torch.bfloat16, torch.float16):
            return Precision.of(self.config).weight
        return super()._dtype_of(param)


class OnDevice:
    """Context manager: tensors are made on ``device`` (by default "meta"), floating-point ones in ``dtype``."""

    def __init__(self, dtype: torch.dtype | None, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._dtype_before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._enabled:
            self._dtype_before = torch.get_default_dtype()
            if self._dtype is not None:
                torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._enabled:
            self._device.__exit__(kind, error, traceback)
            torch.set_default_dtype(self._dtype_before)


def is_zero_param(parameter: object) -> bool:
    """Whether weights of the parameter are sharded: staged under ``Init``, or an engine's at stage 3."""
    if isinstance(parameter, GatheredParameter):
        return True
    owner = owner_of(parameter) if isinstance(parameter, nn.Parameter) else None
    return owner is not None and bool(owner.shards_weights)


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The attribute with a dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Set the attribute with a dotted name."""
    above, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, name, module)


def split_tensor_along_last_dim(
    tensor: torch.Tensor, partitions: list[int], contiguous_split_chunks: bool = False
) -> list[torch.Tensor]:
    """Parts of the last dimension. ``partitions``: how long each is."""
    parts = torch.split(tensor, partitions, dim=-1)
    return [part.contiguous() for part in parts] if contiguous_split_chunks else list(parts)


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch's version lies between two, given as numbers such as 2.6; both ends belong to it."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    bounds = (None if bound is None else tuple(map(int, str(bound).split("."))) for bound in (min_version, max_version))
    least, most = bounds
    return (least is None or (major, minor) >= least) and (most is None or (major, minor) <= most)
