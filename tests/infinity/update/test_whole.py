"""Parameters that are stepped as wholes: what is gathered, and what of it goes back to this rank's store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from infinity.plan.precision import Precision
from infinity.update.rounding import Rounding
from infinity.update.rule import Call, UpdateRule
from infinity.update.whole import WholeParams
from infinity.weights.param import ShardedParam
from io_daemon.shared.protocol import ObjectKind
from tests.support.small_shards import BF16, FP32

SHAPE = (3, 4)
GRAD, WEIGHT, MASTER = ObjectKind.GRAD, ObjectKind.WEIGHT, ObjectKind.MASTER
STATE_0, STATE_1 = ObjectKind.STATE_0, ObjectKind.STATE_1


@dataclass
class FakeIO:
    """The middle of three ranks: it has elements 4 to 7 of each parameter. ``stored``: whole, in order of memory."""

    stored: dict[tuple[int, ObjectKind], torch.Tensor]
    written: dict[tuple[int, ObjectKind], torch.Tensor]

    def read_flat(self, param: ShardedParam, kind: ObjectKind) -> torch.Tensor:
        return self.stored[param.index, kind].clone()

    def own_range(self, _param: ShardedParam) -> tuple[int, int]:
        return 4, 4

    def write_own(self, param: ShardedParam, kinds: Sequence[ObjectKind], values: torch.Tensor) -> None:
        assert values.shape == (4,)
        for kind in kinds:
            self.written[param.index, kind] = values.clone()


class Recorded(Rounding):
    def __init__(self, kinds: Sequence[ObjectKind]) -> None:
        super().__init__(dict.fromkeys(kinds))  # type: ignore[arg-type]
        self.calls: list[Any] = []

    def apply(self, values: torch.Tensor, kind: ObjectKind, **where: Any) -> None:
        self.calls.append((kind, where))
        values.add_(1000)


class Fixture:
    def __init__(self, precision: Precision = FP32, rounded: Sequence[ObjectKind] = ()) -> None:
        transposed = nn.Parameter(torch.zeros(SHAPE[::-1]).t())
        others = [nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)]
        self.params = [
            ShardedParam(index, f"p{index}", param, precision.weight, torch.device("cpu"))
            for index, param in enumerate([others[0], transposed, others[1]])
        ]
        kinds = (GRAD, WEIGHT, MASTER, STATE_0, STATE_1)
        stored = {
            (param.index, kind): torch.arange(12.0) + 100 * number + 20 * param.index
            for param in self.params
            for number, kind in enumerate(kinds)
        }
        self.io = FakeIO(stored, {})
        rule = UpdateRule(
            name="one",
            states={"m": torch.float32, "v": torch.bfloat16},
            options=frozenset(),
            dtype=torch.float32,
            run=lambda _call, history, _options: history,
            whole_groups=frozenset({1}),
        )
        self.rounding = Recorded(rounded)
        io: Any = self.io
        self.whole = WholeParams(
            self.params, io, rule=rule, precision=precision, group_of=(1, 1, 0), rounding=self.rounding
        )

    def stored(self, param: int, kind: ObjectKind) -> torch.Tensor:
        """In the parameter's shape."""
        return self.params[param].unflattened(self.io.stored[param, kind])


def test_only_groups_that_look_at_wholes_are_gathered() -> None:
    assert Fixture().whole.group_of == {0: 1, 1: 1}


@pytest.mark.parametrize(("precision", "stepped"), [(FP32, WEIGHT), (BF16, MASTER)])
@pytest.mark.parametrize("param", [0, 1])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_a_parameter_comes_as_it_lies_with_its_gradient_and_states(
    precision: Precision, stepped: ObjectKind, param: int, factor: float | None
) -> None:
    fixture = Fixture(precision)
    call = fixture.whole.gather(param, None if factor is None else torch.tensor(factor))
    assert torch.equal(call.params[0], fixture.stored(param, stepped))
    assert call.params[0].stride() == fixture.params[param].layout.stride()
    assert torch.equal(call.grads[0], fixture.stored(param, GRAD) * (1.0 if factor is None else factor))
    ((first, second),) = call.states
    assert torch.equal(first, fixture.stored(param, STATE_0))
    assert torch.equal(second, fixture.stored(param, STATE_1).bfloat16())
    assert [len(each) for each in (call.params, call.grads, call.states)] == [1, 1, 1]


@pytest.mark.parametrize("rounded", [(), (STATE_1,)])
@pytest.mark.parametrize(
    ("precision", "kinds"),
    [
        (FP32, {WEIGHT}),
        (BF16, {MASTER, WEIGHT}),
        (replace(BF16, keeps_weights=False), {MASTER, WEIGHT}),
        (replace(BF16, keeps_weights=False, weights_stay=True), {MASTER, WEIGHT}),
    ],
    ids=["fp32", "bf16", "bf16 kept as masters", "bf16 kept as masters, and whole"],
)
@pytest.mark.parametrize("param", [0, 1])
def test_this_ranks_part_goes_back(
    param: int, precision: Precision, kinds: set[ObjectKind], rounded: Sequence[ObjectKind]
) -> None:
    fixture = Fixture(precision, rounded)
    sharded = fixture.params[param]

    def flat(first: int) -> torch.Tensor:
        return torch.arange(first, first + 12, dtype=torch.float32)

    states = (sharded.unflattened(flat(400)), sharded.unflattened(flat(500)))
    call = Call(params=[sharded.unflattened(flat(300))], grads=[], states=[states])
    fixture.whole.write(param, call, (7.0,))
    written = fixture.io.written
    assert {kind for index, kind in written if index == param} == {*kinds, STATE_0, STATE_1}
    assert all(torch.equal(written[param, kind], flat(300)[4:8]) for kind in kinds)
    assert torch.equal(written[param, STATE_0], flat(400)[4:8])
    assert torch.equal(written[param, STATE_1], flat(500)[4:8] + (1000 if rounded else 0))
    expected = [(STATE_1, {"param": param, "first": 4, "history": (7.0,)})] if rounded else []
    assert fixture.rounding.calls == expected
    if precision.keeps_weights or not precision.weights_stay:
        assert sharded.full is None, "the weights come when they are used"
    else:
        assert torch.equal(sharded.allocate(), flat(300).to(precision.weight))
