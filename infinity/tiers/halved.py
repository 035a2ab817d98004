"""A store that has fp32 master weights as the 16-bit weights and a rest: who leases masters sees them whole.

What nobody above needs to know: a lease on masters takes weights, rests and *markers*, the state whose signs carry what
is between (see ``halves``); so does one on the markers, which are shown without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from infinity.errors import ConfigError
from infinity.plan.precision import REST
from infinity.tiers.base import ChunkLayout, Lease, ShardStore, StoreLayer, spans
from infinity.tiers.halves import cut, join, unmark
from infinity.tiers.inference import outside_inference
from infinity.tiers.spare import Spare
from io_daemon.shared.protocol import Access, ObjectKind

WEIGHT, MASTER = ObjectKind.WEIGHT, ObjectKind.MASTER


class HalvedStore(StoreLayer):
    """``markers``: a state of trained chunks that is never negative. Who writes masters writes their weights, too, for
    whoever reads these through the same lease; what the store keeps is rounded again where masters are cut."""

    def __init__(self, inner: ShardStore, markers: ObjectKind) -> None:
        super().__init__(inner)
        self.markers = markers
        self._whole = MASTER.mask | markers.mask
        self.halves = WEIGHT.mask | self._whole
        """What a lease on masters or markers takes."""
        self._halved: dict[int, int] = {}
        """Numel of the chunks that have masters."""
        self._numel_max = 0
        self._spare = Spare(2)
        self.failure: ConfigError | None = None
        """Why no chunk can be leased any more."""

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        chunks = super().register([self._stored(layout) for layout in layouts])
        for chunk, layout in zip(chunks, layouts, strict=True):
            if MASTER in layout.dtypes:
                self._halved[chunk] = layout.numel
                self._numel_max = max(self._numel_max, layout.numel)
        return chunks

    def _stored(self, layout: ChunkLayout) -> ChunkLayout:
        has_masters = MASTER in layout.dtypes
        return replace(layout, dtypes={**layout.dtypes, MASTER: REST}) if has_masters else layout

    def unregister(self, chunks: range) -> None:
        super().unregister(chunks)
        for chunk in chunks:
            self._halved.pop(chunk, None)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        if self.failure is not None:
            raise self.failure
        if not (read | write) & self._whole or chunk not in self._halved:
            return super().acquire(chunk, read=read, write=write)
        inner = super().acquire(chunk, read=self._read(read, write), write=self._write(write))
        return HalvedLease(self, inner, self._halved[chunk], read, write)

    def _read(self, read: int, write: int) -> int:
        """What is only written, masters and markers both, hangs on nothing that was there before."""
        is_new = not read & self._whole and write & self._whole == self._whole
        return read if is_new else read | self.halves

    def _write(self, write: int) -> int:
        return write | self.halves if write & self._whole else write

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        super().set_trace(trace_id, [self._seen_below(access) for access in accesses])

    def _seen_below(self, access: Access) -> Access:
        read, write = access.read_mask, access.write_mask
        if not (read | write) & self._whole or access.chunk not in self._halved:
            return access
        return access._replace(read_mask=self._read(read, write), write_mask=self._write(write))

    def close(self) -> None:
        self._spare.clear()
        super().close()

    def take(self, device: torch.device) -> torch.Tensor:
        """Memory for the values of the largest chunk, fp32, of undefined contents."""
        return self._spare.take(self._numel_max, device)

    def give_back(self, values: torch.Tensor) -> None:
        """They came from ``take``, and are not used any more."""
        self._spare.give_back(values)


class HalvedLease(Lease):
    """A lease on masters, markers or both. ``read`` and ``write``: what its holder asked for."""

    def __init__(self, store: HalvedStore, inner: Lease, numel: int, read: int, write: int) -> None:
        self.chunk = inner.chunk
        self._store, self._inner, self._numel = store, inner, numel
        self._markers = store.markers
        whole = MASTER.mask | store.markers.mask
        self._writes = bool(write & whole)
        self._is_new = not read & whole and write & whole == whole
        self._buffer: torch.Tensor | None = None
        """Memory for masters, once they are here."""
        self._shown: list[torch.Tensor] = []
        """The markers without their marks: those of the store where the lease may write them, else copies."""
        self._marks: list[torch.Tensor] = []
        """Places of the marks, by piece: of those that were taken away, or that are there while ``_is_cut``."""
        self._num_marks = 0
        """All marks that were ever found: one that came or went changes a marker."""
        self._is_cut = False
        """Whether the store has what the masters are, and the markers their marks."""

    def wait(self) -> None:
        self._inner.wait()
        if self._buffer is not None:
            return
        with outside_inference(), torch.no_grad():
            stored = self._inner.pieces(self._markers)
            self._buffer = self._store.take(stored[0].device)
            self._shown = list(stored) if self._writes else [piece.clone() for piece in stored]
            if self._is_new:  # what lies between parameters is written by nobody
                for values in (self._buffer, *self._shown):
                    values.zero_()
            else:
                self._note_marks([join(numbers, rests, shown, out) for out, numbers, rests, shown in self._parts()])

    def pieces(self, kind: int) -> list[torch.Tensor]:
        if self._is_cut and kind in (MASTER, self._markers):
            self._is_cut = False  # first: interrupted here, a release that cuts anew finds marks in its way and refuses
            self._unmark(self._marks)
        if kind == MASTER:
            return self._masters()
        return self._shown if kind == self._markers else self._inner.pieces(kind)

    def round_masters(self) -> None:
        """They are taken apart, which gives weights by the way: in one pass less, and none at the release."""
        try:
            self._cut()
        except ValueError:  # which the release tells
            super().round_masters()

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        changed = 0
        try:
            if self._buffer is not None:
                with outside_inference(), torch.no_grad():
                    changed = self._put(dirty)
                self._store.give_back(self._buffer)
                self._buffer, self._shown = None, []
        finally:
            self._inner.release(dirty=dirty | changed, dead=dead)

    def _put(self, dirty: int) -> int:
        """Take masters apart where they or the markers are dirty; which kinds of the store that changes."""
        if not dirty & (MASTER.mask | self._markers.mask):
            if self._writes and not self._is_cut:
                self._unmark(self._marks)  # back to where they were; else they are nobody's copies
            return 0
        try:
            self._cut()
        except ValueError as error:
            self._store.failure = ConfigError(
                "io_daemon.master_weights",
                "split",
                "a state of the optimizer that should never be negative is, and its signs complete master weights: "
                'write "fp32"',
            )
            raise self._store.failure from error
        if dirty & MASTER.mask:
            return WEIGHT.mask | MASTER.mask | (self._markers.mask if self._num_marks else 0)
        return 0

    def _cut(self) -> None:
        """Raises ValueError, and no marker has changed then."""
        if self._is_cut:
            return
        marks: list[torch.Tensor] = []
        try:
            for values, numbers, rests, shown in self._parts():
                marks.append(cut(values, numbers, rests, shown))
        except ValueError:
            self._unmark(marks)
            raise
        self._note_marks(marks)
        self._is_cut = True

    def _note_marks(self, marks: list[torch.Tensor]) -> None:
        self._marks = marks
        self._num_marks += sum(places.numel() for places in marks)

    def _unmark(self, marks: list[torch.Tensor]) -> None:
        for shown, places in zip(self._shown, marks, strict=False):
            unmark(shown, places)

    def _masters(self) -> list[torch.Tensor]:
        if self._buffer is None:
            raise RuntimeError(f"the lease on chunk {self.chunk} was not waited for")
        return list(torch.split(self._buffer[: self._numel], self._shown[0].numel()))

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(masters, weights, rests, markers), cut where the store cuts any of them."""
        weights, rests = self._inner.pieces(WEIGHT), self._inner.pieces(MASTER)
        offset = 0
        for values, shown in zip(self._masters(), self._shown, strict=True):
            ((_, numbers),) = spans(weights, offset, values.numel())
            ((_, own),) = spans(rests, offset, values.numel())
            yield values, numbers, own, shown
            offset += values.numel()
