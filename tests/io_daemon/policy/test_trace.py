"""Traces: columns, validation, and the form in which they travel."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from io_daemon.policy.trace import TRACE_MAGIC, Geometry, Trace
from io_daemon.shared.protocol import KINDS_MAX, Access, ChunkSpec

ACCESSES = st.lists(
    st.builds(Access, st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 255), st.integers(0, 255)),
    max_size=20,
)
SPECS = st.builds(
    ChunkSpec, st.lists(st.integers(0, 2**40), min_size=KINDS_MAX, max_size=KINDS_MAX).map(tuple), st.integers(0, 255)
)
GEOMETRIES = st.none() | st.builds(Geometry, st.integers(0, 2**40), st.lists(SPECS, max_size=3).map(tuple))


@given(ACCESSES, GEOMETRIES)
@settings(deadline=None)
def test_the_bytes_say_all(accesses: list[Access], geometry: Geometry | None) -> None:
    trace = Trace.from_bytes(Trace.from_accesses(accesses, geometry).to_bytes())
    assert list(trace) == accesses
    assert [trace[i] for i in range(len(trace))] == accesses
    assert list(trace[1:]) == accesses[1:]
    assert trace.geometry == geometry


@given(ACCESSES, GEOMETRIES, st.data())
@settings(deadline=None)
def test_damaged_bytes_are_refused(accesses: list[Access], geometry: Geometry | None, data: st.DataObject) -> None:
    whole = Trace.from_accesses(accesses, geometry).to_bytes()
    index = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[index] ^= 1 << data.draw(st.integers(0, 7))
    for each in (bytes(damaged), whole[:index], whole + b"\0"):
        with pytest.raises(ValueError, match="trace"):
            Trace.from_bytes(each)


def test_an_unknown_version_is_named() -> None:
    whole = bytearray(Trace.from_accesses([]).to_bytes())
    whole[len(TRACE_MAGIC)] = 99
    with pytest.raises(ValueError, match="version 99"):
        Trace.from_bytes(bytes(whole))


@pytest.mark.parametrize("access", [(-1, 1, 0, 0), (2**32, 1, 0, 0), (0, 256, 0, 0), (0, 1, -1, 0), (0, 1, 0, 999)])
def test_fields_that_do_not_fit_are_refused(access: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="access"):
        Trace.from_accesses([Access(*access)])


@pytest.mark.parametrize(
    "bad",
    [
        Access(0, 0b100, 0, 0),  # no such kind
        Access(1, 1, 0, 0),  # no such chunk
        Access(3, 1, 0, 0),  # beyond the last chunk
        Access(0, 0, 0, 0),  # names nothing
        Access(0, 1, 0, 0b10),  # kills what it does not touch
    ],
)
def test_validation_names_the_first_bad_access(bad: Access) -> None:
    kind_masks = np.array([0b11, 0, 0b1], dtype=np.uint8)
    good = [Access(0, 0b01, 0b10, 0b10), Access(2, 1, 0, 1)]
    Trace.from_accesses(good).validate(kind_masks)
    with pytest.raises(ValueError, match=r"access 1 of the trace, Access\(chunk=" + str(bad.chunk)):
        Trace.from_accesses([good[0], bad, good[1], bad]).validate(kind_masks)


def test_an_empty_trace_is_no_trace() -> None:
    with pytest.raises(ValueError, match="0 accesses"):
        Trace.from_accesses([]).validate(np.zeros(1, dtype=np.uint8))


def test_kind_masks_of_a_geometry() -> None:
    geometry = Geometry(4096, (ChunkSpec((1, 0, 1)), ChunkSpec((0, 0)), ChunkSpec((0, 9), 2)))
    assert geometry.kind_masks().tolist() == [0b101, 0, 0b10]


def test_what_a_trace_touches_costs_about_as_much_as_to_check_it() -> None:
    """Sorting or hashing the objects of a million accesses takes seconds, all of them with the interpreter's lock."""
    count, num_chunks = 1_000_000, 300_000
    chunk = (np.arange(count) * 7919 % num_chunks).astype(np.uint32)
    seven, none = np.full(count, 7, dtype=np.uint8), np.zeros(count, dtype=np.uint8)
    trace = Trace(chunk, seven, none, none)
    touched_s, checked_s = [], []
    for _ in range(3):
        start = time.thread_time()
        trace.validate(np.full(num_chunks, 7, dtype=np.uint8))
        checked_s.append(time.thread_time() - start)
        start = time.thread_time()
        objects = trace.touched_objects()
        touched_s.append(time.thread_time() - start)
    assert np.array_equal(objects, np.flatnonzero(np.arange(num_chunks * KINDS_MAX) % KINDS_MAX < 3))
    assert min(touched_s) < 15 * min(checked_s)


@pytest.mark.parametrize("count", [1, 2, 70_000])
def test_every_access_touches_its_objects(count: int) -> None:
    chunk = np.arange(count, dtype=np.uint32)
    read, none = np.ones(count, dtype=np.uint8), np.zeros(count, dtype=np.uint8)
    assert np.array_equal(Trace(chunk, read, none, none).touched_objects(), np.arange(count) * KINDS_MAX)
