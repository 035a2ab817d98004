"""Weights out of the engine into files: rank 0 writes what all ranks stream from their stores, a piece at a time."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.engine.runtime import Runtime
from infinity.engine.whole_state import param_of
from infinity.errors import WeightsError, WeightsFileError
from infinity.files.entry import Entry
from infinity.files.export import Export
from infinity.files.pieces import making_on_cpu
from infinity.files.shards import WHOLE_BYTES, parse_size
from infinity.weights.heap import return_freed
from infinity.weights.param import ShardedParam


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What is to be saved: parameters, and buffers as they are, by name."""

    by_name: Mapping[str, ShardedParam | torch.Tensor]
    aliases: Mapping[str, str]
    """Other names of these, each with the one above."""


def tensors_of(runtime: Runtime, *, exclude_frozen: bool) -> Tensors:
    """What a file of the module holds: its state dict, a parameter of several names under one of them.

    Raises WeightsError for what is no tensor.
    """
    module = runtime.module
    left_out = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    found: dict[str, ShardedParam | torch.Tensor] = {}
    names: dict[int, list[str]] = {}
    secondary = frozenset(getattr(module, "all_tied_weights_keys", None) or ())
    for name, value in module.state_dict().items():
        param = param_of(value, runtime)
        if name in left_out or (exclude_frozen and param is not None and not param.param.requires_grad):
            continue
        if param is not None:
            names.setdefault(param.index, []).append(name)
            found[name] = param
        elif isinstance(value, torch.Tensor):
            found[name] = value.detach()
        else:
            raise WeightsError(
                name, f"is a {type(value).__name__}, and files of weights hold tensors", "save it beside them yourself"
            )
    aliases: dict[str, str] = {}
    for tied in names.values():
        # Transformers' models say which names of what they tie they do not save
        kept = next((name for name in tied if name not in secondary), tied[0])
        aliases |= {name: kept for name in tied if name != kept}
    return Tensors(by_name={name: tensor for name, tensor in found.items() if name not in aliases}, aliases=aliases)


@making_on_cpu
def save_weights(
    runtime: Runtime,
    tensors: Tensors,
    directory: str | os.PathLike[str],
    *,
    safe: bool,
    file: str | None = None,
    max_shard_bytes: int = WHOLE_BYTES,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write files of weights that appear under their names when all of them are whole. Collective.

    Args:
        beside: rank 0 calls it with a directory, whose files are published with the weights.
    """
    collectives = runtime.collectives
    entries = {name: _entry(tensor) for name, tensor in tensors.by_name.items()}

    def begin() -> Export | None:
        if collectives.rank:
            return None
        return Export(
            directory, entries, aliases=tensors.aliases, file=file, safe=safe, max_shard_bytes=max_shard_bytes
        )

    failed: list[WeightsFileError] = []

    with collectives.together(begin, "make files for weights") or nullcontext() as export:

        def finish() -> None:
            if failed:
                raise failed[0]
            if export is not None:
                if beside is not None:
                    beside(export.aside)
                export.publish()

        for name, first, values in _stream(runtime, tensors):
            # the other ranks go on: what fails here is told when all are done
            if export is not None and not failed:
                try:
                    export.write(name, first, values)
                except WeightsFileError as error:
                    failed.append(error)
        collectives.together(finish, "publish files of weights")
    return_freed()


def _entry(tensor: ShardedParam | torch.Tensor) -> Entry:
    return Entry(dtype=tensor.dtype, shape=tuple(tensor.shape))


def _stream(runtime: Runtime, tensors: Tensors) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(name, first element, values) of all tensors, row-major, on the CPU. Collective."""
    for name, tensor in tensors.by_name.items():
        if isinstance(tensor, torch.Tensor):
            yield name, 0, tensor.cpu().reshape(-1)
        elif tensor.layout.is_contiguous():
            for first, values in runtime.stream(tensor):
                yield name, first, values
        else:
            whole = torch.empty(tensor.numel, dtype=tensor.dtype, device="cpu")
            for first, values in runtime.stream(tensor):
                whole[first : first + values.numel()] = values
            yield name, 0, tensor.unflattened(whole).reshape(-1)


def save_model_of_transformers(
    runtime: Runtime,
    directory: str | os.PathLike[str],
    *,
    beside: Iterable[Any],
    safe: bool,
    max_shard_size: str | int,
) -> None:
    """Everything that the model's class reads back with ``from_pretrained``. Collective.

    Raises WeightsError if the module is no model of Transformers.
    """
    module: Any = runtime.module
    if not hasattr(getattr(module, "config", None), "save_pretrained") or not hasattr(module, "save_pretrained"):
        raise WeightsError(
            type(module).__name__,
            "is no model of Transformers, which save_pretrained() is for",
            "call engine.save_16bit_model()",
        )

    def write(path: Path) -> None:
        config = copy.deepcopy(module.config)
        config.architectures = [type(module).__name__]
        # as there: what the first weights are, of a frozen base in 16 bits under a head in fp32, too
        floating = (param.dtype for param in runtime.sharded.params if param.dtype.is_floating_point)
        config.dtype = str(next(floating, runtime.sharded.precision.weight)).removeprefix("torch.")
        config.save_pretrained(path)
        if module.can_generate() and getattr(module, "generation_config", None) is not None:
            module.generation_config.save_pretrained(path)
        for each in beside:
            each.save_pretrained(path)

    save_weights(
        runtime,
        tensors_of(runtime, exclude_frozen=False),
        directory,
        safe=safe,
        max_shard_bytes=parse_size("max_shard_size", max_shard_size),
        beside=write,
    )
