"""Gradients in chunks: what is copied, what is added, what is leased for it, and the norm."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from infinity.plan.sharding import NORM_BLOCK, ChunkPlacement, Segment
from infinity.tiers import under_way
from infinity.tiers.collectives import Collectives
from infinity.tiers.under_way import UnderWay
from infinity.update.gradients import LEASES_AHEAD, GradientChunks
from infinity.update.norms import BlockNorms, Norm, Norms, ParamNorms
from infinity.weights.param_group import GradientOf
from infinity.weights.streams import CopyStream
from io_daemon.shared.protocol import ObjectKind
from tests.support.small_shards import SmallShards
from tests.support.strict_store import StrictLease
from tests.support.work import lines_run

CPU = torch.device("cpu")
GRAD = ObjectKind.GRAD.mask
SHAPES = [(30_000,), (64,), (40_000,), (100,)]
"""A group of five chunks: [0] lies in two, [1] and [2] share one with it, [3] ends the last."""


class Fixture:
    def __init__(
        self,
        chunk_numel: int = NORM_BLOCK,
        piece_numel: int = 5000,
        norms: Norms | None = None,
        copies: CopyStream | None = None,
    ) -> None:
        self.shards = SmallShards([SHAPES], chunk_numel=chunk_numel, piece_numel=piece_numel)
        self.store, self.under_way = self.shards.store, UnderWay()
        self.gradients = GradientChunks(
            self.store,
            self.shards.chunks,
            len(SHAPES),
            self.shards.trained,
            norms or of_blocks(),
            copies or CopyStream(CPU),
            self.under_way,
        )
        self.ids = [chunk for chunk, _ in self.shards.groups[0].chunks]

    def add(self, flats: dict[int, torch.Tensor], *, norms: bool = False) -> None:
        self.gradients.add(self.ids, gradient_of(flats), list(flats), norms=norms)

    def norm(self, params: Sequence[int]) -> Norm:
        return self.gradients.norm([param in params for param in range(len(SHAPES))])

    def held(self, param: int) -> torch.Tensor:
        """The parameter's gradient in the store."""
        parts = [
            self.shards.part(chunk, ObjectKind.GRAD, segment.chunk_offset, segment.numel)
            for chunk, placement in enumerate(self.shards.chunks)
            for segment in placement.segments
            if segment.param == param
        ]
        return torch.cat(parts)


def of_blocks() -> Norms:
    return BlockNorms(Collectives(None))


def of_params() -> Norms:
    return ParamNorms([shape[0] for shape in SHAPES], Collectives(None))


EITHER = pytest.mark.parametrize("norms", [of_blocks, of_params])


def gradient_of(flats: dict[int, torch.Tensor]) -> GradientOf:
    def find(segment: Segment) -> torch.Tensor | None:
        flat = flats.get(segment.param)
        return None if flat is None else flat[segment.param_offset : segment.param_offset + segment.numel]

    return find


def gradients_of(params: Sequence[int], seed: int = 0) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {param: torch.randn(SHAPES[param], generator=generator) for param in params}


def test_the_first_is_copied_and_the_next_are_added() -> None:
    """Copied to the sign of zero: adding to zeros would lose it."""
    fixture = Fixture()
    first, second = gradients_of(range(4)), gradients_of(range(4), seed=1)
    first[0][:5] = -0.0
    fixture.add(first)
    for param in range(4):
        assert torch.equal(fixture.held(param).view(torch.int32), first[param].view(torch.int32))
    fixture.add(second)
    for param in range(4):
        assert torch.equal(fixture.held(param), first[param] + second[param])


def test_what_was_given_no_gradient_is_copied_when_it_comes() -> None:
    """Beside a neighbour in the same run, to which is added."""
    fixture = Fixture()
    first, second = gradients_of([0, 2]), gradients_of([0, 1, 2], seed=1)
    fixture.add(first)
    second[1][:] = -0.0
    fixture.add(second)
    assert torch.equal(fixture.held(0), first[0] + second[0])
    assert torch.equal(fixture.held(1).view(torch.int32), second[1].view(torch.int32))
    assert torch.equal(fixture.held(2), first[2] + second[2])
    third = gradients_of([1], seed=2)
    fixture.add(third)
    assert torch.equal(fixture.held(1), second[1] + third[1])
    assert torch.equal(fixture.held(2), first[2] + second[2])


