from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import numpy as np
import pytest

from io_daemon._native import WIRE_LAYOUT, CompletionRing, Region, SubmissionRing
from tests.support.descriptors import open_fds
from tests.support.reactor import make_region

NUM_ENTRIES = 8
REGION_BYTES = 8192
RING_OFFSET = 128
HEADER = WIRE_LAYOUT["RingHeader"]
SENTINEL = (1, 2, 0, 4, 5, 6, 7, 8, 9)
READY, TIMED_OUT, OTHER_FD = 0, 1, 2
DEADLINE_MS = 60_000


@pytest.fixture
def wakes() -> Iterator[tuple[socket.socket, socket.socket]]:
    """What a producer and a consumer wake each other through."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def wake_fd(wakes: tuple[socket.socket, socket.socket]) -> int:
    """The producer's end."""
    return wakes[0].fileno()


@pytest.fixture
def consumer_wake(wakes: tuple[socket.socket, socket.socket]) -> socket.socket:
    return wakes[1]


@pytest.fixture
def region() -> Region:
    return make_region(REGION_BYTES)


@pytest.fixture
def producer(region: Region, wake_fd: int) -> SubmissionRing:
    return SubmissionRing(region, RING_OFFSET, NUM_ENTRIES, wake_fd, create=True)


@pytest.fixture
def consumer(region: Region, producer: SubmissionRing, consumer_wake: socket.socket) -> SubmissionRing:
    return SubmissionRing(region, RING_OFFSET, NUM_ENTRIES, consumer_wake.fileno(), create=False)


def push(ring: SubmissionRing, seq: int) -> bool:
    return ring.push(seq, 0, 0)


def set_header(region: Region, field: str, value: int) -> None:
    """What a hostile process would do."""
    offset, num_bytes, _ = HEADER[field]
    begin = RING_OFFSET + offset
    region.array()[begin : begin + num_bytes] = np.frombuffer(value.to_bytes(num_bytes, "little"), np.uint8)


def test_entries_arrive_whole(producer: SubmissionRing, consumer: SubmissionRing) -> None:
    largest = (2**64 - 1, 255, 255, 255, 255, 2**32 - 1, 2**64 - 1, 255, 255)
    assert consumer.pop() is None
    assert producer.push(*SENTINEL)
    assert producer.push(*largest)
    assert (len(producer), len(consumer)) == (2, 2)
    assert (consumer.pop(), consumer.pop(), consumer.pop()) == (SENTINEL, largest, None)


def test_completions_arrive_whole(region: Region, wake_fd: int) -> None:
    ring = CompletionRing(region, 0, NUM_ENTRIES, wake_fd, create=True)
    first = (1, 2, -3, 4, 5, 6, 7, 8, 9, 10)
    largest = (2**64 - 1, 2**32 - 1, -(2**31), 2**32 - 1, 2**16 - 1, 255, 255, 2**64 - 1, 2**64 - 1, 2**64 - 1)
    assert ring.push(*first)
    assert ring.push(*largest)
    assert ring.pop_batch(10) == [first, largest]


def test_full_ring_refuses_and_loses_nothing(producer: SubmissionRing, consumer: SubmissionRing) -> None:
    accepted = [push(producer, seq) for seq in range(NUM_ENTRIES + 2)]
    assert accepted == [True] * NUM_ENTRIES + [False] * 2
    assert [entry[0] for entry in consumer.pop_batch(3)] == [0, 1, 2]
    assert [push(producer, seq) for seq in range(100, 104)] == [True, True, True, False]
    assert [entry[0] for entry in consumer.pop_batch(100)] == [3, 4, 5, 6, 7, 100, 101, 102]
    assert consumer.pop_batch(100) == []


def test_order_holds_over_many_turns(producer: SubmissionRing, consumer: SubmissionRing) -> None:
    received: list[int] = []
    next_seq = 0
    random = np.random.default_rng(0)
    while len(received) < 50 * NUM_ENTRIES:
        for _ in range(random.integers(1, NUM_ENTRIES)):
            next_seq += push(producer, next_seq)
        received += [entry[0] for entry in consumer.pop_batch(int(random.integers(1, NUM_ENTRIES)))]
    assert received == list(range(len(received)))


