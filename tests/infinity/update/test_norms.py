"""Which norms an engine takes, and that they are torch's own on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from infinity.plan.sharding import NORM_BLOCK, Segment
from infinity.tiers.collectives import Collectives
from infinity.update import norms
from infinity.update.norms import (
    BlockNorms,
    Norm,
    Norms,
    ParamNorms,
    WholeNorms,
    norms_of,
    torch_sums_in_lanes,
)
from io_daemon.shared.protocol import align_up
from tests.support.threaded_ranks import ThreadedCollectives, on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    torch_sums_in_lanes.cache_clear()
    yield
    torch_sums_in_lanes.cache_clear()


ALONE = Collectives(None)
CPU = torch.device("cpu")


def test_norms_are_torchs_own_where_its_order_is_known() -> None:
    assert isinstance(norms_of([3], ALONE, device=CPU), ParamNorms)
    assert isinstance(norms_of([3], ALONE, device=None), BlockNorms)


def test_all_ranks_take_them_alike() -> None:
    """Nodes may differ in their processors."""

    def of_rank(collectives: ThreadedCollectives) -> Norms:
        return norms_of([3], collectives, device=CPU if collectives.rank != 1 else None)

    assert [type(found) for found in on_ranks(3, of_rank)] == [BlockNorms] * 3


def test_where_torch_sums_in_another_order_it_is_not_imitated_and_that_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked of torch, not of its version or the processor's name."""
    norm_of = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda values: norm_of(values.double()).float())
    found = norms_of([3], ALONE, device=CPU)
    assert isinstance(found, BlockNorms)
    assert caplog.messages == []
    for _ in range(2):
        assert found.total([], nothing) == Norm(torch.tensor(0.0), is_finite=True)
    assert ["fp64" in message for message in caplog.messages] == [True]


def nothing(group: int) -> None:
    raise AssertionError(f"group {group} lacks nothing")


def norm_of(found: Norms, params: Sequence[int]) -> torch.Tensor:
    return found.total([params], lambda group: None).value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 5, 8, 23, 4096, 100_003])