def test_a_cleared_step_is_forgotten() -> None:
    fixture = Fixture()
    fixture.add(gradients_of(range(4)), norms=True)
    fixture.gradients.clear()
    assert fixture.norm([]) == Norm(torch.tensor(0.0), is_finite=True)
    again = gradients_of([0], seed=1)
    fixture.add(again)
    assert torch.equal(fixture.held(0), again[0])
    assert float(fixture.norm([0]).value) == pytest.approx(float(again[0].double().norm()), rel=1e-6)


def test_a_gradient_is_replaced_by_given_values_and_added_to_from_there() -> None:
    """This rank's part of it, which begins at any element of the parameter."""
    fixture = Fixture()
    first = gradients_of(range(4))
    fixture.add(first)
    num_leases = len(fixture.store.acquired())
    values = torch.arange(30_000.0)
    fixture.gradients.replace(0, 0, values)
    assert [chunk for chunk, _, _ in fixture.store.acquired()[num_leases:]] == [0, 1]
    assert torch.equal(fixture.held(0), values)
    assert all(torch.equal(fixture.held(param), first[param]) for param in (1, 2, 3))
    fixture.add({0: first[0]})
    assert torch.equal(fixture.held(0), values + first[0])
    (chunk, placement) = next((i, each) for i, each in enumerate(fixture.shards.chunks) if i == 1)
    begin = next(segment.param_offset for segment in placement.segments if segment.param == 0)
    nothing = ChunkPlacement(group=0, start=0, numel=0, segments=())
    gradients = GradientChunks(fixture.store, [nothing, placement], 4, [], of_blocks(), CopyStream(CPU), UnderWay())
    gradients.replace(0, begin, torch.full((30_000 - begin,), 7.0))
    assert torch.equal(fixture.held(0)[begin:], torch.full((30_000 - begin,), 7.0)), f"of chunk {chunk} alone"


@pytest.mark.parametrize("verb", ["forget", "replace"])
def test_one_among_many_costs_as_much_as_among_few(verb: str) -> None:
    """In lines run, of a group of small parameters: whoever goes through them all would else take their square."""

    def work(num_params: int) -> int:
        shards = SmallShards([[(64,)] * num_params])
        gradients = GradientChunks(
            shards.store, shards.chunks, num_params, shards.trained, of_blocks(), CopyStream(CPU), UnderWay()
        )
        ids = [chunk for chunk, _ in shards.groups[0].chunks]
        gradients.add(ids, lambda segment: torch.ones(segment.numel), range(num_params), norms=True)
        last = num_params - 1
        verbs = {
            "forget": lambda: gradients.forget(last),
            "replace": lambda: gradients.replace(last, 0, torch.zeros(64)),
        }
        return lines_run(verbs[verb], "infinity/update")

    few, many = work(10), work(2000)
    assert many <= 2 * few, f"{few} lines among 10 parameters, {many} among 2000"


def test_only_chunks_of_what_has_a_gradient_are_leased_read_only_to_add() -> None:
    fixture = Fixture()
    fixture.add(gradients_of([3]))
    assert fixture.store.acquired() == [(4, 0, GRAD)]
    fixture.add(gradients_of([0]))
    assert fixture.store.acquired()[1:] == [(0, 0, GRAD), (1, 0, GRAD)]
    fixture.add(gradients_of([0, 1, 2]))
    assert fixture.store.acquired()[3:] == [
        (0, GRAD, GRAD),
        (1, GRAD, GRAD),
        (2, 0, GRAD),
        (3, 0, GRAD),
        (4, GRAD, GRAD),
    ]
    assert [entry[1:] for entry in fixture.store.released()] == [(GRAD, 0)] * 8
    assert fixture.store.num_held == 0
    assert fixture.store.num_held_max == LEASES_AHEAD


def test_a_fault_gives_all_leases_back() -> None:
    fixture = Fixture()

    def fault(lease: StrictLease) -> None:
        if lease.chunk == 1:
            raise OSError("injected")

    fixture.store.before_wait = fault
    with pytest.raises(OSError, match="injected"):
        fixture.add(gradients_of(range(4)))
    assert fixture.store.num_held == 0


def torch_norm(flats: dict[int, torch.Tensor]) -> torch.Tensor:
    """As torch takes it, of parameters in their order."""
    return torch.nn.utils.get_total_norm([flats[param] for param in sorted(flats)])


