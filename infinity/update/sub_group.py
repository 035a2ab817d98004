"""One chunk's optimizer state, swapped in and stepped at once.

The update runs torch's own Adam on exact per-parameter segments of leased frames: no kernel of ours, no padding in a
call, each segment with its parameter's step count (Kingma & Ba 2015; Loshchilov & Hutter 2019 for AdamW).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from infinity.plan.sharding import ChunkPlacement
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
        steps: Sequence[torch.Tensor],
        options: Sequence[Mapping[str, Any]],
        clip: torch.Tensor | None,
    ) -> None:
        """Step every segment whose parameter is ``present``, then release the granted lease: its gradient is dead.

        Args:
            present: for each parameter, whether any rank has a gradient for it.
            steps: fp32 0-D per parameter, the count before this step.
            options: hyper-parameters per optimizer group.
            clip: fp32 0-D factor on the gradients; None: no clipping.
        """
        calls: dict[int, _Call] = {}
        for segment in self.placement.segments:
            if not present[segment.param]:
                continue
            call = calls.setdefault(self._group_of[segment.param], _Call())
            for start, param in spans(lease.pieces(self._stepped), segment.chunk_offset, segment.numel):
                offset, numel = segment.chunk_offset + start, param.numel()
                grad = _view(lease, ObjectKind.GRAD, offset, numel).to(param.device, param.dtype)
                call.params.append(param)
                call.grads.append(grad if clip is None else grad * clip.to(param.device))
                call.exp_avgs.append(_view(lease, ObjectKind.EXP_AVG, offset, numel))
                call.exp_avg_sqs.append(_view(lease, ObjectKind.EXP_AVG_SQ, offset, numel))
                call.steps.append(steps[segment.param].to(param.device, copy=True))
        for group, call in calls.items():
            call.run(options[group])
        if self._stepped is ObjectKind.MASTER:
            self._cast_weights(lease)
        lease.release(dirty=self._dirty, dead=ObjectKind.GRAD.mask)

    def _cast_weights(self, lease: Lease) -> None:
        """Round all segments, also those that were not stepped: the lease did not read the weights."""
        for segment in self.placement.segments:
            for start, master in spans(lease.pieces(ObjectKind.MASTER), segment.chunk_offset, segment.numel):
                _view(lease, ObjectKind.WEIGHT, segment.chunk_offset + start, master.numel()).copy_(master)


def _view(lease: Lease, kind: ObjectKind, offset: int, numel: int) -> torch.Tensor:
    """The range of a kind no wider than the stepped one: its pieces are cut at the same places or fewer."""
    ((_, view),) = spans(lease.pieces(kind), offset, numel)
    return view
