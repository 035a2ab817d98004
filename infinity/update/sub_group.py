"""One chunk's optimizer state, swapped in and stepped at once.

The update runs the optimizer's own code on exact per-parameter segments of leased frames: no kernel of ours, no padding
in a call, each segment with its parameter's history (``rule.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from infinity.plan.precision import Precision
from infinity.plan.sharding import ALIGNMENT, ChunkPlacement, Run, Segment, runs_of
from infinity.tiers.base import Lease, spans
from infinity.update.rounding import Rounding
from infinity.update.rule import Call, History, Options, UpdateRule
from infinity.update.scratch import Scratch
from infinity.weights.param_group import GradientOf
from io_daemon.shared.protocol import ObjectKind, kinds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an update has fixed before its first sub-group: whichever is stepped when, the result is the same."""

    present: Sequence[bool]
    """For each parameter, whether any rank has a gradient for it, and it is stepped in pieces."""
    histories: Sequence[History]
    """What the rule keeps for each parameter, from before the update."""
    options: Sequence[Options]
    """Hyper-parameters per optimizer group."""
    factor: torch.Tensor | None
    """What gradients are multiplied by, fp32 0-D, for clipping and the loss scale; None: neither."""


@dataclass(slots=True)
class _Batch:
    call: Call = field(default_factory=Call)
    targets: list[torch.Tensor] = field(default_factory=list)
    """Where each of the call's parameters belongs; the parameter itself where its dtype is the rule's."""
    indices: list[int] = field(default_factory=list)


GATHERED_NUMEL_MAX: Final = 1 << 14
"""Elements a piece, on the average, below which copying pieces of weights into one run and back, 16 bytes an element,
costs less than stepping each by itself, 40 µs or more."""

WeightsOf = Callable[[Segment], torch.Tensor]
"""A segment's weights on the device, 1-D, to be written."""
_Pieces = Mapping[int, Sequence[torch.Tensor]]


