"""What an object for model parallelism (``mpu``) says under any of its names; each is one rank's world without.

Scripts that come of Megatron pass theirs where every rank has the whole model, too: then it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from infinity.deepspeed.distributed import get_data_parallel_world_size
from infinity.errors import ConfigError

_TENSOR: Final = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPELINE: Final = ("pipeline_model_parallel", "pipe_parallel")
_SPLIT: Final = (*_TENSOR, *_PIPELINE, "sequence_parallel", "context_parallel")
"""What a model can be split by over ranks."""


def refuse_split(mpu: Any) -> None:
    """Raises ConfigError unless every rank has the whole model by what ``mpu`` says, and all of them share it. Asked
    where torch.distributed runs: such objects hold its groups."""
    if mpu is None:
        return
    if not hasattr(mpu, "get_data_parallel_world_size"):
        name = getattr(mpu, "__name__", type(mpu).__name__)
        raise ConfigError("mpu", name, "there is no model parallelism: pass the plain module without it")
    for kind in _SPLIT:
        if (size := _method(mpu, (kind,), "world_size")) is not None and size() != 1:
            raise ConfigError(
                f"mpu.get_{kind}_world_size()",
                size(),
                "there is no model parallelism, ZeRO-3 shards every weight over all ranks: start the script with 1",
            )
    shares, ranks = mpu.get_data_parallel_world_size(), get_data_parallel_world_size()
    if shares != ranks:
        remedy = f"all of the {ranks} ranks share the model: leave mpu out"
        raise ConfigError("mpu.get_data_parallel_world_size()", shares, remedy)


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
