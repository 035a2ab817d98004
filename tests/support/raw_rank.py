"""A rank without manners: it says on the socket and writes to the rings whatever a test likes."""

from __future__ import annotations

import os
import socket
import struct

from io_daemon._native import CompletionRing, Region, SubmissionRing
from io_daemon.shared.arena import create_arena
from io_daemon.shared.control import Attach, Attached, Channel, Ended, Hello, Message, Welcome
from io_daemon.shared.protocol import PROTOCOL_VERSION
from tests.support.daemon import DEADLINE_S


class RawRank:
    """Speaks to the daemon without the client's manners."""

    def __init__(self, socket_path: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(socket_path)
        self.channel = Channel(sock)

    def ask(self, message: Message, fds: list[int] | None = None) -> tuple[Message, list[int]]:
        self.channel.send(message, fds or [], timeout_s=DEADLINE_S)
        item = self.channel.receive(timeout_s=DEADLINE_S)
        if item is None:
            raise AssertionError("the daemon hung up")
        return item

    def hello(self) -> RawRank:
        answer, _ = self.ask(Hello(protocol_version=PROTOCOL_VERSION))
        assert isinstance(answer, Welcome)
        self.swap_dirs = answer.swap_dirs
        return self

    def attach_request(self, num_frames: int = 4, frame_bytes: int = 4096) -> Attach:
        return Attach(
            job="hostile",
            rank=0,
            num_frames=num_frames,
            frame_bytes=frame_bytes,
            page_locked=False,
            swap_dirs=self.swap_dirs,
            chunks_max=64,
        )

    def attach(self) -> RawRank:
        arena = create_arena(4, 4096, "off")
        answer, (table, rings, sq_event, cq_event) = self.ask(self.attach_request(), [arena.fd])
        assert isinstance(answer, Attached)
        self.arena_fd = arena.fd
        self.fds = (table, rings, sq_event, cq_event)
        self.rings = Region(rings, answer.rings_bytes)
        self.cq_offset = answer.cq_offset
        self.sq = SubmissionRing(self.rings, 0, answer.num_sqes, sq_event, create=False)
        self.cq = CompletionRing(self.rings, answer.cq_offset, answer.num_cqes, cq_event, create=False)
        return self

    def poke(self, offset: int, value: int) -> None:
        """Overwrite a ring index and wake the daemon."""
        struct.pack_into("<Q", self.rings.array().data, offset, value)
        os.write(self.fds[2], b"x")

    def last_words(self) -> Ended:
        item = self.channel.receive(timeout_s=DEADLINE_S)
        assert item is not None
        assert isinstance(item[0], Ended)
        assert self.channel.receive(timeout_s=DEADLINE_S) is None
        return item[0]

    def close(self) -> None:
        self.channel.close()
        for fd in (*getattr(self, "fds", ()), *([self.arena_fd] if hasattr(self, "arena_fd") else [])):
            os.close(fd)
