"""One life of a tenant in the soak: it attaches, streams chunks whose every word it can check, and ends as told."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
import traceback
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from io_daemon.errors import DaemonLostError, ProtocolError, WorldError
from io_daemon.rank.client import Client
from io_daemon.rank.lease import Grant
from io_daemon.shared.control import LENGTH, Hello, Message, Register, Unregister, UploadTrace, encode
from io_daemon.shared.protocol import PROTOCOL_VERSION, Access, ChunkSpec, kinds_of
from tests.support.daemon import frame
from tests.support.raw_rank import RawRank

ENDINGS: Final = {
    "kill": 8,
    "detach": 5,
    "hang up": 3,
    "garbage": 4,
    "garbage from the start": 3,
    "time-out": 3,
    "freeze": 2,
}
"""How a life ends, and how often."""
ARENA_BYTES: Final = 4 << 20
FRAMES: Final = (16 << 10, 64 << 10, 256 << 10)
CHUNKS_MAX: Final = 512
THINK_S: Final = 0.02
LEASES_AHEAD_MAX: Final = 3
DEADLINE_S: Final = 60.0


class Figure(IntEnum):
    """What a life tells while it lasts, so that it is known however it ends."""

    ATTACHED = 0
    LEASES = 1
    BYTES_VERIFIED = 2
    WRONG_BYTES = 3


@dataclass(frozen=True)
class Life:
    number: int
    seed: int
    ending: str
    lasts_s: float


def draw_life(number: int, rng: random.Random) -> Life:
    (ending,) = rng.choices(list(ENDINGS), list(ENDINGS.values()))
    return Life(
        number, rng.getrandbits(48), ending, rng.uniform(0.05, 3.0) if rng.random() < 0.3 else rng.uniform(3, 15)
    )


def live(socket_path: str, life: Life, figures: Any) -> None:
    """The whole of a process of its own, which may be killed anywhere."""
    figures[Figure.ATTACHED] = 0
    try:
        _live(socket_path, life, figures)
    except BaseException:  # noqa: BLE001 -- whatever it is, it is told
        os.write(2, f"soak: {life} failed\n{traceback.format_exc()}".encode())
        os._exit(1)
    finally:
        figures[Figure.ATTACHED] = 0


def _live(socket_path: str, life: Life, figures: Any) -> None:
    rng = random.Random(life.seed)
    if life.ending == "garbage from the start":
        be_a_nuisance(socket_path, rng)
        return
    client = Client.connect(socket_path, job=f"soak-{life.number}", rank=rng.randrange(8))
    frame_bytes = rng.choice(FRAMES)
    num_frames = ARENA_BYTES // frame_bytes
    client.attach(
        num_frames=num_frames,
        frame_bytes=frame_bytes,
        swap_dirs=client.swap_dirs,
        chunks_max=CHUNKS_MAX,
        lock_memory="off",
    )
    stream = Stream(client, rng, figures)
    figures[Figure.ATTACHED] = 1
    end_s = time.monotonic() + life.lasts_s
    while life.ending in ("kill", "freeze") or time.monotonic() < end_s:
        stream.step()
    figures[Figure.ATTACHED] = 0
    match life.ending:
        case "detach":
            client.close()
        case "hang up":
            stream.ask_ahead()
            client.close(clean=False)
        case "garbage":
            talk_nonsense(client, rng)
        case "time-out":
            run_out_of_time(client, stream, rng)


class Stream:
    """Passes over chunks, some of them by an uploaded trace. Every object is a stamp plus a ramp, so that no word of it
    could be another object's, another version's or from another place."""

    def __init__(self, client: Client, rng: random.Random, figures: Any) -> None:
        self._client, self._rng, self._figures = client, rng, figures
        self._ramp = np.arange(ARENA_BYTES // 8, dtype=np.uint64)
        self._scratch = np.empty(client.frame_bytes // 8, dtype=np.uint64)
        num_frames = ARENA_BYTES // client.frame_bytes
        lease_frames_max = max(1, num_frames // (LEASES_AHEAD_MAX + 2))
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._stamps: dict[tuple[int, int], int] = {}
        """What an object holds: 0 is zeros, as it was born."""
        self._unknown: set[tuple[int, int]] = set()
        """Given up as dead: anything."""
        self._order: list[Access] = []
        self._ahead: deque[tuple[int, Access]] = deque()
        self._next = 0
        self._register(min(num_frames, lease_frames_max))

    def _register(self, frames_max: int) -> None:
        """More than fits, in most lives; some chunks come later, and some go again."""
        kinds = self._rng.randint(1, min(3, frames_max))
        pieces = self._rng.randint(1, min(4, frames_max // kinds))
        object_bytes = pieces * self._client.frame_bytes - self._rng.choice((0, 0, 8, 2048))
        num_chunks = int(ARENA_BYTES / (kinds * pieces * self._client.frame_bytes) * self._rng.uniform(0.5, 5.0)) + 1
        spec = ChunkSpec((object_bytes,) * kinds)
        chunks = self._client.register([spec] * min(num_chunks, CHUNKS_MAX // 2))
        if self._rng.random() < 0.3:
            gone = self._client.register([spec] * 8)
            self._client.unregister(gone)
        self.chunks = list(chunks)
        self._sizes = dict.fromkeys(chunks, spec.object_bytes)
        self._order = [self._draw_access(chunk) for chunk in self._rng.sample(chunks, len(chunks))]
        if self._rng.random() < 0.7:
            self._client.upload_trace(1, self._order)

    def _draw_access(self, chunk: int) -> Access:
        every = (1 << len(self._sizes[chunk])) - 1
        read = self._rng.randint(0, every)
        write = self._rng.randint(0, every) if read else every
        return Access(chunk, read, write, self._rng.choice((0, 0, 0, read & ~write)))

    def ask_ahead(self) -> None:
        while len(self._ahead) < LEASES_AHEAD_MAX:
            if self._next == 0:
                self._client.mark(1)
            access = self._order[self._next]
            self._next = (self._next + 1) % len(self._order)
            self._ahead.append(
                (self._client.acquire(access.chunk, read=access.read_mask, write=access.write_mask), access)
            )

    def step(self) -> None:
        """One lease: what it reads is checked, what it may write is written, or not."""
        self.ask_ahead()
        seq, access = self._ahead.popleft()
        if self._rng.random() < 0.02:
            self._client.release(seq)  # abandoned
            return
        grant = self._client.wait(seq, DEADLINE_S)
        self._figures[Figure.LEASES] += 1
        for kind in kinds_of(access.read_mask):
            if (access.chunk, kind) not in self._unknown:
                self._verify(grant, access.chunk, kind)
        dirty = access.write_mask if self._rng.random() < 0.8 else 0
        for kind in kinds_of(dirty):
            self._write(grant, access.chunk, kind)
        self._unknown.update((access.chunk, kind) for kind in kinds_of(access.dead_mask))
        self._client.release(seq, dirty=dirty, dead=access.dead_mask)
        time.sleep(self._rng.expovariate(1 / THINK_S))

    def _pieces(self, grant: Grant, chunk: int, kind: int) -> list[NDArray[np.uint64]]:
        left, pieces = self._sizes[chunk][kind], []
        for number in grant.frames[kind]:
            whole = frame(self._client.arena, number, self._client.frame_bytes)
            pieces.append(whole[: min(left, self._client.frame_bytes)].view(np.uint64))
            left -= pieces[-1].nbytes
        return pieces

    def _verify(self, grant: Grant, chunk: int, kind: int) -> None:
        stamp, start = self._stamps.get((chunk, kind), 0), 0
        for piece in self._pieces(grant, chunk, kind):
            words = self._scratch[: len(piece)]
            if stamp:
                np.subtract(piece, self._ramp[start : start + len(piece)], out=words)
            else:
                words[:] = piece
            num_wrong = int(np.count_nonzero(words != stamp))
            if num_wrong:
                where = int(np.argmax(words != stamp))
                self._figures[Figure.WRONG_BYTES] += 8 * num_wrong
                raise AssertionError(
                    f"{num_wrong} wrong words of chunk {chunk}, kind {kind}, piece at {start}, first at {where}: "
                    f"{words[where]:#x} instead of {stamp:#x}"
                )
            self._figures[Figure.BYTES_VERIFIED] += piece.nbytes
            start += len(piece)

    def _write(self, grant: Grant, chunk: int, kind: int) -> None:
        stamp, start = self._rng.getrandbits(63) | 1, 0
        for piece in self._pieces(grant, chunk, kind):
            np.add(self._ramp[start : start + len(piece)], np.uint64(stamp), out=piece)
            start += len(piece)
        self._stamps[chunk, kind] = stamp
        self._unknown.discard((chunk, kind))


# --- other ends than the client's own


def talk_nonsense(client: Client, rng: random.Random) -> None:
    """After an honest life. The daemon must answer it or hang up, and may not wait for more."""
    sock = client._connection._channel.socket
    match rng.randrange(4):
        case 0:
            _send(sock, rng.randbytes(rng.randint(5, 4000)))
        case 1:
            _send(sock, LENGTH.pack(20) + b'{"type": "register"}' * rng.randint(1, 3))
        case 2:
            _send_with_fds(sock, rng)
        case _:
            with contextlib.suppress(ProtocolError):
                for _ in range(2000):
                    client._sq.push(*(rng.getrandbits(rng.choice((1, 4, 32))) & 0xFF for _ in range(9)))
                    client.echo()
                raise AssertionError("none of 2000 random submissions was refused")
            client.close(clean=rng.random() < 0.5)
            return
    _await_reaction(sock)
    client.close(clean=False)


def _send_with_fds(sock: socket.socket, rng: random.Random) -> None:
    """Requests whose data lies beside them, and is wrong."""
    size = rng.randint(0, 5000)
    request: Message = rng.choice(
        (Register(num_chunks=4), UploadTrace(trace_id=1, num_bytes=size), Unregister(start=0, stop=1 << 31))
    )
    memfd, pipe = os.memfd_create("nonsense"), os.pipe()
    try:
        os.write(memfd, rng.randbytes(size))
        fds = rng.choice(([], [memfd], [memfd, memfd], [pipe[0]]))
        socket.send_fds(sock, [encode(request)], fds)
    finally:
        for fd in (memfd, *pipe):
            os.close(fd)


def be_a_nuisance(socket_path: str, rng: random.Random) -> None:
    """Nonsense from the first byte on, or from the first one as a tenant."""
    rank = RawRank(socket_path)
    sock = rank.channel.socket
    match rng.randrange(7):
        case 0:
            _send(sock, rng.randbytes(rng.randint(0, 4000)))  # perhaps nothing at all
        case 1:
            _send(sock, encode(Hello(protocol_version=PROTOCOL_VERSION))[: rng.randint(1, 20)])
        case 2:
            rank.ask(Hello(protocol_version=PROTOCOL_VERSION + 1))
        case 3:
            with open("/dev/zero", "rb") as zero:
                rank.hello().ask(rank.attach_request(), [zero.fileno()])
            rank.close()
            return
        case 4:
            rank.hello().attach().poke(rng.choice((64, rank.cq_offset + 128)), rng.getrandbits(63) | 1 << 62)
        case 5:
            rank.hello().attach()
            os.set_blocking(rank.fds[2], True)
            for seq in range(3000):
                rank.sq.push(seq, *(rng.getrandbits(rng.choice((1, 3, 8))) for _ in range(8)))
            rank.close()
            return
        case _:
            rank.hello()
            _send(sock, encode(rank.attach_request()))  # without an arena
    _await_reaction(sock)
    rank.close()


def run_out_of_time(client: Client, stream: Stream, rng: random.Random) -> None:
    """A message that is never whole, or a lease that is not waited for as long as it takes."""
    if rng.random() < 0.5:
        _send(client._connection._channel.socket, LENGTH.pack(200) + b'{"type":')
        with contextlib.suppress(WorldError):
            end_s = time.monotonic() + DEADLINE_S
            while time.monotonic() < end_s:
                stream.step()
            raise AssertionError(f"half a message was waited for, for {DEADLINE_S} s")
    else:
        with contextlib.suppress(DaemonLostError):
            for _ in range(200):
                client.wait(client.acquire(rng.choice(stream.chunks), read=1), 0.0)
    client.close()


def _send(sock: socket.socket, data: bytes) -> None:
    """Nobody need be there any more to take it."""
    with contextlib.suppress(OSError):
        sock.sendall(data, socket.MSG_NOSIGNAL)


def _await_reaction(sock: socket.socket) -> None:
    """Until the daemon says something or hangs up."""
    sock.settimeout(DEADLINE_S)
    with contextlib.suppress(ConnectionError):
        sock.recv(1 << 16)
