"""A daemon as a child of this process, where the environment says: for ``start: "auto"`` and for ``infinity run``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from infinity.config.environment import Environment, read_environment
from io_daemon.rank import process

DAEMON_COMMAND = process.DAEMON_COMMAND


class DaemonProcess(process.DaemonProcess):
    def __init__(
        self,
        *,
        swap_dirs: Sequence[str | os.PathLike[str]],
        socket: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
        private: bool = True,
        start_timeout_s: float = 60.0,
        environment: Environment | None = None,
    ) -> None:
        """The base's arguments, and ``environment``: where a private socket's directory may be made."""
        where = environment or read_environment()
        parents = [path for path in (where.runtime_dir, where.temp_dir, Path("/tmp")) if path is not None]
        super().__init__(
            swap_dirs=swap_dirs,
            socket=socket,
            options=options,
            private=private,
            start_timeout_s=start_timeout_s,
            command=DAEMON_COMMAND,
            directories=parents,
        )
