"""When gradients are reduced, in which order, and what ranks agree upon: ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from infinity.errors import WeightsError
from infinity.tiers.collectives import Collectives
from infinity.tiers.under_way import UnderWay
from infinity.update.gradients import GradientChunks
from infinity.update.in_backward import InBackward
from infinity.update.norms import BlockNorms
from infinity.update.reducer import Reducer
from infinity.weights.streams import CopyStream
from io_daemon.shared.protocol import ObjectKind
from tests.support.small_shards import SmallShards
from tests.support.threaded_ranks import ThreadedCollectives, on_ranks

SHAPES = [[(100,), (130,)], [(64,)], [(1000,)], [(10,)]]
FROZEN = (3,)
NUM_PARAMS = 5
CPU = torch.device("cpu")


class OneRank:
    def __init__(self, collectives: Collectives | None = None) -> None:
        self.shards = SmallShards(SHAPES, collectives, frozen=FROZEN)
        self.rank = self.shards.collectives.rank
        self.added: list[tuple[int, list[int], bool]] = []
        self.noted = ""
        norms = BlockNorms(self.shards.collectives)
        self.gradients = GradientChunks(
            self.shards.store, self.shards.chunks, NUM_PARAMS, self.shards.trained, norms, CopyStream(CPU), UnderWay()
        )
        add = self.gradients.add

        def recorded(chunk_ids: Sequence[int], gradient_of: Any, params: Sequence[int], *, norms: bool) -> None:
            self.added.append((self.shards.chunks[chunk_ids[0]].group, list(params), norms))
            add(chunk_ids, gradient_of, params, norms=norms)

        self.gradients.add = recorded  # type: ignore[method-assign]
        self.reducer = Reducer(self.shards.groups, self.gradients, self.shards.collectives, NUM_PARAMS)

    def give(self, param: int, value: float) -> None:
        """Autograd accumulates; the group is complete with its last one."""
        group = next(group for group in self.shards.groups if any(p.index == param for p in group.params))
        target = self.shards.params[param].param
        gradient = torch.full_like(target, value) * torch.arange(1, target.numel() + 1)
        target.grad = gradient if target.grad is None else target.grad + gradient
        if self.reducer.take(group, self.shards.params[param]):
            self.reducer.complete(group)

    def held(self, param: int) -> list[float]:
        """This rank's part of the parameter's gradient in the store."""
        return [
            float(value)
            for chunk, placement in enumerate(self.shards.chunks)
            for segment in placement.segments
            if segment.param == param
            for value in self.shards.part(chunk, ObjectKind.GRAD, segment.chunk_offset, segment.numel)
        ]


def ramp(value: float, numel: int) -> list[float]:
    return [value * (i + 1) for i in range(numel)]


def test_one_rank_adds_a_group_as_soon_as_it_is_complete() -> None:
    own = OneRank()
    own.give(0, 1.0)
    assert own.added == []
    own.give(1, 2.0)
    assert own.added == [(0, [0, 1], False)]
    assert own.shards.params[0].param.grad is None, "taken"
    assert [own.reducer.holds(param) for param in range(5)] == [True, True, False, False, False]
    own.reducer.norms = True
    own.give(2, 3.0)
    assert own.added[1:] == [(1, [2], True)]
    own.reducer.finish()
    assert len(own.added) == 2, "what has no gradient is not leased"
    assert own.reducer.used == [True, True, True, False, False]
    assert own.held(1) == ramp(2.0, 130)


def test_one_rank_adds_what_is_left_at_the_end_of_backward() -> None:
    own = OneRank()
    own.give(1, 2.0)
    own.reducer.finish()
    assert own.added == [(0, [1], False)]
    assert own.reducer.used == [False, True, False, False, False]
    own.give(0, 1.0)
    own.give(1, 1.0)
    assert own.added[1:] == [(0, [0, 1], False)], "the next backward begins anew"
    assert own.held(1) == ramp(3.0, 130)


def test_a_gradient_that_comes_again_in_one_backward_is_added_by_itself() -> None:
    """As autograd adds it to ``param.grad``: re-entrant checkpointing accumulates several times."""
    own = OneRank()
    own.give(0, 1.0)
    own.give(0, 2.0)
    assert own.added == [(0, [0], False)], "what was held goes first"
    own.give(1, 4.0)
    assert own.added[1:] == [(0, [0, 1], False)]
    own.give(2, 1.0)
    own.give(2, 2.0)
    own.reducer.finish()
    assert [entry[0] for entry in own.added[2:]] == [1, 1], "also after the group was complete"
    assert own.held(0) == ramp(3.0, 100)
    assert own.held(2) == ramp(3.0, 64)


def test_a_cleared_reducer_holds_nothing() -> None:
    own = OneRank()
    own.give(0, 1.0)
    own.give(2, 1.0)
    own.reducer.clear()
    assert own.reducer.used == [False] * 5
    assert own.shards.params[0].param.grad is None, "dropped"
    own.give(0, 1.0)
    own.give(1, 1.0)
    assert own.added[-1] == (0, [0, 1], False), "both are counted anew"
    own.give(2, 5.0)
    assert own.held(2) == ramp(5.0, 64), "copied, not added"


def test_a_gradient_that_no_backward_gave_is_noted_until_the_step_ends() -> None:
    own = OneRank()
    own.reducer.note(3)
    assert own.reducer.used == [False, False, False, True, False]
    assert own.reducer.holds(3)
    own.reducer.clear()
    assert not own.reducer.holds(3)


def test_a_step_has_gradients_from_the_first_one_to_its_end() -> None:
    own = OneRank()
    found = [own.reducer.has_any]
    own.give(2, 1.0)
    own.reducer.finish()
    found.append(own.reducer.has_any)
    own.reducer.clear()
    assert [*found, own.reducer.has_any] == [False, True, False]


def on_two(work: Callable[[OneRank], Any]) -> list[OneRank]:
    def run(collectives: ThreadedCollectives) -> OneRank:
        own = OneRank(collectives)
        work(own)
        return own

    return list(on_ranks(2, run))


def assert_mean(ranks: Sequence[OneRank], param: int, mean: float) -> None:
    whole = [value for own in ranks for value in own.held(param)]
    assert whole == pytest.approx(ramp(mean, len(whole)))


def test_what_was_complete_before_a_step_was_dropped_waits_for_its_gradients_anew() -> None:
    def work(own: OneRank) -> None:
        own.give(0, 1.0)
        own.give(1, 1.0)  # complete, and behind others that are not
        own.reducer.clear()
        own.give(2, 1.0)
        own.give(3, 1.0)
        own.noted = own.reducer.told

    first, second = on_two(work)
    assert first.noted == second.noted
    assert first.noted.startswith("after 2 reductions")


def groups_reduced(own: OneRank) -> list[int]:
    return [entry[0] for entry in own.added]


def test_ranks_reduce_in_one_order_whatever_comes_first() -> None:
    """First the reverse of registration, then the order in which rank 0's groups were complete in its first backward;
    what rank 0 lacked comes last."""

    def work(own: OneRank) -> None:
        order = (0, 1, 2) if own.rank == 0 else (2, 3, 0, 1)
        for param in order:
            own.give(param, 1.0 + own.rank)
        own.reducer.finish()
        for param in (3, 0, 1, 2):
            own.give(param, 10.0)
        own.reducer.finish()

    ranks = on_two(work)
    for own in ranks:
        assert groups_reduced(own)[:3] == [2, 1, 0]
        assert groups_reduced(own)[3:] == [0, 1, 2]
        assert own.reducer.used == [True, True, True, True, False]
        assert isinstance(own.shards.collectives, ThreadedCollectives)
    assert_mean(ranks, 0, 11.5)
    assert_mean(ranks, 2, 11.5)
    assert_mean(ranks, 3, 11.0)


def test_a_parameter_of_one_rank_only_counts_as_zero_on_the_others() -> None:
    def work(own: OneRank) -> None:
        own.give(0, 2.0)
        if own.rank == 1:
            own.give(1, 4.0)
            own.give(3, 8.0)
        assert own.reducer.holds(1) is False or own.rank == 1
        own.reducer.finish()

    ranks = on_two(work)
    for own in ranks:
        assert own.reducer.used == [True, True, False, True, False], "what any rank has used"
    assert_mean(ranks, 0, 2.0)
    assert_mean(ranks, 1, 2.0)
    assert_mean(ranks, 3, 4.0)


def test_a_reduction_that_is_done_is_added_before_backward_ends() -> None:
    """So that gradients do not pile up."""

    def work(own: OneRank) -> None:
        own.reducer.norms = True
        own.give(3, 1.0)  # both ranks' first in order
        own.shards.collectives.gather_objects(None, "both have issued it")
        own.give(2, 1.0)
        assert groups_reduced(own)[0] == 2
        assert own.added[0] == (2, [3], True)
        own.give(0, 1.0)
        own.give(1, 1.0)
        own.reducer.finish()

    ranks = on_two(work)
    assert_mean(ranks, 3, 1.0)


def test_what_a_complete_group_had_no_gradient_for_is_reduced_when_it_comes() -> None:
    """As of a leaf, which is passed without some of its parameters, and of which others are used outside, too."""

    def work(own: OneRank) -> None:
        own.give(3, 1.0)
        own.give(0, 1.0)
        own.reducer.complete(own.shards.groups[0])  # in the order of the first backward after the two others
        own.give(2, 1.0)
        if own.rank == 1:
            own.give(1, 2.0)
        own.reducer.finish()
        for param in range(4):
            own.give(param, 1.0)
        own.reducer.finish()

    ranks = on_two(work)
    for own in ranks:
        assert groups_reduced(own)[:4] == [2, 1, 0, 0]
        assert sorted(groups_reduced(own)[4:]) == [0, 1, 2]
    assert_mean(ranks, 0, 2.0)
    assert_mean(ranks, 1, 2.0)


def test_a_gradient_after_its_mean_was_taken_is_refused_on_every_rank() -> None:
    def work(own: OneRank) -> None:
        own.give(3, 1.0)
        own.give(2, 1.0)
        if own.rank == 1:
            own.give(3, 2.0)  # re-entrant checkpointing
        own.give(0, 1.0)
        own.give(1, 1.0)
        with pytest.raises(WeightsError, match=r"^p3 got a gradient after its mean.*use_reentrant=False"):
            own.reducer.finish()
        own.reducer.clear()
        for param in range(4):
            own.give(param, 2.0)
        own.reducer.finish()

    ranks = on_two(work)
    for param in range(4):
        assert_mean(ranks, param, 2.0)


def test_where_sums_are_reduced_a_checkpoints_gradients_wait_for_the_end_of_backward() -> None:
    """As ``p.grad`` adds them, one after another: 1 is lost in 2^24, and would not be if it were added to 1 first."""

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
            ctx.run = run
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            ctx.run()
            return gradients[0], None

    def work(own: OneRank) -> None:
        def backward(values: Sequence[float]) -> None:
            out = torch.ones(1, requires_grad=True)
            for value in values:
                out = Checkpoint.apply(out, lambda value=value: own.give(3, value))  # type: ignore[no-untyped-call]
            out.backward()  # type: ignore[no-untyped-call]

        own.reducer.puts_off = True
        backward([2.0**24])
        own.reducer.finish()
        own.reducer.puts_off = False
        backward([1.0, 1.0])
        assert groups_reduced(own) == []
        own.reducer.finish()

    assert on_two(work)[0].held(3)[0] == 2.0**24


def test_a_failed_step_is_begun_anew_on_every_rank() -> None:
    def work(own: OneRank) -> None:
        own.give(3, 1.0)
        own.give(0, 1.0)
        own.reducer.clear()
        assert own.reducer.used == [False] * 5
        for param in range(4):
            own.give(param, 3.0)
        own.reducer.finish()

    ranks = on_two(work)
    for own in ranks:
        assert sorted(groups_reduced(own)[-3:]) == [0, 1, 2]
    for param in range(4):
        assert_mean(ranks, param, 3.0)


def test_what_was_put_off_is_reduced_once_when_somebody_asks_for_it() -> None:
    def work(own: OneRank) -> None:
        own.reducer.puts_off = True
        for value in (1.0, 2.0):
            for param in (0, 1):
                own.give(param, value + own.rank)
            own.reducer.finish()
        assert (own.added, own.reducer.has_put_off, own.reducer.has_any) == ([], True, True)
        own.reducer.norms = True
        for _ in range(2):
            own.reducer.settle()
        assert own.added == [(2, [3], False), (1, [2], False), (0, [0, 1], False)], "and no norm is taken of it yet"
        assert not own.reducer.has_put_off

    ranks = on_two(work)
    for own in ranks:
        said = own.shards.collectives.said  # type: ignore[attr-defined]
        assert sum("reduce what was put off" in what for what in said) == 1
    for param in (0, 1):
        assert_mean(ranks, param, 4.0)


def test_what_a_user_put_waits_for_the_backward_that_is_reduced() -> None:
    def work(own: OneRank) -> None:
        group, param = own.shards.groups[0], own.shards.params[0]
        param.param.grad = torch.arange(1.0, 101.0)
        own.reducer.take_put(group, param)
        assert own.reducer.has_any
        for index in (3, 2, 1, 0):
            own.give(index, 1.0 + own.rank)
        own.reducer.finish()
        assert own.added == [(2, [3], False), (1, [2], False), (0, [0, 1], False)], "each group once"

    ranks = on_two(work)
    assert_mean(ranks, 0, 2.5)
    assert_mean(ranks, 1, 1.5)


class Early:
    """Takes whatever is complete, and says what it was given to step."""

    def __init__(self) -> None:
        self.claimed: list[int] = []
        self.stepped: list[int] = []

    def claim(self, group: Any) -> None:
        assert group.index not in self.stepped
        self.claimed.append(group.index)

    def takes(self, group: Any, params: Sequence[int]) -> bool:
        return len(params) == len(group.params)

    def step(self, group: Any, gradient_of: Any) -> None:
        self.stepped.append(group.index)


def test_only_groups_whose_parameters_all_have_a_gradient_are_stepped_early() -> None:
    def work(collectives: ThreadedCollectives) -> list[int]:
        own, early = OneRank(collectives), Early()
        own.reducer.in_backward = cast(InBackward, early)
        for param in (3, 2, 0):
            own.give(param, 1.0)
        assert early.claimed == [2, 1], "at once, however long reductions take: else who needs it again may be lucky"
        own.reducer.finish()
        return early.stepped

    assert list(on_ranks(2, work)) == [[2, 1], [2, 1]]


@pytest.mark.parametrize("end", ["finish", "clear"])
def test_nothing_is_stepped_early_once_a_backward_is_over(end: str) -> None:
    own = OneRank()
    own.reducer.in_backward = cast(InBackward, object())
    getattr(own.reducer, end)()
    assert own.reducer.in_backward is None


@pytest.mark.parametrize(("reduces_each", "rounds_sums"), [(False, False), (True, False), (False, True)])
def test_a_rank_alone_rounds_where_several_would(reduces_each: bool, rounds_sums: bool) -> None:
    shards = SmallShards(SHAPES, None, frozen=FROZEN)
    gradients = GradientChunks(
        shards.store,
        shards.chunks,
        NUM_PARAMS,
        shards.trained,
        BlockNorms(shards.collectives),
        CopyStream(CPU),
        UnderWay(),
    )
    reducer = Reducer(
        shards.groups,
        gradients,
        shards.collectives,
        NUM_PARAMS,
        reduces_each=reduces_each,
        rounds_sums=rounds_sums,
    )
    asked: list[bool] = []
    take = shards.groups[0].take_gradients

    def told(*, rounded: bool) -> Any:
        asked.append(rounded)
        return take(rounded=rounded)

    shards.groups[0].take_gradients = told  # type: ignore[method-assign]
    shards.params[0].param.grad = torch.ones(100)
    reducer.take(shards.groups[0], shards.params[0])
    reducer.finish()
    assert asked == [reduces_each or rounds_sums]


def test_the_order_is_learnt_once_from_rank_0() -> None:
    def work(own: OneRank) -> None:
        for order in ((2, 3, 0, 1), (3, 0, 1, 2), (0, 1, 2, 3)):
            for param in order:
                own.give(param, 1.0)
            own.reducer.finish()

    for own in on_two(work):
        assert groups_reduced(own) == [2, 1, 0, *[1, 2, 0] * 2]
        said = own.shards.collectives.said  # type: ignore[attr-defined]
        assert sum("learn the order" in what for what in said) == 1
        assert sum("end a backward" in what for what in said) == 3
