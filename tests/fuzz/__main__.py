"""``python -m tests.fuzz --programs 2000 --seed S --json``: random modules and scripts against plain torch.

With ``--num-ranks 2`` on as many ranks, against a loop that averages as DDP. Prints every failure with its seed and,
shrunk, its source; at the end the counts and the rate of refusals. A seed is tried again by ``--seed S --programs 1``.
"""

from __future__ import annotations

import sys

from tests.fuzz.program import program
from tests.fuzz.report import report

if __name__ == "__main__":
    sys.exit(report(program, "programs", about=__doc__, number=2000))
