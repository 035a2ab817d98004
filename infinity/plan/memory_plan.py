"""From a budget in bytes to chunk size, frames and swap space. Pure arithmetic, done before the first step.

The arena is ``num_frames`` equal frames. A frame holds one chunk's weights; a wider object (fp32 master weights of a
bf16 model) takes several. The plan takes the largest chunk that still leaves enough frames to overlap reading,
updating and writing; if not even the smallest chunk does, ``BudgetError`` names the least budget that works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infinity.errors import BudgetError
from infinity.plan.device_share import DeviceShare
from infinity.plan.sharding import NORM_BLOCK
from io_daemon.shared.protocol import PAGE_BYTES, ObjectKind, align_up

DEMAND_SETS_MIN: Final = 2
"""Frame sets of one update that must fit: the one in use, and one on its way in or out."""
DEMAND_SETS_WANTED: Final = 32
"""Enough frame sets that reads, updates and writes overlap, and that residency is fine-grained."""
CHUNKS_WANTED: Final = 128
"""A group's last chunk fills its frames only partly; with this many chunks the waste stays at a few per cent."""
LEASE_NUMEL: Final = 1 << 18
"""A lease costs as much as the work on so many elements: of a small model fewer, larger chunks are made, ..."""
WASTE_MAX: Final = 1 / 16
"""... as long as no more than this share of their frames is empty."""
LARGE_NUMEL: Final = 1 << 22
"""Up to here fewer, larger chunks are worth something by themselves: of 135 leases on 1.3M elements each a step took
1.1 ms to find its way, whose code the data had driven out of the caches, and the daemon as long beside it. ..."""
LARGE_SETS_WANTED: Final = 16
"""... So that many sets are enough then, ..."""
LARGE_CHUNKS_WANTED: Final = 48
"""... and that many chunks, for residency that is fine-grained enough."""
DEVICE_LARGE_NUMEL: Final = 1 << 26
"""``LARGE_NUMEL`` where another device computes: its kernels have no use for small pieces, and what the host says to it
of each takes a millisecond."""
AUTO_STREAMED_BYTES_MAX: Final = 2 << 30
"""Without a stated budget, the arena takes what is pinned plus at most this much for streaming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    chunk_numel: int
    frame_bytes: int
    num_frames: int
    """The frames of this rank's arena."""
    pinned_frames: int
    demand_frames: int
    """Frames of the largest set that one lease needs, pinned kinds aside."""
    swap_bytes: int
    """Disk space of this rank, padding included."""
    chunks_max: int
    holds_all: bool = False
    """Every object has frames of its own, and updates have theirs beside: a larger budget would change nothing."""

    @property
    def arena_bytes(self) -> int:
        return PAGE_BYTES + self.num_frames * self.frame_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What the host store must hold for this rank."""

    group_shard_numels: Sequence[int]
    group_trainable: Sequence[bool]
    itemsizes: Mapping[int, float]
    """Bytes per element by object kind, only kinds that the daemon keeps."""
    trained_mask: int
    """Kinds that only trainable groups have (all but the weight)."""
    pinned_mask: int
    """Kinds of the ``cpu`` tier."""
    frozen_mask: int = 0
    """Kinds that only other groups have."""
    ratio: float = 1.0
    """The part of the trained elements whose kinds of ``trained_mask`` are here; the others' are on the device."""
    group_weight_bytes: Sequence[int] = ()
    """Bytes per element of each group's weights, where they are not alike in all."""

    def device_share(self) -> DeviceShare:
        numels = zip(self.group_shard_numels, self.group_trainable, strict=True)
        return DeviceShare(sum(numel for numel, trainable in numels if trainable), self.ratio)

    def kinds(self, group: int) -> list[int]:
        others = self.frozen_mask if self.group_trainable[group] else self.trained_mask
        return [k for k in self.itemsizes if not others >> k & 1]

    def itemsize(self, group: int, kind: int) -> float:
        """Bytes per element of a kind that the group has."""
        is_own = kind == ObjectKind.WEIGHT and self.group_weight_bytes
        return self.group_weight_bytes[group] if is_own else self.itemsizes[kind]

    @property
    def frame_itemsize(self) -> float:
        """Bytes per element of a frame: of the narrowest kind that any group has."""
        own = self.group_weight_bytes if ObjectKind.WEIGHT in self.itemsizes else ()
        return min((*own, *self.itemsizes.values()))


