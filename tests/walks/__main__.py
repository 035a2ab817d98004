"""``python -m tests.walks --walks 500 --seed S --json``: random sequences of an engine's calls against plain torch.

Prints every failure with its seed and, shrunk, as a script that runs; at the end the counts, and with ``--refusals``
what was refused. A seed is tried again by ``--seed S --walks 1``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from tests.fuzz.judged import judged, judged_alone, shrunk
from tests.support.daemon import ServedDaemon
from tests.support.forked import warm_up
from tests.support.judge import Verdict
from tests.support.parity import DAEMON_OPTIONS
from tests.walks.walk import Walk, walk


def report_of(found: Walk, verdict: Verdict, *, shrink: bool) -> dict[str, str]:
    if judged_alone(found).outcome != "failed":
        verdict = Verdict(**verdict.as_json() | {"message": f"only after the walks before it: {verdict.message}"})
    elif shrink:
        found, verdict = shrunk(found, verdict)
    return verdict.as_json() | {"source": found.source}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first walk; the others follow")
    parser.add_argument("--json", action="store_true", help="one object at the end instead of lines")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--refusals", action="store_true", help="print what was refused, and how often")
    parser.add_argument("--failures-max", type=int, default=20, help="stop after so many")
    arguments = parser.parse_args()
    warm_up()
    start, outcomes, refusals, failures = time.monotonic(), Counter[str](), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="walks-") as ground:
        tempfile.tempdir = ground
        with closing(ServedDaemon([Path(ground)], *DAEMON_OPTIONS)) as daemon:
            os.environ["INFINITY_IO_SOCKET"] = daemon.socket
            for found, verdict in judged(range(arguments.seed, arguments.seed + arguments.walks), walk):
                outcomes[verdict.outcome] += 1
                if verdict.outcome == "refused":
                    refusals.update(verdict.message.splitlines())
                if verdict.outcome == "failed":
                    failures.append(report_of(found, verdict, shrink=not arguments.no_shrink))
                    if not arguments.json:
                        print("\n".join(f"{key}: {value}" for key, value in failures[-1].items()), flush=True)
                    if len(failures) >= arguments.failures_max:
                        break
        tempfile.tempdir = None
    summary = {
        "walks": sum(outcomes.values()),
        "first_seed": arguments.seed,
        **{outcome: outcomes[outcome] for outcome in ("equal", "refused", "failed")},
        "seconds": round(time.monotonic() - start, 1),
    }
    if arguments.json:
        print(json.dumps({**summary, "failures": failures}, indent=1))
    else:
        print(" ".join(f"{key}={value}" for key, value in summary.items()))
    if arguments.refusals:
        print("\n".join(f"{number} {words[:300]}" for words, number in refusals.most_common()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
