"""A rank on a simulated node: it registers, trains, fails, abandons, unregisters, and checks all that it is granted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from io_daemon._native import CompletionRing, Region, SubmissionRing
from io_daemon.errors import ConfigError, SwapSpaceError
from io_daemon.policy.trace import Trace
from io_daemon.serve.tenant import Tenant
from io_daemon.shared.control import Attach, Ended
from io_daemon.shared.protocol import KINDS_MAX, PAGE_BYTES, Access, ChunkSpec, Opcode, Status
from io_daemon.shared.states import TenantState
from tests.support.fake_reactor import check
from tests.support.step_traces import evaluation, training_step
from tests.support.truth import Truth

if TYPE_CHECKING:
    from tests.support.node_world import World

T = TypeVar("T")

GRANT_TIMEOUT_S: Final = 120.0
CHUNKS_MAX: Final = 20
FAILURES_MAX: Final = 4
"""After so many failed leases a rank gives up."""
ENDINGS: Final = ("leaves", "leaves", "dies", "dies", "vandalises")


def keep_apart(tenant: Tenant) -> None:
    """AssertionError when the loop touches the tenant's scheduler while a thread has it."""
    scheduler, watched = tenant._scheduler, weakref.ref(tenant)

    def checked(verb: Callable[..., T]) -> Callable[..., T]:
        unbound = weakref.WeakMethod(verb)

        def call(*args: Any) -> T:
            owner, bound = watched(), unbound()
            check(owner is not None and not owner._is_apart, "the loop and a thread, both at the scheduler")
            assert bound is not None
            return bound(*args)

        return call

    for verb in (scheduler.on_sqe, scheduler.on_io_done, scheduler.drain):
        setattr(scheduler, verb.__name__, checked(verb))


class LeaseError(Exception):
    """A lease has ended with an error."""


