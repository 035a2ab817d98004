"""One chunk's step against torch's own optimizer on each parameter by itself: bits, masks, and what stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from infinity.plan.precision import Precision
from infinity.plan.sharding import Run, Segment
from infinity.update import sub_group
from infinity.update.dry_run import options_of as all_options_of
from infinity.update.rounding import Rounding
from infinity.update.rule import History, UpdateRule
from infinity.update.scratch import Scratch
from infinity.update.sub_group import SubGroup, Terms, _alike
from infinity.update.torch_rule import rule_of
from io_daemon.shared.protocol import ObjectKind
from tests.support.small_shards import BF16, FP32, SmallShards

SHAPES = [(128,), (64,), (300,), (10_000,), (7,)]
"""One chunk: a run of three, padding, two more runs."""
STATE = (ObjectKind.STATE_0, ObjectKind.STATE_1)
MOMENTS = ObjectKind.STATE_0.mask | ObjectKind.STATE_1.mask


def adamw() -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.zeros(1)], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def options_of(**changes: Any) -> dict[str, Any]:
    return {**all_options_of(adamw())[0], "decoupled_weight_decay": True, **changes}


def rule() -> UpdateRule:
    return rule_of(adamw(), dtype=torch.float32)


class Fixture:
    def __init__(self, precision: Precision, group_of: Sequence[int] = (0,) * 5, piece_numel: int = 5000) -> None:
        self.shards = SmallShards([SHAPES], precision=precision, piece_numel=piece_numel)
        self.store = self.shards.store
        (self.placement,) = self.shards.chunks
        self.stepped = precision.stepped
        self.sub_group = SubGroup(
            0,
            self.placement,
            rule=rule(),
            precision=precision,
            group_of=group_of,
            scratch=Scratch(),
            rounding=Rounding({}),
        )
        generator = torch.Generator().manual_seed(3)
        self.store.object(0, self.stepped).copy_(torch.randn(self.placement.numel, generator=generator))
        self.store.object(0, ObjectKind.WEIGHT).copy_(self.store.object(0, self.stepped))
        self.group_of, self.precision = group_of, precision
        self.group_options = [options_of(), options_of(lr=3e-2, betas=(0.8, 0.9), weight_decay=0.0)]
        self.histories: list[History] = [None] * len(SHAPES)
        self.mine = [self.parts(self.stepped, param).clone().requires_grad_() for param in range(len(SHAPES))]
        self.optimizers = [self._optimizer(param) for param in range(len(SHAPES))]

    def _optimizer(self, param: int) -> torch.optim.Optimizer:
        options = dict(self.group_options[self.group_of[param]])
        kind = torch.optim.AdamW if options.pop("decoupled_weight_decay") else torch.optim.Adam
        return kind([self.mine[param]], **options)

    def parts(self, kind: int, param: int) -> torch.Tensor:
        (segment,) = [segment for segment in self.placement.segments if segment.param == param]
        return self.shards.part(0, kind, segment.chunk_offset, segment.numel)

    def step(self, present: Sequence[bool], *, clip: float | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        gradient = self.store.object(0, ObjectKind.GRAD)
        gradient.copy_(torch.randn(self.placement.numel, generator=generator))
        for param, optimizer in enumerate(self.optimizers):
            if present[param]:
                own = self.parts(ObjectKind.GRAD, param).float()
                self.mine[param].grad = own.clone() if clip is None else own * clip
                optimizer.step()
        lease = self.store.acquire(0, read=self.sub_group.read, write=self.sub_group.dirty)
        lease.wait()
        factor = None if clip is None else torch.tensor(clip)
        terms = Terms(present=present, histories=self.histories, options=self.group_options, factor=factor)
        for param, history in self.sub_group.update(lease, terms).items():
            self.histories[param] = history
        lease.release(dirty=self.sub_group.dirty, dead=ObjectKind.GRAD.mask)

    def assert_as_torch(self) -> None:
        for param, mine in enumerate(self.mine):
            stepped = self.parts(self.stepped, param)
            assert torch.equal(stepped, mine), f"parameter {param}"
            assert torch.equal(self.parts(ObjectKind.WEIGHT, param), mine.detach().to(self.precision.weight))
            state = self.optimizers[param].state[mine]
            for kind, name in zip(STATE, ("exp_avg", "exp_avg_sq"), strict=True):
                expected = state[name] if state else torch.zeros_like(mine)
                assert torch.equal(self.parts(kind, param), expected), f"{name} of parameter {param}"


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 0.25])
@pytest.mark.parametrize("group_of", [(0,) * 5, (0, 1, 0, 1, 0), (1, 1, 1, 0, 0)], ids=str)
def test_every_parameter_is_stepped_as_by_itself(precision: Precision, clip: float | None, group_of: list[int]) -> None:
    fixture = Fixture(precision, group_of)
    for step in range(3):
        fixture.step([True] * 5, clip=clip, seed=step)
    fixture.assert_as_torch()


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_what_has_no_gradient_neither_moves_nor_counts(precision: Precision) -> None:
    fixture = Fixture(precision)
    fixture.step([True, False, True, True, False])
    fixture.step([True] * 5, seed=1)
    fixture.step([False, True, False, False, True], seed=2)
    fixture.assert_as_torch()
    assert fixture.histories == [(2.0,)] * 5


@pytest.mark.parametrize("numel_max", [0, 1 << 30], ids=["one by one", "gathered"])
def test_weights_that_lie_in_their_parameters_are_stepped_there(
    numel_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come in as many pieces; those of a parameter without a gradient stay as they are."""
    monkeypatch.setattr(sub_group, "GATHERED_NUMEL_MAX", numel_max)
    fixture = Fixture(replace(FP32, weights_stay=True), (0, 1, 0, 1, 0))
    fixture.step([True] * 5)
    fixture.step([True, False, True, True, False], clip=0.25, seed=1)
    fixture.step([False, True, False, False, True], seed=2)
    fixture.assert_as_torch()


