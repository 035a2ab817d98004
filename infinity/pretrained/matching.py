"""Which tensor of the files is which of the model, and everything that does not fit, found before anything changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, MismatchedWeightsError
from infinity.files.directory import WeightsDirectory
from infinity.files.entry import Entry
from infinity.files.pieces import as_bytes, pieces

Rename = Callable[[str], str | None] | Mapping[str, str]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Match:
    """``sources``: the model's name -> the files' name. A parameter of several names has one of them."""

    sources: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match(module: nn.Module, files: WeightsDirectory, *, strict: bool, rename: Rename | None) -> Match:
    """Raises MismatchedWeightsError with all that is wrong: what lies in both and does not fit always is; what only one
    of them has, where ``strict``."""
    if rename is not None and not (isinstance(rename, Mapping) or callable(rename)):
        raise ConfigError("rename", rename, "is a dict of names, or a function from name to name")
    targets: dict[str, Any] = module.state_dict(keep_vars=True)
    renamed, unfit = _renamed(module, files.entries, targets, rename)
    sources = {name: renamed[name] for name in targets if name in renamed}
    unfit += [
        f"{name}: {problem}" for name, source in sources.items() if (problem := _problem(targets[name], files, source))
    ]
    tied = _names_of_parameters(targets)
    unfit += [] if unfit else _differences(tied, sources, files)
    held = {id(targets[name]) for name in sources}
    missing = _unless_ignored(
        module, "missing", (name for name in targets if name not in sources and id(targets[name]) not in held)
    )
    unexpected = _unless_ignored(module, "unexpected", (name for name in renamed if name not in targets))
    if unfit or (strict and (missing or unexpected)):
        raise MismatchedWeightsError(files.path, missing=missing, unexpected=unexpected, unfit=unfit)
    one_each = {id(targets[name]): name for name in sources}
    return Match(
        sources={name: sources[name] for name in sources if one_each[id(targets[name])] == name},
        missing=tuple(missing),
        unexpected=tuple(unexpected),
    )


def _renamed(
    module: nn.Module, entries: Mapping[str, Entry], targets: Mapping[str, object], rename: Rename | None
) -> tuple[dict[str, str], list[str]]:
    """(name for the model -> name in the files, complaints about two that become one)."""
    found: dict[str, str] = {}
    complaints: list[str] = []
    for source in entries:
        name = (
            rename.get(source, source)
            if isinstance(rename, Mapping)
            else rename(source)
            if rename is not None
            else source
        )
        if name is None:
            continue
        name = _with_prefix(module, name, targets)
        if name in found:
            complaints.append(f"{name}: both {found[name]} and {source} are called so")
        found[name] = source
    return found, complaints


def _with_prefix(module: nn.Module, name: str, targets: Mapping[str, object]) -> str:
    """Models of Transformers are saved with and without their heads, and so with and without the body's prefix."""
    prefix = getattr(module, "base_model_prefix", None)
    if name in targets or not isinstance(prefix, str) or not prefix:
        return name
    other = name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"
    return other if other in targets else name


def _problem(target: Any, files: WeightsDirectory, source: str) -> str:
    entry = files.entries[source]
    if not isinstance(target, torch.Tensor):
        return "the model keeps no tensor there"
    if entry.shape != tuple(target.shape):
        return f"{source} has shape {list(entry.shape)}, the model's is {list(target.shape)}"
    if target.dtype in FLOATS and entry.dtype not in FLOATS:
        return f"{source} is {entry.dtype}, which does not say what weights of {target.dtype} it stands for"
    return ""


def _names_of_parameters(targets: Mapping[str, Any]) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, target in targets.items():
        names.setdefault(id(target), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _differences(tied: list[list[str]], sources: Mapping[str, str], files: WeightsDirectory) -> list[str]:
    """Names of one parameter whose tensors in the files are not one."""
    found = []
    for names in tied:
        held = [sources[name] for name in names if name in sources]
        found += [
            f"{other}: it differs from {held[0]}, and both are one parameter of the model"
            for other in held[1:]
            if not _equal(files, held[0], other)
        ]
    return found


def _equal(files: WeightsDirectory, one: str, other: str) -> bool:
    """Bit for bit, or, of two dtypes, value for value."""
    view = as_bytes if files.entries[one].dtype is files.entries[other].dtype else torch.Tensor.detach
    return all(
        torch.equal(view(files.read(one, first, numel)), view(files.read(other, first, numel)))
        for first, numel in pieces(files.entries[one].numel)
    )


def _unless_ignored(module: nn.Module, kind: str, names: Iterable[str]) -> list[str]:
    """``names`` but for those of which a model of Transformers says that they may be ``kind``."""
    patterns = getattr(module, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
