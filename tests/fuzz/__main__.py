"""``python -m tests.fuzz --programs 2000 --seed S --json``: random modules and scripts against plain torch.

Prints every failure with its seed and, shrunk, its source; at the end the counts and the rate of refusals. A seed is
tried again by ``--seed S --programs 1``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from tests.fuzz.judged import judged, judged_alone, shrunk
from tests.fuzz.program import Program, program
from tests.support.forked import warm_up
from tests.support.judge import Verdict


def report_of(found: Program, verdict: Verdict, *, shrink: bool) -> dict[str, str]:
    """A failure for a reader: seed, setting, message, source."""
    if judged_alone(found).outcome != "failed":
        verdict = Verdict(**verdict.as_json() | {"message": f"only after the programs before it: {verdict.message}"})
    elif shrink:
        found, verdict = shrunk(found, verdict)
    return verdict.as_json() | {"source": found.source}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--json", action="store_true", help="one object at the end instead of lines")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--failures-max", type=int, default=20, help="stop after so many")
    arguments = parser.parse_args()
    warm_up()
    start, outcomes, refusals, failures = time.monotonic(), Counter[str](), Counter[str](), []
    seeds = range(arguments.seed, arguments.seed + arguments.programs)
    for found, verdict in judged(seeds, program):
        outcomes[verdict.outcome] += 1
        if verdict.outcome == "refused":
            refusals[verdict.message] += 1
        if verdict.outcome == "failed":
            failures.append(report_of(found, verdict, shrink=not arguments.no_shrink))
            if not arguments.json:
                print("\n".join(f"{key}: {value}" for key, value in failures[-1].items()), flush=True)
            if len(failures) >= arguments.failures_max:
                break
    judged_total = sum(outcomes.values())
    summary = {
        "programs": judged_total,
        "first_seed": arguments.seed,
        **{outcome: outcomes[outcome] for outcome in ("equal", "refused", "failed")},
        "refusal_rate": round(outcomes["refused"] / max(1, judged_total), 4),
        "seconds": round(time.monotonic() - start, 1),
    }
    if arguments.json:
        print(json.dumps({**summary, "refusals": refusals.most_common(), "failures": failures}, indent=1))
    else:
        print(" ".join(f"{key}={value}" for key, value in summary.items()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
