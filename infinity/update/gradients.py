"""Reduced gradients, kept as chunks of the store between backward and the update, so that they may spill.

The first micro-batch that yields a gradient for a parameter copies it, later ones add (fp32): as ``p.grad`` does in
torch, adding to zeros would turn -0.0 into 0.0. Norms are taken while the bytes are warm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from infinity.plan.sharding import ChunkPlacement, Segment, runs_of
from infinity.tiers.base import Lease, ShardStore, spans, stream
from infinity.update.norms import Norm, Norms
from infinity.weights.param_group import GradientOf
from io_daemon.shared.protocol import ObjectKind

LEASES_AHEAD: Final = 2
TOGETHER_NUMEL: Final = 1 << 15
"""Gradients that are smaller on average are put together first: that costs less than a call for each."""


class GradientChunks:
    def __init__(
        self,
        store: ShardStore,
        chunks: Sequence[ChunkPlacement],
        num_params: int,
        groups: Sequence[tuple[Sequence[int], Sequence[int]]],
        norms: Norms,
    ) -> None:
        """``groups``: parameters and chunks of each param group that is trained, the same on every rank."""
        self._store, self._groups, self._norms = store, groups, norms
        self._chunks = chunks
        self._runs = [runs_of(chunk.segments) for chunk in chunks]
        self._written = [False] * num_params
        """The parameters whose segments hold something in this step: the next micro-batch adds, where not it copies."""

    def holds_any(self, params: Sequence[int]) -> bool:
        """Whether an earlier micro-batch has left a gradient of one of the parameters."""
        return any(self._written[param] for param in params)

    def clear(self) -> None:
        """Forget the step's gradients; what the chunks hold is no longer read."""
        self._written = [False] * len(self._written)
        self._norms.clear()

    def add(self, chunk_ids: Sequence[int], gradient_of: GradientOf, params: Sequence[int], *, norms: bool) -> None:
        """Add one param group's reduced gradients to its chunks.

        Args:
            params: the parameters that ``gradient_of`` has a gradient of.
            norms: this is the last micro-batch and a norm will be asked for.
        """
        touched = (c for c in chunk_ids if any(s.param in params for s in self._chunks[c].segments))

        def add(lease: Lease, chunk: int) -> tuple[int, int]:
            self._add_chunk(chunk, lease, gradient_of, norms=norms)
            return ObjectKind.GRAD.mask, 0

        stream(((self._acquire(chunk), chunk) for chunk in touched), add, num_held_max=LEASES_AHEAD)
        for param in params:
            self._written[param] = True

    def replace(self, param: int, first: int, values: torch.Tensor) -> None:
        """The parameter's gradient becomes ``values``: this rank's part, which begins at element ``first``."""
        self._written[param] = False

        def gradient_of(segment: Segment) -> torch.Tensor | None:
            return values[segment.param_offset - first :][: segment.numel] if segment.param == param else None

        self.add(range(len(self._chunks)), gradient_of, [param], norms=False)

    def _acquire(self, chunk: int) -> Lease:
        grad = ObjectKind.GRAD.mask
        held = any(self._written[s.param] for s in self._chunks[chunk].segments)
        return self._store.acquire(chunk, read=grad if held else 0, write=grad)

    def _add_chunk(self, chunk: int, lease: Lease, gradient_of: GradientOf, *, norms: bool) -> None:
        pieces = lease.pieces(ObjectKind.GRAD)
        for run in self._runs[chunk]:
            given = [gradient_of(segment) for segment in run.segments]
            written = {self._written[segment.param] for segment in run.segments}
            whole = [gradient for gradient in given if gradient is not None]
            is_whole = 1 < len(whole) == len(given) and len(written) == 1
            if is_whole and run.numel <= len(whole) * TOGETHER_NUMEL:
                _store(pieces, run.chunk_offset, torch.cat(whole), add=written.pop())
                continue
            for segment, gradient in zip(run.segments, given, strict=True):
                if gradient is not None:
                    _store(pieces, segment.chunk_offset, gradient, add=self._written[segment.param])
        for segment in self._chunks[chunk].segments:
            if gradient_of(segment) is None:
                continue
            if norms:
                self._norms.take(segment, pieces)
            else:
                self._norms.drop(segment)

    def norm(self, present: Sequence[bool]) -> Norm:
        """The norm of the step's gradients. Collective.

        Args:
            present: for each parameter, whether any rank has a gradient for it.
        """
        counted = [[param for param in params if present[param]] for params, _ in self._groups]
        return self._norms.total(counted, lambda group: self._take_lacking(self._groups[group][1], present))

    def _take_lacking(self, chunks: Sequence[int], present: Sequence[bool]) -> None:
        lacking = {
            chunk: [s for s in self._chunks[chunk].segments if present[s.param] and self._norms.lacks(s)]
            for chunk in chunks
        }

        def take(lease: Lease, chunk: int) -> tuple[int, int]:
            pieces = lease.pieces(ObjectKind.GRAD)
            for segment in lacking[chunk]:
                self._norms.take(segment, pieces)
            return 0, 0

        issued = ((self._store.acquire(chunk, read=ObjectKind.GRAD.mask), chunk) for chunk in chunks if lacking[chunk])
        stream(issued, take, num_held_max=LEASES_AHEAD)


def _store(pieces: Sequence[torch.Tensor], offset: int, gradient: torch.Tensor, *, add: bool) -> None:
    for start, target in spans(pieces, offset, gradient.numel()):
        source = gradient[start : start + target.numel()]
        if add:
            target.add_(source.to(target.device))
        else:
            target.copy_(source)
