"""A store that has fp32 states in fewer bits: who leases them sees fp32.

It lies right above the tiers. What is leased is widened into memory of this process, and narrowed where it was
changed; whoever lies above knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from infinity.errors import ConfigError
from infinity.plan.narrow import Narrow
from infinity.tiers.base import ChunkLayout, Lease, ShardStore, StoreLayer
from infinity.tiers.inference import outside_inference
from infinity.tiers.narrow import narrow, widen
from infinity.tiers.spare import Spare
from io_daemon.shared.protocol import ObjectKind, kinds_of


class NarrowedStore(StoreLayer):
    """``forms``: by kind, what the store below has of it."""

    def __init__(self, inner: ShardStore, forms: Mapping[ObjectKind, Narrow]) -> None:
        super().__init__(inner)
        self.forms = forms
        self._mask = sum(1 << kind for kind in forms)
        self._numels: dict[int, int] = {}
        """Numel of each chunk that has any of them."""
        self._numel_max = 0
        self._spare = Spare(2 * len(forms))
        self.failure: ConfigError | None = None
        """Why no chunk can be leased any more."""

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        chunks = super().register([self._stored(layout) for layout in layouts])
        for chunk, layout in zip(chunks, layouts, strict=True):
            if self.forms.keys() & layout.dtypes.keys():
                self._numels[chunk] = layout.numel
                self._numel_max = max(self._numel_max, layout.numel)
        return chunks

    def _stored(self, layout: ChunkLayout) -> ChunkLayout:
        forms = {kind: form for kind, form in self.forms.items() if kind in layout.dtypes}
        return replace(
            layout,
            dtypes=layout.dtypes | {kind: form.dtype for kind, form in forms.items()},
            numels={**layout.numels, **{kind: form.numel(layout.numel) for kind, form in forms.items()}},
        )

    def unregister(self, chunks: range) -> None:
        super().unregister(chunks)
        for chunk in chunks:
            self._numels.pop(chunk, None)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        if self.failure is not None:
            raise self.failure
        inner = super().acquire(chunk, read=read, write=write)
        kinds = (read | write) & self._mask
        return NarrowedLease(self, inner, self._numels[chunk], kinds, read) if kinds else inner

    def close(self) -> None:
        self._spare.clear()
        super().close()

    def take(self, device: torch.device) -> torch.Tensor:
        """Memory for the values of the largest chunk."""
        return self._spare.take(self._numel_max, device)

    def give_back(self, memory: torch.Tensor) -> None:
        self._spare.give_back(memory)


class NarrowedLease(Lease):
    """``kinds``: those of the lease that are narrowed; ``read``: what its holder asked for."""

    def __init__(self, store: NarrowedStore, inner: Lease, numel: int, kinds: int, read: int) -> None:
        self.chunk = inner.chunk
        self._store, self._inner, self._numel = store, inner, numel
        self._kinds, self._read = kinds, read
        self._memory: dict[int, torch.Tensor] = {}
        """Whole values by kind, once they are here."""

    def wait(self) -> None:
        self._inner.wait()
        if self._memory:
            return
        with outside_inference(), torch.no_grad():
            for kind in kinds_of(self._kinds):
                stored = self._stored(kind)
                self._memory[kind] = memory = self._store.take(stored.device)
                if self._read >> kind & 1:
                    widen(stored, memory[: self._numel], self._store.forms[ObjectKind(kind)])
                else:  # what lies between parameters is written by nobody, and shares blocks with them
                    memory[: self._numel].zero_()

    def pieces(self, kind: int) -> list[torch.Tensor]:
        """A kind that is narrowed comes in one piece."""
        return [self._memory[kind][: self._numel]] if self._kinds >> kind & 1 else self._inner.pieces(kind)

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        try:
            with outside_inference(), torch.no_grad():
                for kind, memory in self._memory.items():
                    if dirty & ~dead & 1 << kind:
                        self._put(kind, memory[: self._numel])
        finally:
            for memory in self._memory.values():
                self._store.give_back(memory)
            self._memory = {}
            self._inner.release(dirty=dirty, dead=dead)

    def _put(self, kind: int, values: torch.Tensor) -> None:
        try:
            narrow(values, self._stored(kind), self._store.forms[ObjectKind(kind)])
        except ValueError as error:
            self._store.failure = ConfigError(
                "io_daemon.moments",
                "8bit",
                "a state of the optimizer that should never be negative is, and 8 bits have no sign for it: "
                'write "bf16" or "fp32"',
            )
            raise self._store.failure from error

    def _stored(self, kind: int) -> torch.Tensor:
        """In one piece: a frame holds the narrowest kind of the largest chunk."""
        (stored,) = self._inner.pieces(kind)
        return stored
