"""A param group: *what* is gathered, used and reduced together.

States and their tensors are in ``states.py``. Issuing and waiting are separate: ``unshard`` leases weight chunks,
``wait_for_unshard`` copies them into memory of the parameters' own; a lease lasts one copy, so that no view of the
arena ever reaches autograd or the user.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import torch

from infinity.errors import WorldError
from infinity.plan.sharding import ChunkPlacement, GroupPlacement, ParamPlacement, Segment
from infinity.states import SHARDED_TRANSITIONS, ShardedState, check_transition
from infinity.tiers.base import Lease, ShardStore, spans
from infinity.tiers.collectives import Collectives
from infinity.tiers.inference import outside_inference
from infinity.tiers.memory import MemoryStore, Views
from infinity.tiers.pool import MemoryPool
from infinity.tiers.reductions import Reducing
from infinity.tiers.under_way import Copying, UnderWay
from infinity.weights import access
from infinity.weights.param import ShardedParam
from infinity.weights.streams import CopyStream
from io_daemon.shared.protocol import ObjectKind

Target = Callable[[Segment], torch.Tensor]
"""Where one segment's weights go, 1-D."""
GradientOf = Callable[[Segment], torch.Tensor | None]
"""The reduced gradient of one segment, 1-D; None where this micro-batch gave the parameter none."""

DEMAND_LEASES_AHEAD: Final = 2


class LeaseAllowance:
    """How many frames weight leases may hold ahead of their use, over all groups: never those a demand needs.

    ``frames_of``: what a lease on a chunk's weights takes now; more than its weights where an update is due."""

    def __init__(self, frames_max: int, frames_of: Callable[[int], int] = lambda _chunk: 1) -> None:
        self.num_left = frames_max
        """Frames that may still be taken."""
        self._frames_of = frames_of

    def take(self, chunk: int) -> int:
        """The frames that are taken for a lease on the chunk; 0: there are not enough."""
        frames = self._frames_of(chunk)
        if frames > self.num_left:
            return 0
        self.num_left -= frames
        return frames

    def give_back(self, num_frames: int) -> None:
        self.num_left += num_frames


