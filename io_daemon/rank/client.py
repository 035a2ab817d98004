"""The door for ranks: connect, attach, register, acquire, wait, release, close.

Any thread may call anything. Submissions go through one producer lock (in the ring); completions are reaped by
whichever thread waits first, which also files those that others wait for. A wait wakes once a second, to count the time
in which this process ran.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Final

from io_daemon._native import CompletionRing, Region, SubmissionRing
from io_daemon.errors import ConfigError, ProtocolError, WorldError
from io_daemon.machine.limits import naming_limits
from io_daemon.machine.meminfo import arenas_bytes_max
from io_daemon.policy.trace import Trace
from io_daemon.rank.connection import Connection, M, process_state
from io_daemon.rank.lease import Grant, Lease, describe, error_of
from io_daemon.rank.turn import Turn
from io_daemon.shared.arena import LockMemory, arena_bytes, create_arena, frame_offset
from io_daemon.shared.bulk import as_memfd, pack_specs
from io_daemon.shared.control import (
    Announce,
    Attach,
    Attached,
    Detach,
    Done,
    Message,
    Register,
    Registered,
    Reserve,
    Stats,
    StatsRequest,
    Unregister,
    UploadTrace,
    Welcome,
    close_all,
)
from io_daemon.shared.metrics import TenantStats
from io_daemon.shared.patience import Patience
from io_daemon.shared.protocol import Access, ChunkSpec, Cqe, Opcode, Status, kinds_of
from io_daemon.shared.table import TableView

CONTROL_TIMEOUT_S: Final = 60.0
RESERVE_TIMEOUT_S: Final = 600.0
"""Reserving space writes metadata for terabytes on some filesystems."""
LEASE_TIMEOUT_S: Final = 120.0
SUBMIT_RETRY_S: Final = 0.0005
ANSWER_POLL_S: Final = 0.00005
REAP_MAX: Final = 256
LEASES_DUMPED_MAX: Final = 8


_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _forget_in_child() -> None:
    for client in list(_open_clients):
        client._forget()


os.register_at_fork(after_in_child=_forget_in_child)


class Client:
    """One rank's attachment. Made by ``connect``; of use after ``attach``."""

    arena: Region
    frame_bytes: int

    def __init__(self, connection: Connection, welcome: Welcome, job: str, rank: int) -> None:
        self.swap_dirs = welcome.swap_dirs
        self.stall_s = 0.0
        """Seconds spent blocked in ``wait``, all threads together."""
        self._connection = connection
        self._job = job
        self._rank = rank
        self._attached: Attached | None = None
        self._next_seq = 1
        self._submission = Turn()
        self._leases: dict[int, Lease] = {}
        self._arrival = threading.Condition()
        self._arrived: dict[int, Cqe] = {}
        self._awaited: set[int] = set()
        self._reaping = False
        self._refusal: ProtocolError | None = None
        _open_clients.add(self)

    @classmethod
    def connect(cls, socket_path: str, *, job: str, rank: int, timeout_s: float = 10.0) -> Client:
        """Raises DaemonLostError if nobody answers there, ProtocolError if it speaks another version."""
        connection, welcome = Connection.open(socket_path, timeout_s)
        return cls(connection, welcome, job, rank)

    def attach(
        self,
        *,
        num_frames: int,
        frame_bytes: int,
        swap_dirs: Sequence[str],
        chunks_max: int = 65536,
        lock_memory: LockMemory = "auto",
    ) -> None:
        """Make the arena (this process pays for it), if the daemon has room for it, and hand it over.

        ``frame_bytes``: a multiple of 4096. ``swap_dirs``: a subset of ``self.swap_dirs``. ``lock_memory``: "auto"
        warns and goes on unlocked where the memlock limit forbids it, "require" raises ConfigError. Raises
        BudgetError over the daemon's budget, SwapSpaceError, ConfigError."""
        if self._attached is not None:
            raise ValueError("this client is attached already")
        wanted_bytes, bytes_max = arena_bytes(num_frames, frame_bytes), arenas_bytes_max()
        if wanted_bytes > bytes_max:  # a container ends, without a word, whoever takes more than it has
            problem = f"this machine, or this container, has memory for {bytes_max} bytes of arenas: lower it"
            raise ConfigError("io_daemon.host_budget_bytes", wanted_bytes, problem)
        announcement = Announce(job=self._job, rank=self._rank, arena_bytes=wanted_bytes)
        self._connection.request(announcement, Done, timeout_s=CONTROL_TIMEOUT_S)
        arena = create_arena(num_frames, frame_bytes, lock_memory)
        try:
            request = Attach(
                job=self._job,
                rank=self._rank,
                num_frames=num_frames,
                frame_bytes=frame_bytes,
                page_locked=arena.page_locked,
                swap_dirs=tuple(swap_dirs),
                chunks_max=chunks_max,
            )
            answer, fds = self._connection.request(request, Attached, [arena.fd], timeout_s=CONTROL_TIMEOUT_S)
        finally:
            os.close(arena.fd)
        if len(fds) != 4:
            close_all(fds)
            raise ProtocolError(f"the daemon sent {len(fds)} fds instead of 4")
        table_fd, rings_fd, sq_event_fd, cq_event_fd = fds
        try:
            with naming_limits("map what the daemon shares"):
                table = Region(table_fd, answer.table_bytes, writable=False)
                rings = Region(rings_fd, answer.rings_bytes, writable=True)
            for region in (table, rings):
                region.dont_fork()
            self.table = TableView(table)
            self._sq = SubmissionRing(rings, 0, answer.num_sqes, sq_event_fd, create=False)
            self._cq = CompletionRing(rings, answer.cq_offset, answer.num_cqes, cq_event_fd, create=False)
        finally:
            close_all(fds)  # mappings and rings hold what they need
        self.arena = arena.region
        self.frame_bytes = frame_bytes
        self._attached = answer

    # --- control plane

    def register(self, specs: Sequence[ChunkSpec], *, spare_bytes: int = 0) -> range:
        """Reserve space for new chunks; their ids, consecutive. Raises SwapSpaceError or BudgetError.

        Args:
            spare_bytes: if any, the disks will have so much more free soon: the space is looked for now, and
                ``reserve`` follows.
        """
        request = Register(num_chunks=len(specs), spare_bytes=spare_bytes)
        answer, _ = self._ask_in_bulk(request, pack_specs(specs), Registered, timeout_s=RESERVE_TIMEOUT_S)
        return range(answer.start, answer.stop)

    def reserve(self) -> None:
        """Reserve what chunks were registered without. Raises SwapSpaceError."""
        self._connection.request(Reserve(), Done, timeout_s=RESERVE_TIMEOUT_S)

    def unregister(self, chunks: range) -> None:
        """Give chunks and their space back; none may be leased."""
        self._connection.request(Unregister(start=chunks.start, stop=chunks.stop), Done, timeout_s=CONTROL_TIMEOUT_S)

    def upload_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        """Tell the daemon the order in which a pass over ``trace_id`` acquires. It plans in the background; the first
        pass marked ``trace_id`` after that follows the plan. Raises ValueError if the trace does not fit the chunks."""
        data = Trace.from_accesses(accesses).to_bytes()
        request = UploadTrace(trace_id=trace_id, num_bytes=len(data))
        self._ask_in_bulk(request, data, Done, timeout_s=CONTROL_TIMEOUT_S)

    def _ask_in_bulk(
        self, request: Message, data: bytes, answer_type: type[M], *, timeout_s: float
    ) -> tuple[M, list[int]]:
        with as_memfd(data) as fd:
            return self._connection.request(request, answer_type, [fd], timeout_s=timeout_s)

    def stats(self) -> TenantStats:
        answer, _ = self._connection.request(StatsRequest(), Stats, timeout_s=CONTROL_TIMEOUT_S)
        return answer.tenant

    # --- data plane

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> int:
        """Ask for a lease on the kinds in ``read | write``; its seq, at once."""
        return self._push(Opcode.ACQUIRE, Lease(chunk, read, write), read=read, write=write, chunk=chunk)

    def has_answer(self, seq: int, within_s: float) -> bool:
        """Whether ``wait`` would not block any more, within so many seconds."""
        deadline = time.monotonic() + within_s
        while True:
            with self._arrival:
                if not self._reaping:
                    self._file_arrivals()
                if seq in self._arrived:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(ANSWER_POLL_S)

    def wait(self, seq: int, timeout_s: float | None = None) -> Grant:
        """Block until the lease is granted. Kinds acquired for read that were never written are zero-filled.

        Raises DeviceIOError, IntegrityError or BudgetError if it cannot be granted (the lease is then over, and
        releasing it is harmless), DaemonLostError if the daemon dies, or when ``timeout_s`` (120 s unless given) is
        up, with a dump of what is waited for. It is then lost for every other call as well."""
        lease = self._leases.get(seq)
        if lease is None or lease.state != "issued":
            raise ValueError(f"seq {seq} is no lease that waits to be granted")
        completion = self._completion(seq, LEASE_TIMEOUT_S if timeout_s is None else timeout_s)
        if completion.status != Status.OK:
            lease.state = "failed"
            raise error_of(completion, lease, self._attached.swap_files if self._attached is not None else ())
        lease.state = "granted"
        frames = {}
        for kind in kinds_of(lease.read | lease.write):
            frames[kind], object_bytes = self.table.placement(lease.chunk, kind)
            if completion.born_mask & lease.read & 1 << kind:
                for piece, frame in enumerate(frames[kind]):
                    num_bytes = min(self.frame_bytes, object_bytes - piece * self.frame_bytes)
                    self.arena.zero(frame_offset(frame, self.frame_bytes), num_bytes)
        return Grant(frames, completion.born_mask)

    def release(self, seq: int, *, dirty: int = 0, dead: int = 0) -> None:
        """Give a lease back, or abandon it if it was not waited for. ``dirty``: kinds written; ``dead``: kinds
        whose contents nobody needs again."""
        lease = self._leases.pop(seq, None)
        if lease is None:
            raise ValueError(f"seq {seq} is no lease of this client")
        if lease.state == "failed":
            return
        with self._arrival:
            self._awaited.discard(seq)
            answered = self._arrived.pop(seq, None)
        if answered is None or answered.status == Status.OK:
            self._push(Opcode.RELEASE, None, chunk=lease.chunk, arg=seq, dirty=dirty, dead=dead)

    def mark(self, trace_id: int) -> None:
        """A pass over ``trace_id`` begins."""
        self._push(Opcode.MARK, None, arg=trace_id)

    def echo(self) -> float:
        """Seconds for one round trip through the rings and the daemon's loop."""
        start = time.perf_counter()
        seq = self._push(Opcode.ECHO, Lease(0, 0, 0))
        try:
            self._completion(seq, CONTROL_TIMEOUT_S)
        finally:
            del self._leases[seq]
        return time.perf_counter() - start

    # --- the end

    @property
    def was_lost(self) -> bool:
        """Whether the daemon was found dead or hung, or ended this rank, before ``close``."""
        return self._connection.was_lost

    def close(self, *, clean: bool = True) -> None:
        """Detach. A clean end waits until the daemon has removed the swap files; otherwise the socket just closes
        and the daemon cleans up on its own time. Never raises for a daemon that is gone."""
        _open_clients.discard(self)
        if clean and self._attached is not None:
            try:
                self._connection.request(Detach(), Done, timeout_s=CONTROL_TIMEOUT_S)
            except WorldError:
                pass  # it is gone, and a successor reclaims by the header
        self._attached = None
        with contextlib.suppress(AttributeError):  # it was never attached, or closed before
            del self.arena  # unmapped when nobody has a view of it
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _forget(self) -> None:
        self._attached = None
        self._connection.forget()

    # --- rings

    def _push(
        self,
        opcode: Opcode,
        lease: Lease | None,
        *,
        read: int = 0,
        write: int = 0,
        chunk: int = 0,
        arg: int = 0,
        dirty: int = 0,
        dead: int = 0,
    ) -> int:
        """Submit one entry, whose seq is the order of submission. A full ring is back-pressure: completions are
        filed meanwhile, so that the daemon finds room to answer."""
        self._check()
        patience = Patience(LEASE_TIMEOUT_S)
        with self._submission.taken():
            seq = self._next_seq
            if lease is not None:
                self._leases[seq] = lease
                self._awaited.add(seq)
            while not self._sq.push(seq, opcode, 0, read, write, chunk, arg, dirty, dead):
                with self._arrival:
                    if not self._reaping:
                        self._file_arrivals()
                if self._connection.wait_lost(SUBMIT_RETRY_S):
                    raise self._connection.lost("room in the submission ring")
                if not patience.slice_s():
                    raise self._connection.lose(self._dump("room in the submission ring", LEASE_TIMEOUT_S))
            self._next_seq = seq + 1
        return seq

    def _completion(self, seq: int, timeout_s: float) -> Cqe:
        """The answer to ``seq``; blocks, at most ``timeout_s``."""
        self._check()
        if (completion := self._taken(seq)) is not None:
            return completion
        start = time.monotonic()
        patience = Patience(timeout_s)
        gone = False
        try:
            while (completion := self._taken(seq)) is None:
                if gone:
                    raise self._connection.lost(self._describe(seq))
                self._check()
                if not (slice_s := patience.slice_s()):
                    raise self._connection.lose(self._dump(self._describe(seq), timeout_s))
                gone = self._sleep_for_arrivals(slice_s, seq)
        finally:
            with self._arrival:
                self.stall_s += time.monotonic() - start
        return completion

    def _taken(self, seq: int) -> Cqe | None:
        """The answer to ``seq``, if it has come."""
        with self._arrival:
            if not self._reaping:
                self._file_arrivals()
            return self._arrived.pop(seq, None)

    def _sleep_for_arrivals(self, timeout_s: float, seq: int) -> bool:
        """Be the one thread that sleeps on the ring, with the lock free meanwhile, or wait for what that one files.
        True: the daemon is gone."""
        sleeps = False
        try:
            with self._arrival:
                if self._reaping:
                    self._arrival.wait(timeout_s)
                    return False
                self._file_arrivals()
                if seq in self._arrived:
                    return False
                self._reaping = sleeps = True
            return self._cq.wait(int(timeout_s * 1000) + 1, self._connection.watch_fd) == 2
        finally:
            if sleeps:
                self._reaping = False  # before any call: an interrupt is heard behind those, and nobody else does it
                with self._arrival:
                    self._arrival.notify_all()

    def _file_arrivals(self) -> None:
        """Pop what has come. Under the lock, and only while no thread sleeps on the ring."""
        while batch := self._cq.pop_batch(REAP_MAX):
            for entry in batch:
                completion = Cqe(*entry)
                if completion.seq in self._awaited:
                    self._awaited.discard(completion.seq)
                    self._arrived[completion.seq] = completion
                elif completion.status == Status.BAD_REQUEST:
                    self._refusal = ProtocolError(
                        f"the daemon refused submission {completion.seq} on chunk {completion.chunk}: "
                        "it was malformed, out of range, or named no lease"
                    )
            self._arrival.notify_all()

    def _check(self) -> None:
        if self._attached is None:
            self._connection.check()
            raise ValueError("attach first")
        if self._refusal is not None:
            raise self._refusal
        self._connection.check()

    # --- errors

    def _describe(self, seq: int) -> str:
        lease = self._leases.get(seq)
        return f"answer {seq}" if lease is None else describe(seq, lease)

    def _dump(self, waiting_for: str, timeout_s: float) -> str:
        pid = self._connection.daemon_pid
        leases = list(self._leases.items())
        daemon = f"the I/O daemon (pid {pid}, state: {process_state(pid)})"
        lines = [
            f"{daemon} did not grant {waiting_for} within {timeout_s:g} s",
            f"  {len(self._sq)} submissions lie unread, {len(leases)} leases are open:",
        ]
        lines += [f"  {describe(seq, lease)} {lease.state}" for seq, lease in leases[:LEASES_DUMPED_MAX]]
        if len(leases) > LEASES_DUMPED_MAX:
            lines.append(f"  … and {len(leases) - LEASES_DUMPED_MAX} more")
        return "\n".join(lines)
