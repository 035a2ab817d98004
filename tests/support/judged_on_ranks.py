"""Judge one script on several ranks of this machine: each compares itself with plain torch on as many ranks."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch.distributed as dist

from tests.support.cases import Case
from tests.support.forked import Child, Say
from tests.support.judge import Verdict, judge
from tests.support.world import Setting

TIMEOUT_S: Final = 100.0
PEER_TIMEOUT: Final = datetime.timedelta(seconds=40)


def judged_on_ranks(case: Case, setting: Setting, *, num_ranks: int = 2) -> Verdict:
    """Fork the ranks and wait for their verdicts with a deadline; the first that failed, or rank 0's."""
    with tempfile.TemporaryDirectory(prefix="infinity-ranks-") as name:
        directory = Path(name)
        (directory / "swap").mkdir()
        children = [Child(_rank(case, setting, rank, num_ranks, directory)) for rank in range(num_ranks)]
        verdicts = []
        for rank, child in enumerate(children):
            text = child.read_line(TIMEOUT_S)
            end = child.end()
            if text is None:
                verdicts.append(Verdict(script=case.name, setting=str(setting), outcome="failed", message=end))
            else:
                verdicts.append(Verdict(**json.loads(text)))
            if verdicts[-1].outcome == "failed":
                verdicts[-1] = replace(verdicts[-1], message=f"rank {rank}: {verdicts[-1].message}")
    if len({verdict.outcome for verdict in verdicts} - {"failed"}) > 1:
        told = " / ".join(f"{verdict.outcome} {verdict.message}" for verdict in verdicts)
        return replace(verdicts[0], outcome="failed", message=f"ranks differ: {told}")
    failed = [verdict for verdict in verdicts if verdict.outcome == "failed"]
    if not failed:
        return verdicts[0]
    return replace(failed[0], message="\n".join(verdict.message for verdict in failed))


def _rank(case: Case, setting: Setting, rank: int, num_ranks: int, directory: Path) -> Callable[[Say], None]:
    def work(say: Say) -> None:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ.update({name: str(value) for name, value in places.items()})
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=num_ranks, timeout=PEER_TIMEOUT
        )
        verdict = judge(
            case.script,
            setting,
            name=case.name,
            about=case.about,
            by_torch=case.by_torch,
            writes=case.writes,
            swap_dir=str(directory / "swap"),
        )
        say(json.dumps(verdict.as_json()))

    return work
