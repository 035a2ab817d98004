"""``python -m tests.zoo [NAME ...] --ways init pretrained --settings each-bf16``: Transformers' architectures, tiny.

Each is judged against plain torch: bits equal, refused in words, or failed. What plain torch has no small model of that
runs counts as "not built", and what it does not train in that setting as "plain torch fails". ``--num-ranks 2``: on as
many ranks, against a loop that averages as DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace

from tests.odd.on_ranks import SETTINGS
from tests.support.cases import Case, cases_of
from tests.support.forkserver import Judges
from tests.support.judge import Verdict
from tests.support.world import Setting
from tests.zoo.models import WAYS

MODULE = "tests.zoo.models"
NOT_BUILT = "NotBuiltError"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a model_type, as qwen3_moe (default: all)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="how the model comes")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["each-fp32"], metavar="SETTING")
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--json", action="store_true", help="one verdict a line; else what is not equal, and the counts"
    )
    arguments = parser.parse_args()
    wanted = []
    for name, case in cases_of(MODULE).by_name.items():
        model, _, way = name.partition("/")
        if way in arguments.ways and (not arguments.names or model in arguments.names):
            settings = [SETTINGS[word] for word in arguments.settings]
            wanted += [(case, replace(setting, dialect=way == "pretrained")) for setting in settings]
    counts = Counter[str]()
    for verdict in _judged(wanted, arguments.jobs, arguments.num_ranks):
        outcome = _outcome_of(verdict)
        counts[outcome] += 1
        if arguments.json:
            print(json.dumps(verdict.as_json() | {"outcome": outcome}), flush=True)
        elif outcome not in ("equal", "not built"):
            print(f"{verdict.setting} {verdict.script}: {outcome}, {verdict.message}", flush=True)
    if not arguments.json:
        print(" ".join(f"{outcome.replace(' ', '_')}={number}" for outcome, number in sorted(counts.items())))
    return 1 if counts["failed"] or not counts["equal"] else 0


def _outcome_of(verdict: Verdict) -> str:
    """Only what has trained is "equal" here."""
    if verdict.error_type == NOT_BUILT:
        return "not built"
    return "plain torch fails" if verdict.outcome == "equal" and verdict.message else verdict.outcome


def _judged(wanted: Sequence[tuple[Case, Setting]], num_jobs: int, num_ranks: int) -> Iterator[Verdict]:
    """As they come, from so many servers."""
    idle: queue.SimpleQueue[Judges] = queue.SimpleQueue()

    def verdict(case: Case, setting: Setting) -> Verdict:
        judges = idle.get()
        try:
            return judges.verdict(MODULE, case, setting, num_ranks=num_ranks)
        finally:
            idle.put(judges)

    with ExitStack() as stack:
        for _ in range(num_jobs):
            idle.put(stack.enter_context(Judges(MODULE)))
        pool = ThreadPoolExecutor(num_jobs)
        stack.callback(pool.shutdown, cancel_futures=True)  # whatever ends the run ends it now
        for done in as_completed([pool.submit(verdict, *each) for each in wanted]):
            yield done.result()


if __name__ == "__main__":
    sys.exit(main())
