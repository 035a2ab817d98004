"""The live set's rules one by one, over groups that only count: what is kept, what goes, what is leased ahead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from infinity.states import ShardedState
from infinity.weights.live_set import LiveSet
from infinity.weights.streams import CopyStream
from tests.support.work import lines_run

ENDLESS = 1 << 40


class CountedGroup:
    def __init__(self, index: int, numel: int, *, persistent: bool = False) -> None:
        self.index, self.numel, self.persistent = index, numel, persistent
        self.state = ShardedState.SHARDED
        self.in_use = False
        self.log: list[str] = []
        self.last_reads: list[bool] = []
        """Of each time that the weights were read, whether they were said not to be needed again."""

    def unshard(self) -> None:
        assert self.state is ShardedState.SHARDED
        self.state = ShardedState.UNSHARDING
        self.log.append("unshard")

    def wait_for_unshard(self, *, gives_up: bool = False) -> None:
        assert self.state is not ShardedState.UNSHARDED
        self.state = ShardedState.UNSHARDED
        self.log.append("wait")
        self.last_reads.append(gives_up)

    def reshard(self) -> None:
        assert not self.in_use
        assert self.state is not ShardedState.SHARDED
        self.state = ShardedState.SHARDED
        self.log.append("reshard")


class Fixture:
    def __init__(
        self,
        numels: Sequence[int],
        *,
        live: int = ENDLESS,
        reuse: int = ENDLESS,
        prefetch: int = 0,
        persistent: Sequence[int] = (),
    ) -> None:
        self.groups = [CountedGroup(i, numel, persistent=i in persistent) for i, numel in enumerate(numels)]
        groups: Any = self.groups
        self.live_set = LiveSet(
            groups,
            live_numel_max=live,
            reuse_distance_max=reuse,
            prefetch_numel_max=prefetch,
            copies=CopyStream(torch.device("cpu")),
        )

    def call(self, index: int, **options: Any) -> None:
        """A use from its beginning to its end."""
        group: Any = self.groups[index]
        self.live_set.use(group, **options)
        group.in_use = True
        assert group.state is ShardedState.UNSHARDED
        group.in_use = False
        self.live_set.done(group)

    def run_pass(self, order: Sequence[int], *, training: bool = True) -> None:
        self.live_set.begin_pass(training=training)
        for index in order:
            self.call(index)

    def learn(self, order: Sequence[int], *, training: bool = True) -> None:
        """A whole pass, so that the next one is predicted; everything is sharded again, the logs are empty."""
        self.run_pass(order, training=training)
        self.live_set.reshard_all()
        for group in self.groups:
            group.log.clear()
        self.live_set.begin_pass(training=training)

    @property
    def live(self) -> list[int]:
        return [group.index for group in self.groups if group.state is ShardedState.UNSHARDED]

    @property
    def leased(self) -> list[int]:
        return [group.index for group in self.groups if group.state is ShardedState.UNSHARDING]


def test_in_the_first_pass_nothing_is_kept_since_nothing_is_known() -> None:
    fixture = Fixture([10, 10])
    fixture.run_pass([0, 1, 0])
    assert fixture.live == []
    assert fixture.groups[0].log == ["wait", "reshard", "wait", "reshard"]
    assert fixture.live_set.live_numel == 0
    assert fixture.live_set.live_numel_peak == 10


@pytest.mark.parametrize(("reuse", "kept"), [(30, True), (29, False)])
def test_a_group_is_kept_if_it_is_needed_again_within_the_reuse_distance(reuse: int, kept: bool) -> None:
    fixture = Fixture([10, 10, 20], reuse=reuse)
    fixture.learn([0, 1, 2, 0])
    fixture.call(0)
    assert fixture.live == ([0] if kept else [])


@pytest.mark.parametrize(("live", "kept"), [(10, True), (9, False)])
def test_a_group_is_kept_only_within_the_live_limit(live: int, kept: bool) -> None:
    fixture = Fixture([10, 10], live=live)
    fixture.learn([0, 1, 0])
    fixture.call(0)
    assert fixture.live == ([0] if kept else [])
    assert fixture.live_set.live_numel == (10 if kept else 0)


def test_room_is_made_by_what_is_needed_last() -> None:
    fixture = Fixture([10] * 4, live=30)
    fixture.learn([0, 1, 2, 3, 1, 0, 2])
    for index in (0, 1, 2):
        fixture.call(index)
    assert fixture.live == [0, 1, 2]
    fixture.live_set.use(fixture.groups[3])  # type: ignore[arg-type]
    assert fixture.live == [0, 1, 3], "2 is needed last"
    assert fixture.live_set.live_numel == 30
    assert fixture.live_set.live_numel_peak == 30


def test_what_is_never_needed_again_goes_first_and_what_is_in_use_never() -> None:
    fixture = Fixture([10] * 4, live=20)
    fixture.learn([0, 1, 2, 0, 1])
    fixture.live_set.use(fixture.groups[0])  # type: ignore[arg-type]
    fixture.groups[0].in_use = True
    fixture.live_set.use(fixture.groups[3])  # type: ignore[arg-type]
    fixture.live_set.linger(fixture.groups[3])  # type: ignore[arg-type]
    fixture.call(1)
    assert fixture.live == [0, 1]
    fixture.groups[1].in_use = True
    fixture.live_set.use(fixture.groups[2])  # type: ignore[arg-type]
    assert fixture.live == [0, 1, 2], "over the limit, but all are in use"


def test_only_as_much_room_is_made_as_is_needed() -> None:
    fixture = Fixture([10, 10, 10, 5], live=30)
    fixture.learn([0, 1, 2, 3, 0, 1, 2])
    for index in (0, 1, 2):
        fixture.call(index)
    fixture.live_set.use(fixture.groups[3])  # type: ignore[arg-type]
    assert fixture.live == [0, 1, 3]
    assert fixture.live_set.live_numel == 25


def test_the_next_groups_are_leased_ahead_within_the_bucket() -> None:
    fixture = Fixture([10, 20, 10, 10], prefetch=30, reuse=0)
    fixture.learn([0, 1, 2, 3])
    fixture.call(0)
    assert fixture.leased == [1, 2]
    assert fixture.groups[3].log == []
    fixture.call(1)
    assert fixture.leased == [2, 3]
    assert fixture.groups[1].log == ["unshard", "wait", "reshard"]


@pytest.mark.parametrize(("live", "leased"), [(40, [1, 2]), (39, [1]), (29, [])])
def test_leasing_ahead_stays_within_the_live_limit(live: int, leased: list[int]) -> None:
    fixture = Fixture([10, 20, 10], prefetch=1000, live=live, reuse=0)
    fixture.learn([0, 1, 2])
    fixture.live_set.use(fixture.groups[0])  # type: ignore[arg-type]
    assert fixture.leased == leased


def test_what_is_here_costs_no_allowance_and_what_is_leased_costs_it_once() -> None:
    fixture = Fixture([10, 10, 10, 10], prefetch=1000, live=40)
    fixture.learn([0, 1, 0, 2, 3])
    for index in (1, 0):
        fixture.live_set.use(fixture.groups[index], in_pass=False)  # type: ignore[arg-type]
    fixture.live_set.use(fixture.groups[0])  # type: ignore[arg-type]
    assert fixture.leased == [2, 3], "20 live, 20 ahead"
    assert fixture.groups[2].log == ["unshard"]


def test_a_use_outside_of_the_order_is_neither_traced_nor_leads_ahead() -> None:
    fixture = Fixture([10, 10, 10], prefetch=1000)
    fixture.learn([0, 1, 2])
    fixture.call(1, in_pass=False)
    assert fixture.leased == []
    fixture.call(0)
    assert 1 in fixture.live or 1 in fixture.leased
    assert 2 in fixture.leased, "the order goes on from 0"


def test_what_backward_updates_is_not_leased_ahead_before_it_is_over() -> None:
    fixture = Fixture([10, 10, 10], prefetch=10, reuse=0)
    fixture.learn([0, 1, 2])
    fixture.call(0)
    assert fixture.leased == [1]
    fixture.live_set.hold_back(fixture.groups[1])  # type: ignore[arg-type]
    fixture.call(0)
    assert fixture.leased == []
    fixture.live_set.settle()
    fixture.call(0)
    assert fixture.leased == [1]


def test_uses_of_what_is_held_are_not_traced() -> None:
    fixture = Fixture([10, 10], reuse=0)
    fixture.live_set.begin_pass(training=True)
    fixture.live_set.use(fixture.groups[0])  # type: ignore[arg-type]
    fixture.groups[0].in_use = True
    fixture.call(1)
    fixture.groups[0].in_use = True
    fixture.live_set.use(fixture.groups[0])  # type: ignore[arg-type]
    fixture.groups[0].in_use = False
    fixture.live_set.reshard_all()
    fixture.live_set.begin_pass(training=True)
    fixture.call(0)
    assert fixture.live == [], "it is not needed again in the pass"


def test_training_and_evaluation_have_orders_of_their_own() -> None:
    fixture = Fixture([10, 10, 10], prefetch=10, reuse=0)
    fixture.learn([0, 1])
    fixture.learn([0, 2], training=False)
    fixture.call(0)
    assert fixture.leased == [2]
    fixture.live_set.reshard_all()
    fixture.live_set.begin_pass(training=True)
    fixture.call(0)
    assert fixture.leased == [1]


def test_persistent_groups_are_neither_counted_nor_resharded() -> None:
    fixture = Fixture([10, 10], persistent=[0], live=0, reuse=0)
    fixture.run_pass([0, 1, 0])
    assert fixture.live == [0]
    assert fixture.groups[0].log == ["wait"]
    assert fixture.live_set.live_numel_peak == 10
    fixture.live_set.linger(fixture.groups[0])  # type: ignore[arg-type]
    fixture.live_set.settle()
    fixture.live_set.forget(fixture.groups[0])  # type: ignore[arg-type]
    fixture.live_set.reshard_all()
    assert fixture.live == [0]
    fixture.live_set.reshard_all(persistent=True)
    assert fixture.live == []


def test_a_persistent_groups_uses_are_no_part_of_the_order() -> None:
    fixture = Fixture([10, 90, 10], persistent=[1], prefetch=10, reuse=20)
    fixture.learn([0, 1, 2, 0])
    fixture.call(0)
    assert fixture.live == [0, 1], "needed again after 10 elements of group 2, not after 100"
    fixture.call(1)
    assert fixture.groups[1].state is ShardedState.UNSHARDED


def test_a_use_that_ends_inside_of_another_is_decided_when_another_group_is_needed() -> None:
    fixture = Fixture([10, 10], reuse=0)
    group: Any = fixture.groups[0]
    fixture.live_set.begin_pass(training=True)
    fixture.live_set.use(group)
    group.in_use = True
    fixture.live_set.done(group)
    assert fixture.live == [0]
    fixture.call(1)
    assert fixture.live == [0], "it is in use"
    group.in_use = False
    fixture.call(1)
    assert fixture.live == []
    assert group.log == ["wait", "reshard"]


def test_what_an_operation_had_stays_until_another_group_is_needed() -> None:
    fixture = Fixture([10, 10], reuse=0)
    group: Any = fixture.groups[0]
    fixture.live_set.begin_pass(training=True)
    fixture.live_set.use(group, in_pass=False)
    fixture.live_set.linger(group)
    fixture.live_set.use(group, in_pass=False)
    fixture.live_set.linger(group)
    assert group.log == ["wait"]
    fixture.call(1)
    assert group.log == ["wait", "reshard"]
    fixture.live_set.use(group, in_pass=False)
    fixture.live_set.linger(group)
    fixture.live_set.settle()
    assert fixture.live == [], "backward is over"


def test_settling_keeps_what_is_in_use_or_needed_soon() -> None:
    fixture = Fixture([10, 10, 10], reuse=10)
    fixture.learn([0, 1, 2, 1, 0])
    held: Any = fixture.groups[2]
    for index in (0, 1, 2):
        fixture.live_set.use(fixture.groups[index], in_pass=index == 2)  # type: ignore[arg-type]
    held.in_use = True
    fixture.live_set.settle()
    assert 2 in fixture.live
    held.in_use = False
    fixture.live_set.settle()
    assert fixture.live == [0, 1]


def test_what_was_written_to_is_forgotten_unless_it_is_in_use() -> None:
    fixture = Fixture([10, 10])
    fixture.learn([0, 1, 0])
    group: Any = fixture.groups[0]
    fixture.call(0)
    group.in_use = True
    fixture.live_set.forget(group)
    assert fixture.live == [0]
    group.in_use = False
    fixture.live_set.forget(group)
    fixture.live_set.forget(group)  # it is not there
    assert fixture.live == []
    assert fixture.live_set.live_numel == 0


def test_resharding_everything_drops_what_was_leased_ahead_and_spares_what_is_in_use() -> None:
    fixture = Fixture([10, 10, 10], prefetch=1000)
    fixture.learn([0, 1, 2])
    held: Any = fixture.groups[0]
    fixture.live_set.use(held)
    held.in_use = True
    assert fixture.leased == [1, 2]
    fixture.live_set.reshard_all()
    assert (fixture.live, fixture.leased) == ([0], [])
    assert fixture.live_set.live_numel == 10


def reads(fixture: Fixture, order: Sequence[int], **options: Any) -> list[bool]:
    """Of each time that group 0 is read in a pass over ``order``, whether that is told to be the last."""
    fixture.groups[0].last_reads.clear()
    fixture.run_pass(order, **options)
    fixture.live_set.reshard_all()
    return list(fixture.groups[0].last_reads)


def test_a_step_reads_weights_for_the_last_time_when_it_read_them_as_often_as_the_one_before() -> None:
    fixture = Fixture([10, 10, 10], live=0)
    assert reads(fixture, [0, 1, 2, 2, 1, 0]) == [False, False]
    assert reads(fixture, [0, 1, 2, 2, 1, 0]) == [False, True]
    assert reads(fixture, [0, 1, 2, 0, 1, 0]) == [False, True, False]  # it foresaw two
    assert reads(fixture, [0, 1, 2, 0, 1, 0]) == [False, False, True]
    assert reads(fixture, [0, 1]) == [False]


def test_what_stays_live_is_read_once_and_then_for_the_last_time() -> None:
    fixture = Fixture([10, 10, 10])
    order = [0, 1, 2, 2, 1, 0]
    assert reads(fixture, order) == [False, False]  # nothing is kept before an order is known
    assert reads(fixture, order) == [False]
    assert reads(fixture, order) == [True]


def test_an_evaluation_reads_nothing_for_the_last_time_and_counts_for_no_step() -> None:
    fixture = Fixture([10, 10, 10], live=0)
    reads(fixture, [0, 1, 0])
    assert reads(fixture, [0, 1, 0], training=False) == [False, False]
    assert reads(fixture, [0, 1, 0], training=False) == [False, False]
    assert reads(fixture, [0, 1, 0]) == [False, True]


def test_what_is_read_outside_of_the_pass_is_not_counted() -> None:
    fixture = Fixture([10, 10, 10], live=0)
    reads(fixture, [0, 1, 0])
    fixture.groups[0].last_reads.clear()
    fixture.live_set.begin_pass(training=True)
    fixture.call(0)
    fixture.call(1)
    fixture.call(0, in_pass=False)
    fixture.call(1)
    fixture.call(0)
    assert fixture.groups[0].last_reads == [False, False, True]


def test_a_use_among_many_that_are_live_costs_what_it_costs_among_few() -> None:
    """In lines run: each use beyond the limit looked at all that were live, for the one that is needed last."""

    def work(num_groups: int) -> float:
        fixture = Fixture([1] * num_groups, live=num_groups // 2)
        order = [*range(num_groups), *reversed(range(num_groups))]
        fixture.learn(order)

        def use_all() -> None:
            for index in order:
                fixture.call(index)

        lines = lines_run(use_all, "infinity/weights")
        assert fixture.live_set.live_numel_peak == num_groups // 2
        return lines / len(order)

    few, many = work(40), work(640)
    assert many <= 1.2 * few, f"{few} lines a use among 20, {many} among 320"


@pytest.mark.parametrize("seed", range(40))
def test_of_all_that_is_live_the_one_that_is_needed_last_goes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a pass leaves out uses of the one before, or has others."""
    generator = random.Random(seed)
    fixture = Fixture([1] * 8, live=3)
    live_set, num_found = fixture.live_set, 0
    real = live_set._farthest_idle

    def checked() -> Any:
        nonlocal num_found
        found = real()
        places = [live_set._place(index) for index, group in live_set._live.items() if not group.in_use]
        assert (None if found is None else live_set._place(found.index)) == min(places, default=None)
        num_found += found is not None
        return found

    monkeypatch.setattr(live_set, "_farthest_idle", checked)
    order = [generator.randrange(8) for _ in range(60)]
    fixture.learn(order)
    for _ in range(3):
        for index in order:
            if generator.random() < 0.9:
                fixture.call(index if generator.random() < 0.9 else generator.randrange(8))
        live_set.begin_pass(training=generator.random() < 0.7)
    assert num_found