class SubGroup:
    def __init__(
        self,
        chunk: int,
        placement: ChunkPlacement,
        *,
        rule: UpdateRule,
        precision: Precision,
        group_of: Sequence[int],
        scratch: Scratch,
        rounding: Rounding,
        weights_of: WeightsOf | None = None,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            group_of: parameter index -> index of its optimizer group.
            scratch: shared by all that are stepped one after the other.
            device: where it is stepped; None: where its states are.
            weights_of: where weights are that the store does not have; None: nowhere between gathers, if it has none.
        """
        self.chunk = chunk
        self.placement = placement
        self._rule, self._stepped, self._group_of = rule, precision.stepped, group_of
        self._device = device
        apart = precision.lies_in_params(trainable=True)  # and so in as many pieces
        self._gathers = apart and placement.numel < GATHERED_NUMEL_MAX * len(placement.segments)
        cut = apart and not self._gathers
        runs = [Run(segments=(each,)) for each in placement.segments] if cut else runs_of(placement.segments)
        self._runs = [(run, _alike(run, group_of)) for run in runs]
        self.read = ObjectKind.GRAD.mask | rule.state_mask | self._stepped.mask
        """Gradient, master weights and states; 16-bit weights beside masters are only written, so never swapped in."""
        dtypes = precision.dtypes(trainable=True)
        self.dirty = rule.state_mask | self._stepped.mask | (ObjectKind.WEIGHT in dtypes and ObjectKind.WEIGHT.mask)
        self._weights_of, self._scratch, self._rounding = weights_of, scratch, rounding
        self._gradient = dtypes[ObjectKind.GRAD]
        self._cut_by_frames = [kind for kind in kinds_of(self.read) if not apart or kind != ObjectKind.WEIGHT]

    def update(
        self, lease: Lease, terms: Terms, gradient_of: GradientOf | None = None, *, rounds: bool = True
    ) -> dict[int, History]:
        """Step every segment whose parameter is present, through a granted lease of ``read`` and ``dirty``.

        Args:
            gradient_of: where the gradients are, if the lease has none.
            rounds: 16-bit weights of the store follow their masters; else the lease has none of them.

        Returns:
            Parameter -> its history from now on.
        """
        leased = self.read | self.dirty
        if gradient_of is not None:
            leased &= ~ObjectKind.GRAD.mask
        if not rounds:
            leased &= ~ObjectKind.WEIGHT.mask
        pieces = {kind: lease.pieces(kind) for kind in kinds_of(leased)}
        if gradient_of is not None:
            pieces[ObjectKind.GRAD] = [self._collected(gradient_of, self._device_of(pieces))]
        apart = pieces[ObjectKind.WEIGHT] if self._gathers else ()
        if apart:
            whole = self._scratch.take(self.placement.numel, apart[0].dtype, apart[0].device, of="weights")
            pieces[ObjectKind.WEIGHT] = [torch.cat(list(apart), out=whole)]
        histories: dict[int, History] = {}
        for (group, history), batch in self._batches(pieces, terms).items():
            after = self._rule.run(batch.call, history, terms.options[group])
            for target, param in zip(batch.targets, batch.call.params, strict=True):
                if param is not target:
                    target.copy_(param)
            histories.update(dict.fromkeys(batch.indices, after))
        if apart:
            self._put_back(apart, pieces[ObjectKind.WEIGHT][0], terms.present)
        self._round_states(pieces, histories)
        if self._weights_of is not None:
            self._round_into(self._weights_of, pieces[ObjectKind.MASTER])
        elif leased & self.dirty & ObjectKind.WEIGHT.mask and self._stepped is ObjectKind.MASTER:
            lease.round_masters()  # the last: the lease may take them apart at once, and what completes them with them
        return histories

    def _device_of(self, pieces: _Pieces) -> torch.device:
        """Where the chunk is stepped: where its states are, be they beside what is stepped or not."""
        if self._device is not None:
            return self._device
        return pieces[(*self._rule.state_kinds, self._stepped)[0]][0].device

    def _put_back(self, apart: Sequence[torch.Tensor], whole: torch.Tensor, present: Sequence[bool]) -> None:
        targets, sources = [], []
        for segment in self.placement.segments:
            if present[segment.param]:
                for start, piece in spans(apart, segment.chunk_offset, segment.numel):
                    targets.append(piece)
                    sources.append(whole[segment.chunk_offset + start :][: piece.numel()])
        if targets:
            torch._foreach_copy_(targets, sources)

    def _round_states(self, pieces: _Pieces, histories: Mapping[int, History]) -> None:
        for kind in self._rounding.forms:
            for segment in self.placement.segments:
                if segment.param in histories:
                    history, first = histories[segment.param], segment.param_offset
                    for start, values in spans(pieces[kind], segment.chunk_offset, segment.numel):
                        self._rounding.apply(values, kind, param=segment.param, first=first + start, history=history)

    def _collected(self, gradient_of: GradientOf, device: torch.device) -> torch.Tensor:
        """The chunk's gradients in the rule's dtype, rounded as the store would round them."""
        values = self._scratch.take(self.placement.numel, self._rule.dtype, device, of="gradients")
        for segment in self.placement.segments:
            gradient = gradient_of(segment)
            if gradient is not None:
                rounded = gradient.to(self._gradient) if self._gradient.itemsize < gradient.itemsize else gradient
                values[segment.chunk_offset : segment.chunk_offset + segment.numel].copy_(rounded)
        return values

    def _batches(self, pieces: _Pieces, terms: Terms) -> dict[tuple[int, History], _Batch]:
        """What is stepped by one call each: pieces of one optimizer group and one history."""
        batches: dict[tuple[int, History], _Batch] = {}
        device = self._device_of(pieces)
        # where frames cut the elements of one kind they cut those of all that have as many pieces or more
        finest = max(self._cut_by_frames, key=lambda kind: len(pieces[kind]))
        for params, offset, numel in self._ranges(terms):
            batch = batches.setdefault((self._group_of[params[0]], terms.histories[params[0]]), _Batch())
            batch.indices += params
            for start, piece in spans(pieces[finest], offset, numel):
                at, length = offset + start, piece.numel()
                target = _view(pieces[self._stepped], at, length)
                param = target.to(device, self._rule.dtype)
                batch.targets.append(target)
                batch.call.params.append(param)
                batch.call.grads.append(self._gradient_for(param, pieces, at, terms.factor))
                batch.call.states.append(tuple(_view(pieces[kind], at, length) for kind in self._rule.state_kinds))
        return batches

    def _gradient_for(
        self, param: torch.Tensor, pieces: _Pieces, offset: int, factor: torch.Tensor | None
    ) -> torch.Tensor:
        """What the optimizer takes: the lease's gradient itself where it is the parameter's dtype, and unscaled."""
        grad = _view(pieces[ObjectKind.GRAD], offset, param.numel())
        is_alike = (grad.dtype, grad.device) == (param.dtype, param.device)
        if is_alike and factor is None:
            return grad
        values = self._scratch.take(self.placement.numel, param.dtype, param.device, of="gradients")[
            offset : offset + param.numel()
        ]
        if not is_alike:
            grad = values.copy_(grad)
        return grad if factor is None else torch.mul(grad, factor, out=values)

    def _ranges(self, terms: Terms) -> Iterator[tuple[list[int], int, int]]:
        """(parameters, chunk offset, numel) of what is stepped alike: whole runs, where all of one are to be stepped
        and have one history, else segment by segment."""
        present, histories = terms.present, terms.histories
        for run, alike in self._runs:
            params = [segment.param for segment in run.segments]
            if alike and all(present[p] and histories[p] == histories[params[0]] for p in params):
                yield params, run.chunk_offset, run.numel
                continue
            for segment in run.segments:
                if present[segment.param]:
                    yield [segment.param], segment.chunk_offset, segment.numel

    def _round_into(self, weights_of: WeightsOf, masters: Sequence[torch.Tensor]) -> None:
        targets, sources = [], []
        for segment in self.placement.segments:
            weights = weights_of(segment)
            for start, master in spans(masters, segment.chunk_offset, segment.numel):
                targets.append(weights[start : start + master.numel()])
                sources.append(master)
        torch._foreach_copy_(targets, sources)


def _alike(run: Run, group_of: Sequence[int]) -> bool:
    """Whether torch's fused kernels give the same bits for the run as for each of its segments.

    All are of one optimizer group, and none but the last ends inside a vector, where the kernel rounds otherwise.
    """
    groups = {group_of[segment.param] for segment in run.segments}
    return len(groups) == 1 and all(segment.numel % ALIGNMENT == 0 for segment in run.segments[:-1])


def _view(pieces: Sequence[torch.Tensor], offset: int, numel: int) -> torch.Tensor:
    """A range of a kind that is cut at no more places than the one that cut its ends."""
    ((_, view),) = spans(pieces, offset, numel)
    return view
