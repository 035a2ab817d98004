"""Swap directories at work: their files are open for direct I/O, and two of them share the load."""

from __future__ import annotations

import os
from pathlib import Path

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
