"""``python -m tests.walks --walks 500 --seed S --json``: random sequences of an engine's calls against plain torch.

With ``--num-ranks 2`` on as many ranks, against a loop that averages as DDP; there some calls are one rank's alone.
Prints every failure with its seed and, shrunk, as a script that runs; at the end the counts, and with ``--refusals``
what was refused. A seed is tried again by ``--seed S --walks 1``.
"""

from __future__ import annotations

import sys

from tests.fuzz.report import report
from tests.walks.walk import walk

if __name__ == "__main__":
    sys.exit(report(walk, "walks", about=__doc__, number=500, refusals_in=str.splitlines))