@pytest.mark.parametrize("warm", [False, True])
@EITHER
def test_the_norm_is_that_of_what_was_given_whatever_the_chunks(norms: Callable[[], Norms], warm: bool) -> None:
    """On one rank torch's own to the bit."""
    flats, found = gradients_of([0, 1, 3]), []
    for chunk_numel, piece_numel in ((NORM_BLOCK, 5000), (NORM_BLOCK, NORM_BLOCK), (4 * NORM_BLOCK, 3 * NORM_BLOCK)):
        fixture = Fixture(chunk_numel, piece_numel, norms())
        fixture.add(flats, norms=warm)
        found.append(fixture.norm([0, 1, 3]).value)
        assert found[-1].dtype is torch.float32
    assert found[0] == found[1] == found[2]
    exact = torch.cat([flat.double() for flat in flats.values()]).norm().float()
    assert found[0] == (exact if norms is of_blocks else torch_norm(flats))


@EITHER
def test_norms_are_read_once_and_taken_while_warm_not_at_all(norms: Callable[[], Norms]) -> None:
    fixture = Fixture(norms=norms())
    flats = gradients_of([0, 3])
    fixture.add(flats, norms=True)
    num_leases = len(fixture.store.acquired())
    assert float(fixture.norm([0, 3]).value) == pytest.approx(float(torch_norm(flats)), rel=1e-6)
    assert len(fixture.store.acquired()) == num_leases, "they were taken on the way"
    fixture.add(flats)
    twice = {param: flat * 2 for param, flat in flats.items()}
    num_leases = len(fixture.store.acquired())
    for _ in range(2):
        assert float(fixture.norm([0, 3]).value) == pytest.approx(float(torch_norm(twice)), rel=1e-6)
        assert fixture.store.acquired()[num_leases:] == [(0, GRAD, 0), (1, GRAD, 0), (4, GRAD, 0)]
    assert fixture.store.num_held == 0
    assert fixture.store.released()[-1] == (4, 0, 0)


