"""``python -m tests.fuzz --programs 2000 --seed S --json``: random modules and scripts against plain torch.

With ``--num-ranks 2`` on as many ranks, against a loop that averages as DDP. Prints every failure with its seed and,
shrunk, its source; at the end the counts and the rate of refusals. A seed is tried again by ``--seed S --programs 1``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from tests.fuzz.program import program
from tests.fuzz.report import report
from tests.support.one_daemon import beside_a_daemon

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num-ranks", type=int, default=1)
    ranks, sys.argv[1:] = parser.parse_known_args()
    make = partial(program, num_ranks=ranks.num_ranks)
    sys.exit(report(make, "programs", about=__doc__, number=2000, around=beside_a_daemon))
