"""Which norms an engine takes, and that they are torch's own on one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infinity.plan.sharding import NORM_BLOCK, Segment
from infinity.update import norms
from infinity.update.norms import BlockNorms, Norm, ParamNorms, norms_of, torch_sums_in_lanes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    torch_sums_in_lanes.cache_clear()
    yield
    torch_sums_in_lanes.cache_clear()


def of(num_ranks: int, *, on_cpu: bool = True) -> object:
    return norms_of([3], num_ranks=num_ranks, on_cpu=on_cpu, sum_over_ranks=lambda total: None)


def test_one_rank_takes_torchs_own_and_several_take_sums_in_fp64() -> None:
    assert isinstance(of(1), ParamNorms)
    assert isinstance(of(2), BlockNorms)
    assert isinstance(of(1, on_cpu=False), BlockNorms)


def test_where_torch_sums_in_another_order_it_is_not_imitated_and_that_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked of torch, not of its version or the processor's name."""
    norm_of = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda values: norm_of(values.double()).float())
    for num_ranks, num_told in ((2, 0), (1, 1)):
        found = of(num_ranks)
        assert isinstance(found, BlockNorms)
        assert caplog.messages == []
        for _ in range(2):
            assert found.total([]) == Norm(torch.tensor(0.0), is_finite=True)
        assert ["fp64" in message for message in caplog.messages] == [True] * num_told


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 5, 8, 23, 4096, 100_003])
def test_a_parameter_has_torchs_norm_however_it_is_cut(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    for step in (1, 3, 8, 1000, 65_536):
        if numel // step > 2000:
            continue
        found = ParamNorms([numel])
        held = []
        for first in range(0, numel, step):
            segment = Segment(param=0, param_offset=first, chunk_offset=first, numel=min(step, numel - first))
            assert found.lacks(segment)
            found.take(segment, [values])
            held.append(segment)
        assert not any(map(found.lacks, held))
        assert found.total(held).value == torch.nn.utils.get_total_norm([values.float()])


@pytest.mark.parametrize("piece_numel", [1 << 30, NORM_BLOCK // 2, 1000])
@pytest.mark.parametrize(
    ("first", "numel"), [(0, 11 * NORM_BLOCK), (192, 9 * NORM_BLOCK), (NORM_BLOCK - 64, 200), (64, 3)]
)
def test_blocks_are_those_of_the_segment_wherever_it_begins(first: int, numel: int, piece_numel: int) -> None:
    chunk = torch.randn(12 * NORM_BLOCK, generator=torch.Generator().manual_seed(first))
    found = BlockNorms(lambda total: None)
    segment = Segment(param=0, param_offset=0, chunk_offset=first, numel=numel)
    found.take(segment, list(torch.split(chunk, piece_numel)))
    expected = chunk[first : first + numel].double().norm()
    torch.testing.assert_close(found.total([segment]).value.double(), expected, rtol=1e-7, atol=0)


def test_a_part_that_comes_too_early_is_asked_for_again() -> None:
    values = torch.arange(10.0)
    first, last = (Segment(param=0, param_offset=at, chunk_offset=at, numel=5) for at in (0, 5))
    found = ParamNorms([10])
    found.take(last, [values])
    assert found.lacks(first)
    assert found.lacks(last)
    found.take(first, [values])
    found.take(last, [values])
    assert found.total([first, last]).value == values.norm()
    found.drop(last)
    assert found.lacks(first)


def test_parameters_count_in_their_order_and_those_without_a_gradient_not_at_all() -> None:
    """A zero in between would move the others to other lanes of torch's sum."""
    numels = [5] * 40
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, generator=generator) * torch.logspace(-3, 3, 200)
    segments = [Segment(param=p, param_offset=0, chunk_offset=5 * p, numel=5) for p in range(40)]
    held = [segment for segment in segments if segment.param % 3]
    found = ParamNorms(numels)
    for segment in reversed(held):
        found.take(segment, [values])
    grads = [values[5 * p : 5 * p + 5] for p in range(40) if p % 3]
    assert found.total(held[::-1]).value == torch.nn.utils.get_total_norm(grads)


def test_fp16_is_cast_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "CAST_NUMEL", 100)
    values = torch.randn(1003, generator=torch.Generator().manual_seed(1)).half()
    segment = Segment(param=0, param_offset=0, chunk_offset=0, numel=1003)
    found = ParamNorms([1003])
    found.take(segment, [values[:500], values[500:]])
    assert found.total([segment]).value == values.float().norm()
