"""Which param groups are unsharded on the device: the policy of the device tier, over live parameters.

A group in use is always allowed; everything else obeys the limits of the config: gathering ahead stays within
``stage3_prefetch_bucket_size``, gathering ahead and keeping stay within ``stage3_max_live_parameters``, and a group is
kept after its use only if it is needed again within ``stage3_max_reuse_distance`` elements. Persistent groups do not
count and are resharded only by the update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

from infinity.plan.trace import GroupTrace
from infinity.states import ShardedState
from infinity.weights.param_group import ParamGroup
from infinity.weights.streams import CopyStream


class LiveSet:
    def __init__(
        self,
        groups: Sequence[ParamGroup],
        *,
        live_numel_max: int,
        reuse_distance_max: int,
        prefetch_numel_max: int,
        copies: CopyStream,
        makes_each: bool = False,
    ) -> None:
        """``makes_each``: of each read of a training step the store may give up the weights, and make them of their
        masters for the next."""
        self._groups, self._copies = groups, copies
        self._live_numel_max = live_numel_max
        self._reuse_distance_max = reuse_distance_max
        self._prefetch_numel_max = prefetch_numel_max
        self._makes_each = makes_each
        numels = [group.numel for group in groups]
        self._traces = {training: GroupTrace(numels) for training in (True, False)}
        self._trace = self._traces[True]
        self._live: dict[int, ParamGroup] = {}
        self._farthest: list[tuple[float, int]] = []
        """A heap of (less the place of the next use, group): of all that are live and not in use, and of some that are
        not, or are elsewhere by now. Nobody keeps it while everything fits."""
        self._epoch = -1
        """The trace's, whose places these are; -1: another trace's."""
        self._lingering: dict[int, ParamGroup] = {}
        self._held_back: set[int] = set()
        """Groups of which nothing is leased ahead before backward is over."""
        self._reads: Counter[int] = Counter()
        """How often each group's weights were read from the store in the running training step."""
        self._reads_before: Counter[int] = Counter()
        """The same of the training step before."""
        self.live_numel = 0
        self.live_numel_peak = 0

    def begin_pass(self, *, training: bool) -> None:
        """A training step (all its micro-batches) or an evaluation begins; each has an order of its own."""
        self._trace = self._traces[training]
        self._trace.begin()
        self._epoch = -1
        self._held_back.clear()
        if training:
            self._reads_before, self._reads = self._reads, Counter()

    def use(self, group: ParamGroup, *, in_pass: bool = True) -> None:
        """Unshard the group now, if it is not, and lease the next ones ahead.

        ``in_pass``: it will be used again at this place of the next pass.
        """
        if group.persistent:
            if group.state is not ShardedState.UNSHARDED:
                group.wait_for_unshard()
            return
        if (
            in_pass and not group.in_use
        ):  # what is held, nobody waits for; and ranks may differ in how often they use it
            self._trace.use(group.index)
        if group.state is not ShardedState.UNSHARDED:
            self._settle_lingering()
            self._make_room(group.numel)
            self._copies.limit(self._live_numel_max - self.live_numel - group.numel)
            group.wait_for_unshard(gives_up=in_pass and self._gives_up(group))
            self._live[group.index] = group
            self.live_numel += group.numel
            self.live_numel_peak = max(self.live_numel_peak, self.live_numel)
        elif self._copies.is_beside:
            group.note_use()
        if in_pass:
            self._gather_ahead()

    def _gives_up(self, group: ParamGroup) -> bool:
        """A training step is about to read the group's weights: whether the store need not keep them. It is the last
        read when there were as many as in the step before."""
        if self._trace is not self._traces[True]:
            return False
        self._reads[group.index] += 1
        return self._makes_each or self._reads[group.index] == self._reads_before[group.index]

    def done(self, group: ParamGroup) -> None:
        """A use ended. Keep the group if it is needed again soon, else reshard it."""
        if group.persistent or group.index not in self._live:
            return
        if group.in_use:
            self._lingering[group.index] = group
            return
        self._lingering.pop(group.index, None)
        distance = self._trace.reuse_distance(group.index)
        if distance is None or distance > self._reuse_distance_max or self.live_numel > self._live_numel_max:
            self._reshard(group)
        else:
            self._may_leave(group)

    def linger(self, group: ParamGroup) -> None:
        """An operation or a node of backward had the weights; decide about the group when another one is needed."""
        if not group.persistent:
            self._lingering[group.index] = group
            self._may_leave(group)

    def forget(self, group: ParamGroup) -> None:
        """Somebody wrote to the weights: what is here is not what the store has. Nothing else may hold them."""
        if group.index in self._live and not group.in_use:
            self._reshard(group)

    def drop_ahead(self, group: ParamGroup) -> None:
        """Give up what was leased of the group ahead of its use."""
        if group.state is ShardedState.UNSHARDING:
            group.reshard()

    def hold_back(self, group: ParamGroup) -> None:
        """Backward updates the group, and others only after it: who needs its weights before is to be told so, and
        nobody is by an order that foresees a use."""
        self.drop_ahead(group)
        self._held_back.add(group.index)

    def reshard_all(self, *, persistent: bool = False) -> None:
        """Nothing is in use: reshard what is live and drop what was leased ahead."""
        self._lingering.clear()
        for group in self._groups:
            if group.persistent and not persistent:
                continue
            if group.index in self._live:
                if not group.in_use:
                    self._reshard(group)
            elif group.state is not ShardedState.SHARDED:
                group.reshard()

    def settle(self) -> None:
        """Backward is over: keep what the pass needs again soon."""
        for group in list(self._live.values()):
            if not group.in_use:
                self.done(group)
        self._lingering.clear()
        self._held_back.clear()

    def _settle_lingering(self) -> None:
        for index, group in list(self._lingering.items()):
            if not group.in_use:
                del self._lingering[index]
                self.done(group)

    def _make_room(self, numel: int) -> None:
        """Reshard what is not in use, farthest reuse first, until ``numel`` more elements fit."""
        while self.live_numel + numel > self._live_numel_max and (group := self._farthest_idle()) is not None:
            self._reshard(group)

    def _farthest_idle(self) -> ParamGroup | None:
        """What is live and not in use, and needed last. Who looks at all for it takes, of thousands, as long as a
        gather."""
        if self._epoch != self._trace.epoch:
            self._epoch = self._trace.epoch
            self._farthest = [self._place(index) for index in self._live]
            heapify(self._farthest)
        while self._farthest:
            place = self._farthest[0]
            group = self._live.get(place[1])
            if group is not None and not group.in_use and place == self._place(group.index):
                return group
            heappop(self._farthest)  # it is put there anew when its use is over
        return None

    def _may_leave(self, group: ParamGroup) -> None:
        if self._epoch == self._trace.epoch:
            heappush(self._farthest, self._place(group.index))

    def _place(self, index: int) -> tuple[float, int]:
        place = self._trace.next_use(index)
        return (-inf if place is None else -place), index

    def _gather_ahead(self) -> None:
        planned_numel = self.live_numel
        for index in self._trace.upcoming(self._prefetch_numel_max):
            group = self._groups[index]
            if group.state is ShardedState.UNSHARDED or index in self._held_back:
                continue
            planned_numel += group.numel
            if planned_numel > self._live_numel_max:
                return
            if group.state is ShardedState.SHARDED:
                group.unshard()

    def _reshard(self, group: ParamGroup) -> None:
        del self._live[group.index]
        self._lingering.pop(group.index, None)
        self.live_numel -= group.numel
        group.reshard()
