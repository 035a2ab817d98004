"""Which models can be sharded: refused by name, before anything is changed, where training would not be torch's."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from infinity.errors import ConfigError
from infinity.files.entry import is_shell
from infinity.plan.precision import dtype_beside
from infinity.plan.registered import modules, named_buffers, named_modules, named_parameters
from infinity.weights.owners import Owner, owner_of, users_class
from infinity.weights.promises import check_promise

_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
)
"""Classes of modules that train what they wrap in their own way."""


def admit(model: nn.Module, weight_dtype: torch.dtype, *, trains: bool = True) -> None:
    """Raises ConfigError for the first parameter or module that cannot be sharded.

    Args:
        weight_dtype: what the config has weights be: fp32 as they are, or a 16-bit dtype that fp32 weights are cast to.
        trains: false where every parameter is as good as frozen.
    """
    named = list(named_parameters(model))
    if not named:
        raise ConfigError("model", type(model).__name__, "has no parameters: there is nothing to shard")
    _admit_lasting(named, model)
    for name, module in named_modules(model):
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"model.{name}", "ScriptModule", "compiled modules hide their weights: pass it unscripted"
            )
        for kind in type(module).__mro__:
            if (kind.__module__, kind.__name__) in _WRAPPERS:
                remedy = "it averages gradients itself, as the engine does: pass the module that it wraps"
                raise ConfigError(f"model.{name}".rstrip("."), kind.__name__, remedy)
    for name, param in named:
        _admit_param(name, param)
    _admit_dtypes([each for each in named if not _stays(each[1], weight_dtype, trains=trains)], weight_dtype)
    _part_spectral_norms(model)
    _admit_memory(model, [(name, param) for name, param in named if owner_of(param) is None])


def refuse_owned(named: Iterable[tuple[str, nn.Parameter]], is_staged: Any) -> None:
    """Raises ConfigError for a parameter that another engine has, or had until its end."""
    for name, param in named:
        owner: Owner | None = owner_of(param)
        if owner is not None and not is_staged(owner):
            raise ConfigError(
                f"model.{name}",
                "sharded",
                "an engine holds its values, or held them until destroy(): build the model anew",
            )


def refuse_without_values(model: nn.Module) -> None:
    """Raises ConfigError for what is on the meta device and nobody has promised values for."""
    for name, param in named_parameters(model):
        if param.is_meta:
            check_promise(name, param)
    for name, buffer in named_buffers(model):
        if buffer.is_meta:
            raise ConfigError(
                f"model.{name}",
                "meta",
                "the buffer has no values, and no file has it: compute it anew on the CPU, or build the model under "
                "infinity.Init() or accelerate.init_empty_weights(), which leave buffers where they are",
            )


def admit_kind(key: str, param: nn.Parameter) -> None:
    """Raises ConfigError for a parameter, ``key`` to the user, that cannot be cut into shards whatever its values."""
    if is_traceable_wrapper_subclass(cast(object, param)):
        kind = type(param).__name__
        raise ConfigError(key, kind, "it consists of other tensors: pass the model before fully_shard() and the like")
    if is_lazy(param):
        raise ConfigError(key, "lazy", "its shape is not known yet: call the model once before, or give it its sizes")
    own, torchs = users_class(param), (nn.Parameter.__torch_function__, torch.Tensor.__torch_function__)
    if own.__torch_function__ not in torchs:
        remedy = (
            "its operations are not torch's: register a plain nn.Parameter, and make such a tensor of it in forward"
        )
        raise ConfigError(key, own.__name__, remedy)
    if param.layout is not torch.strided:
        raise ConfigError(key, str(param.layout), "only dense parameters can be sharded: call .to_dense() on it")
    if param.is_inference():
        raise ConfigError(key, "inference tensor", "autograd keeps no history of it: build it outside inference_mode()")
    if owner_of(param) is None and param.numel() and _overlaps_itself(param):
        raise ConfigError(key, "overlapping", "some of its elements share a place in memory: register it .clone()d")


def _admit_param(name: str, param: nn.Parameter) -> None:
    key = f"model.{name}"
    kind = users_class(param)
    if kind is not nn.Parameter and not param.is_floating_point() and not param.is_complex():
        raise ConfigError(key, f"{kind.__name__} of {param.dtype}", "a base in 4 or 8 bits: load it in bf16")
    admit_kind(key, param)
    if param.is_complex():
        remedy = "only real parameters are sharded: register torch.view_as_real() of it"
        raise ConfigError(key, str(param.dtype), f"{remedy}, and take torch.view_as_complex() of that in forward")
    packs = is_shell(param.dtype) or param.is_quantized or str(param.dtype).startswith("torch.float4")
    if packs or not (param.is_floating_point() or param.itemsize == 1):
        remedy = "only floating-point parameters, and frozen bytes, are sharded: use register_buffer()"
        raise ConfigError(key, str(param.dtype), remedy)
    if owner_of(param) is None and param.requires_grad and not param.is_leaf:
        raise ConfigError(key, "not a leaf", "it has a history: register nn.Parameter(value.detach())")


def _overlaps_itself(param: nn.Parameter) -> bool:
    """An expanded tensor and one of sliding windows do; a slice of a larger one steps over what smaller steps reach."""
    reach = 0
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _admit_lasting(named: Sequence[tuple[str, nn.Parameter]], model: nn.Module) -> None:
    """A module may make its parameters anew whenever somebody looks: none of them is the one that it uses."""
    found = dict(named)
    list(model.parameters())  # as an optimizer looks
    for name, param in named_parameters(model):
        if found.get(name) is not param:
            raise ConfigError(
                f"model.{name}",
                "made anew",
                "its module makes another parameter of it each time that parameters are listed (as LoRA by PEFT does "
                "over nn.MultiheadAttention): leave that module out of target_modules, or build attention of nn.Linear",
            )


def _stays(param: nn.Parameter, weight_dtype: torch.dtype, *, trains: bool) -> bool:
    """Whether it keeps a dtype of its own."""
    return dtype_beside(weight_dtype, param.dtype, trainable=trains and param.requires_grad) is not weight_dtype


def _admit_dtypes(named: Iterable[tuple[str, nn.Parameter]], weight_dtype: torch.dtype) -> None:
    """One dtype, or none is cast in silence: fp32 under a 16-bit config is cast as the config says. So are adapters in
    fp32, as PEFT makes them, over a frozen base in the config's own dtype, beside layers of that base (``score``) that
    learn, too: master weights keep it."""
    named = list(named)
    of_base = [param.dtype is weight_dtype for _, param in named if not param.requires_grad]
    if of_base and all(of_base) and all(param.dtype in (torch.float32, weight_dtype) for _, param in named):
        return
    first = None
    for name, param in named:
        if param.dtype not in (torch.float32, weight_dtype):
            cast = "cast this one, too" if weight_dtype is torch.float32 else "cast the model to it or to fp32"
            remedy = f"the config makes weights {weight_dtype}: {cast}, or change the config"
            raise ConfigError(f"model.{name}", str(param.dtype), remedy)
        first = first or (name, param.dtype)
        if param.dtype is not first[1]:
            raise ConfigError(
                f"model.{name}",
                str(param.dtype),
                f"{first[0]} is {first[1]}, and weights of two dtypes are not kept apart: cast the model to one",
            )


def _part_spectral_norms(model: nn.Module) -> None:
    """``torch.nn.utils.spectral_norm`` leaves the parameter's own memory where each forward puts the normalised weight:
    until the first one a copy stands there."""
    for module in modules(model):
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                value, param = getattr(module, hook.name), module._parameters[f"{hook.name}_orig"]
                if (
                    type(value) is torch.Tensor
                    and isinstance(param, nn.Parameter)
                    and _storage(value) == _storage(param)
                ):
                    setattr(module, hook.name, value.clone())


def _admit_memory(model: nn.Module, named: list[tuple[str, nn.Parameter]]) -> None:
    """No two parameters, buffers or tensors in attributes of modules share memory: an update of one must be seen in the
    other, and could not be."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, param in named:
        if (other := _meets(param, spans)) is not None:
            raise ConfigError(
                f"model.{name}", f"shares memory with {other}", "register one of them .clone()d, or tie them as one"
            )
        if _has_memory(param):
            insort(spans.setdefault(_storage(param), []), (*_span(param), name))
    for where, tensor in _other_tensors(model):
        if (other := _meets(tensor, spans)) is not None:
            raise ConfigError(
                f"model.{other}",
                f"shares memory with {where}",
                "which would not follow its training: keep a .clone() there, or compute it in forward",
            )


