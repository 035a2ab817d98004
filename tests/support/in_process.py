"""The daemon in this process, so that a test can reach into it: what it holds, and what it does when a part fails."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from io_daemon.config import ServeConfig
from io_daemon.serve import server
from tests.support.daemon import DEADLINE_S


def while_serving(
    monkeypatch: pytest.MonkeyPatch, swap_dirs: Sequence[Path], use: Callable[[str], object], **settings: Any
) -> int:
    """Serve on this thread while ``use(socket path)`` runs in another; the daemon's exit code."""
    monkeypatch.setattr(server, "raise_priority", lambda: None)

    async def run(socket_path: Path) -> int:
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

    with tempfile.TemporaryDirectory(prefix="iod-") as directory:  # a socket's path must be short
        return asyncio.run(run(Path(directory) / "s"))
