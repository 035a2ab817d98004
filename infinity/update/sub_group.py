"""One chunk's optimizer state, swapped in and stepped at once.

The update runs torch's own Adam on exact per-parameter segments of leased frames: no kernel of ours, no padding in a
call, each segment with its parameter's step count (Kingma & Ba 2015; Loshchilov & Hutter 2019 for AdamW).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from infinity.plan.sharding import ALIGNMENT, ChunkPlacement, Run, runs_of
from infinity.tiers.base import Lease, ShardStore, spans
from io_daemon.shared.protocol import ObjectKind

MOMENTS = ObjectKind.EXP_AVG.mask | ObjectKind.EXP_AVG_SQ.mask


@dataclass(slots=True)
class _Call:
    """Arguments of one fused call: equal-length lists, one entry a segment."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    exp_avgs: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)

    def run(self, options: Mapping[str, Any]) -> None:
        beta1, beta2 = options["betas"]
        update = adamw if options["decoupled_weight_decay"] else adam
        update(
            self.params,
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            [],
            self.steps,
            fused=True,
            amsgrad=False,
            maximize=options["maximize"],
            beta1=beta1,
            beta2=beta2,
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
        )


class SubGroup:
    def __init__(self, chunk: int, placement: ChunkPlacement, *, master: bool, group_of: Sequence[int]) -> None:
        """``master``: weights are 16-bit and an fp32 master copy is kept; ``group_of``: parameter index -> index of
        its optimizer group."""
        self.chunk = chunk
        self.placement = placement
        self._group_of = group_of
        self._stepped = ObjectKind.MASTER if master else ObjectKind.WEIGHT
        self._runs = [(run, _alike(run, group_of)) for run in runs_of(placement.segments)]
        self._dirty = MOMENTS | self._stepped.mask | ObjectKind.WEIGHT.mask

    def acquire(self, store: ShardStore) -> Lease:
        """Gradient, master weights and moments are read; 16-bit weights are only written, so never swapped in."""
        read = ObjectKind.GRAD.mask | MOMENTS | self._stepped.mask
        return store.acquire(self.chunk, read=read, write=self._dirty)

    def update(
        self,
        lease: Lease,
        *,
        present: Sequence[bool],
        steps: Sequence[int],
        options: Sequence[Mapping[str, Any]],
        clip: torch.Tensor | None,
    ) -> None:
        """Step every segment whose parameter is ``present``, then release the granted lease: its gradient is dead.

        Args:
            present: for each parameter, whether any rank has a gradient for it.
            steps: updates that each parameter had before this one.
            options: hyper-parameters per optimizer group.
            clip: fp32 0-D factor on the gradients; None: no clipping.
        """
        calls: dict[int, _Call] = {}
        pieces = lease.pieces(self._stepped)
        for param, offset, numel in self._ranges(present, steps):
            call = calls.setdefault(self._group_of[param], _Call())
            for start, stepped in spans(pieces, offset, numel):
                at, length = offset + start, stepped.numel()
                grad = _view(lease, ObjectKind.GRAD, at, length).to(stepped.device, stepped.dtype)
                call.params.append(stepped)
                call.grads.append(grad if clip is None else grad * clip.to(stepped.device))
                call.exp_avgs.append(_view(lease, ObjectKind.EXP_AVG, at, length))
                call.exp_avg_sqs.append(_view(lease, ObjectKind.EXP_AVG_SQ, at, length))
                call.steps.append(torch.tensor(float(steps[param]), device=stepped.device))
        for group, call in calls.items():
            call.run(options[group])
        if self._stepped is ObjectKind.MASTER:
            self._cast_weights(lease)
        lease.release(dirty=self._dirty, dead=ObjectKind.GRAD.mask)

    def _ranges(self, present: Sequence[bool], steps: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(parameter, chunk offset, numel) of what one call steps alike: whole runs, where all of one are to be stepped
        and have had as many updates, else segment by segment."""
        for run, alike in self._runs:
            first = run.segments[0].param
            if alike and all(present[s.param] and steps[s.param] == steps[first] for s in run.segments):
                yield first, run.chunk_offset, run.numel
                continue
            for segment in run.segments:
                if present[segment.param]:
                    yield segment.param, segment.chunk_offset, segment.numel

    def _cast_weights(self, lease: Lease) -> None:
        """Round all segments, also those that were not stepped: the lease did not read the weights."""
        for run, _ in self._runs:
            for start, master in spans(lease.pieces(ObjectKind.MASTER), run.chunk_offset, run.numel):
                _view(lease, ObjectKind.WEIGHT, run.chunk_offset + start, master.numel()).copy_(master)


def _alike(run: Run, group_of: Sequence[int]) -> bool:
    """Whether torch's fused kernel gives the same bits for the run as for each of its segments.

    All are of one optimizer group, and none but the last ends inside a vector, where the kernel rounds otherwise.
    """
    groups = {group_of[segment.param] for segment in run.segments}
    return len(groups) == 1 and all(segment.numel % ALIGNMENT == 0 for segment in run.segments[:-1])


def _view(lease: Lease, kind: ObjectKind, offset: int, numel: int) -> torch.Tensor:
    """The range of a kind no wider than the stepped one: its pieces are cut at the same places or fewer."""
    ((_, view),) = spans(lease.pieces(kind), offset, numel)
    return view