def _meets(tensor: torch.Tensor, spans: Mapping[int, list[tuple[int, int, str]]]) -> str | None:
    """The name of what already has some of the tensor's memory. ``spans`` of one storage are in order, and none meets
    another: a file of weights may be one storage of thousands of them."""
    if not _has_memory(tensor) or _storage(tensor) not in spans:
        return None
    start, stop = _span(tensor)
    before = spans[_storage(tensor)]
    number = bisect_left(before, (stop,)) - 1  # the last that begins before the tensor ends
    return before[number][2] if number >= 0 and before[number][1] > start else None


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one behind the last, in the storage."""
    reach = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + reach + 1) * tensor.element_size()


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and plain tensors that modules keep in attributes, lists and dicts, with their names."""
    own = {"_parameters", "_modules", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks"}
    for prefix, module in named_modules(model):
        for attribute, value in vars(module).items():
            if attribute not in own:
                where = f"{prefix}.{attribute}".lstrip(".") if attribute != "_buffers" else prefix or "model"
                yield from _tensors_in(where, value)


def _tensors_in(where: str, value: Any, depth: int = 2) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, nn.Parameter):
        return
    if type(value) is torch.Tensor:
        yield where, value
    elif depth and isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors_in(f"{where}[{number}]", item, depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(f"{where}.{key}", item, depth - 1)
