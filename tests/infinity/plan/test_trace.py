"""The device tier's trace: what comes next, how far away a reuse is, and finding back after a deviation."""

from __future__ import annotations

from infinity.plan.trace import GROUPS_AHEAD_MAX, AccessRecorder, GroupTrace
from io_daemon.shared.protocol import Access

NUMELS = [10, 20, 30]
STEP = [0, 1, 2, 1, 0]


def replay(trace: GroupTrace, order: list[int]) -> None:
    trace.begin()
    for group in order:
        trace.use(group)


def test_nothing_is_known_in_the_first_pass() -> None:
    trace = GroupTrace(NUMELS)
    replay(trace, STEP)
    assert trace.upcoming(1000) == []
    assert trace.reuse_distance(0) is None


def test_the_last_pass_predicts_the_next() -> None:
    trace = GroupTrace(NUMELS)
    replay(trace, STEP)
    trace.begin()
    trace.use(0)
    assert list(trace.upcoming(1000)) == [1, 2, 1, 0]
    assert list(trace.upcoming(50)) == [1, 2]
    assert list(trace.upcoming(0)) == []
    assert trace.reuse_distance(0) == 20 + 30 + 20
    assert trace.reuse_distance(1) == 0
    trace.use(1)
    trace.use(2)
    trace.use(1)
    assert trace.reuse_distance(2) is None


def test_no_more_groups_are_looked_at_ahead_however_small_they_are() -> None:
    num_groups = 3 * GROUPS_AHEAD_MAX
    trace = GroupTrace([1] * num_groups)
    replay(trace, list(range(num_groups)))
    trace.begin()
    trace.use(0)
    assert list(trace.upcoming(10**9)) == list(range(1, GROUPS_AHEAD_MAX + 1))
    for group in range(1, num_groups - 1):
        trace.use(group)
    assert list(trace.upcoming(10**9)) == [num_groups - 1]


def test_repeated_uses_in_a_row_count_once() -> None:
    trace = GroupTrace(NUMELS)
    replay(trace, [0, 0, 1, 1, 1, 0])
    trace.begin()
    trace.use(0)
    assert list(trace.upcoming(1000)) == [1, 0]


def test_a_deviation_resynchronises_at_the_next_known_use() -> None:
    trace = GroupTrace(NUMELS)
    replay(trace, STEP)
    trace.begin()
    trace.use(0)
    trace.use(2)  # 1 was skipped
    assert list(trace.upcoming(1000)) == [1, 0]
    trace.use(2)
    assert list(trace.upcoming(1000)) == [1, 0]


def test_a_changed_pass_replaces_the_prediction() -> None:
    trace = GroupTrace(NUMELS)
    replay(trace, STEP)
    replay(trace, [2, 0])
    trace.begin()
    trace.use(2)
    assert list(trace.upcoming(1000)) == [0]


def test_the_recorder_learns_what_is_dead_at_release() -> None:
    recorder = AccessRecorder()
    first = recorder.acquired(3, 1, 2)
    recorder.acquired(4, 1, 0)
    recorder.released(first, 2)
    assert list(recorder.accesses) == [Access(3, 1, 2, 2), Access(4, 1, 0, 0)]
