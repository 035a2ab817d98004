"""The residency table: what the daemon stores is what a rank reads, and a rank cannot store."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace

import numpy as np
import pytest

from io_daemon._native import Region
from io_daemon.errors import ConfigError, ProtocolError
from io_daemon.shared.protocol import NO_FRAME, NO_OBJECT
from io_daemon.shared.states import FrameState, ObjectFlags, ObjectRecord, ObjectState
from io_daemon.shared.table import Table, TableGeometry, TableView

GEOMETRY = TableGeometry(num_frames=8, frame_bytes=8192, block_bytes=4096, chunks_max=16)


def test_records_arrive_at_the_reader() -> None:
    table = Table(GEOMETRY, "job", 3)
    view = TableView(Region(table.fd, GEOMETRY.table_bytes, writable=False))
    record = ObjectRecord(
        object_bytes=12288,
        num_frames=2,
        file=1,
        checksum_index=64,
        frames=(5, 2, NO_FRAME, NO_FRAME),
        committed_offset=4096,
        lease_seq=77,
        version=9,
        state=ObjectState.RESIDENT,
        flags=ObjectFlags.DIRTY,
        num_readers=2,
        num_writers=1,
    )
    table.store_object(3 * 8 + 2, record)
    table.store_frame(5, 26, 0, FrameState.HELD)
    assert view.placement(3, 2) == ((5, 2), 12288)
    row = view.objects()[26]
    for field in ObjectRecord.__slots__:
        assert np.array_equal(row[field], getattr(record, field)), field
    assert view.frames()[5].tolist() == (26, 0, FrameState.HELD)
    assert view.frames()[4].tolist() == (NO_OBJECT, 0, FrameState.FREE)
    assert (view.header["job"], view.header["rank"]) == (b"job", 3)
    table.close()


def test_no_second_writable_mapping_is_to_be_had() -> None:
    table = Table(GEOMETRY, "job", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(table.fd, GEOMETRY.table_bytes)
    reopened = os.open(f"/proc/self/fd/{table.fd}", os.O_RDWR)  # the file's mode allows it, its seal does not
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, GEOMETRY.table_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(reopened, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(reopened, 0)
    os.close(reopened)
    table.close()


def test_limits_cost_no_memory() -> None:
    table = Table(TableGeometry(num_frames=8, frame_bytes=64 << 20, block_bytes=1 << 20, chunks_max=1 << 16), "job", 0)
    assert os.fstat(table.fd).st_size > 500 << 20
    assert os.fstat(table.fd).st_blocks * 512 < 1 << 20
    table.close()


def test_more_checksums_than_an_index_can_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="use larger blocks"):
        TableGeometry(num_frames=8, frame_bytes=1 << 30, block_bytes=4096, chunks_max=1 << 16)


def test_a_rank_does_not_take_any_memory_for_a_table() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(ProtocolError, match="no residency table"):
        TableView(Region(fd, 4096, writable=False))
    os.close(fd)


def test_a_rank_reads_where_its_object_lies_while_the_daemon_writes_something_else_of_it() -> None:
    """Another lease comes and goes on what this rank has leased: the record is written anew, its place is the same."""
    table = Table(GEOMETRY, "job", 0)
    view = TableView(Region(table.fd, GEOMETRY.table_bytes, writable=False))
    record = ObjectRecord(frames=(3, 1, NO_FRAME, NO_FRAME), num_frames=2, object_bytes=5000)
    table.store_object(0, record)
    if (writer := os.fork()) == 0:
        try:
            for number in range(100_000):
                table.store_object(0, replace(record, num_readers=number % 7))
            os._exit(0)
        finally:
            os._exit(1)  # whatever happens, the tests do not go on in two processes
    places = set()
    while (ended := os.waitpid(writer, os.WNOHANG)) == (0, 0):
        places |= {view.placement(0, 0) for _ in range(1000)}
    assert ended == (writer, 0)
    assert places == {((3, 1), 5000)}
    table.close()
