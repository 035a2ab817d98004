"""The modules, parameters and buffers that are registered in a module, whatever its class answers.

A class may override ``parameters()``, ``children()`` and the like, most often to hide what is frozen from an optimizer.
Its forward uses the others nevertheless, and a state dict has them: they are placed and sharded like all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


def children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module._modules.values() if child is not None]


def modules(module: nn.Module) -> Iterator[nn.Module]:
    return (each for _, each in named_modules(module))


def named_modules(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    ahead = [("", module)]
    while ahead:
        name, each = ahead.pop()
        if remove_duplicate and id(each) in seen:
            continue
        seen.add(id(each))
        yield name, each
        inner = [(f"{name}.{own}" if name else own, child) for own, child in each._modules.items() if child is not None]
        ahead += reversed(inner)


def parameters(module: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    return (param for _, param in named_parameters(module, recurse=recurse))


def named_parameters(
    module: nn.Module, *, recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Under the names of ``nn.Module``'s own, in its order."""
    places = named_modules(module, remove_duplicate=remove_duplicate) if recurse else [("", module)]
    return _named(places, "_parameters", remove_duplicate=remove_duplicate)


def named_buffers(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a state dict leaves out, too."""
    places = named_modules(module, remove_duplicate=remove_duplicate)
    return _named(places, "_buffers", remove_duplicate=remove_duplicate)


def _named(
    places: Iterable[tuple[str, nn.Module]], registry: str, *, remove_duplicate: bool
) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for prefix, each in places:
        for own, tensor in getattr(each, registry).items():
            if tensor is None or (remove_duplicate and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield f"{prefix}.{own}" if prefix else own, tensor
