"""The daemon in this process, so that a test can reach into it: what it holds, and what it does when a part fails."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from io_daemon.config import ServeConfig
from io_daemon.serve import server

DEADLINE_S: Final = 120.0


def while_serving(
    monkeypatch: pytest.MonkeyPatch,
    swap_dirs: Sequence[Path],
    use: Callable[[str], object],
    *,
    loops: list[asyncio.AbstractEventLoop] | None = None,
    **settings: Any,
) -> int:
    """Serve on this thread while ``use(socket path)`` runs in another; the daemon's exit code. ``loops``: where to
    put the loop that serves."""
    monkeypatch.setattr(server, "raise_priority", lambda: None)

    async def run(socket_path: Path) -> int:
        if loops is not None:
            loops.append(asyncio.get_running_loop())
        config = ServeConfig(socket_path=socket_path, swap_dirs=tuple(swap_dirs), **settings)
        serving = asyncio.ensure_future(server.serve(config))
        while not socket_path.exists() and not serving.done():
            await asyncio.sleep(0.005)
        try:
            await asyncio.wait_for(asyncio.to_thread(use, str(socket_path)), DEADLINE_S)
        finally:
            if not serving.done():
                os.kill(os.getpid(), signal.SIGTERM)
            exit_code = await asyncio.wait_for(serving, DEADLINE_S)
        return exit_code

    thresholds, interval_s = gc.get_threshold(), sys.getswitchinterval()
    try:
        with tempfile.TemporaryDirectory(prefix="iod-") as directory:  # a socket's path must be short
            return asyncio.run(run(Path(directory) / "s"))
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