class ParamGroup:
    def __init__(
        self,
        placement: GroupPlacement,
        params: Sequence[ShardedParam],
        chunks: Sequence[tuple[int, ChunkPlacement]],
        *,
        store: ShardStore,
        collectives: Collectives,
        allowance: LeaseAllowance,
        copies: CopyStream,
        under_way: UnderWay | None = None,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        persistent: bool,
        name: str = "a group",
        pool: MemoryPool | None = None,
        home: ObjectKind = ObjectKind.WEIGHT,
        updated_in_place: bool = False,
        reductions: Collectives | None = None,
        all_reduces: bool = False,
        remade: Container[int] = (),
        lent_to: MemoryStore | None = None,
    ) -> None:
        """A group of the ranks of ``collectives``, which have a shard each.

        Args:
            under_way: leases whose bytes are being copied beside the computation.
            pool: where memory for gathering and reducing comes from; None: torch.
            home: the kind that the store has the weights in.
            updated_in_place: that are masters, and an update puts what it rounds of them into the parameters.
            reductions: the ranks that gradients are averaged over; None: those that share the weights.
            all_reduces: the mean is made whole on every rank, also where each takes its shard of it only.
            remade: the chunks whose weights may be given up, since the store makes them anew of their masters.
            lent_to: what has this rank's part of the weights, once they are here, where they are; None: nothing, the
                store has memory of its own for them.
        """
        self.placement = placement
        self.params = params
        self.chunks = chunks
        self.persistent = persistent
        for param in params:
            param.stays = persistent
        self.name = name
        """The name that errors show."""
        self.state = ShardedState.SHARDED
        self.num_holds = 0
        """Calls of modules and single operations that need the weights now."""
        self.num_calls = 0
        """Those of modules: while there are any, all parameters are shown."""
        self.numel = placement.numel
        self._gradients: dict[int, torch.Tensor] = {}
        """What autograd has accumulated, by parameter index, until it is reduced."""
        self._kept: dict[int, torch.Tensor] = {}
        """Flat sums of backwards whose reduction was put off."""
        self._store, self._collectives, self._allowance, self._copies = store, collectives, allowance, copies
        self._under_way = under_way if under_way is not None else UnderWay()
        self._reductions = collectives if reductions is None else reductions
        self._all_reduces = all_reduces
        self.dtype, self._reduce_dtype, self._home = dtype, reduce_dtype, home
        self._updated_in_place = updated_in_place
        self._pool = pool if pool is not None else MemoryPool(0, params[0].device)
        self._remade = remade
        self._lent_to, self._is_lent = lent_to, False
        self._leases: list[Lease] = []
        self._frames_ahead = 0

    @property
    def index(self) -> int:
        return self.placement.index

    @property
    def is_lent(self) -> bool:
        """Whether the weights that are here are the store's own."""
        return self._is_lent

    @property
    def in_use(self) -> bool:
        return self.num_holds > 0

    # Weights

    def unshard(self) -> None:
        """Lease weight chunks ahead of their use, as many as the allowance gives. Does not block."""
        self._go(ShardedState.UNSHARDING)
        for chunk, _ in self.chunks:
            frames = self._allowance.take(chunk)
            if frames == 0:
                return
            self._frames_ahead += frames
            self._leases.append(self._store.acquire(chunk, read=self._home.mask))

    def wait_for_unshard(self, *, updated: bool = False, gives_up: bool = False) -> None:
        """Copy the weights into the parameters. Blocks until every chunk was resident once.

        Args:
            updated: an update has changed them, and nothing else. Where that is done in place, this rank's part is in
                the parameters already; what is lent to the store is where it belongs, whoever wrote it.
            gives_up: the store need not keep them: nobody is expected to read them before an update writes them, or
                they are better made anew.
        """
        own_is_here = self._is_lent or (updated and self._updated_in_place)
        try:
            if self.state is ShardedState.SHARDED:
                if own_is_here:
                    self._go(ShardedState.UNSHARDING)
                else:
                    self.unshard()
            with outside_inference(), torch.no_grad():
                if own_is_here:
                    self._share({param.index: param.allocate() for param in self.params})
                else:
                    # what is computed now may read memory that was there before
                    with self._copies.issue(after_current=any(param.has_memory for param in self.params)):
                        flats = {param.index: param.allocate() for param in self.params}
                    self._gather_into(flats, self._home, self.dtype, gives_up=gives_up)
        except BaseException:  # whoever comes next begins anew, be the weights to stay or not
            with suppress(WorldError):  # the first error says what is wrong
                if self.state is not ShardedState.SHARDED:
                    self.reshard()
            raise
        if self._lent_to is not None and not self._is_lent:
            params = {param.index: param for param in self.params}
            for chunk, placement in self.chunks:
                self._lent_to.keep_in(chunk, ObjectKind.WEIGHT, self._views_of(placement, params))
            self._is_lent = True
        self._go(ShardedState.UNSHARDED)

    def withdraw(self) -> None:
        """The weights are about to leave the parameters: the store has memory of its own for them, until they are here
        again."""
        if self._lent_to is not None and self._is_lent:
            for chunk, _ in self.chunks:
                self._lent_to.take_back(chunk, ObjectKind.WEIGHT)
            self._is_lent = False

    def _views_of(self, chunk: ChunkPlacement, params: Mapping[int, ShardedParam]) -> Views:
        """What gives a chunk's weights within the parameters, with something in between where there is padding."""
        parts = [(params[segment.param], segment) for segment in chunk.segments]
        numel, dtype, device = chunk.numel, self.dtype, self.params[0].device

        def views() -> list[torch.Tensor]:
            found, done = [], 0
            for param, segment in parts:
                if segment.chunk_offset > done:
                    found.append(torch.zeros(segment.chunk_offset - done, dtype=dtype, device=device))
                found.append(param.allocate()[segment.param_offset : segment.param_offset + segment.numel])
                done = segment.chunk_offset + segment.numel
            return [*found, torch.zeros(numel - done, dtype=dtype, device=device)] if done < numel else found

        return views

    def gather(self, kind: ObjectKind, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """The full contents of one kind, for export: parameter index -> flat tensor [numel] on the CPU."""
        if kind is ObjectKind.WEIGHT:
            kind = self._home
        if self.state is ShardedState.UNSHARDING:
            self.reshard()  # what is leased ahead are weights, perhaps not the kind asked for
        device = self.params[0].device
        with self._copies.issue(after_current=False):
            flats = {param.index: torch.empty(param.numel, dtype=dtype, device=device) for param in self.params}
        self._gather_into(flats, kind, dtype)
        return {index: flat.cpu() for index, flat in flats.items()}

    def reshard(self) -> None:
        """Give up the full weights, or the leases on them; a group in use may not be resharded.

        Weights of a persistent group stay where they are: the next ``wait_for_unshard`` overwrites them there.
        """
        if self.state is ShardedState.UNSHARDING:
            self._drop_leases()
        elif not self.persistent:
            for param in self.params:
                param.drop()
            self._copies.note_given_up(self.numel)
        self._go(ShardedState.SHARDED)

    def note_use(self) -> None:
        """The weights that are here are used now, perhaps by another stream than the one that they came for."""
        self._copies.join(param.full for param in self.params if param.full is not None)

    def _drop_leases(self) -> None:
        while self._leases:  # one whose release fails is over, too
            self._leases.pop(0).release()
        self._allowance.give_back(self._frames_ahead)
        self._frames_ahead = 0

    def _gather_into(
        self, flats: dict[int, torch.Tensor], kind: ObjectKind, dtype: torch.dtype, *, gives_up: bool = False
    ) -> None:
        try:
            if self._collectives.world_size == 1:
                self._read_chunks(
                    kind, lambda s: flats[s.param][s.param_offset : s.param_offset + s.numel], gives_up=gives_up
                )
            else:
                self._all_gather(flats, kind, dtype, gives_up=gives_up)
        finally:
            self._copies.join(flats.values())

    def _share(self, flats: dict[int, torch.Tensor]) -> None:
        """Every rank has its own part in ``flats``: the others' come in."""
        if self._collectives.world_size == 1:
            return
        rank = self._collectives.rank

        def fill(shard: torch.Tensor) -> None:
            with self._copies.issue(after_current=True):
                for param in self.placement.params:
                    valid, start = param.valid_numel(rank), rank * param.shard_numel
                    shard[param.offset : param.offset + valid].copy_(flats[param.param][start : start + valid])

        try:
            self._exchange(flats, fill, "weight", self.dtype)
        finally:
            self._copies.join(flats.values())

    def _read_chunks(self, kind: ObjectKind, target_of: Target, *, gives_up: bool) -> None:
        """Copy every segment to its target, holding few leases at a time."""
        leases = deque(self._leases)
        self._leases = []
        num_issued = len(leases)
        try:
            for index, (chunk, placement) in enumerate(self.chunks):
                while num_issued < min(index + DEMAND_LEASES_AHEAD, len(self.chunks)):
                    leases.append(self._store.acquire(self.chunks[num_issued][0], read=kind.mask))
                    num_issued += 1
                leases[0].wait()
                pieces = leases[0].pieces(kind)
                is_on_host = pieces[0].device.type == "cpu"
                with self._copies.issue(after_current=not is_on_host):
                    _copy_segments(pieces, placement.segments, target_of)
                dead = kind.mask if gives_up and chunk in self._remade else 0
                if is_on_host and self._copies.is_beside:
                    copied = self._copies.mark()
                    self._under_way.add(Copying(leases.popleft(), copied, dead=dead))
                else:
                    self._copies.join()  # an update that follows may write there
                    leases.popleft().release(dead=dead)
        finally:
            self._leases = list(leases)
            self._drop_leases()

    def _all_gather(
        self, flats: dict[int, torch.Tensor], kind: ObjectKind, dtype: torch.dtype, *, gives_up: bool
    ) -> None:
        rank = self._collectives.rank
        starts = {p.param: p.offset - rank * p.shard_numel for p in self.placement.params}

        def fill(shard: torch.Tensor) -> None:
            self._read_chunks(kind, lambda s: shard[starts[s.param] + s.param_offset :][: s.numel], gives_up=gives_up)

        # ranks may have them in different kinds
        self._exchange(flats, fill, "weight" if kind is self._home else kind.name.lower(), dtype)

    def _exchange(
        self, flats: dict[int, torch.Tensor], fill: Callable[[torch.Tensor], None], what: str, dtype: torch.dtype
    ) -> None:
        """``fill`` this rank's shard, gather all ranks', and lay them out in ``flats``."""
        world_size, shard_numel = self._collectives.world_size, self.placement.shard_numel

        def own() -> tuple[torch.Tensor, torch.Tensor]:
            with self._copies.issue(after_current=False):
                full = self._pool.empty(world_size * shard_numel, dtype)
                shard = self._pool.empty(shard_numel, dtype).zero_()
            fill(shard)
            return full, shard

        full, shard = self._collectives.prepared(own, f"gather the {what} of {self.name}")
        with self._copies.issue(after_current=False):
            self._collectives.all_gather(full, shard)
            by_rank = full.view(world_size, shard_numel)
            for param in self.placement.params:
                for part, place in _by_rank(flats[param.param], by_rank, param):
                    part.copy_(place)

    # Gradients

    def take_gradient(self, param: ShardedParam, divisor: int = 1) -> bool:
        """Autograd has accumulated a gradient of the parameter: divided, it is the group's now. True if all have
        theirs."""
        gradient = access.take_gradient(param.param)
        if gradient is not None:
            gradient = gradient.detach() if gradient.requires_grad else gradient
            if divisor != 1:
                gradient = gradient / divisor  # not in place: its memory may be another's, too
            held = self._gradients.get(param.index)
            self._gradients[param.index] = gradient if held is None else held + gradient
        return len(self._gradients) == len(self.params)

    def has_taken(self, param: ShardedParam) -> bool:
        """Whether the running backward has given the parameter a gradient that nobody has taken on."""
        return param.index in self._gradients

    def has_gradient_of(self, param: ShardedParam) -> bool:
        return param.index in self._gradients or param.index in self._kept

    @property
    def has_gradients(self) -> bool:
        return bool(self._gradients)

    @property
    def has_kept_gradients(self) -> bool:
        """Whether there are sums of backwards whose reduction was put off."""
        return bool(self._kept)

    def keep_gradients(self, dtype: torch.dtype) -> None:
        """Backward is over and its reduction is put off: add what it gave to what earlier ones did, in ``dtype``."""
        for param in self.params:
            gradient = self._gradients.pop(param.index, None)
            if gradient is None:
                continue
            flat = param.flat_gradient(gradient).to(dtype)
            kept = self._kept.get(param.index)
            self._kept[param.index] = flat if kept is None else kept + flat

    def take_gradients(self, *, rounded: bool) -> tuple[list[int], GradientOf]:
        """One rank: the parameters that have a gradient, and their flat gradients by segment.

        Args:
            rounded: to the dtype of the reduction, as several ranks' are, wherever that loses bits.
        """
        flats = self._flat_gradients()
        if rounded and self._reduce_dtype is not torch.float32:
            flats = {param: flat.to(self._reduce_dtype) for param, flat in flats.items()}

        def gradient_of(segment: Segment) -> torch.Tensor | None:
            flat = flats.get(segment.param)
            return None if flat is None else flat[segment.param_offset : segment.param_offset + segment.numel]

        return list(flats), gradient_of

    def reduce_gradients(self) -> tuple[Reducing, GradientOf]:
        """Several ranks: issue the mean over ranks. This rank's part may be read once the work is done; a parameter
        without a gradient counts as zero."""
        rank, num_shards = self._collectives.rank, self._collectives.world_size
        shard_numel = self.placement.shard_numel
        full = self._pool.empty(num_shards * shard_numel, self._reduce_dtype).zero_().view(num_shards, shard_numel)
        flats = self._flat_gradients()
        for placement in self.placement.params:
            flat = flats.get(placement.param)
            if flat is not None:
                for part, place in _by_rank(flat, full, placement):
                    place.copy_(part)
        del flats
        if self._all_reduces:
            shard, work = full[rank], self._reductions.all_reduce_mean(full.view(-1))
        else:
            shard = self._pool.empty(shard_numel, self._reduce_dtype)
            work = self._reductions.reduce_scatter_mean(shard, full.view(-1))
        starts = {p.param: p.offset - rank * p.shard_numel for p in self.placement.params}

        def gradient_of(segment: Segment) -> torch.Tensor:
            return shard[starts[segment.param] + segment.param_offset :][: segment.numel]

        return work, gradient_of

    def drop_gradient(self, param: ShardedParam) -> None:
        self._gradients.pop(param.index, None)
        self._kept.pop(param.index, None)

    def drop_gradients(self) -> None:
        self._gradients.clear()
        self._kept.clear()

    def _flat_gradients(self) -> dict[int, torch.Tensor]:
        """All that the group has, by parameter index; it has none any more."""
        flats = {p.index: p.flat_gradient(self._gradients[p.index]) for p in self.params if p.index in self._gradients}
        for index, kept in self._kept.items():
            flats[index] = kept + flats[index] if index in flats else kept
        self.drop_gradients()
        return flats

    def _go(self, state: ShardedState) -> None:
        self.state = check_transition(SHARDED_TRANSITIONS, self.state, state)


def _by_rank(
    flat: torch.Tensor, shards: torch.Tensor, param: ParamPlacement
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of a parameter, ``flat`` [numel], each with its place in ``shards`` [ranks, numel of the group's
    shard]: those of all ranks that have a whole one are one, [ranks, numel], so that a thousand ranks cost what two
    do."""
    columns = shards[:, param.offset : param.offset + param.shard_numel]
    num_whole, rest = divmod(param.numel, max(param.shard_numel, 1))
    first = num_whole * param.shard_numel
    if num_whole:
        yield flat[:first].view(num_whole, param.shard_numel), columns[:num_whole]
    if rest:
        yield flat[first:], columns[num_whole, :rest]


def _copy_segments(pieces: Sequence[torch.Tensor], segments: Sequence[Segment], target_of: Target) -> None:
    """One call for all segments that lie within a piece, copies one by one for those that do not."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for segment in segments:
        target = target_of(segment)
        for start, part in spans(pieces, segment.chunk_offset, segment.numel):
            targets.append(target if part.numel() == segment.numel else target[start : start + part.numel()])
            sources.append(part)
    if len(targets) == 1:
        targets[0].copy_(sources[0], non_blocking=True)
    elif targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
