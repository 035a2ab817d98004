"""The optimizer that the user holds, and the update that it drives: order, leases, clipping, counts, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import parse_config
from infinity.errors import ConfigError, EngineStateError
from infinity.plan.sharding import ChunkPlacement
from infinity.tiers.base import Lease
from infinity.tiers.due import DueStore
from infinity.tiers.layers import TracedStore
from infinity.tiers.snapshot import SnapshotStore
from infinity.update.loss_scale import FixedLossScale, LossScale
from infinity.update.norms import Norm
from infinity.update.optimizer import ShardedOptimizer, group_indices, sharded_from_config, sharded_from_torch
from infinity.update.rule import History
from infinity.update.stored_state import retire
from infinity.update.sub_group import Terms
from infinity.update.update import Outcome, Update
from infinity.weights.param_group import GradientOf
from io_daemon.shared.protocol import ObjectKind
from tests.support.small_shards import SmallShards
from tests.support.strict_store import StrictLease

GRAD = ObjectKind.GRAD.mask
NUM_CHUNKS = 6


class CountedSubGroup:
    """Records how it is stepped; ``fault`` is raised in place of a step."""

    def __init__(self, chunk: int, placement: ChunkPlacement, calls: list[dict[str, Any]]) -> None:
        self.chunk, self.placement, self._calls = chunk, placement, calls
        self.fault: Exception | None = None
        self.read, self.dirty = GRAD, 0

    def update(
        self, lease: Lease, terms: Terms, gradient_of: GradientOf | None = None, *, rounds: bool = True
    ) -> dict[int, History]:
        if self.fault is not None:
            raise self.fault
        self._calls.append({"chunk": self.chunk, "terms": terms})
        param = self.placement.segments[0].param
        return {param: (float(count_of(terms.histories[param]) + 1),)}


def count_of(history: History) -> int:
    return int(history[0]) if history else 0


class FixedGradients:
    """A norm to clip by."""

    def __init__(self, norm: float, *, is_finite: bool) -> None:
        self.found, self.num_asked, self.num_cleared = Norm(torch.tensor(norm), is_finite), 0, 0

    def norm(self, present: Sequence[bool]) -> Norm:
        self.num_asked += 1
        self.present = list(present)
        return self.found

    def clear(self) -> None:
        self.num_cleared += 1


class Fixture:
    """Six groups of one parameter and one chunk each."""

    def __init__(
        self,
        *,
        max_norm: float = 0.0,
        ahead: int = 2,
        norm: float = 4.0,
        is_finite: bool = True,
        scale: LossScale | None = None,
        left_out: Sequence[int] = (),
        counts_all: bool = False,
    ) -> None:
        self.shards = SmallShards([[(64,)]] * NUM_CHUNKS)
        self.store = self.shards.store
        snapshots = SnapshotStore(self.store)
        self.due = DueStore(TracedStore(snapshots), snapshots, num_ahead=ahead)
        self.calls: list[dict[str, Any]] = []
        self.sub_groups = [CountedSubGroup(i, chunk, self.calls) for i, chunk in enumerate(self.shards.chunks)]
        self.gradients = FixedGradients(norm, is_finite=is_finite)
        params = [param.param for param in self.shards.params]
        groups = [{"params": params[:3], "lr": 0.5}, {"params": params[3:], "lr": 0.25, "weight_decay": 0.125}]
        self.optimizer = from_config(optimizer_config(), groups)
        self.update = Update(
            self.sub_groups,  # type: ignore[arg-type]
            self.optimizer,
            self.gradients,  # type: ignore[arg-type]
            store=self.due,
            scale=scale or FixedLossScale(),
            num_params=NUM_CHUNKS,
            left_out=left_out,
            counts_all=counts_all,
            max_norm=max_norm,
        )

    def run(self, present: Sequence[bool]) -> Outcome:
        if self.update.begin(present) is Outcome.APPLIED:
            self.update.apply()
        return self.update.finish()

    @property
    def factors(self) -> list[float | None]:
        factors = [call["terms"].factor for call in self.calls]
        return [None if factor is None else float(factor) for factor in factors]

    @property
    def counts(self) -> list[int]:
        return [count_of(history) for history in self.update._histories]


def from_config(config: Any, params: Sequence[Any]) -> ShardedOptimizer:
    return sharded_from_config(config, params, dtype=torch.float32)


def from_torch(optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
    return sharded_from_torch(optimizer, dtype=torch.float32)


def optimizer_config(**params: Any) -> Any:
    config = parse_config(
        {
            "train_batch_size": 1,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 2.0, "betas": (0.5, 0.75), "eps": 0.25, **params}},
        }
    )
    return config.optimizer


ALL = [True] * NUM_CHUNKS


def test_chunks_with_a_gradient_are_stepped_in_order_with_their_groups_options() -> None:
    fixture = Fixture()
    fixture.optimizer.param_groups[1]["lr"] = 0.0625
    fixture.run([True, False, True, True, False, True])
    assert [call["chunk"] for call in fixture.calls] == [0, 2, 3, 5]
    first, second = fixture.calls[0]["terms"].options
    assert "params" not in first
    assert (first["lr"], second["lr"], second["weight_decay"]) == (0.5, 0.0625, 0.125)
    assert (first["betas"], first["eps"], first["maximize"]) == ((0.5, 0.75), 0.25, False)
    assert fixture.gradients.num_cleared == 1
    assert fixture.store.num_held == 0


def test_steps_count_updates_of_each_parameter() -> None:
    fixture = Fixture()
    present = [True, False, True, True, True, True]
    fixture.run(present)
    fixture.run(ALL)
    counts = [[count_of(history) for history in call["terms"].histories] for call in fixture.calls]
    assert counts == [[0] * 6] * 5 + [[1, 0, 1, 1, 1, 1]] * 6
    assert fixture.counts == [2, 1, 2, 2, 2, 2]
    assert fixture.calls[0]["terms"].present == present


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_as_many_chunks_are_leased_ahead_as_were_planned(ahead: int) -> None:
    fixture = Fixture(ahead=ahead)
    fixture.run(ALL)
    assert fixture.store.num_held_max == ahead + 1
    kinds = [entry[0] for entry in fixture.store.log]
    assert kinds[: ahead + 2] == ["acquire"] * (ahead + 1) + ["release"]
    assert fixture.store.num_held == 0


def test_a_fault_before_the_first_step_changes_nothing_and_lets_everything_go() -> None:
    fixture = Fixture()

    def fault(lease: StrictLease) -> None:
        raise OSError("injected")

    fixture.store.before_wait = fault
    with pytest.raises(OSError, match="injected"):
        fixture.run(ALL)
    assert not fixture.update.is_half_applied
    fixture.update.cancel()
    assert (fixture.store.num_held, fixture.gradients.num_cleared, fixture.counts) == (0, 0, [0] * 6)
    fixture.store.before_wait = lambda _lease: None
    fixture.run(ALL)
    assert (fixture.update.num_updated, len(fixture.calls)) == (6, 6)
    fixture.run([True] + [False] * 5)
    assert fixture.update.num_updated == 1, "of the last step"


def test_a_fault_in_the_middle_says_how_many_chunks_were_begun() -> None:
    fixture = Fixture()
    fixture.sub_groups[2].fault = RuntimeError("injected")
    with pytest.raises(RuntimeError, match="injected"):
        fixture.run(ALL)
    assert fixture.update.num_updated == 3, "the third was begun"
    assert fixture.store.num_held == 0
    assert fixture.counts == [0] * 6


def test_a_fault_amid_a_chunk_whose_weights_are_in_use_is_one_in_the_middle() -> None:
    """Its update came due in an earlier step: what it has changed of the chunk belongs to none."""
    fixture = Fixture()
    fixture.update.begin(ALL)
    fixture.update.apply([])
    fixture.update.finish()
    assert not fixture.update.is_half_applied
    fixture.sub_groups[2].fault = RuntimeError("injected")
    lease = fixture.due.acquire(2, read=ObjectKind.WEIGHT.mask)
    with pytest.raises(RuntimeError, match="injected"):
        lease.wait()
    assert fixture.update.is_half_applied


def test_gradients_are_clipped_as_torch_clips() -> None:
    fixture = Fixture(max_norm=1.0)
    assert [fixture.update.wants_norms, fixture.update.grad_norm] == [True, None]
    fixture.run(ALL)
    factor = float((1.0 / (torch.tensor(4.0) + 1e-6)).clamp(max=1.0))
    assert fixture.factors == [factor] * 6
    assert fixture.update.grad_norm == 4.0
    fixture.gradients.found = Norm(torch.tensor(0.5), is_finite=True)
    fixture.run(ALL)
    assert fixture.factors[6:] == [None] * 6, "never made larger"
    assert fixture.gradients.num_asked == 2


def test_without_clipping_the_norm_is_taken_once_it_was_asked_for() -> None:
    fixture = Fixture()
    fixture.run(ALL)
    assert (fixture.gradients.num_asked, fixture.update.wants_norms) == (0, False)
    assert [fixture.update.ask_for_norm(), fixture.update.wants_norms] == [None, True]
    fixture.run(ALL)
    assert fixture.update.ask_for_norm() == 4.0
    assert fixture.factors == [None] * 12


@pytest.mark.parametrize("configured", [0.0, 100.0])
def test_one_step_may_be_clipped_by_hand(configured: float) -> None:
    fixture = Fixture(max_norm=configured)
    norm = fixture.update.clip_once(2.0, ALL)
    assert (float(norm), norm.dtype) == (4.0, torch.float32)
    fixture.run(ALL)
    fixture.run(ALL)
    assert fixture.factors[:6] == [pytest.approx(0.5)] * 6
    assert fixture.factors[6:] == [None] * 6, "and only that one"


def test_a_clip_of_gradients_that_are_dropped_is_forgotten() -> None:
    fixture = Fixture()
    fixture.update.clip_once(2.0, ALL)
    fixture.update.forget_clipping()
    fixture.run(ALL)
    assert fixture.factors == [None] * 6


def test_a_clip_to_nothing_is_one() -> None:
    fixture = Fixture()
    fixture.update.clip_once(0.0, ALL)
    fixture.run(ALL)
    assert fixture.factors == [0.0] * 6


def test_the_loss_scale_is_taken_out_of_the_gradients_and_of_the_norm() -> None:
    fixture = Fixture(scale=FixedLossScale(8.0, checks_overflow=True))
    assert fixture.run(ALL) is Outcome.APPLIED
    assert (fixture.factors, fixture.update.grad_norm) == ([1 / 8] * 6, 0.5)
    clipped = Fixture(max_norm=0.25, scale=FixedLossScale(8.0, checks_overflow=True))
    clipped.run(ALL)
    assert clipped.factors == [pytest.approx(0.5 / 8, rel=1e-5)] * 6


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_an_overflow_changes_nothing_and_is_told(norm: float) -> None:
    fixture = Fixture(norm=norm, is_finite=False, scale=FixedLossScale(8.0, checks_overflow=True))
    assert fixture.run(ALL) is Outcome.SKIPPED
    assert (fixture.calls, fixture.counts, fixture.gradients.num_cleared) == ([], [0] * 6, 1)
    assert [fixture.optimizer.overflow] == [True]
    assert not any(fixture.due.is_due(chunk) for chunk in range(NUM_CHUNKS))
    fixture.gradients.found = Norm(torch.tensor(1.0), is_finite=True)
    assert fixture.run(ALL) is Outcome.APPLIED
    assert [fixture.optimizer.overflow] == [False]
    unchecked = Fixture(norm=norm, is_finite=False, max_norm=1.0)
    assert unchecked.run(ALL) is Outcome.APPLIED


def test_a_norm_too_large_for_fp32_is_no_overflow() -> None:
    """As torch has it: the scaler looks at gradients, and what is clipped by an infinite norm is zero."""
    fixture = Fixture(norm=float("inf"), max_norm=1.0, scale=FixedLossScale(8.0, checks_overflow=True))
    assert fixture.run(ALL) is Outcome.APPLIED
    assert fixture.factors == [0.0] * 6


def test_sub_groups_may_be_stepped_in_any_order_and_at_any_time() -> None:
    fixture = Fixture()
    fixture.update.begin(ALL)
    fixture.update.apply([])
    fixture.optimizer.param_groups[0]["lr"] = 100.0  # what the user writes meanwhile is for the next step
    assert fixture.update.finish() is Outcome.APPLIED
    for sub_group in reversed(fixture.sub_groups):
        assert fixture.counts == [0] * 6, "nothing counts before the last"
        lease = fixture.due.acquire(sub_group.chunk, read=ObjectKind.WEIGHT.mask)
        lease.wait()
        lease.release()
    assert [call["chunk"] for call in fixture.calls] == [5, 4, 3, 2, 1, 0]
    assert {call["terms"].options[0]["lr"] for call in fixture.calls} == {0.5}
    assert fixture.counts == [1] * 6


# The object.


RULE = from_config(optimizer_config(), [{"params": []}]).rule


def params_of(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_a_step_runs_what_the_engine_has_bound() -> None:
    optimizer = from_config(optimizer_config(), params_of(1))
    with pytest.raises(RuntimeError, match="not bound"):
        optimizer.step()
    runs: list[int] = []
    optimizer.zero_grad()
    optimizer.bind(lambda: runs.append(1), lambda **_: runs.append(2), FixedLossScale(4.0))
    optimizer.step()
    assert runs == [1]
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
    optimizer.param_groups[0]["params"] = params_of(1)
    with pytest.raises(EngineStateError, match="or others"):
        optimizer.step()
    assert runs == [1]
    optimizer.zero_grad()
    assert runs == [1, 2]


def test_parameters_may_come_in_groups_with_options_of_their_own() -> None:
    first, second = params_of(2)
    plain = from_config(optimizer_config(), [first, second])
    assert [group["params"] for group in plain.param_groups] == [[first, second]]
    given: list[dict[str, Any]] = [{"params": [first], "lr": 1.0}, {"params": [second], "name": "rest"}]
    grouped = from_config(optimizer_config(weight_decay=0.5), given)
    assert [group["lr"] for group in grouped.param_groups] == [1.0, 2.0]
    assert [group["weight_decay"] for group in grouped.param_groups] == [0.5, 0.5]
    assert [group["maximize"] for group in grouped.param_groups] == [False, False]
    assert [group["decoupled_weight_decay"] for group in grouped.param_groups] == [True, True]
    assert [sorted(group) for group in given] == [["lr", "params"], ["name", "params"]], "the user's are the user's"
    with pytest.raises(ConfigError, match=r"model_parameters\[1\]\.momentum"):
        from_config(optimizer_config(), [{"params": [first]}, {"params": [second], "momentum": 0.9}])


@pytest.mark.parametrize(("kind", "decoupled"), [(torch.optim.Adam, False), (torch.optim.AdamW, True)])
def test_an_optimizer_of_the_users_is_taken_over_with_its_groups(kind: Any, decoupled: bool) -> None:
    first, second = params_of(2)
    rate = torch.tensor(0.5)
    theirs = kind([{"params": [first], "lr": rate}, {"params": [second], "maximize": True}], lr=0.25)
    ours = from_torch(theirs)
    assert ours.taken_over is theirs
    assert ours.param_groups is theirs.param_groups, "a schedule made on the given one drives this one"
    assert [group["lr"] for group in ours.param_groups] == [0.5, 0.25]
    assert ours.param_groups[0]["lr"] is rate, "which may be written in place"
    assert [group["maximize"] for group in ours.param_groups] == [False, True]
    assert [group["decoupled_weight_decay"] for group in ours.param_groups] == [decoupled] * 2
    assert "params" not in ours.defaults
    assert ours.defaults["lr"] == 0.25
    assert [group["params"] for group in ours.state_dict()["param_groups"]] == [[0], [1]]
    ours.bind(lambda: None, lambda: None, FixedLossScale())
    retire(theirs, ours)
    ours.step()
    assert theirs._opt_called


def test_one_that_another_engine_had_is_taken_over_again() -> None:
    given = torch.optim.SGD(params_of(1), lr=0.5)
    first = from_torch(given)
    retire(given, first)
    with pytest.raises(EngineStateError, match="store"):
        given.state.items()
    second = from_torch(given)
    assert second is not first
    assert second.param_groups is given.param_groups
    assert dict(given.state) == {}


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_without_a_sharded_form_are_refused(option: str) -> None:
    theirs = torch.optim.AdamW(params_of(1))
    theirs.param_groups[0][option] = True
    with pytest.raises(ConfigError, match=rf"optimizer\.{option} = True"):
        from_torch(theirs)


class TwoPoints(torch.optim.SGD):
    """As schedule-free optimizers are: ``eval()`` shows the average of the points, ``train()`` the last one."""

    def train(self) -> None:
        """Write weights."""

    def eval(self) -> None:
        """Write others."""


def test_one_that_writes_weights_outside_of_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer = 'TwoPoints': has train\(\) and eval\(\), .* torch's AdamW"):
        from_torch(TwoPoints(params_of(1), lr=0.5))


def test_stepped_ones_are_refused() -> None:
    (param,) = params_of(1)
    stepped = torch.optim.Adam([param])
    param.grad = torch.ones(2)
    stepped.step()
    with pytest.raises(ConfigError, match="has state"):
        from_torch(stepped)


def test_every_parameter_in_a_group_is_the_models_and_others_have_none() -> None:
    params = params_of(4)
    params[1].requires_grad_(False)
    index_of = {id(param): index for index, param in enumerate(params)}
    optimizer = ShardedOptimizer([{"params": [params[3]]}, {"params": [params[0], params[2]]}], {"lr": 1.0}, RULE)
    assert group_indices(optimizer, index_of, params) == [1, -1, 1, 0]
    with pytest.raises(ConfigError, match="does not belong"):
        group_indices(optimizer, {id(param): index for index, param in enumerate(params[:3])}, params[:3])
    lacking = ShardedOptimizer([{"params": [params[3], params[0]]}], {"lr": 1.0}, RULE)
    assert group_indices(lacking, index_of, params) == [0, -1, -1, 0], "one that trains as well"
    alone = ShardedOptimizer([{"params": [params[0]]}], {"lr": 1.0}, RULE)
    assert group_indices(alone, index_of, params[:1]) == [0], "the first group is one, too"


@pytest.mark.parametrize("counts_all", [False, True])
def test_a_parameter_of_no_group_is_not_stepped_though_it_has_a_gradient(counts_all: bool) -> None:
    present = [True, True, False, True, True, True]
    fixture = Fixture(max_norm=2.0, left_out=[1, 4], counts_all=counts_all)
    fixture.run(present)
    assert fixture.counts == [1, 0, 0, 1, 0, 1]
    assert fixture.gradients.present == (present if counts_all else [True, False, False, True, False, True])


def test_its_state_is_loaded_by_its_engine_alone() -> None:
    """Torch's own dictionary has none of it: what was given is as it was."""
    fixture = Fixture()
    before = fixture.optimizer.param_groups[0]["lr"]
    given = fixture.optimizer.state_dict()
    given |= {"state": {}, "param_groups": [{**group, "lr": 1.0} for group in given["param_groups"]]}
    with pytest.raises(EngineStateError, match="load_checkpoint"):
        fixture.optimizer.load_state_dict(given)
    assert fixture.optimizer.param_groups[0]["lr"] == before
    assert fixture.optimizer.loss_scale == fixture.optimizer.cur_scale == 1.0
