"""Leases with real I/O behind them: what is written comes back, within a budget smaller than the data."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from io_daemon.errors import BudgetError, ConfigError, SwapSpaceError
from io_daemon.rank.client import Client
from io_daemon.shared.protocol import Access, ChunkSpec, ObjectKind
from io_daemon.shared.states import ObjectFlags
from tests.io_daemon.conftest import Serve
from tests.support.daemon import (
    DEADLINE_S,
    FRAME_BYTES,
    MASTER,
    WEIGHT,
    ServedDaemon,
    chunk_is_intact,
    contents,
    eventually,
    frame,
    pattern,
    specs,
    write_chunk,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDaemon]:
    """One for all tests here that leave nothing behind."""
    served = ServedDaemon([tmp_path_factory.mktemp("swap")])
    yield served
    assert served.files() == []
    served.close()


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "posix"])
def test_data_larger_than_the_arena_comes_back(serve: Serve, engine: str) -> None:
    daemon = serve("--engine", f"require:{engine}", "--block-size", "16K")
    with daemon.attached(num_frames=6) as client:
        chunks = client.register(specs(12, ObjectKind.WEIGHT, ObjectKind.MASTER))
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT | MASTER)
        assert all(chunk_is_intact(client, chunk, WEIGHT | MASTER) for chunk in chunks)
        total = client.stats().total
        assert sum(total.bytes_written) >= (24 - 6) * FRAME_BYTES
        assert sum(total.bytes_read) >= (24 - 6) * FRAME_BYTES
    assert daemon.files() == []


def test_objects_of_several_frames_over_two_directories(serve: Serve, tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    daemon = serve(swap_dirs=directories)
    sizes = (3 * FRAME_BYTES - 4096, 0, 4 * FRAME_BYTES)
    with daemon.attached(num_frames=8) as client:
        assert client.swap_dirs == tuple(map(str, directories))
        chunks = client.register([ChunkSpec(sizes)] * 6)
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT | MASTER)
        for chunk in chunks:
            seq = client.acquire(chunk, read=WEIGHT | MASTER)
            grant = client.wait(seq, DEADLINE_S)
            for kind in (ObjectKind.WEIGHT, ObjectKind.MASTER):
                wrote = pattern(len(grant.frames[kind]) * FRAME_BYTES, chunk, kind)
                assert np.array_equal(contents(client, grant, kind)[: sizes[kind]], wrote[: sizes[kind]])
            client.release(seq)
        assert [len(os.listdir(directory)) for directory in directories] == [1, 1]
    assert daemon.files() == []


def test_born_kinds_read_as_zero_until_written_and_after_death(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=2) as client:
        (first, second) = client.register(specs(2))

        def reads_zero() -> bool:
            seq = client.acquire(first, read=WEIGHT)
            grant = client.wait(seq, DEADLINE_S)
            zero = not contents(client, grant, ObjectKind.WEIGHT).any()
            assert grant.born_mask == WEIGHT
            client.release(seq)
            return zero

        for number in range(2):
            frame(client.arena, number, FRAME_BYTES)[:] = 0xFF
        assert reads_zero()
        write_chunk(client, first, WEIGHT)
        assert chunk_is_intact(client, first, WEIGHT)
        write_chunk(client, second, WEIGHT)
        client.release(_granted(client, first, WEIGHT), dead=WEIGHT)
        assert reads_zero()
        assert chunk_is_intact(client, second, WEIGHT)


def _granted(client: Client, chunk: int, write: int) -> int:
    seq = client.acquire(chunk, write=write)
    client.wait(seq, DEADLINE_S)
    return seq


def test_clean_data_is_never_written_again_and_dead_data_never(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=4) as client:
        chunks = client.register(specs(8))
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT)

        def num_written() -> int:
            assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in chunks)
            return sum(client.stats().total.bytes_written) // FRAME_BYTES

        eventually(lambda: num_written() == 8, "each chunk is written, once")  # what is dirty leaves last
        assert [num_written(), num_written()] == [8, 8], "reading evicts clean frames for nothing"
        for chunk in chunks:
            client.release(_granted(client, chunk, WEIGHT), dirty=WEIGHT, dead=WEIGHT)
        client.echo()
        assert sum(client.stats().total.bytes_written) == 8 * FRAME_BYTES


def test_pinned_kinds_never_touch_the_disk(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=8) as client:
        chunks = client.register(specs(8, pinned_mask=WEIGHT))
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT)
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in chunks)
        total = client.stats().total
        assert sum(total.bytes_read) == sum(total.bytes_written) == 0


def test_an_arena_too_small_is_refused_at_register_with_the_smallest_that_works(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=2) as client:
        with pytest.raises(BudgetError) as caught:
            client.register(specs(1, ObjectKind.WEIGHT, ObjectKind.MASTER, ObjectKind.STATE_0))
        assert caught.value.smallest_bytes == 3 * FRAME_BYTES
        assert len(client.register(specs(1, ObjectKind.WEIGHT, ObjectKind.MASTER))) == 1


def test_leases_issued_ahead_are_granted_in_turn_and_may_be_abandoned(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=3) as client:
        chunks = client.register(specs(9))
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT)
        leases = [(chunk, client.acquire(chunk, read=WEIGHT)) for chunk in chunks]
        for chunk, seq in leases:
            if chunk % 2:
                client.release(seq)
                continue
            grant = client.wait(seq, DEADLINE_S)
            assert np.array_equal(contents(client, grant, 0), pattern(FRAME_BYTES, chunk, 0))
            client.release(seq)
        client.echo()
        assert client.stats().num_leases == 0


def test_whoever_sleeps_is_told_what_another_thread_releases(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=1) as client:
        first, second = client.register(specs(2))
        held = client.acquire(first, write=WEIGHT)
        client.wait(held, DEADLINE_S)
        waiting = client.acquire(second, write=WEIGHT)
        granted = threading.Event()

        def wait() -> None:
            client.wait(waiting, DEADLINE_S)
            granted.set()

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: client._reaping, "the other thread sleeps")
        client.release(held, dirty=WEIGHT)
        assert granted.wait(DEADLINE_S / 2), "this thread asks for nothing more"
        thread.join(DEADLINE_S)
        client.release(waiting)


class InterruptedLock:
    """Ctrl-C comes while it is let go for the n-th time: Python hears of signals behind calls."""

    def __init__(self, nth: int) -> None:
        self._lock, self._num_left = threading.Lock(), nth
        self.acquire = self._lock.acquire

    def release(self, *_: object) -> None:
        self._lock.release()
        self._num_left -= 1
        if self._num_left == 0:
            raise KeyboardInterrupt

    def __enter__(self) -> bool:
        return self._lock.acquire()

    __exit__ = release


@pytest.mark.parametrize("nth", range(1, 5))
def test_whoever_was_interrupted_in_a_wait_no_longer_sleeps_on_the_ring(daemon: ServedDaemon, nth: int) -> None:
    with daemon.attached(num_frames=1) as client:
        first, second = client.register(specs(2))
        held = client.acquire(first, write=WEIGHT)
        client.wait(held, DEADLINE_S)
        waiting = client.acquire(second, write=WEIGHT)
        client._arrival = threading.Condition(InterruptedLock(nth))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            client.wait(waiting, 0.5)
        assert not client._reaping
        client.release(held, dirty=WEIGHT)
        client.wait(waiting, DEADLINE_S)


def test_threads_share_a_client(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=8) as client:
        chunks = client.register(specs(32))
        failures: list[int] = []

        def work(mine: range) -> None:
            for seed in range(5):
                for chunk in mine:
                    write_chunk(client, chunk, WEIGHT, seed)
                failures.extend(chunk for chunk in mine if not chunk_is_intact(client, chunk, WEIGHT, seed))

        threads = [threading.Thread(target=work, args=(chunks[start::4],)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        assert client.stall_s > 0


def test_more_submissions_than_the_rings_hold_are_all_answered(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=4) as client:
        (chunk,) = client.register(specs(1))
        seqs = [client.acquire(chunk, read=WEIGHT) for _ in range(4000)]
        for seq in seqs:
            client.wait(seq, DEADLINE_S)
        for seq in seqs:
            client.release(seq)
        client.echo()
        assert client.stats().num_leases == 0


def test_two_tenants_see_only_their_own(daemon: ServedDaemon) -> None:
    with daemon.attached(rank=0, num_frames=4) as one, daemon.attached(rank=1, num_frames=4) as other:
        for client, seed in ((one, 1), (other, 2)):
            for chunk in client.register(specs(12)):
                write_chunk(client, chunk, WEIGHT, seed)
        assert len(daemon.files()) == 2
        for client, seed in ((one, 1), (other, 2)):
            assert all(chunk_is_intact(client, chunk, WEIGHT, seed) for chunk in range(12))
        one.close()
        assert len(daemon.files()) == 1
        assert all(chunk_is_intact(other, chunk, WEIGHT, 2) for chunk in range(12))


def test_a_traced_pass_is_prefetched(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=8) as client:
        chunks = client.register(specs(24))
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT)
        client.upload_trace(7, [Access(chunk, WEIGHT, 0, 0) for chunk in chunks])
        eventually(lambda: client.stats().num_plans == 1, "the plan is made")
        for _ in range(3):
            client.mark(7)
            client.echo()
            before = client.stats().total
            assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in chunks)
        after = client.stats().total
        assert after.misses == before.misses
        assert after.prefetch_hits > before.prefetch_hits
        assert after.prefetch_hits + after.hits == before.prefetch_hits + before.hits + 24
        # MIN on a cyclic scan: at least C of N stay, whatever the window of prefetch costs
        assert sum(after.bytes_read) - sum(before.bytes_read) <= 24 * FRAME_BYTES
        assert after.io_s > before.io_s


def test_a_trace_that_does_not_fit_is_refused(daemon: ServedDaemon) -> None:
    with daemon.attached() as client:
        client.register(specs(1))
        with pytest.raises(ValueError, match="chunk is unknown"):
            client.upload_trace(1, [Access(5, WEIGHT, 0, 0)])
        assert client.echo() > 0


def test_unregistered_space_is_used_again(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=4) as client:
        first = client.register(specs(16))
        for chunk in first:
            write_chunk(client, chunk, WEIGHT)
        reserved = client.stats().swap_bytes
        eventually(lambda: client.stats().num_in_flight == 0, "the last write-behind has ended")
        client.unregister(first)
        assert client.stats().num_chunks == 0
        second = client.register(specs(16))
        assert client.stats().swap_bytes == reserved
        seq = client.acquire(second[0], read=WEIGHT)
        assert client.wait(seq, DEADLINE_S).born_mask == WEIGHT
        client.release(seq)


def test_swap_space_is_reserved_at_register_and_moved_directly(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=4) as client:
        client.register(specs(100))
        (path,) = Path(daemon.swap_dirs[0]).iterdir()
        status = path.stat()
        assert status.st_mode & 0o777 == 0o600
        assert status.st_size == 4096 + 100 * FRAME_BYTES
        assert status.st_blocks * 512 >= status.st_size
        flags = daemon.swap_fds()
        assert flags
        assert all(flag & os.O_DIRECT for flag in flags)


def test_stats_agree_with_what_the_kernel_counted(serve: Serve) -> None:
    daemon = serve("--engine", "require:io_uring")
    with daemon.attached(num_frames=8, frame_bytes=256 << 10) as client:
        chunks = client.register(specs(96, object_bytes=256 << 10))
        before = _io_bytes(daemon.pid)
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT)
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in chunks)
        client.echo()
        total = client.stats().total
        after = _io_bytes(daemon.pid)
    read, written = after[0] - before[0], after[1] - before[1]
    assert abs(read - sum(total.bytes_read)) <= 0.01 * read
    assert abs(written - sum(total.bytes_written)) <= 0.01 * written


def _io_bytes(pid: int) -> tuple[int, int]:
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def test_the_table_is_the_truth_and_ranks_cannot_write_it(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=4) as client:
        chunks = client.register(specs(2))
        write_chunk(client, chunks[1], WEIGHT)
        client.echo()
        objects = client.table.objects()
        record = objects[chunks[1] * 8]
        assert record["object_bytes"] == FRAME_BYTES
        assert record["flags"] & ObjectFlags.DIRTY
        assert client.table.frames()[record["frames"][0]]["object_id"] == chunks[1] * 8
        assert objects[chunks[0] * 8]["flags"] & ObjectFlags.BORN
        assert not objects.flags.writeable


def test_an_unknown_directory_and_a_second_attach_are_refused(daemon: ServedDaemon, tmp_path: Path) -> None:
    with daemon.connect() as client:
        with pytest.raises(ConfigError, match="this daemon serves"):
            client.attach(num_frames=2, frame_bytes=4096, swap_dirs=[str(tmp_path)], lock_memory="off")
        client.attach(num_frames=2, frame_bytes=4096, swap_dirs=client.swap_dirs, lock_memory="off")
        with pytest.raises(ValueError, match="attached already"):
            client.attach(num_frames=2, frame_bytes=4096, swap_dirs=client.swap_dirs, lock_memory="off")


def test_budgets_of_a_tenant(serve: Serve) -> None:
    daemon = serve("--host-budget-bytes", "256K", "--swap-budget-bytes", "1M")
    with daemon.connect() as client:
        with pytest.raises(BudgetError, match="--host-budget-bytes"):
            client.attach(num_frames=64, frame_bytes=4096, swap_dirs=client.swap_dirs, lock_memory="off")
        client.attach(num_frames=32, frame_bytes=4096, swap_dirs=client.swap_dirs, lock_memory="off")
        with pytest.raises(SwapSpaceError, match="--swap-budget-bytes"):
            client.register(specs(256, object_bytes=4096))
        client.register(specs(200, object_bytes=4096))
