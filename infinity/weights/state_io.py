"""One way in and out of the store: any kind of state of any parameter, read and written chunk by chunk.

Nothing here changes what is on the device; ``Runtime`` does, who calls. Elements are in the order of memory, see
``ShardedParam``; every rank holds a contiguous part of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from infinity.plan.sharding import Segment
from infinity.tiers.base import Lease, ShardStore, spans
from infinity.tiers.collectives import Collectives
from infinity.weights.owners import Values
from infinity.weights.param import ShardedParam
from infinity.weights.promises import pieces
from infinity.weights.sharded_model import ShardedModel
from io_daemon.shared.protocol import ObjectKind

LEASES_AHEAD = 2


class StateIO:
    def __init__(self, sharded: ShardedModel, collectives: Collectives) -> None:
        self._store: ShardStore = sharded.store
        self._collectives = collectives
        self._segments: dict[int, list[tuple[int, Segment]]] = {param.index: [] for param in sharded.params}
        for chunk_id, chunk in enumerate(sharded.chunks):
            for segment in chunk.segments:
                self._segments[segment.param].append((chunk_id, segment))
        self._placements = {p.param: p for placement in sharded.layout.placements for p in placement.params}
        kinds = {trainable: frozenset(sharded.precision.dtypes(trainable=trainable)) for trainable in (True, False)}
        self._kinds = {p.param: kinds[group.trainable] for group in sharded.layout.placements for p in group.params}

    def has(self, param: ShardedParam, kind: int) -> bool:
        """Whether the parameter has state of that kind: a frozen one has weights only."""
        return kind in self._kinds[param.index]

    def own_range(self, param: ShardedParam) -> tuple[int, int]:
        """(first element, numel) of this rank's part."""
        placement = self._placements[param.index]
        rank = self._collectives.rank
        return rank * placement.shard_numel, placement.valid_numel(rank)

    def read_own(self, param: ShardedParam, kind: ObjectKind) -> torch.Tensor:
        """[numel of this rank's part], fp32 on the CPU."""
        first, numel = self.own_range(param)
        own = torch.zeros(numel, dtype=torch.float32)

        def take(segment: Segment, start: int, piece: torch.Tensor) -> None:
            own[segment.param_offset - first + start :][: piece.numel()].copy_(piece)

        self._stream(param, kind.mask, 0, lambda lease, segment: _each(lease, kind, segment, take))
        return own

    def read(self, param: ShardedParam, kind: ObjectKind) -> torch.Tensor:
        """The whole, in the parameter's shape, fp32 on the CPU. Collective."""
        own = self.read_own(param, kind)
        if self._collectives.world_size == 1:
            return param.unflattened(own).contiguous()
        placement = self._placements[param.index]
        agreement = self._collectives.agree(f"read the {kind.name.lower()} of {param.name}")
        shard = torch.zeros(placement.shard_numel, dtype=torch.float32, device=param.device)
        shard[: own.numel()].copy_(own)
        full = torch.empty(self._collectives.world_size * placement.shard_numel, dtype=shard.dtype, device=shard.device)
        agreement.wait()
        self._collectives.all_gather(full, shard)
        return param.unflattened(full[: param.numel].cpu()).contiguous()

    def write_own(self, param: ShardedParam, kinds: Sequence[ObjectKind], values: torch.Tensor) -> None:
        """Write this rank's part, [its numel], of several kinds at once, each rounded to its own dtype."""
        first, _ = self.own_range(param)
        self.write_from(param, kinds, lambda start, numel: values[start - first :][:numel])

    def write_from(self, param: ShardedParam, kinds: Sequence[ObjectKind], values: Values) -> None:
        """Write this rank's part of several kinds at once, of values that are asked for piece by piece."""
        mask = sum(kind.mask for kind in kinds)

        def put_all(lease: Lease, segment: Segment) -> None:
            for first, numel in pieces(segment.numel):
                new = values(segment.param_offset + first, numel)
                for kind in kinds:
                    for start, piece in spans(lease.pieces(kind), segment.chunk_offset + first, numel):
                        piece.copy_(new[start : start + piece.numel()])

        # what the chunk's other parameters have must be there, too: a lease to write only may hold anything
        self._stream(param, mask, mask, put_all)

    def _stream(self, param: ShardedParam, read: int, write: int, use: Callable[[Lease, Segment], None]) -> None:
        """Lease the chunks that hold the parameter, in order, few at a time."""
        waiting: Iterator[tuple[int, Segment]] = iter(self._segments[param.index])
        leases: deque[tuple[Lease, Segment]] = deque()
        try:
            while True:
                while len(leases) < LEASES_AHEAD and (found := next(waiting, None)) is not None:
                    leases.append((self._store.acquire(found[0], read=read, write=write), found[1]))
                if not leases:
                    return
                lease, segment = leases[0]
                lease.wait()
                use(lease, segment)
                leases.popleft()
                lease.release(dirty=write)
        finally:
            for lease, _ in leases:
                lease.release()


def _each(lease: Lease, kind: ObjectKind, segment: Segment, use: Callable[[Segment, int, torch.Tensor], None]) -> None:
    for start, piece in spans(lease.pieces(kind), segment.chunk_offset, segment.numel):
        use(segment, start, piece)
