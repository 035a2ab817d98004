"""``load_pretrained``: weights from files into a model, every rank reading its own parts, a piece at a time."""

from __future__ import annotations

import logging
import os
from time import monotonic
from typing import NamedTuple

import torch
from torch import nn

from infinity.engine import Engine
from infinity.files.directory import WeightsDirectory
from infinity.files.pieces import making_on_cpu
from infinity.plan.registered import parameters
from infinity.pretrained.matching import Match, Rename, match
from infinity.weights.owners import Owner, Values, owner_of
from infinity.weights.param import flattened, memory_order
from infinity.weights.promises import fill, promise
from infinity.weights.samples import compare, samples_of

_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """What ``load_pretrained`` left out, which is nothing where it was ``strict``."""

    missing_keys: tuple[str, ...]
    """Names that the model has and the files lack: these weights stayed as they were."""
    unexpected_keys: tuple[str, ...]
    """Names that the files have and the model lacks."""


@making_on_cpu
def load_pretrained(
    model: nn.Module, source: str | os.PathLike[str], strict: bool = True, rename: Rename | None = None
) -> Loaded:
    """Give ``model`` the weights of files, streamed: no rank ever holds more than a piece of what it does not keep.

    An engine's weights and master weights are written in its store, and its optimizer's states stay as they are. Of a
    model that was built under ``Init`` each rank reads its shard. On the meta device parameters keep waiting, and
    ``initialize`` reads each rank's shards straight into the store: the files must stay until then. Collective.

    Args:
        model: an engine, or a model before ``initialize``.
        source: a directory as Transformers writes it (safetensors, or ``torch.save``'s files, sharded or not), its
            index, or one file.
        strict: refuse files that lack a name of the model's, or have one that it has not. Names that a model of
            Transformers says may be absent, and other names of a parameter that is there, are not missed.
        rename: from a name in the files to one in the model: a function, which may return None for what is to be left
            out, or a dict of those that differ. The prefix of a Transformers model's body needs none.

    Raises:
        MismatchedWeightsError: the files are not this model's; all that does not fit is named, and nothing was changed.
        WeightsFileError: a file is not there, not whole or not readable, or ranks that share the parameters are given
            different ones, as far as samples of each tensor show; of a model on the meta device by ``initialize``.
        DeviceIOError: a read failed. Of weights that are in memory or in a store some may be new: load again.
        EngineStateError: the engine is in a forward or backward.
    """
    module = model.module if isinstance(model, Engine) else model
    start = monotonic()

    def look() -> tuple[WeightsDirectory, Match]:
        files = WeightsDirectory(source)
        return files, match(module, files, strict=strict, rename=rename)

    owners = dict.fromkeys(owner for param in parameters(module) if (owner := owner_of(param)) is not None)
    asked = next(iter(owners), None)
    files, matched = asked.collectives.together(look, "look at pretrained weights") if asked else look()
    targets: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    owned: dict[Owner, list[tuple[nn.Parameter, Values]]] = {owner: [] for owner in owners}
    own: list[tuple[torch.Tensor, Values]] = []
    given: dict[str, _FileValues] = {}
    for name, key in matched.sources.items():
        target = targets[name]
        if isinstance(target, nn.Parameter) and (owner := owner_of(target)) is not None:
            given[name] = _FileValues(files, key, owner.layout_of(target))
        else:
            given[name] = _FileValues(files, key, target)
    if asked is not None:
        parts = [(name, files.path, values.numel, values) for name, values in given.items()]
        samples = asked.collectives.together(lambda: samples_of(parts), "look at pretrained weights")
        compare(samples, asked.collectives, "compare pretrained weights")
    for name, values in given.items():
        target = targets[name]
        if not isinstance(target, nn.Parameter):
            own.append((_buffer(module, name), values))
        elif (owner := owner_of(target)) is not None:
            owned[owner].append((target, values))
        elif target.is_meta:
            promise(target, values, files.path)
        else:
            own.append((target, values))
    for owner, parts_of_owner in owned.items():
        if parts_of_owner:
            owner.overwrite(parts_of_owner)
    for tensor, new in own:
        fill(tensor, new)
    _say(files, matched, monotonic() - start)
    return Loaded(matched.missing, matched.unexpected)


class _FileValues:
    """A tensor of the files, in the order in which a parameter lies in memory."""

    def __init__(self, files: WeightsDirectory, key: str, layout: torch.Tensor) -> None:
        self._files, self._key = files, key
        self.numel, self._dtype = layout.numel(), layout.dtype
        self._order = memory_order(layout)

    def __call__(self, first: int, numel: int) -> torch.Tensor:
        entry = self._files.entries[self._key]
        if self._order == sorted(self._order):
            values = self._files.read(self._key, first, numel)
        else:  # rows of the file lie apart in memory
            whole = self._files.read(self._key, 0, entry.numel).view(entry.shape)
            values = flattened(whole, self._order)[first : first + numel]
        is_wider = values.dtype is torch.float64 and self._dtype is not torch.float64
        return values.float() if is_wider else values


def _buffer(module: nn.Module, name: str) -> torch.Tensor:
    """The buffer, given memory if it has none."""
    prefix, _, own_name = name.rpartition(".")
    holder = module.get_submodule(prefix)
    buffer = holder._buffers[own_name]
    if buffer is None:
        raise AssertionError(f"{name} is in the state dict and is no buffer")
    if buffer.is_meta:
        holder._buffers[own_name] = buffer = torch.empty_like(buffer, device="cpu")
    return buffer


def _say(files: WeightsDirectory, matched: Match, seconds: float) -> None:
    num_bytes = sum(files.entries[key].nbytes for key in matched.sources.values())
    _log.info(
        "%s: %d tensors, %.2f GB, %.1f s (%.2f GB/s)",
        files.path,
        len(matched.sources),
        num_bytes / 1e9,
        seconds,
        num_bytes / 1e9 / max(seconds, 1e-9),
    )
