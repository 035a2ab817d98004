"""Leaf modules: what the user marked to be gathered and reduced as one, since the data decides what it calls.

The marks lie here and not on the modules, and are read once, when the model is cut into groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.config.sections import LeafModule
from infinity.errors import ConfigError
from infinity.plan.registered import modules, named_modules

ModuleKind = type[nn.Module] | str | nn.Module
"""A class, its name (plain, or with its module's), or one module."""

_marked: WeakIdKeyDictionary = WeakIdKeyDictionary()
_laid_out: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Modules of models whose groups are made."""


def set_leaf_modules(model: nn.Module, modules: Sequence[ModuleKind]) -> list[nn.Module]:
    """Mark modules of ``model`` as leaves, before ``infinity.initialize``; all ranks mark the same.

    Every call of a leaf brings the weights of everything in it, and so does its part of backward: ranks may differ in
    what they call inside. A parameter that only some ranks used has zero gradients on the others. The leaf itself must
    be called, and its output reached by backward, on every rank.

    Returns:
        The modules that were marked.

    Raises:
        ConfigError: nothing in the model is meant, or the model's groups are made already.
    """
    return _change("set_leaf_modules", model, modules, leaf=True)


def unset_leaf_modules(model: nn.Module, modules: Sequence[ModuleKind]) -> list[nn.Module]:
    """Take the marks of ``set_leaf_modules`` away; the modules that had one."""
    return _change("unset_leaf_modules", model, modules, leaf=False)


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaves of ``model``, in the order in which they are registered."""
    return [module for module in modules(model) if is_leaf(module)]


def mark_leaves(model: nn.Module, section: LeafModule) -> list[str]:
    """Mark what ``zero_optimization.leaf_module`` names: classes, modules by name, or by the end of their names.

    Returns:
        The words that mean nothing in this model: one configuration may serve several.

    Raises:
        ConfigError: none of them means anything.
    """
    found: list[nn.Module] = []
    unmet = []
    for kind, words in section.model_dump().items():
        for word in words:
            meant = [module for name, module in named_modules(model) if _is_meant(name, module, kind, word)]
            found += meant
            if not meant:
                unmet.append(word)
    if unmet and not found:
        raise ConfigError(
            "zero_optimization.leaf_module",
            unmet,
            f"means nothing in {type(model).__name__}: name its modules' classes",
        )
    if found:
        set_leaf_modules(model, found)
    return unmet


def is_leaf(module: nn.Module) -> bool:
    return module in _marked


def lay_out(model: nn.Module) -> None:
    """The model is cut into groups: marks come too late from now on."""
    for module in modules(model):
        _laid_out[module] = True


def _change(function: str, model: nn.Module, kinds: Sequence[ModuleKind], *, leaf: bool) -> list[nn.Module]:
    if isinstance(kinds, (str, type, nn.Module)):
        kinds = [kinds]
    found = [module for module in modules(model) if any(is_meant(module, kind) for kind in kinds)]
    if not found:
        raise ConfigError(
            function,
            [kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__) for kind in kinds],
            f"is in no place of {type(model).__name__}, which has "
            f"{', '.join(sorted({type(module).__name__ for module in modules(model)}))}",
        )
    if any(module in _laid_out for module in found):
        raise ConfigError(function, type(found[0]).__name__, "comes too late: call it before infinity.initialize()")
    changed = [module for module in found if is_leaf(module) is not leaf]
    for module in changed:
        if leaf:
            _marked[module] = True
        else:
            del _marked[module]
    return found if leaf else changed


def _is_meant(name: str, module: nn.Module, kind: str, word: str) -> bool:
    if kind == "classes":
        return is_meant(module, word)
    return name == word if kind == "names" else name.endswith(word)


def is_meant(module: nn.Module, kind: ModuleKind) -> bool:
    """Whether the kind means this module."""
    if isinstance(kind, nn.Module):
        return module is kind
    if isinstance(kind, str):
        cls = type(module)
        return kind in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    return isinstance(module, kind)
