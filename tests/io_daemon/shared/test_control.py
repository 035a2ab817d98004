"""Messages over a socket: whole, in pieces, malformed, and with fds."""

from __future__ import annotations

import itertools
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_daemon import errors
from io_daemon.shared import control
from io_daemon.shared.control import (
    FDS_MAX,
    LENGTH,
    MESSAGE_BYTES_MAX,
    Assembler,
    Attach,
    Channel,
    Done,
    Fault,
    Hello,
    Register,
    UploadTrace,
    encode,
)
from io_daemon.shared.patience import Patience
from tests.support.descriptors import open_fds

ATTACH = Attach(
    job="a-job_1.x", rank=3, num_frames=4, frame_bytes=8192, page_locked=False, swap_dirs=("/x", "/y"), chunks_max=9
)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=50))
def test_messages_survive_any_fragmentation(cuts: list[int]) -> None:
    messages = [
        ATTACH,
        Done(),
        Register(num_chunks=2),
        UploadTrace(trace_id=1, num_bytes=14),
    ]
    stream = b"".join(encode(message) for message in messages)
    assembler = Assembler()
    received = []
    position = index = 0
    while position < len(stream):
        step = cuts[index % len(cuts)]
        assembler.feed(stream[position : position + step], [])
        position, index = position + step, index + 1
        while (item := assembler.take()) is not None:
            received.append(item[0])
    assert received == messages


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"nonsense",
        b'{"type": "unheard"}',
        b'{"type": "done", "extra": 1}',
        b'{"type": "hello", "protocol_version": true}',
        b'{"type": "hello", "protocol_version": 3.0}',
        b'{"type": "hello", "protocol_version": "3"}',
        b'{"type": "hello", "protocol_version": -1}',
        b'{"type": "hello", "protocol_version": 4294967296}',
        b'{"type": "hello", "protocol_version": 1%s}' % (b"0" * 2000),
        b'{"type": "welcome", "protocol_version": true, "swap_dirs": []}',
        b'{"type": "unregister", "start": -1, "stop": 2}',
        b'{"type": "attach", "job": "../../etc", "rank": 0}',
        b'{"type": "register", "num_chunks": -1}',
        b'{"type": "upload_trace", "trace_id": 0, "num_bytes": 1000000000}',
    ],
)
def test_malformed_messages_are_refused(body: bytes) -> None:
    assembler = Assembler()
    assembler.feed(LENGTH.pack(len(body)) + body, [])
    with pytest.raises(errors.ProtocolError, match="malformed message"):
        assembler.take()


def test_a_job_name_cannot_leave_its_directory() -> None:
    for job in ("a/b", "..", "", "a" * 64, "a\nb", ".hidden"):
        with pytest.raises(ValueError):
            Attach(**{**ATTACH.model_dump(), "job": job})


def test_an_oversized_length_is_refused_before_a_byte_is_kept() -> None:
    assembler = Assembler()
    assembler.feed(LENGTH.pack(MESSAGE_BYTES_MAX + 1), [])
    with pytest.raises(errors.ProtocolError, match="longer than"):
        assembler.take()


def test_hello_of_another_version_can_still_be_read() -> None:
    assembler = Assembler()
    body = b'{"type": "hello", "protocol_version": 99, "something_new": true}'
    assembler.feed(LENGTH.pack(len(body)) + body, [])
    item = assembler.take()
    assert item is not None
    assert item[0] == Hello(protocol_version=99)


def test_fds_travel_with_their_message() -> None:
    left, right = socket.socketpair()
    sender, receiver = Channel(left), Channel(right)
    read_fd, write_fd = os.pipe()
    sender.send(ATTACH, [write_fd], timeout_s=5)
    sender.send(Done(), timeout_s=5)
    item = receiver.receive(timeout_s=5)
    assert item is not None
    message, (received_fd,) = item
    assert message == ATTACH
    assert not os.get_inheritable(received_fd)
    os.write(received_fd, b"x")
    assert os.read(read_fd, 1) == b"x"
    assert receiver.receive(timeout_s=5) == (Done(), [])
    with pytest.raises(TimeoutError):
        receiver.receive(timeout_s=0.01)
    sender.close()
    assert receiver.receive(timeout_s=5) is None
    for fd in (read_fd, write_fd, received_fd):
        os.close(fd)
    receiver.close()


@pytest.mark.parametrize("stopped", ["both", "the receiver", "the receiver, half a message on"])
def test_time_in_which_this_process_was_stopped_is_not_waited(stopped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender had no time either, or its answer lies here, whole."""
    left, right = socket.socketpair()
    receiver = Channel(right)
    data = encode(ATTACH)
    away_s = itertools.chain([1000.0], itertools.repeat(0.0))
    parts = {"both": [b"", data], "the receiver": [data], "the receiver, half a message on": [data[:9], data[9:]]}
    coming = iter(parts[stopped])
    now_s = 0.0

    def receive(sock: socket.socket, assembler: Assembler) -> bool:
        nonlocal now_s
        now_s += next(away_s)
        part = next(coming)
        if not part:
            raise TimeoutError
        assembler.feed(part, [])
        return True

    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr(control, "_receive", receive)
    assert receiver.receive(timeout_s=5) == (ATTACH, [])
    receiver.close()
    left.close()


def test_patience_ends_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    patience, slices_s = Patience(3.5), []
    while slice_s := patience.slice_s():
        slices_s.append(slice_s)
        now_s += slice_s
    assert slices_s == [1.0, 1.0, 1.0, 0.5]


def test_a_message_that_nobody_takes_is_given_up() -> None:
    left, right = socket.socketpair()
    sender = Channel(left)
    with pytest.raises(TimeoutError):
        sender.send(Fault(error="x", text="x" * (8 << 20), attributes={}), timeout_s=0.01)
    sender.close()
    right.close()


def test_too_many_fds_are_refused_and_closed() -> None:
    left, right = socket.socketpair()
    receiver = Channel(right)
    pipe = os.pipe()
    before = len(open_fds())
    for _ in range(FDS_MAX // 2 + 1):
        socket.send_fds(left, [b"\x00"], list(pipe))
    with pytest.raises(errors.ProtocolError):
        receiver.receive(timeout_s=5)
    receiver.close()
    assert len(open_fds()) == before - 1
    left.close()
    for fd in pipe:
        os.close(fd)


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("a.b", 3, "use 4"),
        errors.SwapSpaceError(path="/x", needed_bytes=5, free_bytes=2, errno=28, remedy="free some"),
        errors.BudgetError(key="k", budget_bytes=1, smallest_bytes=2, reason="r"),
        errors.DeviceIOError(errno=5, path="/x", offset=1, expected_bytes=2, actual_bytes=0, operation="read"),
        errors.IntegrityError(path="/x", offset=1, expected_checksum=2, actual_checksum=3),
        errors.ProtocolError("no"),
        errors.LimitError(errno=24, operation="start", limit="-n", value=5, remedy="to 1024 or more"),
        errors.SwapBusyError(path="/x", owner_pid=1, timeout_s=2.0),
        ValueError("chunk 7 is not registered"),
    ],
)
def test_errors_arrive_as_they_left(error: Exception) -> None:
    arrived = Fault.model_validate_json(Fault.of(error).model_dump_json()).exception()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == {
        name: value if isinstance(value, int | float) else str(value) for name, value in vars(error).items()
    }


def test_an_error_of_no_known_type_arrives_as_a_world_error() -> None:
    arrived = Fault.of(OSError(24, "Too many open files")).exception()
    assert type(arrived) is errors.WorldError
    assert "Too many open files" in str(arrived)
