"""A user who may start few threads: the daemon has all that it will need, or says at its start what to raise."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from io_daemon.errors import WorldError
from io_daemon.serve.threads import start_pool
from tests.support.daemon import DEADLINE_S

UID = 64_123
"""Of nobody else: its threads are what the limit counts."""
SERVE_AS = """
import os, resource, sys
import concurrent.futures.thread, multiprocessing.resource_tracker, shutil
import io_daemon.command.cli, io_daemon.serve.server
from io_daemon.__main__ import main
uid, num_threads = int(sys.argv.pop(1)), int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NPROC, (num_threads, num_threads))
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
sys.exit(main())
"""
"""Python itself may lie where only root may read."""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's identity needs root")
@pytest.mark.parametrize("num_threads", [1, 3, 6, 12])
def test_too_few_threads_are_told_at_the_start(num_threads: int) -> None:
    own = Path(tempfile.mkdtemp(prefix="few-"))
    os.chown(own, UID, UID)
    words = ["serve", "--swap-dir", str(own), "--socket", str(own / "s")]
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", SERVE_AS, str(UID), str(num_threads), *words],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert ended.returncode == 1
        assert "raise ulimit -u, or the container's pids.max" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert not list(own.iterdir())
    finally:
        own.rmdir()


def test_too_few_addresses_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(WorldError) as told:
        start_pool()
    assert "ulimit -v" not in str(told.value)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200_000 << 10, resource.RLIM_INFINITY))
    with pytest.raises(WorldError, match=r"ulimit -v unlimited` \(it is 200000\)"):
        start_pool()
