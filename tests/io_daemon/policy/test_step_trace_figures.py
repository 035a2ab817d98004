"""What a step trace says of itself: figures by hand, columns that belong together, work before events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from io_daemon.policy.step_trace import Part, StepTrace, work_before, world_text
from io_daemon.shared.protocol import KINDS_MAX, ChunkSpec
from tests.support.small_step import FRAME_BYTES, RATES, small_step

NUM_CHUNKS = 3
PINNED = 0b00100
APART, BETWEEN, UPDATE = Part


@pytest.fixture
def trace() -> StepTrace:
    """Chunks of a frame each of weights and gradients, two of master weights (pinned) and of both moments."""
    return small_step(NUM_CHUNKS, pinned_mask=PINNED)


def test_figures_of_a_whole_step(trace: StepTrace) -> None:
    assert trace.object_bytes(0, 0b00111) == 4 * FRAME_BYTES
    assert trace.object_frames(0, 0b11000) == 4
    assert trace.total_frames == NUM_CHUNKS * 8
    assert trace.pinned_frames == NUM_CHUNKS * 2
    assert trace.swap_bytes == NUM_CHUNKS * 6 * FRAME_BYTES
    sizes = (FRAME_BYTES, FRAME_BYTES, *[2 * FRAME_BYTES] * 3, *[0] * (KINDS_MAX - 5))
    assert trace.specs() == [ChunkSpec(sizes, PINNED)] * NUM_CHUNKS


def test_an_object_takes_whole_frames(trace: StepTrace) -> None:
    values = json.loads(trace.model_dump_json())
    values["chunks"] = [[[FRAME_BYTES + 1, 1, FRAME_BYTES, 3 * FRAME_BYTES, 2 * FRAME_BYTES - 1], 0]] * NUM_CHUNKS
    other = StepTrace.model_validate(values)
    assert [other.object_frames(1, 1 << kind) for kind in range(5)] == [2, 1, 1, 3, 2]
    assert (other.pinned_frames, other.total_frames) == (0, 27)


def test_all_that_writes_more_than_gradients_is_an_update(trace: StepTrace) -> None:
    assert trace.update_leases == [False] * 3 * NUM_CHUNKS + [True] * NUM_CHUNKS, "weights, and in backward gradients"


def _parts(order: list[tuple[int, int, int]]) -> list[Part]:
    """Of the work before each wait and each release of leases that read and write so in turn."""
    values = json.loads(small_step(num_chunks=NUM_CHUNKS, ahead=0).model_dump_json())
    num = len(order)
    values["accesses"] = [(chunk, read, write, 0) for chunk, read, write in order]
    values["leases"] = {
        "chunk": [chunk for chunk, _, _ in order],
        "read": [read for _, read, _ in order],
        "write": [write for _, _, write in order],
        "dirty": [write for _, _, write in order],
        "dead": [0] * num,
    }
    values["events"] = {
        "ops": "awr" * num,
        "lease": [lease for lease in range(num) for _ in "awr"],
        "gap": [1e-3] * 3 * num,
    }
    return [work.part for work in work_before(StepTrace.model_validate(values))]


def test_work_is_the_update_s_while_it_has_a_lease_and_between_updates_where_more_of_them_follow() -> None:
    forward, backward, update = (0b1, 0), (0b1, 0b10), (0b11110, 0b11101)
    in_step = _parts([(0, *forward), (1, *forward), (1, *backward), (0, *backward), (0, *update), (1, *update)])
    assert in_step == [*[APART] * 14, UPDATE, BETWEEN, BETWEEN, UPDATE, APART]
    on_use = _parts([(0, *update), (0, *forward), (1, *update), (1, *forward), (1, *backward), (0, *backward)])
    assert on_use == [APART, APART, UPDATE, *[BETWEEN] * 5, UPDATE, *[APART] * 10]
    without = _parts([(0, *forward), (0, *backward)])
    assert without == [APART] * 7


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rates": None}, "seconds come with the rates"),
        ({"gap_unit": "flops"}, "seconds come with the rates"),
        ({"tail": -1.0}, "tail"),
        ({"num_frames": 0}, "num_frames"),
        ({"frame_bytes": 4097}, "frame_bytes"),
        ({"chunks": []}, "chunks"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(trace: StepTrace, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        StepTrace.model_validate(json.loads(trace.model_dump_json()) | change)


@pytest.mark.parametrize("column", ["chunk", "read", "write", "dirty", "dead"])
def test_columns_of_leases_are_of_one_length(trace: StepTrace, column: str) -> None:
    values = json.loads(trace.model_dump_json())
    values["leases"][column].append(values["leases"][column][-1])
    with pytest.raises(ValidationError, match="columns of leases"):
        StepTrace.model_validate(values)


@pytest.mark.parametrize("column", ["ops", "lease", "gap"])
def test_columns_of_events_are_of_one_length(trace: StepTrace, column: str) -> None:
    values = json.loads(trace.model_dump_json())
    values["events"][column] = values["events"][column][:-1]
    with pytest.raises(ValidationError, match="columns of events"):
        StepTrace.model_validate(values)


def test_a_chunk_has_so_many_kinds_and_no_more(trace: StepTrace) -> None:
    values = json.loads(trace.model_dump_json())
    values["chunks"][0][0] += [1] * (KINDS_MAX - 5)
    StepTrace.model_validate(values)
    values["chunks"][0][0].append(1)
    with pytest.raises(ValidationError, match="more than 8 kinds"):
        StepTrace.model_validate(values)


@pytest.mark.parametrize(("column", "value"), [("chunk", NUM_CHUNKS), ("read", 1 << 6), ("write", 1 << 5)], ids=str)
def test_leases_name_what_there_is(trace: StepTrace, column: str, value: int) -> None:
    values = json.loads(trace.model_dump_json())
    values["leases"][column][0] = value
    with pytest.raises(ValidationError, match="does not have them"):
        StepTrace.model_validate(values)


def test_a_lease_names_something(trace: StepTrace) -> None:
    values = json.loads(trace.model_dump_json())
    values["leases"]["read"][0] = values["leases"]["write"][0] = 0
    with pytest.raises(ValidationError, match="asks kinds 0x0"):
        StepTrace.model_validate(values)


def test_every_lease_is_used(trace: StepTrace) -> None:
    values = json.loads(trace.model_dump_json())
    for column in values["leases"].values():
        column.append(column[0])
    with pytest.raises(ValidationError, match="not released, or not used"):
        StepTrace.model_validate(values)


def test_what_is_updated_in_place_goes_at_its_own_rate() -> None:
    """A lease that is read and written takes as long as the machine updates its bytes, one that is not as it copies."""
    gap = 1.0
    trace = small_step(1, ahead=0, gap=gap)
    work = work_before(trace)
    for number, (read, write) in enumerate(zip(trace.leases.read, trace.leases.write, strict=True)):
        rate = RATES.updated_bytes if read and write else RATES.copied_bytes
        num_bytes = trace.object_bytes(0, read | write)
        assert work[3 * number + 2].flops == pytest.approx((gap - num_bytes / rate) * RATES.flops)
        assert work[3 * number + 2].share == 1.0
    assert {bool(read and write) for read, write in zip(trace.leases.read, trace.leases.write, strict=True)} == {
        False, True,
    }  # fmt: skip
    assert work[-1] == (0.0, gap * RATES.flops, APART), "the tail comes after a release"


@pytest.mark.parametrize(
    ("nodes", "ranks", "text"),
    [
        (1, 1, "one rank"),
        (1, 4, "4 ranks on one node"),
        (2, 1, "2 ranks, 1 on each of 2 nodes"),
        (2, 4, "8 ranks, 4 on each of 2 nodes"),
    ],
)
def test_who_trains_together(nodes: int, ranks: int, text: str) -> None:
    assert world_text(nodes, ranks) == text
