"""What travels beside a message arrives as it was, or is refused: never waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from io_daemon.errors import ProtocolError
from io_daemon.shared.bulk import CHUNK_BYTES, as_memfd, pack_specs, read_memfd, unpack_specs
from io_daemon.shared.protocol import ChunkSpec

SPECS = [ChunkSpec((1, 0, 2), 1), ChunkSpec((5,) * 8, 255), ChunkSpec(())] * 3000


def test_specs_arrive_whole() -> None:
    data = pack_specs(SPECS)
    assert len(data) == len(SPECS) * CHUNK_BYTES
    with as_memfd(data) as fd:
        arrived = unpack_specs(read_memfd(fd, len(data)))
    assert arrived == [ChunkSpec(spec.object_bytes + (0,) * (8 - len(spec.object_bytes)), spec[1]) for spec in SPECS]
    assert unpack_specs(pack_specs([])) == []


@pytest.mark.parametrize("spec", [ChunkSpec((-1,)), ChunkSpec((1 << 63,)), ChunkSpec((1,) * 9), ChunkSpec((1,), 256)])
def test_specs_out_of_range_are_refused(spec: ChunkSpec) -> None:
    with pytest.raises(ValueError, match="ChunkSpec"):
        pack_specs([spec])


@pytest.mark.parametrize("num_bytes", [0, 2, 4, 1 << 30])
def test_another_size_than_announced_is_refused(num_bytes: int) -> None:
    with as_memfd(b"abc") as fd, pytest.raises(ProtocolError, match="holds 3 bytes"):
        read_memfd(fd, num_bytes)


def test_what_could_make_the_reader_wait_is_refused(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    for fd in (reader, file, os.pidfd_open(os.getpid())):
        with pytest.raises(ProtocolError, match="no memfd"):
            read_memfd(fd, 0)
        os.close(fd)
    os.close(writer)
