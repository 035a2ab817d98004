"""What a tenant holds of the node: space it has looked for, room for the answers it waits for, descriptors."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from io_daemon.errors import SwapSpaceError
from io_daemon.serve.holdings import NUM_CQES, NUM_SQES, Holdings
from io_daemon.shared.bulk import as_memfd, pack_specs
from io_daemon.shared.control import Register, Registered
from io_daemon.shared.protocol import Opcode
from tests.io_daemon.conftest import Serve
from tests.support.daemon import FRAME_BYTES, WEIGHT, ServedDaemon, eventually, specs
from tests.support.raw_rank import RawRank

NUM_READERS = 2000


def test_space_that_was_looked_for_in_vain_is_nobodys() -> None:

    class Full:
        device, free_bytes, file_bytes = 1, 1 << 30, 4096

        def grow(self, _bytes: int, *, reserve: bool) -> None:
            raise SwapSpaceError(path="/nvme", needed_bytes=1, free_bytes=0)

    device: Any = SimpleNamespace(looked_for={}, swap_dir=SimpleNamespace(path="/nvme"))
    holdings = Holdings.__new__(Holdings)
    seat: Any = SimpleNamespace(device=device, swap_file=Full())
    holdings.seats = [seat]
    with pytest.raises(SwapSpaceError):
        holdings.grow([1 << 20], 1 << 40, spare_bytes=4096)
    assert sum(device.looked_for.values()) == 0


@pytest.mark.root
def test_space_that_a_rank_has_looked_for_is_free_when_it_has_gone(serve: Serve, small_disk: Path) -> None:
    daemon = serve(swap_dirs=[small_disk])
    space = os.statvfs(small_disk)
    half = space.f_bavail * space.f_frsize // 2 // FRAME_BYTES
    for rank in range(3):
        with daemon.attached(num_frames=4, rank=rank) as client:
            client.register(specs(half + 8), spare_bytes=FRAME_BYTES)


def test_answers_that_leases_wait_for_have_room_beside_what_nobody_reaps(daemon: ServedDaemon) -> None:
    raw = RawRank(daemon.socket).hello().attach()
    with as_memfd(pack_specs(specs(1, object_bytes=4096))) as fd:
        answer, _ = raw.ask(Register(num_chunks=1), [fd])
    assert isinstance(answer, Registered)
    start, seq = answer.start, 0

    def push(opcode: Opcode, **fields: int) -> None:
        nonlocal seq
        seq += 1
        entry = (0, fields.get("read", 0), fields.get("write", 0), start, fields.get("arg", 0))
        eventually(lambda: raw.sq.push(seq, opcode, *entry), "there is room in the submission ring")

    push(Opcode.ACQUIRE, write=WEIGHT)
    eventually(lambda: len(raw.cq) == 1, "the writer has its lease")
    for _ in range(NUM_READERS):
        push(Opcode.ACQUIRE, read=WEIGHT)
    eventually(lambda: not len(raw.sq), "all readers wait")

    def stalled() -> bool:
        nonlocal seq
        while raw.sq.push(seq + 1, Opcode.ECHO, 0, 0, 0, 0, 0):
            seq += 1
        return len(raw.sq) == NUM_SQES and len(raw.cq) >= NUM_CQES - NUM_READERS

    eventually(stalled, "it takes no more than it has room to answer")
    with daemon.attached(job="beside") as beside:
        for _ in range(20):
            beside.echo()  # by then it has looked for room again
    assert len(raw.cq) == NUM_CQES - NUM_READERS
    raw.close()


def test_a_daemon_that_had_no_descriptor_for_a_connection_takes_the_next(daemon: ServedDaemon) -> None:
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (len(daemon.fds()), limits[1]))
    with socket.socket(socket.AF_UNIX) as early:
        early.connect(daemon.socket)
        eventually(lambda: "cannot accept more ranks" in daemon.stderr(), "it has no descriptor")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
    with daemon.attached(job="again"):
        pass
