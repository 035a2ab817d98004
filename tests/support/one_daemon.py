"""One daemon for all engines of this process and its forks, which are spared starting one each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.support.daemon import ServedDaemon
from tests.support.parity import DAEMON_OPTIONS


@contextmanager
def beside_a_daemon() -> Iterator[None]:
    """It serves whoever keeps his files in a temporary directory, all of which lie in one."""
    with tempfile.TemporaryDirectory(prefix="beside-") as ground:
        tempfile.tempdir = ground
        with closing(ServedDaemon([Path(ground)], *DAEMON_OPTIONS)) as daemon:
            os.environ["INFINITY_IO_SOCKET"] = daemon.socket
            yield
        tempfile.tempdir = None