@pytest.mark.parametrize("changes", [{"maximize": True}, {"decoupled_weight_decay": False}, {"eps": 1e-2}], ids=str)
def test_options_reach_torchs_kernel(changes: dict[str, Any]) -> None:
    fixture = Fixture(FP32)
    fixture.group_options[0].update(changes)
    fixture.optimizers = [fixture._optimizer(param) for param in range(len(SHAPES))]
    for step in range(2):
        fixture.step([True] * 5, seed=step)
    fixture.assert_as_torch()


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_weights_beside_a_master_are_written_and_never_read_and_the_gradient_dies(precision: Precision) -> None:
    fixture = Fixture(precision)
    fixture.step([False, False, True, False, False])
    stepped = fixture.stepped.mask
    assert fixture.store.acquired() == [
        (0, ObjectKind.GRAD.mask | MOMENTS | stepped, MOMENTS | stepped | ObjectKind.WEIGHT.mask)
    ]
    assert fixture.store.released() == [(0, MOMENTS | stepped | ObjectKind.WEIGHT.mask, ObjectKind.GRAD.mask)]
    fixture.assert_as_torch()


def test_a_run_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its parameters have had as many updates; elsewhere one a segment. All of a group go in one launch."""
    fixture = Fixture(FP32, (0, 0, 0, 0, 1))
    assert ranges(fixture) == [([0, 1, 2], 0, 492), ([3], 512, 10_000), ([4], 10_560, 7)]
    assert [entry[2] for entry in ranges(fixture, steps=(3, 3, 2, 3, 3))] == [128, 64, 300, 10_000, 7]
    assert [entry[2] for entry in ranges(fixture, present=(True, False, True, False, True))] == [128, 300, 7]
    other = Fixture(FP32, (0, 1, 0, 0, 0))
    assert [entry[2] for entry in ranges(other)] == [128, 64, 300, 10_000, 7]


def ranges(
    fixture: Fixture, *, present: Sequence[bool] = (True,) * 5, steps: Sequence[int] = (3,) * 5
) -> list[tuple[list[int], int, int]]:
    histories = [(float(count),) for count in steps]
    terms = Terms(present=present, histories=histories, options=fixture.group_options, factor=None)
    return list(fixture.sub_group._ranges(terms))


def test_what_ends_inside_a_vector_is_stepped_with_none_behind_it() -> None:
    """The kernel rounds its rest otherwise, on some CPUs."""
    parts = [Segment(param=i, param_offset=0, chunk_offset=0, numel=numel) for i, numel in enumerate((64, 128, 65))]
    assert _alike(Run(segments=tuple(parts)), [0, 0, 0])
    assert not _alike(Run(segments=(parts[2], parts[0])), [0, 0, 0])
    assert not _alike(Run(segments=(parts[0], parts[2], parts[1])), [0, 0, 0])
    assert not _alike(Run(segments=tuple(parts)), [0, 1, 0])
