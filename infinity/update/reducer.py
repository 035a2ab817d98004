"""When gradients are reduced: as soon as a group has them all, in one order on every rank.

With several ranks the reductions run asynchronously on a process group of their own and in a fixed order, first the
reverse of registration, then the order in which rank 0's groups were complete in the first backward. So a parameter
that is used on one rank only delays a reduction, and neither mixes up nor deadlocks the others (as DDP's buckets).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from infinity.errors import WeightsError
from infinity.tiers.collectives import Collectives
from infinity.tiers.reductions import Reducing
from infinity.update.gradients import GradientChunks
from infinity.update.in_backward import InBackward
from infinity.weights import transforms
from infinity.weights.param import ShardedParam
from infinity.weights.param_group import GradientOf, ParamGroup


class _InFlight(NamedTuple):
    group: ParamGroup
    work: Reducing
    gradient_of: GradientOf
    final: bool
    """Every parameter of the group had its gradient on this rank."""


class Reducer:
    def __init__(
        self,
        groups: Sequence[ParamGroup],
        gradients: GradientChunks,
        collectives: Collectives,
        num_params: int,
        *,
        gradient_dtype: torch.dtype = torch.float32,
        reduces_each: bool = False,
        rounds_sums: bool = False,
    ) -> None:
        """
        Args:
            gradient_dtype: of gradients whose reduction is put off.
            reduces_each: every backward is reduced by itself, and not the sum of several.
            rounds_sums: that sum is rounded where it is reduced, also by a rank that is alone.
        """
        self._groups = {group.index: group for group in groups if group.placement.trainable}
        self._gradients, self._collectives = gradients, collectives
        self._gradient_dtype = gradient_dtype
        self._reduces_each = reduces_each
        self._rounds = reduces_each or rounds_sums
        """Whether what a rank adds by itself is rounded to the dtype of reductions."""
        self._adds_at_once = collectives.world_size == 1 and not rounds_sums
        """Whether a gradient goes to the step's as it comes: nobody waits for it, and it is not rounded with others."""
        self._used = torch.zeros(num_params, dtype=torch.uint8, device="cpu")
        self._reduced = torch.zeros_like(self._used)
        """For each parameter, whether the running backward has begun to reduce a gradient of this rank's for it."""
        self._order = sorted(self._groups, reverse=True)
        self._completed: dict[int, None] = {}
        self._order_learnt = False
        self._num_issued = 0
        self._num_dropped = 0
        self._in_flight: deque[_InFlight] = deque()
        self.norms = False
        """The running micro-batch is the last one and a gradient norm is wanted."""
        self.puts_off = False
        """The running backward is not reduced: its gradients stay whole, and are reduced with the next one's."""
        self._has_put_off = False
        self.has_taken = False
        """Whether the running backward has given a gradient; whoever begins one says that it has not."""
        self.divisor = 1
        """What the running backward's gradients are divided by, where its loss was not."""
        self.in_backward: InBackward | None = None
        """Steps groups as their gradients become final, until the running backward is over; None: nothing does."""

    @property
    def used(self) -> list[bool]:
        """For each parameter, whether any rank had a gradient for it since ``clear``; true after ``finish``."""
        return [bool(flag) for flag in self._used.tolist()]

    def holds(self, param: int) -> bool:
        """Whether the running step has a gradient of the parameter."""
        return bool(self._used[param])

    def take(self, group: ParamGroup, param: ShardedParam) -> bool:
        """Autograd has accumulated a gradient of the parameter. True if it was the last of the group.

        Re-entrant checkpointing accumulates several times in one backward: each is added to the step's by itself, since
        added up first they would be rounded otherwise than in ``param.grad``.
        """
        self.has_taken = True
        if group.has_taken(param):
            if self._adds_at_once:
                self._add_own(group)
            elif not self._reduces_each:
                group.keep_gradients(self._gradient_dtype)
        return group.take_gradient(param, self.divisor)

    def take_put(self, group: ParamGroup, param: ShardedParam) -> None:
        """The user has given the parameter a gradient: as that of a backward whose reduction is put off."""
        group.take_gradient(param)
        if self._adds_at_once:
            self._add_own(group)
            return
        group.keep_gradients(self._gradient_dtype)
        self._has_put_off = True

    @property
    @transforms.apart
    def has_any(self) -> bool:
        """Whether the running step has a gradient of any parameter."""
        return self._has_put_off or bool(self._used.any())

    def note(self, param: int) -> None:
        """The running step has a gradient of the parameter that no backward gave."""
        self._used[param] = 1

    def forget(self, group: ParamGroup, param: ShardedParam) -> None:
        """The user wants no gradient of the parameter in the running step; between passes. What is not reduced yet is
        this rank's own business, as under DDP."""
        self._num_dropped += self.holds(param.index)
        self._used[param.index] = 0
        group.drop_gradient(param)
        self._gradients.forget(param.index)

    @property
    def told(self) -> str:
        """What must be the same on all ranks, or one's gradients would meet others of another."""
        return f"after {self._collectives.num_reductions} reductions and {self._num_dropped} zero_grad() of gradients"

    def clear(self, *, by_user: bool = False) -> None:
        """Drop the gradients of an update that was done, of a step that failed, or as the user wants it."""
        self._num_dropped += by_user and self.has_any
        self._gradients.clear()
        self._used.zero_()
        self._reduced.zero_()
        self._completed.clear()
        self._in_flight.clear()
        self._num_issued = 0
        self._has_put_off, self.in_backward = False, None
        for group in self._groups.values():
            group.drop_gradients()

    def complete(self, group: ParamGroup) -> None:
        """Every parameter of the group has its gradient."""
        if self._adds_at_once:
            self._add_own(group, final=True)
            return
        if self.puts_off or self._collectives.world_size == 1:
            return
        if not self._reduces_each and _is_within_checkpoint():
            return  # it may come again, and nobody counts on its memory before
        self._completed[group.index] = None
        if self.in_backward is not None:
            self.in_backward.claim(group)
        while self._num_issued < len(self._order) and self._order[self._num_issued] in self._completed:
            self._issue()
        while self._in_flight and self._in_flight[0].work.is_completed():
            self._add_reduced()

    def finish(self) -> None:
        """Backward is over: reduce what is left, agree on which parameters were used."""
        self._finish("end a backward", puts_off=self.puts_off)
        self.in_backward = None

    def settle(self) -> None:
        """Reduce what was put off, if anything was: somebody asks for it before the boundary. Collective."""
        if self._has_put_off:
            self.norms = False
            self._finish("reduce what was put off", puts_off=False)

    @property
    def has_put_off(self) -> bool:
        """Whether gradients of the running step wait, whole, for the last micro-batch."""
        return self._has_put_off

    def _finish(self, what: str, *, puts_off: bool) -> None:
        if not self._adds_at_once:
            # ranks that still gather must hear of it before this one waits for what they have not reduced yet
            self._collectives.agree(f"{what}{', its gradients to be reduced later' * puts_off}")
            self._has_put_off = puts_off
            if puts_off:
                for group in self._groups.values():
                    group.keep_gradients(self._gradient_dtype)
                return
        if self._collectives.world_size == 1:
            for group in self._groups.values():
                self._add_own(group)
            return
        completed = list(self._completed)
        while self._num_issued < len(self._order):
            self._issue()
        while self._in_flight:
            self._add_reduced()
        self._completed.clear()
        self._num_issued = 0
        self._agree()
        if not self._order_learnt:
            seen = self._collectives.broadcast_object(completed, "learn the order of reductions")
            self._order = list(dict.fromkeys([*seen, *self._order]))
            self._order_learnt = bool(seen)

    def _agree(self) -> None:
        """On what any rank had, and reduce what has come since: to a leaf's group, which is complete without it.

        Raises WeightsError, on every rank, for a parameter whose gradient was reduced before: the mean of a sum has
        other bits than the sum of two means.
        """
        late = torch.zeros_like(self._used)
        groups = [group for group in self._groups.values() if group.has_gradients]
        late[[param.index for group in groups for param in group.params if group.has_gradient_of(param)]] = 1
        told = torch.stack([self._used, self._reduced, late])
        self._collectives.max(told, "agree which parameters were used")
        used, reduced, given = told.bool()
        self._used.copy_(used | given)
        self._reduced.zero_()
        if not given.any():
            return
        params = [(group, param) for group in self._groups.values() for param in group.params]
        if (reduced & given).any():
            raise WeightsError(
                ", ".join(param.name for _, param in params if reduced[param.index] and given[param.index]),
                "got a gradient after its mean over the ranks was taken, as re-entrant checkpoints give several in one "
                "backward",
                "checkpoint with use_reentrant=False, whose gradients come once",
            )
        for group in dict.fromkeys(group for group, param in params if given[param.index]):
            self._start(group)
            self._add_reduced()
        self._reduced.zero_()

    def _add_own(self, group: ParamGroup, *, final: bool = False) -> None:
        if group.has_gradients or group.has_kept_gradients:
            params, gradient_of = group.take_gradients(rounded=self._rounds)
            self._used[params] = 1
            self._add(group, gradient_of, params, final=final)

    def _add(self, group: ParamGroup, gradient_of: GradientOf, params: list[int], *, final: bool) -> None:
        """``final``: every parameter has its gradient, and none will get another."""
        if self.in_backward is not None and self.in_backward.takes(group, params) and final:
            self.in_backward.step(group, gradient_of)
            return
        self._gradients.add([chunk for chunk, _ in group.chunks], gradient_of, params, norms=self.norms)

    def _issue(self) -> None:
        self._start(self._groups[self._order[self._num_issued]])
        self._num_issued += 1

    def _start(self, group: ParamGroup) -> None:
        used = [param.index for param in group.params if group.has_gradient_of(param)]
        self._used[used] = self._reduced[used] = 1
        final = group.index in self._completed and len(used) == len(group.params)
        self._in_flight.append(_InFlight(group, *group.reduce_gradients(), final))

    def _add_reduced(self) -> None:
        group, work, gradient_of, final = self._in_flight.popleft()
        work.wait()
        self._add(group, gradient_of, [param.index for param in group.params], final=final)


def _is_within_checkpoint() -> bool:
    """Whether this runs within a node's backward that is written in Python, as that of re-entrant checkpoints is: it
    runs a backward of its own, which is over before all gradients are there."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        frame = frame.f_back
    return frame is not None
