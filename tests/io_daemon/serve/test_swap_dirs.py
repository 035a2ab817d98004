"""Swap directories at work: their files are open for direct I/O, and two of them share the load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from io_daemon.errors import SwapSpaceError
from io_daemon.shared.control import Status, StatusRequest
from tests.io_daemon.conftest import Serve
from tests.support.daemon import FRAME_BYTES, WEIGHT, chunk_is_intact, specs, write_chunk
from tests.support.raw_rank import RawRank


def test_two_directories_share_the_load_with_direct_io(serve: Serve, tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for path in directories:
        path.mkdir()
    daemon = serve(swap_dirs=directories)
    num_chunks = 32
    with daemon.attached(num_frames=4) as client:
        chunks = client.register(specs(num_chunks))
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT)
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in chunks)
        flags = daemon.swap_fds()
        assert len(flags) >= 2
        assert all(flag & os.O_DIRECT for flag in flags) == all(each["direct"] for each in daemon.ready["swap_dirs"])
        rank = RawRank(daemon.socket).hello()
        answer, _ = rank.ask(StatusRequest())
        rank.close()
        assert isinstance(answer, Status)
        first, second = answer.daemon.devices
        at_least = (num_chunks // 2 - 4) * FRAME_BYTES  # four frames may never have left the arena
        for device in (first, second):
            assert device.bytes_read >= at_least
            assert device.bytes_written >= at_least


@pytest.mark.root
def test_space_that_will_be_spare_counts_once_for_all_tenants(serve: Serve, small_disk: Path) -> None:
    daemon = serve(swap_dirs=[small_disk])
    with daemon.attached(num_frames=4) as first, daemon.attached(num_frames=4, rank=1) as second:
        free_bytes = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        half = free_bytes // 2 // FRAME_BYTES
        first.register(specs(half + 8), spare_bytes=16 * FRAME_BYTES)
        assert os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize > free_bytes - (1 << 20)
        with pytest.raises(SwapSpaceError) as caught:
            second.register(specs(half + 32), spare_bytes=16 * FRAME_BYTES)
        assert caught.value.needed_bytes > caught.value.free_bytes > 0
        first.reserve()
        assert os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize < free_bytes // 2 + (1 << 20)
        chunks = second.register(specs(4), spare_bytes=FRAME_BYTES)
        write_chunk(second, chunks[0], WEIGHT)
        second.reserve()
        second.reserve()
        assert chunk_is_intact(second, chunks[0], WEIGHT)
