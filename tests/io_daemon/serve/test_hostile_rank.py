"""A rank that breaks the rules harms itself: the daemon and its other tenants go on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import stat
import time
from collections.abc import Iterator

import pytest

from io_daemon.errors import ProtocolError
from io_daemon.rank.client import Client
from io_daemon.shared.control import (
    Detach,
    Ended,
    Fault,
    Hello,
    Message,
    StatsRequest,
    encode,
)
from io_daemon.shared.protocol import PROTOCOL_VERSION, Opcode, Status
from tests.support.daemon import DEADLINE_S, ServedDaemon, eventually
from tests.support.raw_rank import RawRank

TAIL_OFFSET, HEAD_OFFSET, SLEEPS_OFFSET = 64, 128, 192
SQES_MAX, CQES_MAX = 1024, 4096


@pytest.fixture
def raw(daemon: ServedDaemon, bystander: Client) -> Iterator[RawRank]:
    rank = RawRank(daemon.socket)
    yield rank
    rank.close()


def test_malformed_submissions_are_refused_one_by_one(raw: RawRank) -> None:
    raw.hello().attach()
    bad = [
        (1, 99, 0, 0, 0, 0, 0),
        (2, Opcode.ACQUIRE, 1, 1, 0, 0, 0),
        (3, Opcode.ACQUIRE, 0, 1, 0, 0, 0),  # no such chunk
        (4, Opcode.ACQUIRE, 0, 255, 255, 0xFFFFFFFF, 0),
        (5, Opcode.RELEASE, 0, 0, 0, 0, 77),  # no such lease
        (9, Opcode.ECHO, 0, 0, 0, 0, 0),  # this seq was there before
    ]
    for entry in (*bad[:-1], (9, Opcode.ECHO, 0, 0, 0, 0, 0), bad[-1]):
        assert raw.sq.push(*entry)
    answers: list[tuple[int, ...]] = []
    while len(answers) < len(bad) + 1:
        assert raw.cq.wait(int(DEADLINE_S * 1000)) == 0
        answers += raw.cq.pop_batch(64)
    assert [(answer[0], answer[1]) for answer in answers] == [
        *((entry[0], Status.BAD_REQUEST) for entry in bad[:-1]),
        (9, Status.OK),
        (9, Status.BAD_REQUEST),
    ]


def test_random_submissions_break_nothing(raw: RawRank) -> None:
    raw.hello().attach()
    chance = random.Random(7)
    for _ in range(5000):
        entry = (
            chance.choice([chance.getrandbits(64), chance.randrange(6000)]),
            chance.randrange(8),
            chance.choice([0, 0, 0, chance.getrandbits(8)]),
            chance.getrandbits(8),
            chance.getrandbits(8),
            chance.choice([0, 1, chance.getrandbits(32)]),
            chance.choice([0, 1, chance.getrandbits(64)]),
            chance.getrandbits(8),
            chance.getrandbits(8),
        )
        while not raw.sq.push(*entry):
            raw.cq.pop_batch(4096)
    assert isinstance(raw.ask(StatsRequest())[0], Message)


@pytest.mark.parametrize("value", [SQES_MAX + 1, (1 << 64) - 1, 1 << 63])
def test_a_submission_tail_out_of_range_ends_the_tenant(raw: RawRank, value: int) -> None:
    raw.hello().attach()
    raw.poke(TAIL_OFFSET, value)
    ended = raw.last_words()
    assert ended.by_fault
    assert "indexes are corrupt" in ended.reason


def test_a_completion_head_out_of_range_ends_the_tenant(raw: RawRank) -> None:
    raw.hello().attach()
    raw.poke(raw.cq_offset + HEAD_OFFSET, 12345)
    assert raw.sq.push(1, Opcode.ECHO, 0, 0, 0, 0, 0)
    ended = raw.last_words()
    assert ended.by_fault
    assert "completion ring" in ended.reason


def test_a_rank_that_never_reaps_stalls_only_itself(raw: RawRank, bystander: Client) -> None:
    raw.hello().attach()
    num_pushed = 0

    def stalled() -> bool:
        nonlocal num_pushed
        while raw.sq.push(num_pushed + 1, Opcode.ECHO, 0, 0, 0, 0, 0):
            num_pushed += 1
        return len(raw.sq) == SQES_MAX and len(raw.cq) == CQES_MAX

    eventually(stalled, "both rings are full")
    assert num_pushed == SQES_MAX + CQES_MAX
    assert bystander.echo() < DEADLINE_S
    num_answers = 0
    while num_answers < num_pushed:
        assert raw.cq.wait(int(DEADLINE_S * 1000)) == 0
        num_answers += len(raw.cq.pop_batch(CQES_MAX))
    assert num_answers == num_pushed


def test_a_sleep_flag_and_a_flood_of_wakeups_are_harmless(raw: RawRank) -> None:
    raw.hello().attach()
    for _ in range(1000):
        raw.poke(SLEEPS_OFFSET, 0xDEADBEEF)
    assert not isinstance(raw.ask(StatsRequest())[0], Ended)


@pytest.mark.parametrize("full", [False, True])
def test_a_rank_that_makes_its_wake_ups_block_stops_only_itself(raw: RawRank, bystander: Client, full: bool) -> None:
    """More than a batch makes the daemon come again without a wake-up; a full queue leaves no room for one."""
    raw.hello().attach()
    for fd in raw.fds[2:]:
        os.set_blocking(fd, True)
    if full and stat.S_ISSOCK(os.fstat(raw.fds[3]).st_mode):
        wake = socket.socket(fileno=os.dup(raw.fds[3]))
        with contextlib.suppress(BlockingIOError):
            while True:
                wake.send(b"x", socket.MSG_DONTWAIT)
        wake.close()
    for seq in range(1, 200):
        assert raw.sq.push(seq, Opcode.ECHO, 0, 0, 0, 0, 0)
    assert bystander.echo() < DEADLINE_S
    num_answers = 0
    while num_answers < 199:
        assert raw.cq.wait(int(DEADLINE_S * 1000)) == 0
        num_answers += len(raw.cq.pop_batch(CQES_MAX))
    assert bystander.echo() < DEADLINE_S


def test_a_rank_that_takes_none_of_its_wake_ups_stops_only_itself(raw: RawRank, bystander: Client) -> None:
    """It says that it sleeps before each answer, until the socket's queue has no room for one more."""
    raw.hello().attach()
    for seq in range(1, 1000):
        raw.poke(raw.cq_offset + SLEEPS_OFFSET, 1)
        assert raw.sq.push(seq, Opcode.ECHO, 0, 0, 0, 0, 0)
        eventually(lambda: bool(raw.cq.pop_batch(CQES_MAX)), "it is answered")
    assert bystander.echo() < DEADLINE_S