@EITHER
def test_the_norm_counts_what_earlier_micro_batches_left(norms: Callable[[], Norms]) -> None:
    fixture = Fixture(norms=norms())
    first, last = gradients_of([0, 2]), gradients_of([1])
    fixture.add(first)
    fixture.add(last, norms=True)
    assert float(fixture.norm([0, 1, 2]).value) == pytest.approx(float(torch_norm({**first, **last})), rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@EITHER
def test_a_gradient_that_is_not_finite_is_told_wherever_it_is(norms: Callable[[], Norms], bad: float) -> None:
    for place in (0, 17, 29_999):
        fixture = Fixture(norms=norms())
        flats = gradients_of(range(4))
        flats[0][place] = bad
        fixture.add(flats, norms=True)
        assert not fixture.norm(range(4)).is_finite
    fixture = Fixture(norms=norms())
    fixture.add({2: torch.full(SHAPES[2], 1e30)}, norms=True)
    value, is_finite = fixture.norm([2])
    assert is_finite, "as the scaler of torch has it: no gradient is infinite"
    assert (norms is of_blocks) == bool(value.isfinite())


@EITHER
def test_norms_of_a_step_that_was_dropped_or_a_gradient_that_was_replaced_count_no_more(
    norms: Callable[[], Norms],
) -> None:
    fixture = Fixture(norms=norms())
    fixture.add(gradients_of(range(4)), norms=True)
    fixture.gradients.clear()
    again = gradients_of([0, 3], seed=1)
    fixture.add(again)
    assert float(fixture.norm([0, 3]).value) == pytest.approx(float(torch_norm(again)), rel=1e-6)
    again[0] = torch.arange(30_000.0)
    fixture.gradients.replace(0, 0, again[0])
    assert float(fixture.norm([0, 3]).value) == pytest.approx(float(torch_norm(again)), rel=1e-6)
    fixture.add(again)
    twice = {param: 2 * flat for param, flat in again.items()}
    assert float(fixture.norm([0, 3]).value) == pytest.approx(float(torch_norm(twice)), rel=1e-6)


# From a device to the host


class Device(CopyStream):
    """A device whose copies are done when the host waits for them, and not before."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.under_way: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @property
    def is_beside(self) -> bool:
        return True

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), torch.nan, dtype=dtype)

    def mark(self) -> Any:
        return self

    def synchronize(self) -> None:
        with self._lock:
            while self.under_way:
                self.under_way.pop(0)()


class _LateCopies(TorchFunctionMode):
    """What is copied without blocking comes when the device is waited for."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = args
            self._device.under_way.append(lambda: target.copy_(source))
            return target
        return function(*args, **(kwargs or {}))


FEW = 2


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(under_way, "UNDER_WAY_MAX", FEW)
    device = Device()
    with _LateCopies(device):
        yield device


def flats_of(seed: int, params: Sequence[int]) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {param: torch.randn(SHAPES[param], generator=generator) for param in params}


@pytest.mark.parametrize("norms", [of_blocks, of_params])
def test_gradients_that_come_late_are_those_that_come_at_once(norms: Callable[[], Norms], device: Device) -> None:
    late, at_once = Fixture(norms=norms(), copies=device), Fixture(norms=norms())
    for number, params in enumerate(([0, 1, 2, 3], [1, 3], [0, 1, 2, 3])):
        for fixture in (late, at_once):
            fixture.add(flats_of(number, params), norms=number == 2)
    assert late.norm([0, 1, 2, 3]) == at_once.norm([0, 1, 2, 3])
    for param in range(len(SHAPES)):
        assert torch.equal(late.held(param), at_once.held(param))
    assert late.store.num_held == 0


def test_leases_are_held_until_gradients_have_arrived_and_few_at_a_time(device: Device) -> None:
    fixture = Fixture(copies=device)
    fixture.add(flats_of(0, [0, 1, 2, 3]))
    assert fixture.store.num_held == FEW < len(fixture.ids)
    assert fixture.store.num_held_max == FEW + 1
    assert len(fixture.store.released()) == len(fixture.ids) - FEW
    fixture.under_way.settle()
    assert fixture.store.released() == [(chunk, GRAD, 0) for chunk in fixture.ids]
    for param, flat in flats_of(0, [0, 1, 2, 3]).items():
        assert torch.equal(fixture.held(param), flat)


def test_who_asks_for_a_chunk_waits_for_what_is_on_its_way_there(device: Device) -> None:
    fixture = Fixture(copies=device)
    fixture.add(flats_of(0, [0, 1, 2, 3]))
    fixture.under_way.settle_chunk(fixture.ids[0])  # has arrived
    assert fixture.store.num_held == FEW
    fixture.under_way.settle_chunk(fixture.ids[-1])
    assert fixture.store.num_held == 0


def test_what_is_forgotten_on_its_way_gives_its_leases_back(device: Device) -> None:
    fixture = Fixture(copies=device)
    fixture.add(flats_of(0, [0, 1, 2, 3]))
    fixture.gradients.clear()
    assert fixture.store.num_held == 0
    assert not fixture.gradients.holds_any([0, 1, 2, 3])


def test_a_gradient_that_does_not_arrive_gives_its_lease_back_and_is_not_written(device: Device) -> None:
    fixture = Fixture(copies=device)
    fixture.add(flats_of(0, [3]))

    def lost() -> None:
        raise RuntimeError("the device is gone")

    device.under_way.append(lost)
    for _ in range(2):  # and no step goes on without it
        with pytest.raises(RuntimeError, match="the device is gone"):
            fixture.norm([3])
    assert fixture.store.released() == [(fixture.ids[-1], 0, 0)]
    fixture.gradients.clear()
    fixture.add(flats_of(0, [3]))
    fixture.under_way.settle()


def test_what_somebody_gives_is_taken_before_it_is_theirs_again(device: Device) -> None:
    fixture, values = Fixture(copies=device), torch.ones(SHAPES[1])
    fixture.gradients.replace(1, 0, values)
    values.zero_()
    assert bool((fixture.held(1) == 1).all())


def test_a_copy_that_was_begun_is_over_before_its_lease_is(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture, order = Fixture(copies=device), list[str]()

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    def release(lease: StrictLease, **_: object) -> None:
        order.append(f"released with {len(device.under_way)} under way")

    monkeypatch.setattr(fixture.gradients, "_issue_works", refused)
    monkeypatch.setattr(StrictLease, "release", release)
    with pytest.raises(RuntimeError, match="new thread"):
        fixture.add(flats_of(0, [0]))
    assert order == ["released with 0 under way"]
