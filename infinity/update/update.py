"""One optimizer step over all chunks: begin fixes its terms, each sub-group is stepped by them when it is due.

Nothing that a sub-group does depends on the others: they may be stepped in any order, and at any time until somebody
looks at their chunk, or the next step begins.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Final

import torch

from infinity.errors import EngineStateError
from infinity.tiers.base import Lease, stream
from infinity.tiers.collectives import Collectives
from infinity.tiers.due import DueStore, Work
from infinity.tiers.inference import outside_inference
from infinity.update.dry_run import in_words, options_of
from infinity.update.gradients import GradientChunks
from infinity.update.loss_scale import LossScale
from infinity.update.optimizer import ShardedOptimizer
from infinity.update.rule import History, Options
from infinity.update.sub_group import SubGroup, Terms
from infinity.update.whole import WholeParams
from infinity.weights import transforms
from infinity.weights.param_group import GradientOf
from io_daemon.shared.protocol import ObjectKind

EARLY_LEASES: Final = 2
"""Leases at a time while a group is stepped inside backward."""


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
        store: DueStore,
        scale: LossScale,
        num_params: int,
        left_out: Sequence[int],
        counts_all: bool,
        max_norm: float,
        whole: WholeParams | None = None,
        remade: Container[int] = (),
    ) -> None:
        """
        Args:
            left_out: the parameters that are in no group of the optimizer: it steps none of them.
            counts_all: the norm is that of all gradients; else of those that are stepped.
            whole: the parameters that the optimizer's rule steps as wholes; None where it has no such groups.
            remade: chunks whose weights the store makes anew of the masters: an update inside backward writes none.
        """
        self._works = [(sub_group, self._work_of(sub_group)) for sub_group in sub_groups]
        self._sub_group_of = {sub_group.chunk: sub_group for sub_group in sub_groups}
        self._early: set[int] = set()
        """Chunks that were stepped inside the running step's backward."""
        self.is_early = False
        """Whether the running step began inside backward, and ``begin`` is still to come."""
        self._optimizer, self._gradients = optimizer, gradients
        self._store, self._remade = store, remade
        self._max_norm = max_norm
        self.scale = scale
        self._left_out, self._counts_all = left_out, counts_all
        self._histories: list[History] = [None] * num_params
        """What the rule keeps for each parameter; one without a gradient neither decays nor counts a step."""
        self.grad_norm: float | None = None
        """Global norm before clipping in the last step, not finite if that was skipped; None if nobody asked."""
        self._norm_asked = max_norm > 0 or scale.checks_overflow
        self._is_finite = True
        """Whether the gradients are, of which the norm was taken last."""
        self._clip_once: float | None = None
        self._clipped: Sequence[bool] = ()
        """Whether its norm has counted a parameter, by that."""
        self._whole = whole
        self._present: Sequence[bool] = ()
        """For each parameter, whether the running step steps it."""
        self._terms: Terms | None = None
        """Those of the step whose sub-groups are stepped, or due."""
        self._histories_after: dict[int, History] = {}
        self._num_due = 0
        self._is_running = False
        """Whether ``begin`` was called and ``finish`` not yet."""
        self._is_applied = False
        """Whether the running step is more than begun: ``apply`` was called."""
        self.num_updated = 0
        """Chunks that the step has begun to change."""
        self._is_torn = False
        """An error came while a chunk was changed."""
        self._seconds = 0.0

    @property
    def histories(self) -> list[History]:
        """The rule's histories of all parameters, after what is due is done."""
        self.settle()
        return self._histories

    @property
    def steps_whole(self) -> bool:
        """Whether some parameters are gathered for their step."""
        return self._whole is not None

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else's code steps the chunks, which may look at anything as it is in ``step()``."""
        return self._optimizer.rule.is_foreign

    @property
    def wants_norms(self) -> bool:
        """Whether norms should be taken while gradients are warm."""
        return self._norm_asked

    def check_overflow(self) -> None:
        """A step whose gradients are not all finite is skipped from now on."""
        self.scale.checks_overflow = self._norm_asked = True

    def ask_for_norm(self) -> float | None:
        """The norm of the last step, if it was taken; from now on it is."""
        self._norm_asked = True
        return self.grad_norm

    def clip_once(self, max_norm: float, present: Sequence[bool]) -> torch.Tensor:
        """Have the coming update clip to ``max_norm``, whatever the config says. The norm, 0-D fp32, of the parameters
        that are ``present``."""
        self._clip_once, self._clipped = float(max_norm), list(present)
        return self._norm(present)

    def refuse_clipped(self, call: str) -> None:
        """Raises EngineStateError where the step's gradients were clipped: the store has them unclipped until then."""
        if self._clip_once is not None:
            raise EngineStateError(
                f"{call} after clip_grad_norm_(), whose factor the step's gradients are multiplied by in step(): call "
                "step() or zero_grad() before it, or clip behind it"
            )

    def refuse_clipping(self, *, is_boundary: bool) -> None:
        """Raises EngineStateError where ``clip_once`` would not give what torch's clipping gives."""
        if self._max_norm > 0:
            raise EngineStateError(
                f"clip_grad_norm_() beside gradient_clipping {self._max_norm:g} of the configuration, to which step() "
                "clips: leave the call out, or write 0 there"
            )
        if not is_boundary:
            raise EngineStateError(
                "clip_grad_norm_() before the last micro-batch of a step would clip a part of its gradients: call it "
                "where engine.is_gradient_accumulation_boundary()"
            )
        self.refuse_clipped("clip_grad_norm_()")

    def keeps_states(self, param: int) -> bool:
        """Whether the next step goes on from the parameter's states, as they are or as somebody writes them."""
        return self._optimizer.rule.from_zeros or self.histories[param] is not None

    def forget_clipping(self) -> None:
        """The gradients that were to be clipped are dropped."""
        self._clip_once = None

    def begin_early(self) -> None:
        """The last backward of a step begins: its terms are fixed now, and chunks may be stepped before ``begin``.
        Where they may, there is no loss scale."""
        self.settle()
        options = self._checked_options()
        self._is_running, self.is_early, self.num_updated = True, True, 0
        self._histories_after = {}
        self._terms = Terms(
            present=self.grouped([True] * len(self._histories)),
            histories=list(self._histories),
            options=options,
            factor=None,
        )

    def bar(self, chunks: Sequence[int], whose: str) -> None:
        """Gradients of the chunks are final: nobody may have these before they are stepped, and the step is over."""
        self._store.bar(chunks, whose)

    def beyond_bar(self, chunks: Sequence[int], whose: str) -> AbstractContextManager[None]:
        """``step_early`` is called within, of these chunks, and whatever it takes."""
        return self._store.beyond_bar(chunks, whose)

    def step_early(self, chunks: Sequence[int], gradient_of: GradientOf | None) -> None:
        """Step chunks that are final, by gradients as given, or as the store has them."""
        grad = 0 if gradient_of is None else ObjectKind.GRAD.mask

        def written(sub_group: SubGroup) -> int:
            return sub_group.dirty & ~(ObjectKind.WEIGHT.mask if sub_group.chunk in self._remade else 0)

        def step(lease: Lease, sub_group: SubGroup) -> tuple[int, int]:
            self._run(sub_group, lease, gradient_of, rounds=sub_group.chunk not in self._remade)
            return written(sub_group), ObjectKind.GRAD.mask & ~grad

        sub_groups = (self._sub_group_of[chunk] for chunk in chunks)
        issued = (
            (self._store.acquire(each.chunk, read=each.read & ~grad, write=written(each)), each) for each in sub_groups
        )
        stream(issued, step, num_held_max=EARLY_LEASES)
        self._early.update(chunks)

    def agree(self, collectives: Collectives, number: int, present: Sequence[bool]) -> None:
        """All ranks are about to do the same step, and take its norm if any wants it. Collective. Raises WorldError."""
        if collectives.world_size > 1:
            asked = torch.tensor([self._norm_asked], dtype=torch.uint8, device="cpu")
            clips = "" if self._clip_once is None else f" clipped to {float(self._clip_once)!r}"
            options = in_words(options_of(self._optimizer))
            collectives.max(asked, f"update {sum(present)} parameters{clips} in step {number}, with {options}")
            self._norm_asked = bool(asked)

    def begin(self, present: Sequence[bool]) -> Outcome:
        """Fix what the step is: norm, clip factor, learning rates, and what becomes of it.

        Args:
            present: for each parameter, whether any rank has a gradient for it.
        """
        if self.is_early:
            return self._go_on(self.grouped(present))
        if self._clip_once is not None and list(present) != self._clipped:
            raise EngineStateError(
                "a parameter was given a gradient, or its own was dropped, behind clip_grad_norm_(), by whose norm the "
                "step clips: do that before it, or drop all by engine.zero_grad()"
            )
        self.settle()  # what the step before left to chunks that nobody has used since
        options = self._checked_options()
        self._is_running, self._terms, self.num_updated = True, None, 0
        factor = self._factor(present)
        if self.scale.checks_overflow and not self._is_finite:
            return Outcome.SKIPPED
        self._present = present = self.grouped(present)
        wholes = self._whole.group_of if self._whole is not None else {}
        in_pieces = [flag and param not in wholes for param, flag in enumerate(present)]
        self._histories_after = {}
        self._terms = Terms(
            present=in_pieces,
            histories=list(self._histories),
            options=options,
            factor=factor,
        )
        return Outcome.APPLIED

    def _checked_options(self) -> list[Options]:
        """The options of the step. Raises EngineStateError, before anything begins, where they cannot be followed."""
        options = options_of(self._optimizer)
        self._optimizer.rule.check(options)
        return options

    def _go_on(self, present: Sequence[bool]) -> Outcome:
        """The step that began inside backward is called: the rest is stepped by the same terms."""
        if self._terms is None:
            raise AssertionError("a step began without its terms")
        if options_of(self._optimizer) != self._terms.options:
            raise EngineStateError(
                "the optimizer's options were changed between backward() and step(), and backward had used them: "
                'change them after step(), or write false for "io_daemon.update_in_backward"'
            )
        self._present = present
        self._terms = replace(self._terms, present=self._present)
        return Outcome.APPLIED

    def apply(self, chunks: Iterable[int] | None = None) -> None:
        """Step what is stepped whole. The rest is due from then on, and done now of ``chunks``, or of all."""
        if self._terms is None:
            raise AssertionError("an update is applied outside a step, or in one that is skipped")
        self._is_applied = True
        if self._whole is not None:
            self._apply_whole(self._whole, self._terms)
        for sub_group, work in self._works:
            if sub_group.chunk not in self._early and self._steps(sub_group, self._terms.present):
                self._num_due += 1
                self._store.postpone(sub_group.chunk, work)
        if self._num_due == 0:
            self._note_histories()
        self.settle(chunks)

    def settle(self, chunks: Iterable[int] | None = None) -> None:
        """Step the sub-groups that are due, of ``chunks`` or all, streaming them through the frames."""
        self._store.settle(chunks)

    def finish(self) -> Outcome:
        """The step is over, whatever is due of it. Raises LossScaleError where no smaller scale is left."""
        outcome = Outcome.SKIPPED if self._terms is None else Outcome.APPLIED
        self.scale.update(overflow=outcome is Outcome.SKIPPED)
        self._is_running = self._is_applied = False
        self._forget_early()
        self._gradients.clear()
        self._clip_once = None
        self._optimizer.overflow = outcome is Outcome.SKIPPED
        return outcome

    def cancel(self) -> None:
        """The running step has failed, and nothing that it would change has: nothing is due of it."""
        if self._is_running:
            self._store.forget_due()
            self._num_due, self._is_running, self._is_applied = 0, False, False
            self._forget_early()

    def _forget_early(self) -> None:
        self.is_early = False
        self._early.clear()
        self._store.lift_bar()

    @property
    def is_half_applied(self) -> bool:
        """Whether an error now leaves weights that belong to no step: some of the running one, or half a chunk."""
        return self._is_torn or self._store.is_torn or (self._is_running and self.num_updated > 0)

    @property
    def goes_on(self) -> bool:
        """Whether the running step began inside backward, and nothing was done of it since."""
        return self.is_early and not self._is_torn and not self._is_applied

    def take_seconds(self) -> float:
        """Wall-clock seconds that sub-groups were stepped in since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def grouped(self, present: Sequence[bool]) -> list[bool]:
        """``present``, but without the parameters that are in no group of the optimizer."""
        grouped = list(present)
        for param in self._left_out:
            grouped[param] = False
        return grouped

    def _steps(self, sub_group: SubGroup, present: Sequence[bool]) -> bool:
        return any(present[segment.param] for segment in sub_group.placement.segments)

    def _work_of(self, sub_group: SubGroup) -> Work:
        return Work(
            read=sub_group.read,
            write=sub_group.dirty,
            dead=ObjectKind.GRAD.mask,
            run=partial(self._step, sub_group),
            note="some weights are needed whose last update is due; they are as before it, and it stays due",
        )

    def _step(self, sub_group: SubGroup, lease: Lease) -> None:
        """Do what is due of a chunk, through a lease of its own or of whoever needs the chunk."""
        self._run(sub_group, lease)
        self._num_due -= 1
        if self._num_due == 0:
            self._note_histories()

    def _run(
        self, sub_group: SubGroup, lease: Lease, gradient_of: GradientOf | None = None, *, rounds: bool = True
    ) -> None:
        if self._terms is None:
            raise AssertionError("a sub-group is stepped in no step")
        start = time.perf_counter()
        self.num_updated += 1
        self._is_torn = True
        with _undisturbed():
            self._histories_after.update(sub_group.update(lease, self._terms, gradient_of, rounds=rounds))
        self._is_torn = False
        self._seconds += time.perf_counter() - start

    def _note_histories(self) -> None:
        for param, flag in enumerate(self._present):
            if flag:
                # a rank without a part of the parameter never needs its numbers, only that it was stepped
                self._histories[param] = self._histories_after.get(param, ())

    def _apply_whole(self, whole: WholeParams, terms: Terms) -> None:
        for param, group in whole.group_of.items():
            if self._present[param]:
                call = whole.gather(param, terms.factor)
                self.num_updated += 1
                after = self._optimizer.rule.run(call, terms.histories[param], terms.options[group])
                self._histories_after[param] = after
                whole.write(param, call, after)
        for sub_group, _ in self._works:
            if self._steps(sub_group, self._present) and not self._steps(sub_group, terms.present):
                lease = self._store.acquire(sub_group.chunk, write=ObjectKind.GRAD.mask)
                try:
                    lease.wait()
                finally:
                    lease.release(dead=ObjectKind.GRAD.mask)

    def _factor(self, present: Sequence[bool]) -> torch.Tensor | None:
        """What gradients are multiplied by: 1 over the loss scale, and max_norm / (norm + 1e-6), at most 1, as in
        torch.nn.utils.clip_grad_norm_. None: as they are."""
        max_norm = self._max_norm if self._clip_once is None else self._clip_once
        clips = max_norm > 0 or self._clip_once is not None
        norm = self._norm(present) if clips or self._norm_asked else None
        if norm is None:
            self.grad_norm = None
        factor = (
            torch.ones((), device="cpu") if norm is None or not clips else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        )
        if self.scale.value == 1.0:
            return factor if clips and factor != 1.0 else None
        return factor / self.scale.value

    def _norm(self, present: Sequence[bool]) -> torch.Tensor:
        value, self._is_finite = self._gradients.norm(present if self._counts_all else self.grouped(present))
        norm = value / self.scale.value
        self.grad_norm = float(norm)
        return norm


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Whoever needs weights that are due an update may be within anything that changes what operations do."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as modes:
        modes.enter_context(outside_inference())
        modes.enter_context(transforms.outside())
        modes.enter_context(torch.no_grad())
        for kind in kinds:
            modes.enter_context(torch.autocast(kind, enabled=False))
        yield
