"""``python -m tests.walks --walks 500 --seed S --json``: random sequences of an engine's calls against plain torch.

With ``--num-ranks 2`` on as many ranks, against a loop that averages as DDP; there some calls are one rank's alone.
Prints every failure with its seed and, shrunk, as a script that runs; at the end the counts, and with ``--refusals``
what was refused. A seed is tried again by ``--seed S --walks 1``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from tests.fuzz.report import report
from tests.support.daemon import ServedDaemon
from tests.support.parity import DAEMON_OPTIONS
from tests.walks.walk import walk


@contextmanager
def beside_a_daemon() -> Iterator[None]:
    """One daemon serves all walks, whose files lie in one directory."""
    with tempfile.TemporaryDirectory(prefix="walks-") as ground:
        tempfile.tempdir = ground
        with closing(ServedDaemon([Path(ground)], *DAEMON_OPTIONS)) as daemon:
            os.environ["INFINITY_IO_SOCKET"] = daemon.socket
            yield
        tempfile.tempdir = None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num-ranks", type=int, default=1)
    ranks, sys.argv[1:] = parser.parse_known_args()
    make = partial(walk, num_ranks=ranks.num_ranks)
    code = report(make, "walks", about=__doc__, number=500, refusals_in=str.splitlines, around=beside_a_daemon)
    sys.exit(code)
