"""Reduced gradients, kept as chunks of the store between backward and the update, so that they may spill.

The first micro-batch that yields a gradient for a parameter copies it, later ones add (fp32): as ``p.grad`` does in
torch, adding to zeros would turn -0.0 into 0.0. Norms are taken while the bytes are warm.

From a device to the host gradients go beside the computation, and what the CPU does with them is done by threads of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final

import torch

from infinity.plan.sharding import ChunkPlacement, Segment, runs_of
from infinity.tiers.base import Lease, ShardStore, spans, stream
from infinity.tiers.inference import outside_inference
from infinity.tiers.under_way import Copying, UnderWay
from infinity.update.norms import Norm, Norms
from infinity.weights.param_group import GradientOf
from infinity.weights.streams import CopyStream
from io_daemon.shared.protocol import ObjectKind

LEASES_AHEAD: Final = 2
SERIAL_NUMEL: Final = 1 << 14
"""So few elements torch adds by the thread that it is called in: each of ours would have OpenMP's for itself."""
NUM_WORKERS: Final = 4
"""Threads that add gradients that have arrived, and take their norms: one goes through 8 GB a second."""
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
        copies: CopyStream,
        under_way: UnderWay,
    ) -> None:
        """
        Args:
            groups: parameters and chunks of each param group that is trained, the same on every rank.
            copies: of gradients from the device to the host.
            under_way: the leases of those.
        """
        self._store, self._groups, self._norms = store, groups, norms
        self._copies, self._under_way = copies, under_way
        self._workers: list[ThreadPoolExecutor] = []
        """One thread each, so that what is done with a parameter is done in order."""
        self._chunks = chunks
        self._runs = [runs_of(chunk.segments) for chunk in chunks]
        self._places: list[list[tuple[int, Segment]]] = [[] for _ in range(num_params)]
        """Where each parameter lies: chunk, and what it has of that."""
        for chunk_id, chunk in enumerate(chunks):
            for segment in chunk.segments:
                self._places[segment.param].append((chunk_id, segment))
        self._written = [False] * num_params
        """The parameters whose segments hold something in this step: the next micro-batch adds, where not it copies."""

    def holds_any(self, params: Sequence[int]) -> bool:
        """Whether an earlier micro-batch has left a gradient of one of the parameters."""
        return any(self._written[param] for param in params)

    def clear(self) -> None:
        """Forget the step's gradients; what the chunks hold is no longer read."""
        self._under_way.forget()
        self._written = [False] * len(self._written)
        self._norms.clear()

    def forget(self, param: int) -> None:
        """The step has no gradient of the parameter any more."""
        self._under_way.settle()  # whoever counts its norm has done so
        self._written[param] = False
        for _, segment in self._places[param]:
            self._norms.drop(segment)

    def add(self, chunk_ids: Sequence[int], gradient_of: GradientOf, params: Sequence[int], *, norms: bool) -> None:
        """Add one param group's reduced gradients to its chunks.

        Args:
            params: the parameters that ``gradient_of`` has a gradient of.
            norms: this is the last micro-batch and a norm will be asked for.
        """
        given = frozenset(params)
        touched = (c for c in chunk_ids if any(s.param in given for s in self._chunks[c].segments))

        def add(lease: Lease, chunk: int) -> tuple[int, int]:
            self._add_chunk(chunk, lease, gradient_of, norms=norms)
            return ObjectKind.GRAD.mask, 0

        if self._copies.is_beside:
            for chunk in touched:
                self._send(chunk, gradient_of, norms=norms)
        else:
            stream(((self._acquire(chunk), chunk) for chunk in touched), add, num_held_max=LEASES_AHEAD)
        for param in params:
            self._written[param] = True

    def _send(self, chunk: int, gradient_of: GradientOf, *, norms: bool) -> None:
        """Add to a chunk, be it on the device or on the host, without waiting for the device."""
        lease = self._acquire(chunk)
        copying, works = None, list[Future[None]]()
        try:
            lease.wait()
            pieces = lease.pieces(ObjectKind.GRAD)
            if pieces[0].device.type != "cpu":
                self._add_chunk(chunk, lease, gradient_of, norms=norms)
            else:
                with self._copies.issue(after_current=True):
                    added = self._copy(chunk, pieces, gradient_of)
                copied = self._copies.mark()
                self._issue_works(works, chunk, pieces, gradient_of, copied, added, norms=norms)
                copying = Copying(lease, copied, works, keeps=gradient_of, dirty=ObjectKind.GRAD.mask)
        except BaseException:
            wait(works)
            with suppress(Exception):  # the first error says what is wrong
                self._copies.mark().synchronize()  # what was issued still writes there
            lease.release()
            raise
        if copying is None:
            lease.release(dirty=ObjectKind.GRAD.mask)
        else:
            self._under_way.add(copying)

    def _issue_works(
        self,
        works: list[Future[None]],
        chunk: int,
        pieces: Sequence[torch.Tensor],
        gradient_of: GradientOf,
        copied: torch.Event,
        added: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        norms: bool,
    ) -> None:
        """Into ``works``: what is to be done once all is copied. ``added`` goes where it belongs, then norms are
        taken."""
        if not norms:
            self._take_norms(chunk, pieces, gradient_of, norms=False)
        if not (norms or added):
            return
        if not self._workers:
            self._workers = [ThreadPoolExecutor(1, "infinity-gradients") for _ in range(NUM_WORKERS)]

        def add() -> None:
            copied.synchronize()
            with outside_inference(), torch.no_grad():
                for target, gradient in added:
                    for first in range(0, target.numel(), SERIAL_NUMEL):
                        target[first : first + SERIAL_NUMEL].add_(gradient[first : first + SERIAL_NUMEL])

        def count(counted: Sequence[Segment]) -> None:
            adding.result()
            for segment in counted:
                self._norms.take(segment, pieces)

        adding = self._workers[chunk % NUM_WORKERS].submit(add)
        works.append(adding)
        for number, worker in enumerate(self._workers):
            own = (each for each in self._chunks[chunk].segments if each.param % NUM_WORKERS == number)
            counted = [segment for segment in own if gradient_of(segment) is not None]
            if norms and counted:
                works.append(worker.submit(count, counted))

    def _copy(
        self, chunk: int, pieces: Sequence[torch.Tensor], gradient_of: GradientOf
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Issue copies of a chunk's gradients. What is to be added to earlier ones comes into memory of its own: where
        it belongs, and what."""
        added = []
        for offset, gradient, adds in self._given(chunk, gradient_of):
            for start, target in spans(pieces, offset, gradient.numel()):
                here = self._copies.host_memory(target.numel(), gradient.dtype) if adds else target
                here.copy_(gradient[start : start + target.numel()], non_blocking=True)
                if adds:
                    added.append((target, here))
        return added

    def replace(self, param: int, first: int, values: torch.Tensor) -> None:
        """The parameter's gradient becomes ``values``: this rank's part, which begins at element ``first``."""

        def put(lease: Lease, segment: Segment) -> tuple[int, int]:
            own = values[segment.param_offset - first :][: segment.numel]
            _store(lease.pieces(ObjectKind.GRAD), segment.chunk_offset, own, add=False)
            self._norms.drop(segment)
            return ObjectKind.GRAD.mask, 0

        issued = ((self._acquire(chunk), segment) for chunk, segment in self._places[param])
        stream(issued, put, num_held_max=LEASES_AHEAD)
        self._written[param] = True

    def _acquire(self, chunk: int) -> Lease:
        self._under_way.settle_chunk(chunk)
        grad = ObjectKind.GRAD.mask
        held = any(self._written[s.param] for s in self._chunks[chunk].segments)
        return self._store.acquire(chunk, read=grad if held else 0, write=grad)

    def _add_chunk(self, chunk: int, lease: Lease, gradient_of: GradientOf, *, norms: bool) -> None:
        pieces = lease.pieces(ObjectKind.GRAD)
        for offset, gradient, adds in self._given(chunk, gradient_of):
            _store(pieces, offset, gradient, add=adds)
        self._take_norms(chunk, pieces, gradient_of, norms=norms)

    def _given(self, chunk: int, gradient_of: GradientOf) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """(offset in the chunk, gradient, whether it is added to an earlier one)."""
        for run in self._runs[chunk]:
            given = [gradient_of(segment) for segment in run.segments]
            written = {self._written[segment.param] for segment in run.segments}
            whole = [gradient for gradient in given if gradient is not None]
            is_whole = 1 < len(whole) == len(given) and len(written) == 1
            if is_whole and run.numel <= len(whole) * TOGETHER_NUMEL:
                yield run.chunk_offset, torch.cat(whole), written.pop()
                continue
            for segment, gradient in zip(run.segments, given, strict=True):
                if gradient is not None:
                    yield segment.chunk_offset, gradient, self._written[segment.param]

    def _take_norms(self, chunk: int, pieces: Sequence[torch.Tensor], gradient_of: GradientOf, *, norms: bool) -> None:
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
        self._under_way.end_all()
        counted = [[param for param in params if present[param]] for params, _ in self._groups]

        def take_lacking(group: int) -> None:
            self._under_way.settle()  # what has failed is told where other ranks hear of it
            self._take_lacking(self._groups[group][1], present)

        return self._norms.total(counted, take_lacking)

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