def test_a_rank_that_closes_its_end_of_the_wake_ups_is_not_spun_on(raw: RawRank, daemon: ServedDaemon) -> None:
    raw.hello().attach()
    for fd in raw.fds[2:]:
        with socket.socket(fileno=os.dup(fd)) as wake:
            wake.shutdown(socket.SHUT_RDWR)
    assert not isinstance(raw.ask(StatsRequest())[0], Ended)
    before_s = daemon.cpu_s()
    time.sleep(0.5)
    assert daemon.cpu_s() - before_s < 0.25


def test_neither_arena_nor_rings_can_be_shrunk(raw: RawRank) -> None:
    raw.hello().attach()
    for fd in (raw.arena_fd, raw.fds[1], raw.fds[0]):
        with pytest.raises(OSError, match=r"not permitted|Invalid argument"):  # sealed, or open for reading only
            os.ftruncate(fd, 0)
    assert not isinstance(raw.ask(StatsRequest())[0], Ended)


def test_an_arena_that_could_shrink_is_refused(raw: RawRank) -> None:
    raw.hello()
    fd = os.memfd_create("soft", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 5 * 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    answer, _ = raw.ask(raw.attach_request(), [fd])
    assert isinstance(answer, Ended)
    assert "could still shrink" in answer.reason
    os.close(fd)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x05\x00\x00\x00hello",
        b"\x02\x00\x00\x00{}",
        encode(Detach()),
        encode(StatsRequest()),
        encode(Ended(reason="you", by_fault=True)),
    ],
)
@pytest.mark.parametrize("greeted", [False, True])
def test_nonsense_on_the_socket_ends_the_connection(raw: RawRank, data: bytes, greeted: bool) -> None:
    if greeted:
        raw.hello()
    raw.channel.socket.sendall(data)
    assert raw.last_words().by_fault


def test_fds_that_nobody_asked_for_are_closed(daemon: ServedDaemon, raw: RawRank) -> None:
    raw.hello()
    before = daemon.fds()
    pipe = os.pipe()
    raw.attach()
    attached = daemon.fds()
    raw.ask(StatsRequest(), list(pipe))
    assert daemon.fds() == attached
    assert len(attached) > len(before)
    for fd in pipe:
        os.close(fd)


def test_another_protocol_version_is_told_both_versions(daemon: ServedDaemon, raw: RawRank) -> None:
    answer, _ = raw.ask(Hello(protocol_version=PROTOCOL_VERSION + 1))
    assert isinstance(answer, Fault)
    error = answer.exception()
    assert isinstance(error, ProtocolError)
    assert f"speaks protocol {PROTOCOL_VERSION}, the rank {PROTOCOL_VERSION + 1}" in str(error)
    assert "same version of infinity" in str(error)
