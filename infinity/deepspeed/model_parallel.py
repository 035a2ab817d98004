"""``utils.bwc``: what an object for model parallelism says under any of its names; each is one rank's world without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_TENSOR: Final = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPELINE: Final = ("pipeline_model_parallel", "pipe_parallel")


def _said(mpu: Any, kinds: Sequence[str], what: str) -> Any:
    """Raises AttributeError if it has none of the methods."""
    if (method := _method(mpu, kinds, what)) is None:
        names = ", ".join(f"get_{kind}_{what}" for kind in kinds)
        raise AttributeError(f"{type(mpu).__name__} has none of {names}")
    return method()


def _method(mpu: Any, kinds: Sequence[str], what: str) -> Any:
    """The first that ``mpu`` has, or None."""
    names = (f"get_{kind}_{what}" for kind in kinds)
    return next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> Any:
    """The rank among those that share each layer; 0 without ``mpu``."""
    return 0 if mpu is None else _said(mpu, _TENSOR, "rank")


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> Any:
    """How many ranks share each layer; 1 without ``mpu``."""
    return 1 if mpu is None else _said(mpu, _TENSOR, "world_size")


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """The process group of those ranks; None without ``mpu``."""
    return None if mpu is None else _said(mpu, _TENSOR, "group")


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> Any:
    """How many ranks the layers are dealt out to; 1 where ``mpu`` does not say."""
    method = _method(mpu, _PIPELINE, "world_size")
    return 1 if method is None else method()


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """The process group of those ranks; None without ``mpu``. Raises AssertionError if that has none."""
    if mpu is None:
        return None
    if (method := _method(mpu, _PIPELINE, "group")) is None:
        raise AssertionError("mpu does not support pipeline parallel group")
    return method()
