"""State in and out of the store by element: each comes once, at its place, and no other moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.commands.absent_peers import AbsentPeers
from infinity.files import pieces
from infinity.plan.precision import Precision
from infinity.plan.sharding import NORM_BLOCK, Segment
from infinity.tiers.collectives import Collectives
from infinity.weights.state_io import StateIO
from io_daemon.shared.protocol import ObjectKind
from tests.support.small_shards import BF16, FP32, SmallShards
from tests.support.threaded_ranks import ThreadedCollectives, on_ranks

SHAPES = [[(70, 100), (64,), (7, 300), (5,)], [(33, 3), (1,)]]
"""The second group is frozen."""
WEIGHT, MASTER, GRAD = ObjectKind.WEIGHT, ObjectKind.MASTER, ObjectKind.GRAD
MASTERS_ONLY = replace(BF16, keeps_weights=False)


def io_of(collectives: Any, precision: Precision = BF16) -> tuple[StateIO, SmallShards]:
    """Weights 1, 2, 3, ... in the store, all other kinds zeros."""
    shards = SmallShards(SHAPES, collectives, precision=precision, chunk_numel=NORM_BLOCK, piece_numel=999, frozen=[1])
    for chunk, placement in enumerate(shards.chunks):
        if not placement.segments:  # padding alone
            continue
        trainable = placement.segments[0].param < len(SHAPES[0])
        for kind in precision.dtypes(trainable=trainable):
            shards.part(chunk, kind, 0, placement.numel).zero_()
            for segment in placement.segments if kind in (WEIGHT, MASTER) else ():
                full = shards.full[segment.param].float()
                values = full[segment.param_offset : segment.param_offset + segment.numel]
                shards.part(chunk, kind, segment.chunk_offset, segment.numel).copy_(values)
    sharded: Any = SimpleNamespace(
        store=shards.store,
        chunks_ahead=2,
        sharers=collectives,
        chunks=shards.chunks,
        precision=precision,
        params=shards.params,
        layout=SimpleNamespace(placements=shards.placements),
        dtypes_of=lambda group: precision.dtypes(trainable=shards.placements[group].trainable),
        refuse_away=lambda kinds: None,
    )
    return StateIO(sharded), shards


def in_ranks(world_size: int, work: Any) -> list[Any]:
    return list(on_ranks(world_size, work))


@pytest.fixture(params=[300, 1 << 22], ids=lambda numel: f"pieces of {numel}")
def piece_numel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    numel: int = request.param
    monkeypatch.setattr(pieces, "PIECE_NUMEL", numel)
    return numel


def test_what_is_away_is_refused_also_to_a_rank_without_a_part() -> None:
    asked: list[tuple[int, int]] = []

    def work(collectives: ThreadedCollectives) -> int:
        io, shards = io_of(collectives)
        _, numel = io.own_range(shards.params[5])
        io._refuse_away = lambda kinds: asked.append((collectives.rank, kinds))
        io.write_own(shards.params[5], [WEIGHT], torch.zeros(numel))
        return numel

    assert in_ranks(2, work) == [1, 0]
    assert sorted(asked) == [(0, WEIGHT.mask), (1, WEIGHT.mask)]


@pytest.mark.parametrize("way", ["read", "stream"])
def test_ranks_that_read_different_things_are_told_apart_before_they_do(way: str) -> None:
    def work(collectives: ThreadedCollectives) -> None:
        io, shards = io_of(collectives)
        kind = MASTER if collectives.rank else WEIGHT
        if way == "read":
            io.read(shards.params[0], kind)
        else:
            list(io.stream(shards.params[0], kind))

    with pytest.raises(AssertionError, match="the ranks diverge"):
        on_ranks(2, work)


@pytest.mark.usefixtures("piece_numel")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("precision", [FP32, BF16, MASTERS_ONLY], ids=["fp32", "bf16", "masters only"])
def test_what_is_read_is_what_lies_there(world_size: int, precision: Precision) -> None:
    def work(collectives: ThreadedCollectives) -> list[tuple[int, int]]:
        io, shards = io_of(collectives, precision)
        ranges = []
        for param, full in zip(shards.params, shards.full, strict=True):
            first, numel = io.own_range(param)
            ranges.append((first, numel))
            assert torch.equal(io.read_own(param, WEIGHT), full.float()[first : first + numel])
            assert torch.equal(io.read_flat(param, WEIGHT), full.float())
            assert torch.equal(io.read(param, WEIGHT), full.float().view(param.shape))
            streamed = torch.full_like(full, torch.nan)
            seen = 0
            for start, part in io.stream(param, WEIGHT):
                assert part.dtype is precision.weight
                streamed[start : start + part.numel()] = part
                seen += part.numel()
            assert seen == param.numel, "each element once"
            assert torch.equal(streamed, full)
        assert shards.store.num_held == 0
        return ranges

    of_ranks = in_ranks(world_size, work)
    for index, shape in enumerate(shape for group in SHAPES for shape in group):
        parts = [ranges[index] for ranges in of_ranks]
        assert sum(numel for _, numel in parts) == torch.Size(shape).numel()
        ends = [first + numel for first, numel in parts]
        assert all(first == end for (first, numel), end in zip(parts[1:], ends, strict=False) if numel)


@pytest.mark.parametrize("world_size", [2, 4096])
def test_a_small_parameter_streams_in_one_part_however_many_ranks_have_some(world_size: int) -> None:
    io, shards = io_of(AbsentPeers(world_size))
    for param in shards.params:
        assert [(start, part.numel()) for start, part in io.stream(param, WEIGHT)] == [(0, param.numel)]


def test_parts_of_thousands_of_ranks_are_no_shorter_than_those_of_hundreds() -> None:
    def parts(world_size: int) -> int:
        return sum(1 for _ in pieces.pieces(1 << 20, num_ranks=world_size))

    assert [parts(world_size) for world_size in (2, 256, 4096)] == [1, 128, 128]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("written", range(6))
def test_what_is_written_is_there_and_nothing_else_has_moved(world_size: int, written: int) -> None:
    def work(collectives: ThreadedCollectives) -> None:
        io, shards = io_of(collectives)
        param = shards.params[written]
        first, numel = io.own_range(param)
        kinds = [MASTER, WEIGHT] if io.has(param, MASTER) else [WEIGHT]
        io.write_own(param, kinds, -torch.arange(first, first + numel, dtype=torch.float32))
        for other, full in zip(shards.params, shards.full, strict=True):
            expected = -torch.arange(other.numel, dtype=torch.float32) if other is param else full.float()
            for kind in (WEIGHT, MASTER):
                if io.has(other, kind):
                    dtype = torch.bfloat16 if kind is WEIGHT else torch.float32
                    assert torch.equal(io.read_flat(other, kind), expected.to(dtype).float()), (other.name, kind)

    in_ranks(world_size, work)


@pytest.mark.parametrize(
    ("precision", "trained", "frozen"),
    [
        (FP32, [WEIGHT, ObjectKind(3), ObjectKind(4)], [WEIGHT]),
        (BF16, [MASTER, ObjectKind(3), ObjectKind(4)], [WEIGHT]),
        (MASTERS_ONLY, [MASTER, ObjectKind(3), ObjectKind(4)], [WEIGHT]),
    ],
    ids=["fp32", "bf16", "masters only"],
)
@pytest.mark.parametrize("numel_max", [64, 1000, 1 << 20])
def test_what_lasts_is_gone_through_once(
    precision: Precision, trained: Sequence[ObjectKind], frozen: Sequence[ObjectKind], numel_max: int
) -> None:
    def work(collectives: ThreadedCollectives) -> None:
        io, shards = io_of(collectives, precision)
        seen = {(p.index, kind): torch.zeros(p.numel) for p in shards.params for kind in io.lasting(p.index)}
        num_bytes = 0
        params = {0, 2, 3, 4}

        def use(kind: ObjectKind, segment: Segment, values: torch.Tensor) -> None:
            nonlocal num_bytes
            assert values.numel() == segment.numel <= numel_max
            seen[segment.param, kind][segment.param_offset : segment.param_offset + segment.numel] += 1
            num_bytes += values.numel() * values.element_size()
            if kind in (WEIGHT, MASTER):
                full = shards.full[segment.param].float()
                assert torch.equal(values.float(), full[segment.param_offset :][: segment.numel])

        io.scan(params, use, numel_max=numel_max)
        for param in shards.params:
            assert list(io.lasting(param.index)) == list(trained if param.index < 4 else frozen)
            first, numel = io.own_range(param)
            for kind in io.lasting(param.index):
                expected = torch.zeros(param.numel)
                expected[first : first + numel] = param.index in params
                assert torch.equal(seen[param.index, kind], expected), (param.name, kind)
        assert io.lasting_bytes(params) == num_bytes

    in_ranks(2, work)


def test_a_fill_writes_followers_and_asks_in_order() -> None:
    def work(collectives: ThreadedCollectives) -> None:
        io, shards = io_of(collectives)
        wanted = {MASTER: {0, 2}, ObjectKind(3): {2}, WEIGHT: {4}}
        asked: list[tuple[ObjectKind, Segment]] = []

        def source(kind: ObjectKind, segment: Segment) -> torch.Tensor:
            asked.append((kind, segment))
            first = segment.param_offset
            return 0.1 + kind * 1000 + torch.arange(first, first + segment.numel, dtype=torch.float64)

        io.fill(wanted, source, numel_max=500)
        assert asked == list(io.asked_for(wanted, numel_max=500))
        assert all(segment.numel <= 500 for _, segment in asked)
        for param, full in zip(shards.params, shards.full, strict=True):
            for kind in (WEIGHT, MASTER, ObjectKind(3), ObjectKind(4)):
                if not io.has(param, kind):
                    continue
                of = MASTER if kind is WEIGHT and param.index in wanted[MASTER] else kind
                dtype = torch.bfloat16 if kind is WEIGHT else torch.float32
                expected = full.float() if kind in (WEIGHT, MASTER) else torch.zeros(param.numel)
                if param.index in wanted.get(of, ()):
                    expected = 0.1 + of * 1000 + torch.arange(param.numel, dtype=torch.float64)
                assert torch.equal(io.read_flat(param, kind), expected.to(dtype).float()), (param.name, kind)

    in_ranks(2, work)


def test_who_has_what() -> None:
    io, shards = io_of(Collectives(None))
    assert [io.has(param, WEIGHT) for param in shards.params] == [True] * 6
    assert [io.has(param, MASTER) for param in shards.params] == [True] * 4 + [False] * 2
    assert [io.has(param, GRAD) for param in shards.params] == [True] * 4 + [False] * 2