def test_a_restarted_side_goes_on_where_the_ring_stands(
    region: Region, producer: SubmissionRing, consumer: SubmissionRing, wake_fd: int
) -> None:
    for seq in range(6):
        push(producer, seq)
    consumer.pop_batch(2)
    again = SubmissionRing(region, RING_OFFSET, NUM_ENTRIES, wake_fd, create=False)
    assert [entry[0] for entry in again.pop_batch(100)] == [2, 3, 4, 5]
    successor = SubmissionRing(region, RING_OFFSET, NUM_ENTRIES, wake_fd, create=False)
    assert push(successor, 6)
    assert again.pop() == (6, 0, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("field", ["magic", "version", "num_entries", "entry_bytes"])
def test_another_geometry_is_refused(region: Region, producer: SubmissionRing, wake_fd: int, field: str) -> None:
    set_header(region, field, 16)
    with pytest.raises(ValueError, match=r"ring"):
        SubmissionRing(region, RING_OFFSET, NUM_ENTRIES, wake_fd, create=False)


def test_ring_of_another_kind_is_refused(region: Region, producer: SubmissionRing, wake_fd: int) -> None:
    with pytest.raises(ValueError, match="another size"):
        CompletionRing(region, RING_OFFSET, NUM_ENTRIES, wake_fd, create=False)


@pytest.mark.parametrize(
    ("offset", "num_entries"),
    [(0, 0), (0, 3), (0, -8), (32, 8), (-64, 8), (REGION_BYTES - 64, 1), (0, 256), (2**40, 8), (0, 2**21)],
)
def test_rings_that_do_not_fit_are_refused(region: Region, wake_fd: int, offset: int, num_entries: int) -> None:
    with pytest.raises(ValueError):
        SubmissionRing(region, offset, num_entries, wake_fd, create=True)


def test_bytes_required_is_what_a_ring_takes(wake_fd: int) -> None:
    for kind in (SubmissionRing, CompletionRing):
        num_bytes = kind.bytes_required(NUM_ENTRIES)
        kind(make_region(num_bytes), 0, NUM_ENTRIES, wake_fd, create=True)
        with pytest.raises(ValueError):
            kind(make_region(num_bytes - 1), 0, NUM_ENTRIES, wake_fd, create=True)


def test_read_only_region_and_bad_wake_fds_are_refused(region: Region, wake_fd: int) -> None:
    with pytest.raises(ValueError, match="writable"):
        SubmissionRing(make_region(REGION_BYTES, writable=False), 0, NUM_ENTRIES, wake_fd, create=True)
    with pytest.raises(OSError) as caught:
        SubmissionRing(region, 0, NUM_ENTRIES, -1, create=True)
    assert caught.value.errno == errno.EBADF
    event_fd = os.eventfd(0)  # one description for both sides: the other side could make this one block
    stream, other = socket.socketpair()
    for wrong_fd in (event_fd, stream.fileno()):
        with pytest.raises(ValueError, match="datagram socket"):
            SubmissionRing(region, 0, NUM_ENTRIES, wrong_fd, create=True)
    os.close(event_fd)
    stream.close()
    other.close()


@pytest.mark.parametrize("tail", [NUM_ENTRIES + 1, 2**32, 2**64 - 1])
def test_hostile_tail_is_an_error_for_the_consumer(region: Region, consumer: SubmissionRing, tail: int) -> None:
    set_header(region, "tail", tail)
    for verb in (consumer.pop, consumer.prepare_sleep, lambda: consumer.pop_batch(9), lambda: consumer.wait(0)):
        with pytest.raises(ValueError, match="corrupt"):
            verb()


@pytest.mark.parametrize("head", [NUM_ENTRIES + 1, 2**32, 2**64 - 1])
def test_hostile_head_is_an_error_for_the_producer(region: Region, producer: SubmissionRing, head: int) -> None:
    set_header(region, "head", head)
    for seq in range(NUM_ENTRIES):
        push(producer, seq)
    with pytest.raises(ValueError, match="corrupt"):
        push(producer, NUM_ENTRIES)


def test_hostile_header_cannot_move_an_attached_ring(
    region: Region, producer: SubmissionRing, consumer: SubmissionRing
) -> None:
    push(producer, 1)
    for field, value in [("num_entries", 2**31), ("entry_bytes", 0), ("magic", 0), ("tail", 0), ("head", 0)]:
        set_header(region, field, value)
    push(producer, 2)
    assert [entry[0] for entry in consumer.pop_batch(9)] == [1, 2]


def test_several_threads_may_push(region: Region, wake_fd: int, consumer_wake: socket.socket) -> None:
    num_threads, num_each = 4, 500
    ring = SubmissionRing(region, 0, 128, wake_fd, create=True)
    consumer = SubmissionRing(region, 0, 128, consumer_wake.fileno(), create=False)

    def produce(chunk: int) -> None:
        for seq in range(num_each):
            while not ring.push(seq, 0, 0, 0, 0, chunk, 0):
                pass

    threads = [threading.Thread(target=produce, args=(chunk,)) for chunk in range(num_threads)]
    for thread in threads:
        thread.start()
    received: list[list[int]] = [[] for _ in range(num_threads)]
    while sum(map(len, received)) < num_threads * num_each:
        assert consumer.wait(DEADLINE_MS) == READY
        for entry in consumer.pop_batch(128):
            received[entry[5]].append(entry[0])
    for thread in threads:
        thread.join()
    assert received == [list(range(num_each))] * num_threads


def test_push_signals_only_a_sleeper(
    producer: SubmissionRing, consumer: SubmissionRing, consumer_wake: socket.socket
) -> None:
    push(producer, 1)
    with pytest.raises(BlockingIOError):
        consumer_wake.recv(1, socket.MSG_DONTWAIT)
    assert not consumer.prepare_sleep()  # there is something to pop
    consumer.pop()
    assert consumer.prepare_sleep()
    push(producer, 2)
    push(producer, 3)
    assert consumer_wake.recv(64, socket.MSG_DONTWAIT)
    with pytest.raises(BlockingIOError):
        consumer_wake.recv(1, socket.MSG_DONTWAIT)


def test_wait_sees_time_pass_entries_and_the_other_descriptor(
    producer: SubmissionRing, consumer: SubmissionRing
) -> None:
    reader, writer = os.pipe()
    assert consumer.wait(1) == TIMED_OUT
    assert consumer.wait(1, reader) == TIMED_OUT
    os.write(writer, b"x")
    assert consumer.wait(DEADLINE_MS, reader) == OTHER_FD
    push(producer, 1)
    assert consumer.wait(DEADLINE_MS, reader) == READY
    consumer.pop()
    os.read(reader, 1)
    os.close(writer)
    assert consumer.wait(DEADLINE_MS, reader) == OTHER_FD  # hung up
    os.close(reader)
    with pytest.raises(ValueError, match="deadline"):
        consumer.wait(-1)


def test_an_entry_goes_before_what_the_other_descriptor_says(
    region: Region, producer: SubmissionRing, consumer: SubmissionRing
) -> None:
    """What a side has pushed before its end is answered, though nothing but its end has woken this one."""
    reader, writer = os.pipe()
    sleeps = RING_OFFSET + HEADER["consumer_sleeps"][0]

    def push_and_end() -> None:
        while not region.array()[sleeps]:
            pass
        set_header(region, "consumer_sleeps", 0)  # so that the push wakes nobody
        push(producer, 1)
        os.close(writer)

    thread = threading.Thread(target=push_and_end)
    thread.start()
    found = consumer.wait(DEADLINE_MS, reader)
    thread.join()
    os.close(reader)
    assert (found, consumer.pop()) == (READY, (1, *[0] * 8))


def test_wait_is_not_fooled_by_stale_signals(consumer: SubmissionRing, wakes: tuple[socket.socket, ...]) -> None:
    for _ in range(5):
        wakes[0].send(b"x")
    assert consumer.wait(1) == TIMED_OUT


FAULTY_WAKE_UPS = """
import errno, socket, sys
from io_daemon._native import SubmissionRing
from tests.support.reactor import make_region
from tests.support.seccomp import NR_RECVFROM, NR_SENDTO, forbid
ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
region = make_region(1 << 16)
producer = SubmissionRing(region, 0, 8, ends[0].fileno(), create=True)
consumer = SubmissionRing(region, 0, 8, ends[1].fileno(), create=False)
if sys.argv[1] == "drain":
    ends[0].send(b"x")
    forbid(NR_RECVFROM, errno.EIO)
    consumer.wait(1000)
else:
    consumer.prepare_sleep()
    forbid(NR_SENDTO, errno.EIO)
    producer.push(1, 0, 0)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter names x86-64 system calls")
@pytest.mark.parametrize(("step", "says"), [("drain", "take a wake-up"), ("signal", "wake the other side")])
def test_faults_of_a_wake_up_are_told(step: str, says: str) -> None:
    command = [sys.executable, "-c", FAULTY_WAKE_UPS, step]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "OSError: [Errno 5]" in run.stderr
    assert says in run.stderr


def flood(end: socket.socket) -> None:
    """Until its queue takes no more."""
    with contextlib.suppress(BlockingIOError):
        while True:
            end.send(b"x" * 64, socket.MSG_DONTWAIT)


def test_nothing_that_the_other_side_does_to_its_socket_blocks_this_one(
    producer: SubmissionRing, consumer: SubmissionRing, wakes: tuple[socket.socket, ...]
) -> None:
    for end in wakes:
        os.set_blocking(end.fileno(), True)
        flood(end)
    assert consumer.prepare_sleep()
    push(producer, 1)  # its wake-up finds no room
    assert consumer.wait(DEADLINE_MS) == READY
    consumer.pop()
    assert consumer.wait(1) == TIMED_OUT


def test_a_side_that_has_gone_makes_the_other_neither_fail_nor_spin(
    region: Region, wakes: tuple[socket.socket, ...]
) -> None:
    ring = SubmissionRing(region, 0, NUM_ENTRIES, wakes[0].fileno(), create=True)
    wakes[1].shutdown(socket.SHUT_RDWR)
    wakes[1].close()
    assert ring.prepare_sleep()
    push(ring, 1)  # as producer: nobody is there to be woken
    ring.pop()
    assert ring.prepare_sleep()
    assert select.select([wakes[0]], [], [], 0)[0] == []  # as consumer: asleep, not awake for ever


def test_wait_lets_other_threads_run_and_wakes(producer: SubmissionRing, consumer: SubmissionRing) -> None:
    asleep = threading.Event()

    def produce() -> None:
        asleep.wait()
        push(producer, 42)

    thread = threading.Thread(target=produce)
    thread.start()
    asleep.set()
    assert consumer.wait(DEADLINE_MS) == READY
    thread.join()
    assert consumer.pop() == (42, 0, 0, 0, 0, 0, 0, 0, 0)


def test_wait_runs_signal_handlers_and_goes_on_or_raises(consumer: SubmissionRing) -> None:
    num_calls = 0

    def on_alarm(number: int, frame: FrameType | None) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise InterruptedError("third alarm")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        with pytest.raises(InterruptedError, match="third alarm"):
            consumer.wait(DEADLINE_MS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


ECHO_SCRIPT = """
import sys
from io_daemon._native import CompletionRing, Region, SubmissionRing
memory, wake_fd, num_entries, cq_offset, num_rounds = map(int, sys.argv[1:])
region = Region(memory, cq_offset * 2)
sq = SubmissionRing(region, 0, num_entries, wake_fd, create=False)
cq = CompletionRing(region, cq_offset, num_entries, wake_fd, create=False)
num_answered = 0
while num_answered < num_rounds:
    if sq.wait(60_000) != 0:
        sys.exit("no request in time")
    for seq, opcode, flags, read_mask, write_mask, chunk, arg, dirty_mask, dead_mask in sq.pop_batch(num_entries):
        cq.push(seq, opcode, -1, chunk, 0, 0, 0, arg, 0, 0)
        num_answered += 1
"""


def test_two_processes_hand_entries_to_and_fro(wake_fd: int, consumer_wake: socket.socket) -> None:
    num_rounds, cq_offset = 2000, 4096
    memory = os.memfd_create("rings")
    os.truncate(memory, 2 * cq_offset)
    region = Region(memory, 2 * cq_offset)
    sq = SubmissionRing(region, 0, NUM_ENTRIES, wake_fd, create=True)
    cq = CompletionRing(region, cq_offset, NUM_ENTRIES, wake_fd, create=True)
    arguments = [memory, consumer_wake.fileno(), NUM_ENTRIES, cq_offset, num_rounds]
    echo = subprocess.Popen(
        [sys.executable, "-c", ECHO_SCRIPT, *map(str, arguments)], pass_fds=(memory, consumer_wake.fileno())
    )
    exit_fd = os.pidfd_open(echo.pid)
    answers: list[int] = []
    next_seq = 0
    while len(answers) < num_rounds:
        while next_seq < num_rounds and next_seq - len(answers) < NUM_ENTRIES and push(sq, next_seq):
            next_seq += 1
        assert cq.wait(DEADLINE_MS, exit_fd) == READY, "the other process ended or does not answer"
        answers += [answer[0] for answer in cq.pop_batch(NUM_ENTRIES)]
    assert answers == list(range(num_rounds))
    assert echo.wait(60) == 0
    assert cq.wait(DEADLINE_MS, exit_fd) == OTHER_FD  # the death of the other side ends a wait
    for fd in (memory, exit_fd):
        os.close(fd)


def test_rings_give_their_descriptors_back(region: Region, wake_fd: int, consumer_wake: socket.socket) -> None:
    before = open_fds()
    ring = SubmissionRing(region, 0, NUM_ENTRIES, wake_fd, create=True)
    ring.prepare_sleep()
    push(ring, 1)
    assert select.select([consumer_wake], [], [], 0)[0] == [consumer_wake]
    del ring
    assert open_fds() <= before
