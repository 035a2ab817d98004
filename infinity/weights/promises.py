"""Values that a parameter is to have, and is given part by part: at once, or by ``initialize`` where it has no memory.

A parameter on the meta device keeps a promise until ``initialize`` writes its shards: so the model is never built
whole, and every rank asks for its own parts alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import swap_tensors
from torch.utils.weak import WeakIdKeyDictionary

from infinity.errors import ConfigError
from infinity.files.pieces import pieces
from infinity.weights.buffers import is_expanded
from infinity.weights.owners import Values
from infinity.weights.param import flattened, memory_order
from infinity.weights.samples import Samples, samples_of


@dataclass(frozen=True, slots=True)
class Promise:
    values: Values
    source: str
    """The file or index that has them."""
    version: int
    """The parameter's when the promise was given: what writes to a meta parameter does nothing but count."""
    shape: torch.Size


_promises: WeakIdKeyDictionary = WeakIdKeyDictionary()


def promise(param: nn.Parameter, values: Values, source: str) -> None:
    """A parameter on the meta device shall have these values of ``source``, in its own dtype, in place of what it was
    promised."""
    _promises[param] = Promise(values, source, param._version, param.shape)


def samples_of_promises(named: Iterable[tuple[str, nn.Parameter]]) -> Samples:
    """Samples of what parameters were promised, by which ranks compare them."""
    promised = [(name, param, _promises[param]) for name, param in named if param in _promises]
    return samples_of((name, each.source, param.numel(), each.values) for name, param, each in promised)


def check_promise(name: str, param: nn.Parameter) -> None:
    """Raises ConfigError for a meta parameter that has no values to come, or was written to since."""
    found: Promise | None = _promises[param] if param in _promises else None  # noqa: SIM401 (get is untyped)
    if found is None:
        raise ConfigError(
            f"model.{name}",
            "meta",
            "it has no values: give it some with infinity.load_pretrained(), or build the model on the CPU or under "
            "Init",
        )
    if (found.version, found.shape) != (param._version, param.shape):
        raise ConfigError(
            f"model.{name}",
            "meta",
            "it was changed after infinity.load_pretrained(), which a parameter without memory does not keep: change "
            "it after infinity.initialize(), inside GatheredParameters(param, modifier_rank=0)",
        )


def take_promises(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, Values]:
    """What parameters were promised, by their id(); these are on the CPU from now on, without contents of their own.

    Raises ConfigError, and nothing has changed, where somebody keeps hold of one in a way that torch cannot follow.
    """
    taken: list[tuple[nn.Parameter, nn.Parameter, Promise]] = []
    try:
        for name, param in named:
            if param in _promises:
                taken.append((param, *_give_memory(name, param)))
    except ConfigError:
        for param, stand_in, promised in taken:
            swap_tensors(param, stand_in)  # type: ignore[no-untyped-call]
            _promises[param] = promised
        raise
    return {id(param): promised.values for param, _, promised in taken}


def _give_memory(name: str, param: nn.Parameter) -> tuple[nn.Parameter, Promise]:
    """(what the parameter was, what it was promised)."""
    placeholder = torch.full((), torch.nan, dtype=param.dtype, device="cpu").expand(param.shape)
    stand_in = nn.Parameter(placeholder, requires_grad=param.requires_grad)
    stand_in.__dict__.update(param.__dict__)
    promised: Promise = _promises[param]
    del _promises[param]  # torch swaps nothing that is weakly referred to
    try:
        swap_tensors(param, stand_in)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        _promises[param] = promised
        reason = str(error.__cause__ or error).split("\n")[0]
        raise ConfigError(
            f"model.{name}",
            "meta",
            f"it cannot be given memory ({reason}): use it, and refer to it weakly, after infinity.initialize() only",
        ) from error
    return stand_in, promised


def fill(param: torch.Tensor, values: Values) -> None:
    """Write the values into a parameter or buffer that has memory of its own, in place."""
    with torch.no_grad():
        own, order = param.detach(), memory_order(param)
        flat = flattened(own, order)
        if is_expanded(own):
            own, flat = torch.empty(own.shape, dtype=own.dtype, device=own.device), flat.clone()
        for first, numel in pieces(param.numel()):
            flat[first : first + numel].copy_(values(first, numel))
        if param.numel() and flat.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            # with holes between its rows, or expanded: ``flat`` is a copy
            own.permute(order).copy_(flat.view([own.size(dim) for dim in order]))
        if is_expanded(param):
            param.data = own
