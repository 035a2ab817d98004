"""The connection to a daemon: it comes about, be the daemon busy, and ends with the daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from io_daemon.errors import DaemonLostError
from io_daemon.rank.connection import Connection, connect_to
from tests.support.busy_socket import busy_socket
from tests.support.daemon import DEADLINE_S


def test_a_killed_daemon_is_noticed_whoever_holds_its_end_of_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    script = f"""
        import os, socket, time
        from io_daemon.shared.control import Channel, Welcome
        from io_daemon.shared.protocol import PROTOCOL_VERSION
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind({str(path)!r})
            listener.listen()
            print("ready", flush=True)
            channel = Channel(listener.accept()[0])
            channel.receive(timeout_s=10)
            channel.send(Welcome(protocol_version=PROTOCOL_VERSION, swap_dirs=("/x",)), timeout_s=10)
            child = os.fork()
            if child:
                print(child, flush=True)
            time.sleep(60)
    """
    daemon = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    daemon.stdout.readline()
    connection, _ = Connection.open(str(path), 10)
    holder = int(daemon.stdout.readline())
    assert not connection.wait_lost(0)
    daemon.kill()
    try:
        assert connection.wait_lost(5)
    finally:
        os.kill(holder, signal.SIGKILL)
        connection.close()
        daemon.wait()
        daemon.stdout.close()


def test_a_signal_makes_no_connection_of_one_that_waits_for_room(tmp_path: Path) -> None:
    path = tmp_path / "busy"
    num_signals = 0

    def make_room_at_last(*_: object) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 3:
            listener.accept()[0].close()

    before = signal.signal(signal.SIGALRM, make_room_at_last)
    try:
        with busy_socket(path) as listener:
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with connect_to(str(path), DEADLINE_S) as sock:
                assert sock.getpeername() == str(path)
            assert num_signals >= 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_who_has_no_time_is_told_from_nobody(tmp_path: Path) -> None:
    path = tmp_path / "busy"
    with busy_socket(path), pytest.raises(DaemonLostError, match="has taken no connection"):
        Connection.open(str(path), 0.1)
    with pytest.raises(DaemonLostError, match="no I/O daemon answers"):
        Connection.open(str(path), 0.1)
