"""One optimizer step over all chunks: begin fixes its terms, each sub-group is stepped by them, finish ends it.

Nothing that a sub-group does depends on the others: they may be stepped in any order, and at any time in between.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

import torch

from infinity.tiers.base import Lease, ShardStore
from infinity.tiers.collectives import Collectives
from infinity.update.dry_run import options_of
from infinity.update.gradients import GradientChunks
from infinity.update.loss_scale import LossScale
from infinity.update.optimizer import ShardedOptimizer
from infinity.update.rule import History
from infinity.update.sub_group import SubGroup, Terms
from infinity.update.whole import WholeParams
from io_daemon.shared.protocol import ObjectKind


class Outcome(Enum):
    APPLIED = auto()
    SKIPPED = auto()
    """A gradient was not finite on some rank: nothing has changed on any."""


class Update:
    def __init__(
        self,
        sub_groups: Sequence[SubGroup],
        optimizer: ShardedOptimizer,
        gradients: GradientChunks,
        *,
        store: ShardStore,
        collectives: Collectives,
        scale: LossScale,
        num_params: int,
        max_norm: float,
        sub_groups_ahead: int,
        whole: WholeParams | None = None,
    ) -> None:
        """``whole``: the parameters that the optimizer's rule steps as wholes; None where it has no such groups."""
        self._sub_groups = sub_groups
        self._optimizer, self._gradients = optimizer, gradients
        self._store, self._collectives = store, collectives
        self._max_norm, self._sub_groups_ahead = max_norm, sub_groups_ahead
        self.scale = scale
        self.histories: list[History] = [None] * num_params
        """What the rule keeps for each parameter; one without a gradient neither decays nor counts a step."""
        self.grad_norm: float | None = None
        """Global norm before clipping in the last step, not finite if that was skipped; None if nobody asked."""
        self._norm_asked = max_norm > 0 or scale.checks_overflow
        self._clip_once: float | None = None
        self._whole = whole
        self._present: Sequence[bool] = ()
        """For each parameter, whether the running step steps it."""
        self._terms: Terms | None = None
        self._histories_after: dict[int, History] = {}
        self.due: Sequence[SubGroup] = ()
        """What the running step has to apply."""
        self.num_updated = 0
        """Chunks that the running, or failed, step has begun to change: with 0 the step may be repeated."""

    @property
    def wants_norms(self) -> bool:
        """Whether norms should be taken while gradients are warm."""
        return self._norm_asked

    def ask_for_norm(self) -> float | None:
        """The norm of the last step, if it was taken; from now on it is."""
        self._norm_asked = True
        return self.grad_norm

    def clip_once(self, max_norm: float) -> torch.Tensor:
        """Have the coming update clip to ``max_norm``, whatever the config says. The norm, 0-D fp32."""
        self._clip_once = float(max_norm)
        return self._norm()

    def keeps_states(self, param: int) -> bool:
        """Whether the next step goes on from the parameter's states, as they are or as somebody writes them."""
        return self._optimizer.rule.from_zeros or self.histories[param] is not None

    def forget_clipping(self) -> None:
        """The gradients that were to be clipped are dropped."""
        self._clip_once = None

    def begin(self, present: Sequence[bool]) -> Outcome:
        """Fix what the step is: norm, clip factor, learning rates, and what becomes of it.

        Args:
            present: for each parameter, whether any rank has a gradient for it.
        """
        self.num_updated = 0
        self._histories_after = {}
        self._terms, self.due = None, []
        factor = self._factor()
        if self.scale.checks_overflow and not math.isfinite(self.grad_norm or 0.0):
            return Outcome.SKIPPED
        self._present = list(present)
        wholes = self._whole.group_of if self._whole is not None else {}
        in_pieces = [flag and param not in wholes for param, flag in enumerate(present)]
        self._terms = Terms(
            present=in_pieces,
            histories=list(self.histories),
            options=options_of(self._optimizer),
            factor=factor,
        )
        self.due = [g for g in self._sub_groups if any(in_pieces[s.param] for s in g.placement.segments)]
        return Outcome.APPLIED

    def apply_all(self) -> None:
        """Step what is stepped whole, then stream every sub-group that is due through the frames."""
        if self._whole is not None and self._terms is not None:
            self._apply_whole(self._whole, self._terms)
        leases: deque[tuple[SubGroup, Lease]] = deque()
        waiting = iter(self.due)
        try:
            while True:
                while len(leases) <= self._sub_groups_ahead and (sub_group := next(waiting, None)) is not None:
                    leases.append((sub_group, sub_group.acquire(self._store)))
                if not leases:
                    break
                self.apply(*leases[0])
                leases.popleft()
        except BaseException:
            for _, lease in leases:
                lease.release()
            raise

    def _apply_whole(self, whole: WholeParams, terms: Terms) -> None:
        for param, group in whole.group_of.items():
            if self._present[param]:
                call = whole.gather(param, terms.factor)
                self.num_updated += 1
                after = self._optimizer.rule.run(call, terms.histories[param], terms.options[group])
                self._histories_after[param] = after
                whole.write(param, call)
        self._bury_gradients()

    def _bury_gradients(self) -> None:
        """Nobody reads gradients any more of chunks that no sub-group will step."""
        due = {sub_group.chunk for sub_group in self.due}
        for sub_group in self._sub_groups:
            if sub_group.chunk not in due and any(self._present[s.param] for s in sub_group.placement.segments):
                lease = self._store.acquire(sub_group.chunk, write=ObjectKind.GRAD.mask)
                lease.wait()
                lease.release(dead=ObjectKind.GRAD.mask)

    def apply(self, sub_group: SubGroup, lease: Lease) -> None:
        """Step one of the sub-groups that are due, through a lease of its own, which is released."""
        if self._terms is None:
            raise AssertionError("a sub-group is stepped outside a step, or in one that is skipped")
        lease.wait()
        self.num_updated += 1
        self._histories_after.update(sub_group.update(lease, self._terms))

    def finish(self) -> Outcome:
        """The step is over: what it counts counts from now on. Raises LossScaleError where no smaller scale is left."""
        terms, outcome = self._terms, Outcome.SKIPPED if self._terms is None else Outcome.APPLIED
        self.scale.update(overflow=outcome is Outcome.SKIPPED)
        self._terms = None
        for param, flag in enumerate(self._present if terms is not None else ()):
            if flag:
                # a rank without a part of the parameter never needs its numbers, only that it was stepped
                self.histories[param] = self._histories_after.get(param, ())
        self._gradients.clear()
        self._clip_once = None
        self._optimizer.overflow = outcome is Outcome.SKIPPED
        return outcome

    def _factor(self) -> torch.Tensor | None:
        """What gradients are multiplied by: 1 over the loss scale, and max_norm / (norm + 1e-6), at most 1, as in
        torch.nn.utils.clip_grad_norm_. None: as they are."""
        max_norm = self._max_norm if self._clip_once is None else self._clip_once
        clips = max_norm > 0 or self._clip_once is not None
        norm = self._norm() if clips or self._norm_asked else None
        factor = torch.ones(()) if norm is None or not clips else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.scale.value == 1.0:
            return factor if clips else None
        return factor / self.scale.value

    def _norm(self) -> torch.Tensor:
        total = self._gradients.square_sum()
        self._collectives.sum(total, "sum the norm of the gradients")
        norm = (total.sqrt() / self.scale.value).float()
        self.grad_norm = float(norm)
        return norm