def test_a_parameter_has_torchs_norm_however_it_is_cut(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    for step in (1, 3, 8, 1000, 65_536):
        if numel // step > 2000:
            continue
        found = ParamNorms([numel], ALONE)
        held = []
        for first in range(0, numel, step):
            segment = Segment(param=0, param_offset=first, chunk_offset=first, numel=min(step, numel - first))
            assert found.lacks(segment)
            found.take(segment, [values])
            held.append(segment)
        assert not any(map(found.lacks, held))
        assert norm_of(found, [0]) == torch.nn.utils.get_total_norm([values.float()])


@pytest.mark.parametrize("piece_numel", [1 << 30, NORM_BLOCK // 2, 1000])
@pytest.mark.parametrize(
    ("first", "numel"), [(0, 11 * NORM_BLOCK), (192, 9 * NORM_BLOCK), (NORM_BLOCK - 64, 200), (64, 3)]
)
def test_blocks_are_those_of_the_segment_wherever_it_begins(first: int, numel: int, piece_numel: int) -> None:
    chunk = torch.randn(12 * NORM_BLOCK, generator=torch.Generator().manual_seed(first))
    found = BlockNorms(ALONE)
    segment = Segment(param=0, param_offset=0, chunk_offset=first, numel=numel)
    found.take(segment, list(torch.split(chunk, piece_numel)))
    expected = chunk[first : first + numel].double().norm()
    torch.testing.assert_close(norm_of(found, [0]).double(), expected, rtol=1e-7, atol=0)


def test_where_torchs_order_is_not_known_every_rank_has_the_norm_of_all_parts() -> None:
    values = torch.randn(2 * NORM_BLOCK, generator=torch.Generator().manual_seed(0))

    def of_rank(collectives: ThreadedCollectives) -> Norm:
        first = collectives.rank * NORM_BLOCK
        found = BlockNorms(collectives)
        segment = Segment(param=0, param_offset=first, chunk_offset=0, numel=NORM_BLOCK)
        found.take(segment, [values[first : first + NORM_BLOCK]])
        return found.total([[0]], lambda group: None)

    expected = Norm(values.double().norm().float(), is_finite=True)
    assert on_ranks(2, of_rank) == [expected] * 2


@pytest.mark.parametrize("numel", range(1, 26))
def test_what_makes_no_whole_row_is_added_as_torch_adds_it(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    segment = Segment(param=0, param_offset=0, chunk_offset=0, numel=numel)
    found = ParamNorms([numel], ALONE)
    for _ in range(100):
        values = torch.randn(numel, generator=generator)
        found.take(segment, [values])
        assert norm_of(found, [0]) == torch.nn.utils.get_total_norm([values])


def test_a_part_that_comes_too_early_is_asked_for_again() -> None:
    values = torch.arange(10.0)
    first, last = (Segment(param=0, param_offset=at, chunk_offset=at, numel=5) for at in (0, 5))
    found = ParamNorms([10], ALONE)
    found.take(last, [values])
    assert found.lacks(first)
    assert found.lacks(last)
    found.take(first, [values])
    found.take(last, [values])
    assert norm_of(found, [0]) == values.norm()
    found.drop(last)
    assert found.lacks(first)


def test_parameters_count_in_their_order_and_those_without_a_gradient_not_at_all() -> None:
    """A zero in between would move the others to other lanes of torch's sum."""
    numels = [5] * 40
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, generator=generator) * torch.logspace(-3, 3, 200)
    segments = [Segment(param=p, param_offset=0, chunk_offset=5 * p, numel=5) for p in range(40)]
    held = [segment for segment in segments if segment.param % 3]
    found = ParamNorms(numels, ALONE)
    for segment in reversed(held):
        found.take(segment, [values])
    grads = [values[5 * p : 5 * p + 5] for p in range(40) if p % 3]
    assert norm_of(found, [s.param for s in held[::-1]]) == torch.nn.utils.get_total_norm(grads)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_have_parts_find_torchs_norm_of_the_whole(world_size: int) -> None:
    """A parameter may end on any rank, and rank 0 may have taken its part while it was warm, or not."""
    numels = [100_003, 64, 5, 4096, 999]
    groups = [[1, 0], [2], [3, 4]]
    generator = torch.Generator().manual_seed(world_size)
    grads = [torch.randn(numel, generator=generator) for numel in numels]
    expected = torch.nn.utils.get_total_norm([grad for param, grad in enumerate(grads) if param != 3])

    def of_rank(collectives: ThreadedCollectives) -> list[tuple[Norm, int]]:
        parts = {}
        for param, numel in enumerate(numels):
            share = align_up(-(-numel // world_size), 64)
            first = min(collectives.rank * share, numel)
            if part := min(share, numel - first):
                parts[param] = Segment(param=param, param_offset=first, chunk_offset=first, numel=part)
        found = ParamNorms(numels, collectives)
        counted = [[param for param in group if param != 3] for group in groups]
        taken: list[int] = []

        def take(group: int) -> None:
            for param in counted[group]:
                if param in parts and found.lacks(parts[param]):
                    found.take(parts[param], [grads[param]])
                    taken.append(param)

        take(0)
        told = []
        for _ in range(2):
            for _ in range(2):
                taken.clear()
                told.append((found.total(counted, take), len(taken)))
            found.clear()
        return told

    for told in on_ranks(world_size, of_rank):
        assert [norm for norm, _ in told] == [Norm(expected, is_finite=True)] * 4
        assert (told[1][1], told[3][1]) == (0, 0), "what is known is not taken again"


def test_fp16_is_cast_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "CAST_NUMEL", 100)
    values = torch.randn(1003, generator=torch.Generator().manual_seed(1)).half()
    segment = Segment(param=0, param_offset=0, chunk_offset=0, numel=1003)
    found = ParamNorms([1003], ALONE)
    found.take(segment, [values[:500], values[500:]])
    assert norm_of(found, [0]) == values.float().norm()


def test_an_accelerator_that_has_all_of_a_parameter_takes_its_norm_by_its_own_kernel() -> None:
    cuda = torch.device("cuda")
    assert isinstance(norms_of([3], ALONE, device=cuda), WholeNorms)
    assert isinstance(norms_of([3], ALONE, device=torch.device("meta")), BlockNorms)
    assert on_ranks(2, lambda ranks: type(norms_of([3], ranks, device=cuda))) == [BlockNorms] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_is_whole_once_its_last_chunk_is_there(dtype: torch.dtype) -> None:
    """Held against torch's kernel for a CPU, which gets the same tensors as another device's."""
    numels, generator = [100_003, 5, 40_000], torch.Generator().manual_seed(0)
    values = [torch.randn(numel, generator=generator).to(dtype) for numel in numels]
    found = WholeNorms(numels)
    for _ in range(2):
        for param, gradient in enumerate(values):
            for first in range(0, gradient.numel(), 30_000):
                part = gradient[first : first + 30_000]
                segment = Segment(param=param, param_offset=first, chunk_offset=7, numel=part.numel())
                chunk = torch.cat([torch.full((7,), torch.nan, dtype=dtype), part])
                assert found.lacks(segment)
                found.take(segment, list(torch.split(chunk, 11_000)))
                chunk.fill_(torch.nan)  # another has the lease
        expected = torch.nn.utils.get_total_norm([gradient.float() for gradient in values])
        total = found.total([[2, 1], [0]], lambda group: None)
        assert (float(total.value), total.is_finite) == (float(expected), True)
        for param in range(len(numels)):
            found.drop(Segment(param=param, param_offset=0, chunk_offset=0, numel=1))
    found.clear()
    assert found.total([[]], lambda group: None) == Norm(torch.zeros(()), is_finite=True)


def test_a_parameter_without_elements_has_a_norm_of_zero() -> None:
    found = WholeNorms([2, 0])
    found.take(Segment(param=0, param_offset=0, chunk_offset=0, numel=2), [torch.tensor([3.0, 4.0])])
    assert found.total([[0, 1]], lambda group: None) == Norm(torch.tensor(5.0), is_finite=True)
    assert found.total([[1]], lambda group: None) == Norm(torch.tensor(0.0), is_finite=True)


def test_a_norm_that_is_too_large_is_of_finite_gradients() -> None:
    found = WholeNorms([2, 2])
    for param, value in enumerate((3e38, 1.0)):
        found.take(Segment(param=param, param_offset=0, chunk_offset=0, numel=2), [torch.tensor([value, value])])
    assert found.total([[0, 1]], lambda group: None) == Norm(torch.tensor(torch.inf), is_finite=True)
    found.take(Segment(param=1, param_offset=0, chunk_offset=0, numel=2), [torch.tensor([1.0, -torch.inf])])
    assert not found.total([[0, 1]], lambda group: None).is_finite


def test_a_part_that_comes_before_what_lies_before_it_is_still_lacking() -> None:
    found, second = WholeNorms([4]), Segment(param=0, param_offset=2, chunk_offset=0, numel=2)
    found.take(second, [torch.ones(2)])
    assert found.lacks(second)
