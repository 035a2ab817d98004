"""Every kind of message with every kind of nonsense in it, at every point of a conversation."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from io_daemon.rank.client import Client
from io_daemon.shared import control
from io_daemon.shared.control import Ended, Fault, Message
from tests.support.daemon import DEADLINE_S, WEIGHT, ServedDaemon, chunk_is_intact, eventually
from tests.support.raw_rank import RawRank

NONSENSE: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 31, 1 << 63, 1 << 64, 1e308, 0.5, "", "\x00", "\ud800", "../../x", "x" * 3000, [], [[]],
    {}, {"type": "hello"},
)  # fmt: skip
TEXTS = (
    "[" * 3000, '{"a":' * 700, "9" * 3900, "1e999999", "NaN", '"\\ud800"', '{"type":"detach","type":"attach"}',
    '{"type":"no_such"}', '{"type":null}', "\ufeff{}", "{}",
)  # fmt: skip
STATES = ("new", "greeted", "attached")


def kinds() -> list[type[Message]]:
    return [each for each in Message.__subclasses__() if "type" in each.model_fields]


def bodies() -> Iterator[bytes]:
    """Each field of each message in turn is nonsense, the others are what they may be."""
    plain = {"job": "j", "swap_dirs": ["/"], "page_locked": False, "chunks_max": 64, "frame_bytes": 4096}
    for kind in kinds():
        whole = {name: plain.get(name, 1) for name in kind.model_fields} | {"type": kind.model_fields["type"].default}
        yield json.dumps(whole).encode()
        for name in kind.model_fields:
            for value in NONSENSE:
                yield json.dumps({**whole, name: value}).encode()
            yield json.dumps({each: value for each, value in whole.items() if each != name}).encode()
        yield json.dumps({**whole, "more": 1}).encode()
    yield from (text.encode() for text in TEXTS)
    yield from (b"\xff\xfe", b"\x00" * 100, b"")


def brought(rank: RawRank, state: str) -> RawRank:
    if state != "new":
        rank.hello()
    return rank.attach() if state == "attached" else rank


@pytest.mark.parametrize("state", STATES)
def test_nonsense_is_answered_or_ends_its_own_connection(daemon: ServedDaemon, bystander: Client, state: str) -> None:
    num_fds, ends = len(daemon.fds()), {"answered": 0, "ended": 0}
    rank: RawRank | None = None
    for body in bodies():
        rank = brought(RawRank(daemon.socket), state) if rank is None else rank
        try:
            rank.channel.socket.sendall(len(body).to_bytes(4, "little") + body)
            item = rank.channel.receive(timeout_s=DEADLINE_S)
        except OSError as error:  # it hung up before all was sent
            assert error.errno in (errno.ECONNRESET, errno.EPIPE), body[:80]
            item = None
        answer, fds = item if item is not None else (None, [])
        control.close_all(fds)
        if answer is None or isinstance(answer, Ended):
            assert answer is None or "daemon failed" not in answer.reason, (body[:200], answer)
            ends["ended"] += 1
            rank.close()
            rank = None
        else:
            assert not isinstance(answer, Fault) or answer.text, body[:80]
            ends["answered"] += 1
    if rank is not None:
        rank.close()
    assert ends["ended"] > 100, ends
    assert "Traceback" not in daemon.stderr()
    eventually(lambda: len(daemon.fds()) == num_fds, "nothing of them stays")
    assert all(chunk_is_intact(bystander, chunk, WEIGHT) for chunk in range(6))


@pytest.mark.parametrize("how", [socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR])
@pytest.mark.parametrize("state", STATES)
def test_a_socket_that_is_closed_by_half_ends_its_tenant(
    daemon: ServedDaemon, bystander: Client, state: str, how: int
) -> None:
    num_fds = len(daemon.fds())
    rank = brought(RawRank(daemon.socket), state)
    rank.channel.socket.shutdown(how)
    if how == socket.SHUT_RD:  # the daemon notices as soon as it has something to say
        with contextlib.suppress(OSError):
            while daemon.fds():
                rank.channel.socket.sendall(b"\x02\x00\x00\x00{}")
    eventually(lambda: len(daemon.fds()) == num_fds, "it is gone")
    assert len(daemon.files()) == 1
    assert chunk_is_intact(bystander, 0, WEIGHT)
    rank.close()
    assert os.path.exists(daemon.socket)
