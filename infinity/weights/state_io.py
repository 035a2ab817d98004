"""One way in and out of the store: any kind of state of any parameter, read and written chunk by chunk.

Nothing here changes what is on the device; ``Runtime`` does, who calls. Elements are in the order of memory, see
``ShardedParam``; every rank holds a contiguous part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from infinity.files.pieces import pieces
from infinity.plan.sharding import Segment
from infinity.tiers.base import Lease, ShardStore, spans, stream
from infinity.weights.owners import Values
from infinity.weights.param import ShardedParam
from infinity.weights.sharded_model import ShardedModel
from io_daemon.shared.protocol import ObjectKind

Seen = Callable[[ObjectKind, Segment, torch.Tensor], None]
"""What is done with elements of a chunk: their kind, where they belong, and a view of them while they are leased."""

Source = Callable[[ObjectKind, Segment], torch.Tensor]
"""(kind, which elements) -> their values, 1-D and in any dtype; a call is for ``numel_max`` elements at most."""

Wanted = Mapping[ObjectKind, Container[int]]
"""Parameters, by their indices, for each kind that is wanted of them."""

_ByKind = Mapping[ObjectKind, Sequence[Segment]]

_Request = tuple[int, int, int, Callable[[Lease], None]]
"""(chunk, kinds that are read, kinds that are written, what is done with the lease)."""


class StateIO:
    def __init__(self, sharded: ShardedModel) -> None:
        self._store: ShardStore = sharded.store
        self._refuse_away = sharded.refuse_away
        self._num_ahead = sharded.chunks_ahead
        self._collectives, self._chunks = sharded.sharers, sharded.chunks
        self._segments: dict[int, list[tuple[int, Segment]]] = {param.index: [] for param in sharded.params}
        for chunk_id, chunk in enumerate(sharded.chunks):
            for segment in chunk.segments:
                self._segments[segment.param].append((chunk_id, segment))
        self._placements = {p.param: p for placement in sharded.layout.placements for p in placement.params}
        self._dtypes = {p.param: sharded.dtypes_of(g.index) for g in sharded.layout.placements for p in g.params}

    def has(self, param: ShardedParam, kind: int) -> bool:
        """Whether the parameter has state of that kind: a frozen one has weights only."""
        return kind == ObjectKind.WEIGHT or kind in self._dtypes[param.index]

    def lasting(self, param: int) -> list[ObjectKind]:
        """The kinds that the parameter of that index has and all others follow from: no gradient, no weight beside a
        master weight."""
        kinds = self._dtypes[param].keys()
        derived = {ObjectKind.GRAD, *([ObjectKind.WEIGHT] if ObjectKind.MASTER in kinds else [])}
        return [kind for kind in ObjectKind if kind in kinds - derived]

    def lasting_bytes(self, params: Container[int]) -> int:
        """The bytes of this rank's part of what ``scan`` goes through."""
        return sum(
            segment.numel * self._dtypes[param][kind].itemsize
            for param, segments in self._segments.items()
            if param in params
            for _, segment in segments
            for kind in self.lasting(param)
        )

    def own_range(self, param: ShardedParam) -> tuple[int, int]:
        """(first element, numel) of this rank's part."""
        placement = self._placements[param.index]
        rank = self._collectives.rank
        return rank * placement.shard_numel, placement.valid_numel(rank)

    def read_own(self, param: ShardedParam, kind: ObjectKind) -> torch.Tensor:
        """[numel of this rank's part], fp32 on the CPU; of a model on the meta device there."""
        return self._read_range(param, kind, *self.own_range(param)).float()

    def own_weights(self, param: ShardedParam) -> torch.Tensor:
        """[numel of this rank's part], in the weights' dtype on the CPU; of a model on the meta device there."""
        return self.read_own(param, ObjectKind.WEIGHT).to(param.dtype)

    def _stored(self, param: int, kind: ObjectKind) -> ObjectKind:
        """What the store has of the kind: weights may be there as their masters alone."""
        is_rounded = kind is ObjectKind.WEIGHT and kind not in self._dtypes[param]
        return ObjectKind.MASTER if is_rounded else kind

    def read(self, param: ShardedParam, kind: ObjectKind) -> torch.Tensor:
        """The whole, in the parameter's shape, fp32 on the parameter's device. Collective."""
        return param.unflattened(self.read_flat(param, kind)).contiguous()

    def read_flat(self, param: ShardedParam, kind: ObjectKind) -> torch.Tensor:
        """The whole, flattened in memory order, fp32 on the parameter's device. Collective."""
        if self._collectives.world_size == 1:
            return self._read_range(param, kind, *self.own_range(param), device=param.device).float()
        what = f"read the {kind.name.lower()} of {param.name}"
        shard_numel = self._placements[param.index].shard_numel
        read = partial(self.read_own, param, kind)
        full, shard = self._collectives.prepared(partial(self._shard_of, read, shard_numel, param.device), what)
        self._collectives.all_gather(full, shard)
        return full[: param.numel]

    def stream(self, param: ShardedParam, kind: ObjectKind) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of all pieces of the whole, in the kind's own dtype, on the CPU. Collective."""
        placement = self._placements[param.index]
        world_size = self._collectives.world_size
        own_first, own_numel = self.own_range(param)
        for start, numel in pieces(placement.shard_numel, num_ranks=world_size):
            read = partial(self._read_range, param, kind, own_first + start, max(0, min(numel, own_numel - start)))
            if world_size == 1:
                yield start, read()
                continue
            what = f"stream the {kind.name.lower()} of {param.name} from {start} on"
            full, shard = self._collectives.prepared(partial(self._shard_of, read, numel, param.device), what)
            self._collectives.all_gather(full, shard)
            whole = full.cpu()
            if numel == placement.shard_numel:  # one behind the other, and behind the last what pads it
                yield 0, whole[: param.numel]
                return
            for rank in range(-(-param.numel // placement.shard_numel)):
                valid = min(numel, placement.valid_numel(rank) - start)
                if valid > 0:
                    yield rank * placement.shard_numel + start, whole[rank * numel :][:valid]

    def _shard_of(
        self, read: Callable[[], torch.Tensor], numel: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(memory for all ranks' shards [world_size * numel], this rank's [numel] with what is read)."""
        own = read()
        shard = torch.zeros(numel, dtype=own.dtype, device=device)
        shard[: own.numel()].copy_(own)
        return torch.empty(self._collectives.world_size * numel, dtype=own.dtype, device=device), shard

    def _read_range(
        self, param: ShardedParam, kind: ObjectKind, first: int, numel: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Elements [first, first + numel) of this rank's part in the kind's own dtype; of a model on the meta device
        there."""
        dtype = param.dtype if kind is ObjectKind.WEIGHT else self._dtypes[param.index][kind]
        values = torch.empty(numel, dtype=dtype, device=param.device if param.device.type == "meta" else device)
        kind = self._stored(param.index, kind)
        self._refuse_away(kind.mask)

        def take(lease: Lease, segment: Segment) -> None:
            begin, end = max(first, segment.param_offset), min(first + numel, segment.param_offset + segment.numel)
            offset = segment.chunk_offset + begin - segment.param_offset
            for start, piece in spans(lease.pieces(kind), offset, end - begin):
                values[begin - first + start :][: piece.numel()].copy_(piece)

        self._stream(
            (chunk_id, kind.mask, 0, partial(take, segment=segment))
            for chunk_id, segment in self._segments[param.index]
            if segment.param_offset < first + numel and first < segment.param_offset + segment.numel
        )
        return values

    def write_own(self, param: ShardedParam, kinds: Sequence[ObjectKind], values: torch.Tensor) -> None:
        """Write this rank's part, [its numel], of several kinds at once, each rounded to its own dtype."""
        first, _ = self.own_range(param)
        self.write_from(param, kinds, lambda start, numel: values[start - first :][:numel])

    def write_from(self, param: ShardedParam, kinds: Sequence[ObjectKind], values: Values) -> None:
        """Write this rank's part of several kinds at once, of values that are asked for piece by piece."""
        kinds = list(dict.fromkeys(self._stored(param.index, kind) for kind in kinds))
        mask = sum(kind.mask for kind in kinds)
        self._refuse_away(mask)

        def put_all(lease: Lease, segment: Segment) -> None:
            for first, numel in pieces(segment.numel):
                new = values(segment.param_offset + first, numel)
                for kind in kinds:
                    for start, piece in spans(lease.pieces(kind), segment.chunk_offset + first, numel):
                        piece.copy_(new[start : start + piece.numel()])

        # what the chunk's other parameters have must be there, too: a lease to write only may hold anything
        self._stream(
            (chunk_id, mask, mask, partial(put_all, segment=segment))
            for chunk_id, segment in self._segments[param.index]
        )

    def scan(self, params: Container[int], use: Seen, *, numel_max: int) -> None:
        """Go through all that this rank keeps for good of ``params`` (indices), each chunk once, in stored dtypes."""

        def seen(lease: Lease) -> None:
            self.show(lease, params, use, numel_max=numel_max)

        self._stream(((chunk, mask, 0, seen) for chunk, mask in self.lasting_chunks(params).items()), in_bursts=True)

    def lasting_chunks(self, params: Container[int]) -> dict[int, int]:
        """Chunk -> mask of the kinds that ``scan`` goes through."""
        having = (
            (chunk_id, next((s.param for s in chunk.segments if s.param in params), None))
            for chunk_id, chunk in enumerate(self._chunks)
        )
        return {chunk: sum(kind.mask for kind in self.lasting(param)) for chunk, param in having if param is not None}

    def show(self, lease: Lease, params: Container[int], use: Seen, *, numel_max: int) -> None:
        """Go through what a granted lease of ``lasting_chunks`` has of ``params``."""
        segments = [segment for segment in self._chunks[lease.chunk].segments if segment.param in params]
        for kind in self.lasting(segments[0].param):
            for part in (part for segment in segments for part in _cut(segment, numel_max)):
                found = [piece for _, piece in spans(lease.pieces(kind), part.chunk_offset, part.numel)]
                use(kind, part, found[0] if len(found) == 1 else torch.cat(found))

    def fill(self, wanted: Wanted, source: Source, *, numel_max: int) -> None:
        """Write this rank's part of these kinds of these parameters (indices), each chunk once; with a master weight
        its 16-bit weight, too. What else a chunk holds stays."""

        def put(lease: Lease, segments: _ByKind) -> None:
            for kind, having in segments.items():
                targets = [lease.pieces(each) for each in self._with_followers(kind, having[0].param)]
                for part in (part for segment in having for part in _cut(segment, numel_max)):
                    values = source(kind, part)
                    for pieces_of_kind in targets:
                        for start, piece in spans(pieces_of_kind, part.chunk_offset, part.numel):
                            piece.copy_(values[start : start + piece.numel()])

        def requests() -> Iterable[_Request]:
            for chunk_id, segments in self._filled(wanted):
                chunk = self._chunks[chunk_id]
                read = write = 0
                for kind, having in segments.items():
                    mask = sum(each.mask for each in self._with_followers(kind, having[0].param))
                    write |= mask
                    read |= 0 if len(having) == len(chunk.segments) else mask  # written only, it may hold anything
                yield chunk_id, read, write, partial(put, segments=segments)

        self._stream(requests(), in_bursts=True)

    def asked_for(self, wanted: Wanted, *, numel_max: int) -> Iterator[tuple[ObjectKind, Segment]]:
        """What ``fill`` will call its source with, in order."""
        for _, segments in self._filled(wanted):
            for kind, having in segments.items():
                yield from ((kind, part) for segment in having for part in _cut(segment, numel_max))

    def _filled(self, wanted: Wanted) -> Iterator[tuple[int, _ByKind]]:
        """Chunks of which something is wanted, and what."""
        for chunk_id, chunk in enumerate(self._chunks):
            segments = {kind: [s for s in chunk.segments if s.param in params] for kind, params in wanted.items()}
            if segments := {kind: having for kind, having in segments.items() if having}:
                yield chunk_id, segments

    def _with_followers(self, kind: ObjectKind, param: int) -> list[ObjectKind]:
        """The kind, and what is rounded from it."""
        follows = kind is ObjectKind.MASTER and ObjectKind.WEIGHT in self._dtypes[param]
        return [kind, ObjectKind.WEIGHT] if follows else [kind]

    def _stream(self, requests: Iterable[_Request], *, in_bursts: bool = False) -> None:
        """Lease the chunks in order, few at a time; in bursts, where each comes once."""

        def used(lease: Lease, item: tuple[int, Callable[[Lease], None]]) -> tuple[int, int]:
            write, use = item
            use(lease)
            return write, 0

        issued = (
            (self._store.acquire(chunk, read=read, write=write), (write, use)) for chunk, read, write, use in requests
        )
        num_held_max = 1 + self._num_ahead
        stream(issued, used, num_held_max=num_held_max, num_at_once=num_held_max // 2 if in_bursts else 1)


def _cut(segment: Segment, numel_max: int) -> Iterable[Segment]:
    """Parts of the segment with ``numel_max`` elements at most."""
    return (
        Segment(
            param=segment.param,
            param_offset=segment.param_offset + start,
            chunk_offset=segment.chunk_offset + start,
            numel=numel,
        )
        for start, numel in pieces(segment.numel, numel_max)
    )
