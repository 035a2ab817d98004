"""Disks that fail: every fault reaches the rank as a typed error that says what and where."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from io_daemon.errors import DaemonLostError, DeviceIOError, IntegrityError
from io_daemon.rank.client import Client
from tests.io_daemon.conftest import Serve
from tests.support.daemon import (
    DEADLINE_S,
    FRAME_BYTES,
    WEIGHT,
    ServedDaemon,
    chunk_is_intact,
    contents,
    pattern,
    specs,
    write_chunk,
)


def faults(what: str, value: int, nths: Sequence[int]) -> list[str]:
    return [option for nth in nths for option in ("--inject-fault", f"{what}:{nth}:{value}")]


def fill(client: Client, count: int) -> range:
    chunks = client.register(specs(count))
    for chunk in chunks:
        write_chunk(client, chunk, WEIGHT)
    return chunks


def swap_path(daemon: ServedDaemon) -> str:
    (name,) = daemon.files()
    return str(Path(daemon.swap_dirs[0]) / name)


def test_a_failed_read_is_a_typed_error_and_the_next_try_works(serve: Serve) -> None:
    # 10 chunks through 2 frames: eight are written out, so the first read is block I/O number 8 or later
    daemon = serve(*faults("errno_read", errno.EIO, [0]))
    with daemon.attached(num_frames=2) as client:
        chunks = fill(client, 10)
        seq = client.acquire(chunks[0], read=WEIGHT)
        with pytest.raises(DeviceIOError) as caught:
            client.wait(seq, DEADLINE_S)
        error = caught.value
        assert (error.errno, error.path) == (errno.EIO, swap_path(daemon))
        assert error.offset == 4096
        assert (error.expected_bytes, error.actual_bytes) == (FRAME_BYTES, 0)
        assert "WEIGHT of chunk 0" in str(error)
        assert "Input/output error" in str(error)
        client.release(seq)  # harmless
        assert chunk_is_intact(client, chunks[0], WEIGHT)
        assert client.stats().total.io_errors == 1


def test_a_short_read_is_continued(serve: Serve) -> None:
    daemon = serve(*faults("short_read", 4096, [0, 2]))
    with daemon.attached(num_frames=2) as client:
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in fill(client, 10))
        assert client.stats().total.io_errors == 0


def test_a_flipped_bit_is_an_integrity_error(serve: Serve) -> None:
    daemon = serve(*faults("flip_read", 77, [0]))
    with daemon.attached(num_frames=2) as client:
        chunks = fill(client, 10)
        seq = client.acquire(chunks[0], read=WEIGHT)
        with pytest.raises(IntegrityError) as caught:
            client.wait(seq, DEADLINE_S)
        assert caught.value.path == swap_path(daemon)
        assert caught.value.expected_checksum != caught.value.actual_checksum
        assert chunk_is_intact(client, chunks[0], WEIGHT)


def test_without_verification_a_flipped_bit_passes(serve: Serve) -> None:
    daemon = serve("--no-verify-checksums", *faults("flip_read", 77, [0]))
    with daemon.attached(num_frames=2) as client:
        chunks = fill(client, 10)
        seq = client.acquire(chunks[0], read=WEIGHT)
        grant = client.wait(seq, DEADLINE_S)
        differing = np.flatnonzero(contents(client, grant, 0) != pattern(FRAME_BYTES, chunks[0], 0))
        assert differing.tolist() == [77]


def test_a_failed_write_reaches_whoever_waits_for_frames(serve: Serve) -> None:
    daemon = serve(*faults("errno_write", errno.ENOSPC, range(64)))
    with daemon.attached(num_frames=2) as client:
        with pytest.raises(DeviceIOError) as caught:
            fill(client, 4)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.path == swap_path(daemon)
        assert client.echo() > 0


def test_faults_of_one_tenant_leave_the_other_alone(serve: Serve) -> None:
    daemon = serve(*faults("errno_read", errno.EIO, [0]))
    with daemon.attached(rank=0, num_frames=2) as one, daemon.attached(rank=1, num_frames=2) as other:
        chunks = fill(one, 10)
        fill(other, 10)
        seq = one.acquire(chunks[0], read=WEIGHT)
        with pytest.raises(DeviceIOError):
            one.wait(seq, DEADLINE_S)
        assert all(chunk_is_intact(other, chunk, WEIGHT) for chunk in range(10))


def test_a_broken_engine_ends_the_daemon_so_that_systemd_starts_another(serve: Serve) -> None:
    """Nothing in flight is given back before the process is gone, and every rank is told at once."""
    daemon = serve("--inject-fault", "delay:9:600000000", *faults("break", errno.ENODEV, [10]))
    with daemon.attached(rank=0, num_frames=8) as one, daemon.attached(rank=1, num_frames=2) as other:
        other.register(specs(1))
        with pytest.raises(DaemonLostError, match="engine broke down"):
            fill(one, 40)
        assert daemon.process.wait(DEADLINE_S) == 1  # Restart=on-failure in packaging/io-daemon.service
        with pytest.raises(DaemonLostError):
            other.echo()
    assert daemon.files() == []
    assert "has to end" in daemon.stderr()
