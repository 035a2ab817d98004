"""``python -m tests.odd.on_ranks MODULE...``: cases on two ranks, each compared with plain torch that averages as DDP.

One verdict a line as JSON goes to ``--out``, which a later run goes on from; what failed is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.odd.table import modules
from tests.support.cases import cases_of
from tests.support.forkserver import Judges
from tests.support.world import Setting

SETTINGS: Final = {
    str(setting): setting
    for setting in (
        *(Setting(stage=stage, bf16=bf16) for stage in (0, 1, 2) for bf16 in (False, True)),
        *(Setting(thresholds=name, bf16=bf16) for name in ("each", "grouped", "default") for bf16 in (False, True)),
        *(Setting(stage=stage, cpu=True, bf16=bf16) for stage in (1, 2, 3) for bf16 in (False, True)),
        *(Setting(stage=stage, nvme=True, bf16=bf16) for stage in (1, 2, 3) for bf16 in (False, True)),
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="each-fp32,stage2-bf16,stage1-fp32", help="of " + ", ".join(SETTINGS))
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--out", type=Path, help="a file of verdicts")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to leave the rest to another run")
    parser.add_argument("modules", nargs="*", help="e.g. state_dicts; default: all")
    arguments = parser.parse_args()
    chosen = [f"tests.odd.test_{name}" for name in arguments.modules] or [*modules(), "tests.odd.test_on_two_ranks"]
    rows = arguments.out.read_text().splitlines() if arguments.out and arguments.out.exists() else []
    done = {(row["file"], row["script"], row["setting"]) for row in map(json.loads, rows)}
    begin = time.monotonic()
    every = [(module, case) for module in chosen for case in cases_of(module).by_name.values()]
    named = [(module, case) for module, case in every if arguments.only in case.name]
    wanted = [(*each, name) for each in named for name in arguments.settings.split(",")]
    with Judges(*chosen) as judges:
        for module, case, name in wanted:
            if (module, case.name, name) in done:
                continue
            if time.monotonic() - begin > arguments.seconds:
                print("there is more to do")
                return 3
            setting = SETTINGS[name]
            if setting.stage not in {each.stage for each in case.settings}:  # where the case demands nothing
                case = replace(case, must="either")
            verdict = judges.verdict(module, case, setting, num_ranks=2)
            if arguments.out:
                with arguments.out.open("a") as stream:
                    stream.write(json.dumps({"file": module, **verdict.as_json()}) + "\n")
            if verdict.outcome == "failed" or not arguments.out:
                print(f"{module} {name} {case.name}: {verdict.outcome} {verdict.message}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
