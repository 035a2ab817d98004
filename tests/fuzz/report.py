"""What a run over seeds comes to: counts, and each failure shrunk, for a reader or as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from tests.fuzz.judged import Some, judged, judged_alone, shrunk
from tests.support.forked import warm_up
from tests.support.judge import Verdict
from tests.support.one_daemon import beside_a_daemon


def report(
    make: Callable[..., Some],
    noun: str,
    *,
    about: str | None,
    number: int,
    refusals_in: Callable[[str], Sequence[str]] = lambda message: [message],
) -> int:
    """The command ``python -m tests.…``; its exit code, 1 if anything failed.

    Args:
        make: what a seed gives, for ``num_ranks``.
        noun: what that is called, many of them.
        number: how many are judged unless ``--NOUN`` says.
        refusals_in: the refusals that a verdict's message tells of.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{noun}", dest="number", type=int, default=number)
    parser.add_argument("--seed", type=int, default=0, help=f"of the first of the {noun}; the others follow")
    parser.add_argument("--num-ranks", type=int, default=1, help="on which each is judged")
    parser.add_argument("--json", action="store_true", help="one object at the end instead of lines")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--refusals", action="store_true", help="print what was refused, and how often")
    parser.add_argument("--failures-max", type=int, default=20, help="stop after so many")
    arguments = parser.parse_args()
    warm_up()
    start, outcomes, refusals, failures = time.monotonic(), Counter[str](), Counter[str](), []
    with beside_a_daemon():
        seeds = range(arguments.seed, arguments.seed + arguments.number)
        for found, verdict in judged(seeds, partial(make, num_ranks=arguments.num_ranks)):
            outcomes[verdict.outcome] += 1
            if verdict.outcome == "refused":
                refusals.update(refusals_in(verdict.message))
            if verdict.outcome == "failed":
                failures.append(_failure(found, verdict, noun, shrink=not arguments.no_shrink))
                if not arguments.json:
                    print("\n".join(f"{key}: {value}" for key, value in failures[-1].items()), flush=True)
                if len(failures) >= arguments.failures_max:
                    break
    judged_total = sum(outcomes.values())
    summary = {
        noun: judged_total,
        "first_seed": arguments.seed,
        **{outcome: outcomes[outcome] for outcome in ("equal", "refused", "failed")},
        "refusal_rate": round(outcomes["refused"] / max(1, judged_total), 4),
        "seconds": round(time.monotonic() - start, 1),
    }
    if arguments.json:
        print(json.dumps({**summary, "refusals": refusals.most_common(), "failures": failures}, indent=1))
    else:
        print(" ".join(f"{key}={value}" for key, value in summary.items()))
        if arguments.refusals:
            print("\n".join(f"{times} {words[:300]}" for words, times in refusals.most_common()))
    return 1 if failures else 0


def _failure(found: Some, verdict: Verdict, noun: str, *, shrink: bool) -> dict[str, str]:
    """For a reader: seed, setting, message, source."""
    if judged_alone(found).outcome != "failed":
        verdict = Verdict(**verdict.as_json() | {"message": f"only after the {noun} before it: {verdict.message}"})
    elif shrink:
        found, verdict = shrunk(found, verdict)
    return verdict.as_json() | {"source": found.source}
