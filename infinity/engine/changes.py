"""Changing weights in the store: what must not be in use before, what follows on the device afterwards.

An update, a checkpoint that is loaded and weights that move to another tier are all changes: nothing has changed where
one is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from infinity.engine.phases import Phases
from infinity.engine.refusals import Refusals
from infinity.engine.written import Written
from infinity.errors import EngineStateError
from infinity.states import ShardedState
from infinity.update.reducer import Reducer
from infinity.weights.live_set import LiveSet
from infinity.weights.param_group import ParamGroup
from infinity.weights.saved_tensors import stale_weights
from infinity.weights.sharded_model import ShardedModel


class WeightChanges:
    def __init__(
        self,
        sharded: ShardedModel,
        live_set: LiveSet,
        reducer: Reducer,
        phases: Phases,
        *,
        lock: threading.RLock,
        refusals: Refusals,
        written: Written,
    ) -> None:
        self._sharded, self._store, self._written = sharded, sharded.store, written
        self._live_set, self._reducer, self._phases = live_set, reducer, phases
        self._lock, self._refusals = lock, refusals

    def check(self) -> None:
        """Raises WeightsError or EngineStateError, before anything changes, for what an update would break."""
        self._check_groups(self._sharded.groups)

    def check_written(self) -> None:
        """Raises WeightsError for what was written and is not kept, or was since the forward that saved it, while
        nothing is updated: early updates cannot be taken back for a write to a group that comes last."""
        self._written.check(self._sharded.params)
        if stale := [param for param in self._sharded.params if param.take_stale()]:
            raise stale_weights(stale[0].name)

    def make_ready(self, group: ParamGroup) -> None:
        """Backward is about to change the group's weights in the store. Raises WeightsError or EngineStateError for
        what that would break."""
        self._check_groups([group])
        self._live_set.hold_back(group)

    def _check_groups(self, groups: Sequence[ParamGroup]) -> None:
        params = [param for group in groups for param in group.params]
        self._written.check(params)
        for param in params:
            self._refusals.refuse_views(param)
        with self._lock:
            for group in groups:
                if group.in_use and not group.persistent:
                    raise EngineStateError(
                        f"the weights of {group.name} are in use: change them, as step() does, outside of "
                        "GatheredParameters and of calls that use them, and while no other thread calls the model"
                    )

    def settle(self) -> None:
        """Do what is due of every chunk."""
        with self._lock:
            self._live_set.reshard_all()
            self._store.settle()

    def begin(self) -> None:
        """Nothing is in use any more."""
        with self._lock:
            self._live_set.reshard_all(persistent=True)

    def end(self) -> None:
        self._reducer.clear()
        self.refresh(updated=True)
        for param in self._sharded.params:
            param.count_update()
        self._store.complete()
        self._phases.in_training_pass = False

    def skip(self) -> None:
        """The weights stay as they are. The next passes will not be like this one, which has no update."""
        self._reducer.clear()
        with self._lock:
            self._live_set.reshard_all()
        self._store.abandon()
        self._phases.in_training_pass = False

    def begin_rewrite(self) -> None:
        """Weights are about to get other values in the store: nothing is in use, and nothing is leased ahead. Raises
        EngineStateError or WeightsError, before anything changes, where something is."""
        for group in self._sharded.groups:
            if group.in_use:
                raise EngineStateError(f"the weights of {group.name} are gathered: load outside GatheredParameters")
        self.check()
        self.skip()
        self._live_set.reshard_all(persistent=True)

    def end_rewrite(self) -> None:
        """The store has them: what is on the device follows."""
        self.refresh()
        for param in self._sharded.params:
            param.count_write()

    def drop_weights(self) -> None:
        """Give up all weights that are in memory; ``refresh`` brings back those that stay, under the views that are
        kept of them.

        Raises WeightsError for what is changed, or kept in a view of before.
        """
        self.check()
        with self._lock:
            self._live_set.reshard_all(persistent=True)
            for group in self._sharded.groups:
                group.withdraw()
                for param in group.params:
                    if param.is_shown:
                        param.hide()
                    param.drop(come_back=group.persistent)

    def refresh(self, *, updated: bool = False) -> None:
        """Persistent weights are what the store has, where they were. ``updated``: by an update, and nothing else."""
        for group in self._sharded.groups:
            if not group.persistent:
                continue
            if group.state is ShardedState.SHARDED:
                group.wait_for_unshard(updated=updated)
            for param in group.params:
                if not param.is_shown:  # dropped, and perhaps gathered since then by an evaluation
                    param.show()

    @property
    def chunks_that_stay(self) -> Sequence[int]:
        """Those of weights that are on the device between steps as well: nobody asks for them before a use."""
        return [chunk for group in self._sharded.groups if group.persistent for chunk, _ in group.chunks]