class SimulatedRank:
    """One rank and its conversation with the node, as ``Conversation`` has it: a question is answered whole before the
    tenant ends."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.rng = random.Random(world.rng.random())
        self.num_frames = self.rng.randint(8, 40)
        self.num_failures = 0
        self.last_status = 0
        self._departure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._question: asyncio.Future[Any] | None = None
        self._answers: dict[int, asyncio.Future[tuple[int, ...]]] = {}
        self._seqs = itertools.count(1)
        self.chunks: list[int] = []
        self._specs: dict[int, ChunkSpec] = {}

    def depart(self, why: str) -> None:
        if not self._departure.done():
            self._departure.set_result(why)

    async def live(self) -> None:
        rng = self.rng
        await asyncio.sleep(rng.random() * 0.1 if rng.random() < 0.7 else rng.random() * 0.5)
        if not await self.attach():
            return
        ending = rng.choice(ENDINGS)
        if ending != "leaves":
            asyncio.get_running_loop().call_later(rng.random() * 0.3, self.depart, ending)
        script = asyncio.ensure_future(self._script())
        either: set[asyncio.Future[Any]] = {script, self._departure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if script.done():
            script.result()
        elif self._departure.result() == "vandalises":
            self._rings.array()[:] = 0xFF
            self._wake.send(b"!")
            await asyncio.sleep(0.001)
        script.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await script
        await self.end()

    async def end(self) -> None:
        """Once what was asked last is answered."""
        world = self.world
        if self._question is not None:
            await asyncio.gather(self._question, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._wake)
        world.note(f"rank {self.number} ends")
        world.met["closes under I/O"] += self.tenant.num_in_flight > 0
        world.met["plans"] += self.tenant.stats().num_plans
        world.met[self._departure.result() if self._departure.done() else "leaves"] += 1
        await self.tenant.close()
        world.node.detached(self.tenant)
        check(self.tenant.state is TenantState.RECLAIMED, "not everything was given back")
        check(self.tenant.num_in_flight == 0, "I/O is counted that is none")
        self._wake.close()
        del self.tenant, self._sq, self._cq, self._rings, self._question  # else tenant and rank would hold each other

    async def ask_to_attach(self) -> Tenant:
        request = Attach(
            job=f"job{self.number}",
            rank=self.number,
            num_frames=self.num_frames,
            frame_bytes=PAGE_BYTES,
            page_locked=False,
            swap_dirs=self.world.node.welcome().swap_dirs,
            chunks_max=CHUNKS_MAX,
        )
        return await self.world.node.attach(request, self.number, 1, self._on_end)

    async def attach(self) -> bool:
        """Whether the node took it."""
        world = self.world
        try:
            self.tenant = await self.ask_to_attach()
        except ConfigError:
            check(world.draining, "refused, and nobody drains")
            world.met["is refused"] += 1
            return False
        except OSError:
            check(world.faulty, "refused without a fault")
            return False
        check(not world.draining, "a draining node takes no rank")
        keep_apart(self.tenant)
        self.tenant.serve()
        answer, (_, rings_fd, wake_fd, _) = self.tenant.attached()
        self._wake = socket.socket(fileno=os.dup(wake_fd))
        self._rings = Region(rings_fd, answer.rings_bytes)
        self._sq = SubmissionRing(self._rings, 0, answer.num_sqes, wake_fd, create=False)
        self._cq = CompletionRing(self._rings, answer.cq_offset, answer.num_cqes, wake_fd, create=False)
        self.arena = world.arenas[self.number]
        self.truth = Truth(self.arena)
        asyncio.get_running_loop().add_reader(self._wake, self._on_completions)
        self._on_completions()
        return True

    def _on_end(self, ended: Ended) -> None:
        check(ended.by_fault or self.world.faulty, f"the daemon failed: {ended.reason}")
        self.world.met["daemon failed"] += not ended.by_fault
        self.depart(ended.reason)

    # --- what it says

    def _push(self, opcode: int, *, read: int = 0, write: int = 0, chunk: int = 0, arg: int = 0, dirty: int = 0,
              dead: int = 0, flags: int = 0) -> int:  # fmt: skip
        seq = next(self._seqs)
        check(self._sq.push(seq, opcode, flags, read, write, chunk, arg, dirty, dead), "the ring is full")
        return seq

    def acquire(self, chunk: int, read: int, write: int) -> int:
        seq = self._push(Opcode.ACQUIRE, chunk=chunk, read=read, write=write)
        self.truth.issue(seq, chunk, read=read, write=write)
        self._answers[seq] = asyncio.get_running_loop().create_future()
        return seq

    async def granted(self, seq: int) -> None:
        """Raises LeaseError."""
        async with asyncio.timeout(GRANT_TIMEOUT_S):
            _, status, *_ = await self._answers[seq]
        if status == Status.OK:
            return
        self.last_status = status
        del self.truth.leases[seq], self._answers[seq]
        if status == Status.SHUTTING_DOWN:
            check(self.world.draining, "refused, and nobody drains")
            self.world.met["lease refused"] += 1
            self.num_failures = FAILURES_MAX
        else:
            check(self.world.faulty and status != Status.BAD_REQUEST, f"a lease ended with {status}")
            self.num_failures += 1
            self.world.met["lease failed"] += 1
        raise LeaseError

    def release(self, seq: int, *, dirty: int = 0, dead: int = 0) -> None:
        lease = self.truth.release(seq, dirty=dirty, dead=dead)
        del self._answers[seq]
        self._push(Opcode.RELEASE, chunk=lease.chunk, arg=seq, dirty=dirty, dead=dead)

    async def _ask(self, question: Awaitable[T]) -> T:
        self._question = asyncio.ensure_future(question)
        return await asyncio.shield(self._question)

    def _on_completions(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(1, socket.MSG_DONTWAIT)
        while True:
            while batch := self._cq.pop_batch(16):
                for entry in batch:
                    self._on_completion(entry)
            if self._cq.prepare_sleep():
                return

    def _on_completion(self, entry: tuple[int, ...]) -> None:
        seq, status, *_, born_mask, _, _, _ = entry
        self.world.note(f"rank {self.number}: {seq} {status}")
        if seq in self.truth.leases and status == Status.OK:
            self.truth.grant(seq, born_mask)
        if seq in self._answers and not self._answers[seq].done():
            self._answers[seq].set_result(entry)

    def kinds(self, chunk: int) -> int:
        """That the chunk has."""
        return sum(1 << kind for kind, size in enumerate(self._specs[chunk].object_bytes) if size)

    # --- what it does

    async def _script(self) -> None:
        rng = self.rng
        await self.register(rng.randint(3, 14))
        for _ in range(rng.randint(2, 6)):
            trace_id = rng.randint(1, 3)
            accesses = self._pass()
            self._push(Opcode.MARK, arg=trace_id)
            await self._walk(accesses)
            if self.num_failures >= FAILURES_MAX:
                return
            if accesses and rng.random() < 0.5:
                trace = Trace.from_accesses(accesses)
                await self._ask(self.tenant.set_trace(trace_id, lambda trace=trace: trace))  # type: ignore[misc]
            if rng.random() < 0.3:
                await self._ask(self.world.node.status())
            if rng.random() < 0.3 and len(self.chunks) > 3:
                await self._unregister(rng.randint(1, 3))
            if rng.random() < 0.3:
                await self.register(rng.randint(1, 6))

    def _pass(self) -> list[Access]:
        """A step, a stretch of an evaluation, or anything at all; what the chunks do not have is left out."""
        rng, chunks = self.rng, self.chunks
        match rng.randrange(3):
            case 0:
                accesses = [access for chunk in chunks for access in training_step(range(chunk, chunk + 1))]
            case 1:
                accesses = [access for chunk in chunks for access in evaluation(range(chunk, chunk + 1))]
            case _:
                masks = [rng.getrandbits(KINDS_MAX) & rng.getrandbits(KINDS_MAX) for _ in range(40)]
                accesses = [Access(rng.choice(chunks), read, rng.choice(masks), 0) for read in masks] if chunks else []
        fitting = []
        for chunk, read, write, dead in accesses:
            has = self.kinds(chunk)
            if (read | write) & has:
                fitting.append(Access(chunk, read & has, write & has, dead & write & has))
        return fitting

    async def _walk(self, accesses: Sequence[Access]) -> None:
        """Acquire ahead, compute, release; now and then abandon a lease, or say something malformed."""
        rng, leases_ahead = self.rng, self.rng.randint(0, 5)
        issued: list[tuple[int, Access]] = []
        left = list(reversed(accesses))
        while left or issued:
            while left and len(issued) <= leases_ahead:
                access = left.pop()
                issued.append((self.acquire(access.chunk, access.read_mask, access.write_mask), access))
                if rng.random() < 0.02:
                    self._push(rng.choice([Opcode.ACQUIRE, 99]), read=1, chunk=rng.choice([0, 10_000]), flags=1)
            seq, access = issued.pop(0)
            if rng.random() < 0.03:
                self.release(seq)
                continue
            try:
                await self.granted(seq)
            except LeaseError:
                if self.num_failures < FAILURES_MAX:
                    continue
                for other, _ in issued:
                    self.release(other)
                return
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.002)
            dirty = access.write_mask & ~access.dead_mask if rng.random() < 0.9 else 0
            self.release(seq, dirty=dirty, dead=access.dead_mask)

    async def register(self, count: int) -> None:
        rng = self.rng
        specs = []
        for _ in range(count):
            sizes = [rng.choice([0, 1, 1, 2]) * PAGE_BYTES for _ in range(3)]
            specs.append(ChunkSpec(tuple(sizes), 0))
        if rng.random() < 0.2 and specs[0].object_bytes[0] == PAGE_BYTES and self.num_frames > 20:
            specs[0] = ChunkSpec(specs[0].object_bytes, 1)
        before = self.tenant.stats()
        try:
            chunks = await self._ask(self.tenant.register(lambda: list(specs)))
        except SwapSpaceError:
            after = self.tenant.stats()
            check((before.swap_bytes, before.num_chunks) == (after.swap_bytes, after.num_chunks), "a refusal changes")
            self.world.met["register refused"] += 1
            return
        except ValueError:
            return  # the table is full
        self.truth.add(chunks, specs)
        self.chunks += chunks
        self._specs.update(zip(chunks, specs, strict=True))
        check(self.arena.num_chunks == len(self.chunks), "the table counts other chunks")

    async def _unregister(self, count: int) -> None:
        gone = [self.chunks.pop(self.rng.randrange(len(self.chunks))) for _ in range(count)]
        await self._flush()
        self.world.met["unregisters under I/O"] += self.tenant.num_in_flight > 0
        for chunk in gone:
            await self._ask(self.tenant.unregister(range(chunk, chunk + 1)))

    async def _flush(self) -> None:
        """Until the daemon has seen every release."""
        seq = self._push(Opcode.ECHO)
        self._answers[seq] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(GRANT_TIMEOUT_S):
            await self._answers[seq]
        del self._answers[seq]
