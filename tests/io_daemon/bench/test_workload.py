"""Which block next: every block once a pass, the mix true at every moment, the same for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_daemon.bench.settings import IoSettings
from io_daemon.bench.workload import Permutation, Workload

BS = 4096


def workload(num_blocks: int, job: int = 0, **changes: Any) -> Workload:
    return Workload(
        IoSettings(directories=(Path("/"),), bs=BS, size=num_blocks * BS, iodepth=1, **changes),
        job,
    )


@given(num_blocks=st.integers(1, 5000), seed=st.integers(0, 2**32))
def test_a_permutation_meets_every_block_once(num_blocks: int, seed: int) -> None:
    order = Permutation(num_blocks, seed)(np.arange(num_blocks, dtype=np.uint64))
    assert sorted(order.tolist()) == list(range(num_blocks))


def test_a_permutation_has_no_stride() -> None:
    order = Permutation(1 << 16, 3)(np.arange(1 << 16, dtype=np.uint64)).astype(np.int64)
    steps, counts = np.unique(np.diff(order), return_counts=True)
    assert counts.max() < 16
    assert len(steps) > 40_000
    assert abs(np.corrcoef(np.arange(order.size), order)[0, 1]) < 0.02


def test_huge_files_need_no_table() -> None:
    order = Permutation(1 << 40, 1)(np.arange(1000, dtype=np.uint64))
    assert len(set(order.tolist())) == 1000
    assert order.max() < 1 << 40
    assert order.max() > 1 << 39


@given(
    num_blocks=st.integers(8, 500),
    mix=st.integers(0, 100),
    rw=st.sampled_from(["rw", "randrw"]),
    cuts=st.lists(st.integers(1, 70), min_size=1, max_size=20),
)
def test_the_mix_is_true_at_every_moment(num_blocks: int, mix: int, rw: str, cuts: list[int]) -> None:
    stream = workload(num_blocks, rw=rw, rwmixread=mix)
    writes = np.concatenate([stream.next(cut).writes for cut in cuts])
    written = np.cumsum(writes)
    wanted = np.arange(1, writes.size + 1) * (100 - mix) / 100
    assert np.abs(written - wanted).max() < 1


@pytest.mark.parametrize("rw", ["read", "write", "rw", "randread", "randwrite", "randrw"])
def test_a_block_comes_again_only_after_all_others(rw: str) -> None:
    stream = workload(101, rw=rw, rwmixread=50)
    batches = [stream.next(7) for _ in range(200)]
    writes = np.concatenate([batch.writes for batch in batches])
    blocks = np.concatenate([batch.blocks for batch in batches])
    for way in (0, 1):
        own = blocks[writes == way].tolist()
        for begin in range(len(own) - 101):
            assert len(set(own[begin : begin + 101])) == 101
    assert {int(way) for way in np.unique(writes)} == {"read": {0}, "write": {1}}.get(rw.removeprefix("rand"), {0, 1})


def test_batches_may_be_cut_anywhere() -> None:
    whole, cut = workload(64, rw="randrw", rwmixread=30), workload(64, rw="randrw", rwmixread=30)
    expected = whole.next(100)
    parts = [cut.next(count) for count in (1, 30, 69)]
    assert np.array_equal(np.concatenate([part.writes for part in parts]), expected.writes)
    assert np.array_equal(np.concatenate([part.blocks for part in parts]), expected.blocks)


def test_seeds_and_jobs_differ() -> None:
    streams = [
        workload(4096, rw="randread"),
        workload(4096, job=1, rw="randread"),
        workload(4096, rw="randread", seed=9),
    ]
    orders = [tuple(stream.next(64).blocks.tolist()) for stream in streams]
    assert len(set(orders)) == 3
    assert orders[0] == tuple(workload(4096, rw="randread").next(64).blocks.tolist())


def test_sequential_reads_go_round() -> None:
    assert workload(5, rw="read").next(12).blocks.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