def plan_memory(
    shape: StateShape,
    *,
    budget_bytes: int | None,
    chunk_numel_max: int,
    local_world_size: int,
    budget_key: str,
    large_numel: int = LARGE_NUMEL,
) -> MemoryPlan:
    """Choose chunk size and frames for one rank.

    Args:
        budget_bytes: for the arenas of all ``local_world_size`` ranks of the job on the node; None: what is pinned
            plus the streamed state, the latter up to ``AUTO_STREAMED_BYTES_MAX``.
        chunk_numel_max: ``sub_group_size``; a chunk never exceeds it.
        large_numel: up to here a chunk is as large as leaves a fair number of them, and of sets.

    Raises:
        BudgetError: with the smallest ``budget_bytes`` that works.
    """
    largest_group = _largest_group(shape)
    wanted = min(chunk_numel_max, largest_group, sum(shape.group_shard_numels) // CHUNKS_WANTED)
    wanted = max(NORM_BLOCK, wanted // NORM_BLOCK * NORM_BLOCK)
    while 2 * wanted <= min(chunk_numel_max, LEASE_NUMEL) and _waste(shape, 2 * wanted) <= WASTE_MAX:
        wanted *= 2
    if wanted >= LEASE_NUMEL:
        for numel in _equal_parts(largest_group, wanted, min(chunk_numel_max, large_numel)):
            candidate = _plan_for_chunk(shape, numel, budget_bytes, local_world_size)
            if candidate.holds_all and _is_sparing(candidate) and _waste(shape, numel) <= WASTE_MAX:
                return candidate
    smallest_that_works: MemoryPlan | None = None
    for numel, sets in _sizes(shape, wanted, min(chunk_numel_max, large_numel)):
        candidate = _plan_for_chunk(shape, numel, budget_bytes, local_world_size)
        streamed_frames = candidate.num_frames - candidate.pinned_frames
        if candidate.holds_all or streamed_frames >= sets * candidate.demand_frames:
            return candidate
        if streamed_frames >= DEMAND_SETS_MIN * candidate.demand_frames:
            smallest_that_works = candidate
    if smallest_that_works is not None:
        return smallest_that_works
    smallest = _plan_for_chunk(shape, NORM_BLOCK, None, local_world_size)
    frames = smallest.pinned_frames + DEMAND_SETS_MIN * smallest.demand_frames
    raise BudgetError(
        key=budget_key,
        budget_bytes=budget_bytes or 0,
        smallest_bytes=local_world_size * (PAGE_BYTES + frames * smallest.frame_bytes),
        reason=(
            f"{smallest.pinned_frames * smallest.frame_bytes} bytes of the cpu tier must stay resident on each of "
            f"{local_world_size} ranks, and updating one chunk needs {DEMAND_SETS_MIN} sets of "
            f"{smallest.demand_frames} frames of {smallest.frame_bytes} bytes"
        ),
    )


def _plan_for_chunk(shape: StateShape, chunk_numel: int, budget_bytes: int | None, local_world_size: int) -> MemoryPlan:
    frame_bytes = align_up(int(chunk_numel * shape.frame_itemsize), PAGE_BYTES)
    pinned_frames = streamed_frames = swap_bytes = num_chunks = 0
    demand_frames = 0
    share = shape.device_share()
    for group, shard_numel in enumerate(shape.group_shard_numels):
        for numel, count, kinds in _chunk_sizes(shape, group, shard_numel, chunk_numel, share):
            num_chunks += count
            needs = {k: align_up(int(numel * shape.itemsize(group, k)), PAGE_BYTES) for k in kinds}
            frames = {k: -(-needs[k] // frame_bytes) for k in kinds}
            demand_frames = max(demand_frames, sum(n for k, n in frames.items() if not shape.pinned_mask >> k & 1))
            for kind in kinds:
                if shape.pinned_mask >> kind & 1:
                    pinned_frames += count * frames[kind]
                else:
                    streamed_frames += count * frames[kind]
                    swap_bytes += count * needs[kind]
    all_frames = pinned_frames + streamed_frames + DEMAND_SETS_MIN * demand_frames
    if budget_bytes is None:
        streamed_max = max(DEMAND_SETS_WANTED * demand_frames, AUTO_STREAMED_BYTES_MAX // frame_bytes)
        num_frames = min(all_frames, pinned_frames + streamed_max)
    else:
        num_frames = min(all_frames, max(0, (budget_bytes // local_world_size - PAGE_BYTES) // frame_bytes))
    return MemoryPlan(
        chunk_numel=chunk_numel,
        frame_bytes=frame_bytes,
        num_frames=max(num_frames, 1),  # also of a rank that has nothing to keep
        pinned_frames=pinned_frames,
        demand_frames=demand_frames,
        swap_bytes=swap_bytes,
        chunks_max=max(num_chunks, 1),
        holds_all=num_frames == all_frames,
    )


def _sizes(shape: StateShape, wanted: int, large_numel: int) -> Iterator[tuple[int, int]]:
    """Sizes of chunks, and the number of sets with which each is as good as any: large ones that cut groups evenly, and
    halves of ``wanted`` above and below them."""
    numel = wanted
    while numel > large_numel:
        yield numel, DEMAND_SETS_WANTED
        numel = numel // 2 // NORM_BLOCK * NORM_BLOCK
    most = min(large_numel, sum(shape.group_shard_numels) // LARGE_CHUNKS_WANTED)
    for part in _equal_parts(_largest_group(shape), LEASE_NUMEL, most):
        if _waste(shape, part) <= WASTE_MAX:
            yield part, LARGE_SETS_WANTED
    while numel > NORM_BLOCK:
        yield numel, DEMAND_SETS_WANTED
        numel = max(NORM_BLOCK, numel // 2 // NORM_BLOCK * NORM_BLOCK)
    yield NORM_BLOCK, DEMAND_SETS_WANTED


def _largest_group(shape: StateShape) -> int:
    return align_up(max(shape.group_shard_numels, default=NORM_BLOCK), NORM_BLOCK)


def _is_sparing(plan: MemoryPlan) -> bool:
    """Whether the sets that updates need beside the state are no great part of the frames."""
    return DEMAND_SETS_MIN * plan.demand_frames <= WASTE_MAX * plan.num_frames


def _equal_parts(numel: int, above: int, numel_max: int) -> Iterator[int]:
    """Sizes between ``above`` and ``numel_max``, largest first, of which ``numel`` is a whole number, about; some of
    them, where they are many."""
    count = -(-numel // max(numel_max, 1))
    while (part := align_up(-(-numel // count), NORM_BLOCK)) > above:
        if part <= numel_max:
            yield part
        count += 1 + count // 16


def _waste(shape: StateShape, chunk_numel: int) -> float:
    """The share of the frames that last chunks leave empty."""
    numel = sum(shape.group_shard_numels)
    filled = sum(-(-shard_numel // chunk_numel) * chunk_numel for shard_numel in shape.group_shard_numels)
    return 1 - numel / filled if filled else 0.0


def _chunk_sizes(
    shape: StateShape, group: int, shard_numel: int, chunk_numel: int, share: DeviceShare
) -> Iterator[tuple[int, int, list[int]]]:
    """(numel, how many, kinds that are here) of the chunks of one shard."""
    full, rest = divmod(shard_numel, chunk_numel)
    kinds = shape.kinds(group)
    weights = [kind for kind in kinds if not shape.trained_mask >> kind & 1]
    for numel, count in ((chunk_numel, full), (rest, 1 if rest else 0)):
        stay = share.take(numel, count) if count and shape.group_trainable[group] else 0
        for part, of_part in ((stay, weights), (count - stay, kinds)):
            if part:
                yield numel, part, of_part
