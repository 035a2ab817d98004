"""Weights that the user gathers for a while, to read them or to change them: what ``GatheredParameters`` asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from infinity.engine.phases import Phases
from infinity.engine.refusals import Refusals
from infinity.engine.written import Written
from infinity.errors import WorldError
from infinity.tiers.collectives import Collectives
from infinity.weights import access, arrays, owners, transforms
from infinity.weights.live_set import LiveSet
from infinity.weights.param import ShardedParam, flattened
from infinity.weights.param_group import ParamGroup
from infinity.weights.sharded_model import ShardedModel
from infinity.weights.state_io import StateIO
from io_daemon.shared.protocol import ObjectKind


class Gathering:
    """``lock``: weights come and go under it."""

    def __init__(
        self,
        sharded: ShardedModel,
        io: StateIO,
        collectives: Collectives,
        live_set: LiveSet,
        phases: Phases,
        *,
        lock: AbstractContextManager[object],
        written: Written,
        refusals: Refusals,
    ) -> None:
        self._sharded, self._io, self._collectives = sharded, io, collectives
        self._live_set = live_set
        self._phases, self._lock = phases, lock
        self._written, self._refusals = written, refusals
        self._num_writable = written.num_writable
        arrays.watch(self)

    def keeps_writes(self, param: ShardedParam) -> bool:
        return param.index in self._num_writable

    @property
    def resident(self) -> Mapping[int, ShardedParam]:
        return self._sharded.resident

    @property
    def left_behind(self) -> Mapping[int, ShardedParam]:
        return self._sharded.left_behind

    def lend_array(self, param: ShardedParam) -> bool:
        param.lend_memory()
        return not self._sharded.policy.shards_weights or self.keeps_writes(param)

    @contextmanager
    def gathered(self, params: Sequence[ShardedParam], *, in_pass: bool, modifier_rank: int | None) -> Iterator[None]:
        """The parameters are their weights inside. Collective, at both ends.

        Args:
            in_pass: a pass of the model is open, and will ask for the weights at this place again.
            modifier_rank: the rank whose changes become everybody's, and are kept; None: changes are refused, but for
                those that leave every bit as it was, such as of a state dict that is loaded to be looked at.
        """
        groups = self._begin(params, in_pass=in_pass, modifier_rank=modifier_rank)
        whole_world = True
        try:
            yield
            if modifier_rank is None:
                self._overlook_unchanged(params)
        except WorldError:
            whole_world = False  # nobody is there to agree with
            raise
        finally:
            try:
                if modifier_rank is not None and whole_world:
                    self._keep(params, modifier_rank)
            finally:
                changed, unseen = self._end(params, groups, writable=modifier_rank is not None)
        with transforms.outside():
            for param in changed:
                self._written.settle(param)
        for param in unseen:
            self._refusals.refuse_unseen(param)

    @transforms.apart
    def _begin(
        self, params: Sequence[ShardedParam], *, in_pass: bool, modifier_rank: int | None
    ) -> Sequence[ParamGroup]:
        """The parameters are their weights from now on; the groups that are held for them."""
        groups = list({group.index: group for group in (self._sharded.group_of[p.index] for p in params)}.values())
        owners.check_modifier_rank(modifier_rank, self._collectives.world_size)
        if modifier_rank is not None:
            for param in params:
                # what is written cannot be taken back where the store is it
                if self._sharded.group_of[param.index].persistent:
                    self._refusals.refuse_views(param)
        with self._lock:
            held: list[ParamGroup] = []
            try:
                self._phases.refuse_beside_update()
                for group in groups:
                    self._live_set.use(group, in_pass=in_pass)
                    group.num_holds += 1
                    held.append(group)
            except BaseException:  # one of them cannot be here
                self._end([], held, writable=False)
                raise
            written = [param for param in params if not param.show()]
        if written:
            self._end(params, groups, writable=False)
            self._written.refuse(written[0])
        if modifier_rank is not None:
            for param in params:
                self._num_writable[param.index] = self._num_writable.get(param.index, 0) + 1
        return groups

    def refresh(self, param: ShardedParam) -> None:
        """The store has new weights of the parameter: those that are on the device follow, and what a graph has kept
        of the weights, here or not, is no more. Collective."""
        if param.full is not None:
            values = self._io.read(param, ObjectKind.WEIGHT)
            with torch.no_grad():
                param.allocate().copy_(flattened(values, param.order))
        param.count_write()

    def begin_write(self, param: ShardedParam) -> None:
        """The store is about to get new weights of the parameter."""
        group = self._sharded.group_of[param.index]
        with self._lock:
            # what was leased ahead was read before the write, and would be waited for by it
            self._live_set.drop_ahead(group)
            if not group.persistent and not group.in_use:
                self._live_set.forget(group)
        self._refusals.refuse_views(param)

    def set_data(self, param: ShardedParam, data: torch.Tensor) -> None:
        """``param.data = data``: the weights have new values, which are in ``data``'s own memory where they stay."""
        if data.shape != param.shape:
            raise ValueError(f"{param.name}: its shape stays {tuple(param.shape)}, {tuple(data.shape)} was given")
        with torch.no_grad():
            param.move(
                data if access.param_behind(data) is None else data.clone(),
                takes_over=not self._sharded.policy.shards_weights,
            )

    @transforms.apart
    def _overlook_unchanged(self, params: Sequence[ShardedParam]) -> None:
        if self._sharded.policy.shards_weights:
            written = [param for param in params if param.is_written() and not self.keeps_writes(param)]
            self._written.overlook_unchanged(written)

    @transforms.apart
    def _keep(self, params: Sequence[ShardedParam], modifier_rank: int) -> None:
        changed = torch.tensor([param.is_written() for param in params], dtype=torch.uint8, device="cpu")
        what = f"agree which of {len(params)} gathered parameters were changed, and take what rank {modifier_rank} has"
        self._collectives.max(changed, what)
        for param in [param for param, flag in zip(params, changed.tolist(), strict=True) if flag]:
            self._refusals.refuse_views(param)
            with torch.no_grad():
                values = param.allocate()
                self._collectives.broadcast(values, f"share the changes of {param.name}", source=modifier_rank)
            self._live_set.drop_ahead(self._sharded.group_of[param.index])
            self._written.keep(param, values)
            param.count_write()

    @transforms.apart
    def _end(
        self, params: Sequence[ShardedParam], groups: Sequence[ParamGroup], *, writable: bool
    ) -> tuple[list[ShardedParam], list[ShardedParam]]:
        """The parameters that were changed where that is not kept, and those that autograd keeps where no hook is."""
        for param in params if writable else ():
            self._num_writable[param.index] -= 1
            if not self._num_writable[param.index]:
                del self._num_writable[param.index]
        with self._lock:
            changed = [param for param in params if param.is_written() and not self.keeps_writes(param)]
            unseen = [p for p in params if not self._sharded.group_of[p.index].persistent and p.is_kept_unseen()]
            for param in params:
                param.hide()
            for group in groups:
                group.num_holds -= 1
                self._live_set.linger(group)
            for param in changed:
                self._live_set.forget(self._sharded.group_of[param.index])
        return changed, unseen
