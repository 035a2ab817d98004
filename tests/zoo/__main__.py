"""``python -m tests.zoo [NAME ...] --ways init pretrained --settings each-bf16``: Transformers' architectures, tiny.

Each is judged against plain torch: bits equal, refused in words, or failed. What plain torch has no small model of that
runs counts as "not built". ``--num-ranks 2``: on as many ranks, against a loop that averages as DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator
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
    wanted: queue.SimpleQueue[tuple[Case, Setting]] = queue.SimpleQueue()
    for name, case in cases_of(MODULE).by_name.items():
        model, _, way = name.partition("/")
        if way in arguments.ways and (not arguments.names or model in arguments.names):
            for setting in arguments.settings:
                wanted.put((case, replace(SETTINGS[setting], dialect=way == "pretrained")))
    counts = Counter[str]()
    for verdict in _judged(wanted, arguments.jobs, arguments.num_ranks):
        outcome = "not built" if verdict.error_type == NOT_BUILT else verdict.outcome
        counts[outcome] += 1
        if arguments.json:
            print(json.dumps(verdict.as_json() | {"outcome": outcome}), flush=True)
        elif outcome in ("refused", "failed"):
            print(f"{verdict.setting} {verdict.script}: {outcome}, {verdict.message}", flush=True)
    if not arguments.json:
        print(" ".join(f"{outcome.replace(' ', '_')}={number}" for outcome, number in sorted(counts.items())))
    return 1 if counts["failed"] or not counts["equal"] else 0


def _judged(wanted: queue.SimpleQueue[tuple[Case, Setting]], num_jobs: int, num_ranks: int) -> Iterator[Verdict]:
    """As they come, from so many servers."""
    found: queue.SimpleQueue[Verdict | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            with Judges(MODULE) as judges:
                while True:
                    case, setting = wanted.get_nowait()
                    found.put(judges.verdict(MODULE, case, setting, num_ranks=num_ranks))
        except queue.Empty:
            found.put(None)
        except BaseException as error:  # noqa: BLE001 (whoever takes the verdicts raises it)
            found.put(error)

    for _ in range(num_jobs):
        threading.Thread(target=work, daemon=True).start()
    num_working = num_jobs
    while num_working:
        verdict = found.get()
        if isinstance(verdict, BaseException):
            raise verdict
        if verdict is None:
            num_working -= 1
        else:
            yield verdict


if __name__ == "__main__":
    sys.exit(main())
