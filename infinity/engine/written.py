"""What users write to weights that are here: kept where weights are whole, else refused by name, and undone."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch

from infinity.errors import WeightsError, WorldError
from infinity.tiers.collectives import KEEPING, Collectives
from infinity.weights import owners, shard_copies
from infinity.weights.live_set import LiveSet
from infinity.weights.param import ShardedParam
from infinity.weights.param_group import ParamGroup
from infinity.weights.sharded_model import ShardedModel
from infinity.weights.state_io import StateIO
from io_daemon.shared.protocol import ObjectKind


class Written:
    """``lock``: weights come and go under it."""

    def __init__(
        self,
        owner: owners.Owner,
        sharded: ShardedModel,
        io: StateIO,
        collectives: Collectives,
        live_set: LiveSet,
        *,
        lock: threading.RLock,
    ) -> None:
        self._owner, self._sharded, self._io = owner, sharded, io
        self._collectives, self._live_set, self._lock = collectives, live_set, lock
        self.num_writable: dict[int, int] = {}
        """Parameter index -> how many of the contexts that it is gathered in keep what is written."""

    def check(self, params: Iterable[ShardedParam]) -> None:
        """Raises WeightsError for a parameter that was written to where that is not kept, be it through a view, or in
        a copy of its shard."""
        shard_copies.check(self._owner)
        params = list(params)
        if inside := [param for param in params if param.index in self.num_writable]:
            self._refuse_apart(inside)
        written = [param for param in params if param.is_written()]
        if written and self._owner.shards_weights:
            self.refuse(written[0])
        for param in written:
            self.settle(param)

    def _refuse_apart(self, inside: Sequence[ShardedParam]) -> None:
        """Raises WeightsError, on all ranks, where what was written inside GatheredParameters is not all ranks' own:
        its end makes it that. Collective, as those contexts are."""
        found = [f"{param.checksum():08x}" if param.is_written() else "as it was" for param in inside]
        apart = set(self._collectives.unlike(found, "compare what was written inside GatheredParameters"))
        for place, param in enumerate(inside):
            if place in apart or (self._owner.shards_weights and param.is_written()):
                raise WeightsError(
                    param.name,
                    "is written to inside GatheredParameters(modifier_rank=...), whose end keeps that",
                    "call this behind that block",
                )

    def own(self, param: ShardedParam) -> torch.Tensor | None:
        """This rank's part of what was written, as the store will have it when all ranks agree that they wrote it; None
        if nothing was. For one rank alone. Raises as ``check``."""
        shard_copies.check(self._owner)
        if not param.is_written():
            return None
        if self._owner.shards_weights:
            self.refuse(param)
        return self._kept(param, param.allocate())

    def keep(self, param: ShardedParam, flat: torch.Tensor) -> None:
        """This rank's part of ``flat``, the whole weights in memory order, is what the store has."""
        kinds = [ObjectKind.MASTER, ObjectKind.WEIGHT] if self._has_master(param) else [ObjectKind.WEIGHT]
        self._io.write_own(param, kinds, self._kept(param, flat))

    def _kept(self, param: ShardedParam, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``flat``. Of weights that are still their masters' rounding the masters stay."""
        first, numel = self._io.own_range(param)
        values = flat[first : first + numel].detach()
        if not self._has_master(param):
            return values
        masters = self._io.read_own(param, ObjectKind.MASTER).to(values.device)
        as_before = masters.to(values.dtype).view(torch.int16) == values.view(torch.int16)
        return torch.where(as_before, masters, values.float())

    def overlook_unchanged(self, params: Sequence[ShardedParam]) -> None:
        """Take no notice of what all ranks wrote to sharded weights, those that were, if it has every bit of what the
        store has. Collective, once for all of them."""
        if not params:
            return
        as_before = [self._is_as_before(param) for param in params]
        # each rank knows its own part alone, and has written the whole
        found = [
            f"{param.name} {param.checksum():08x}" if is_so else f"changed on rank {self._collectives.rank}"
            for param, is_so in zip(params, as_before, strict=True)
        ]
        named = params[0].name + f" and {len(params) - 1} others" * (len(params) > 1)
        what = f"compare what was written to {named} in GatheredParameters(), which keeps it for a modifier_rank"
        apart = set(self._collectives.unlike(found, what))
        for place, param in enumerate(params):
            if as_before[place] and place not in apart:
                param.overlook_change()

    def _is_as_before(self, param: ShardedParam) -> bool:
        first, numel = self._io.own_range(param)
        written = param.allocate()[first : first + numel].detach().cpu()
        return torch.equal(written.view(torch.uint8), self._io.own_weights(param).view(torch.uint8))

    def _has_master(self, param: ShardedParam) -> bool:
        return self._sharded.group_of[param.index].placement.trainable and bool(self._sharded.precision.master)

    def refuse(self, param: ShardedParam) -> NoReturn:
        """What was written goes with the weights that are here, at once or when nobody uses them; the store has what it
        had. So does all that was written elsewhere, which is named, too: nobody goes on with some of it."""
        others = [each for each in self._sharded.params if each is not param and each.is_written()]
        self._undo(param)
        for other in others:
            if other.is_written():  # a group goes back as one
                self._undo(other)
        owners.refuse_write(self._owner, param.param, [other.name for other in others])

    def _undo(self, param: ShardedParam) -> None:
        group = self._sharded.group_of[param.index]
        with self._lock:
            if group.persistent:  # shown, or gathered while its states are offloaded
                if not group.in_use:
                    home = self._sharded.precision.home(trainable=group.placement.trainable)
                    self._sharded.refuse_away(home.mask)  # and what was written is refused when they are back
                    self._restore(group)
            elif not param.is_shown:
                param.overlook_change()
                param.disown_graphs()  # a forward may have seen what was written
                self._live_set.forget(group)

    def settle(self, param: ShardedParam) -> None:
        """Take over what was written, or refuse it. Every rank must have written the same."""
        if self._owner.shards_weights:
            self.refuse(param)
        flat = param.allocate()
        if self._collectives.world_size > 1:
            self._collectives.agree(f"{KEEPING} {param.name} ({param.checksum():08x})")
        if not self._sharded.group_of[param.index].is_lent:
            self.keep(param, flat)
        param.overlook_change()

    def _restore(self, group: ParamGroup) -> None:
        written = [param for param in group.params if param.is_written()]
        try:
            group.reshard()
            group.wait_for_unshard()
        except WorldError:
            return  # the others wrote nothing, and do something else: they are told what
        for param in group.params:
            param.overlook_change()
        for param in written:
            param.disown_graphs()
