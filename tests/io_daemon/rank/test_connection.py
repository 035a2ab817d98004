"""The connection to a daemon ends with the daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from io_daemon.rank.connection import Connection


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
