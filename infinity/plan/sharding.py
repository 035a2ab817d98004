"""Where every element lives: param groups cut into shards, shards cut into chunks, chunks into segments.

Pure. Positions are elements, never bytes. The rules keep parity bit-exact:

- a parameter is cut on its flattened form at multiples of ``ALIGNMENT``, so that no element moves between the vector
  body and the scalar tail of torch's fused kernels;
- padding exists in storage only; a ``Segment`` never covers any;
- a chunk's numel is a multiple of ``NORM_BLOCK``, and norms are taken per ``NORM_BLOCK`` of the group shard, so that
  the gradient norm does not depend on the chunk size and therefore not on the memory budget.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from io_daemon.shared.protocol import align_up

ALIGNMENT: Final = 64
NORM_BLOCK: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamPlacement:
    """One parameter's place in its group's shard; the same on every rank."""

    param: int
    """Index of the parameter in the engine's list."""
    numel: int
    shard_numel: int
    """Elements per rank, padded to ``ALIGNMENT``."""
    offset: int
    """First element in the group shard."""

    def valid_numel(self, rank: int) -> int:
        """Elements of the parameter, without padding, that ``rank`` owns."""
        return max(0, min(self.shard_numel, self.numel - rank * self.shard_numel))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of one parameter's elements inside one chunk: the exact range an optimizer call may touch."""

    param: int
    param_offset: int
    """In the flattened, unsharded parameter."""
    chunk_offset: int
    numel: int

    def norm_ranges(self) -> Iterator[tuple[int, int]]:
        """(chunk offset, numel) of the segment's parts, cut at the group shard's norm blocks, at one of which every
        chunk begins."""
        position, end = self.chunk_offset, self.chunk_offset + self.numel
        while position < end:
            block_end = (position // NORM_BLOCK + 1) * NORM_BLOCK
            stop = min(end, block_end)
            yield position, stop - position
            position = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Segments that lie one behind another without padding: what is copied or stepped in one go."""

    segments: tuple[Segment, ...]

    @property
    def chunk_offset(self) -> int:
        return self.segments[0].chunk_offset

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)


def runs_of(segments: Sequence[Segment]) -> list[Run]:
    """``segments``, in their order, as the longest runs."""
    runs: list[list[Segment]] = []
    for segment in segments:
        last = runs[-1][-1] if runs else None
        if last is not None and last.chunk_offset + last.numel == segment.chunk_offset:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [Run(segments=tuple(run)) for run in runs]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlacement:
    """One chunk of this rank's shard of one group."""

    group: int
    start: int
    """First element in the group shard."""
    numel: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """One param group: parameters that are gathered and reduced together."""

    index: int
    params: tuple[ParamPlacement, ...]
    shard_numel: int
    trainable: bool

    @property
    def numel(self) -> int:
        """Unsharded elements, without padding: what counts as live."""
        return sum(param.numel for param in self.params)


def place_group(index: int, params: Sequence[tuple[int, int]], *, world_size: int, trainable: bool) -> GroupPlacement:
    """Lay the parameters, given as (index, numel), one after another in every rank's shard."""
    placements: list[ParamPlacement] = []
    offset = 0
    for param, numel in params:
        shard_numel = align_up(-(-numel // world_size), ALIGNMENT)
        placements.append(ParamPlacement(param=param, numel=numel, shard_numel=shard_numel, offset=offset))
        offset += shard_numel
    return GroupPlacement(index=index, params=tuple(placements), shard_numel=offset, trainable=trainable)


def cut_chunks(group: GroupPlacement, *, rank: int, chunk_numel: int) -> list[ChunkPlacement]:
    """Cut ``rank``'s shard of the group into chunks of ``chunk_numel``; the last one holds the rest."""
    if chunk_numel % NORM_BLOCK:
        raise ValueError(f"chunk_numel {chunk_numel} is not a multiple of {NORM_BLOCK}")
    offsets = [param.offset for param in group.params]

    def segments(start: int, stop: int) -> tuple[Segment, ...]:
        params = group.params[max(0, bisect_right(offsets, start) - 1) : bisect_left(offsets, stop)]
        return tuple(_segments(params, rank, start, stop))

    return [
        ChunkPlacement(
            group=group.index,
            start=start,
            numel=min(chunk_numel, group.shard_numel - start),
            segments=segments(start, min(start + chunk_numel, group.shard_numel)),
        )
        for start in range(0, group.shard_numel, chunk_numel)
    ]


def _segments(params: Sequence[ParamPlacement], rank: int, start: int, stop: int) -> Iterator[Segment]:
    for param in params:
        first = max(start, param.offset)
        last = min(stop, param.offset + param.valid_numel(rank))
        if first < last:
            yield Segment(
                param=param.param,
                param_offset=rank * param.shard_numel + first - param.offset,
                chunk_offset=first - start,
                numel=last - first,
            )
