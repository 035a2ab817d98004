"""Judge on several ranks of this machine: each compares itself with plain torch on as many ranks."""

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
PEER_TIMEOUT_S: Final = 40.0


def judged_on_ranks(case: Case, setting: Setting, *, num_ranks: int = 2) -> Verdict:
    """One script's verdict on ``num_ranks`` ranks."""

    def judge_one(directory: Path) -> Verdict:
        return judge(
            case.script,
            setting,
            name=case.name,
            about=case.about,
            by_torch=case.by_torch,
            writes=case.writes,
            swap_dir=str(directory),
        )

    return verdict_of_ranks(judge_one, case.name, str(setting), num_ranks=num_ranks)


def verdict_of_ranks(
    judge_one: Callable[[Path], Verdict],
    name: str,
    setting: str,
    *,
    num_ranks: int,
    timeout_s: float = TIMEOUT_S,
    peer_timeout_s: float = PEER_TIMEOUT_S,
) -> Verdict:
    """Fork the ranks and wait for their verdicts with a deadline; the first that failed, or rank 0's.

    Args:
        judge_one: what each rank does, in a directory that all share.
        timeout_s: for all of it; ``peer_timeout_s``: how long a rank waits for the others in a collective.
    """
    with tempfile.TemporaryDirectory(prefix="infinity-ranks-") as ground:
        directory = Path(ground)
        (directory / "shared").mkdir()
        children = [Child(_rank(judge_one, rank, num_ranks, directory, peer_timeout_s)) for rank in range(num_ranks)]
        verdicts = []
        for rank, child in enumerate(children):
            text = child.read_line(timeout_s)
            end = child.end()
            if text is None:
                verdicts.append(Verdict(script=name, setting=setting, outcome="failed", message=end))
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


def _rank(
    judge_one: Callable[[Path], Verdict], rank: int, num_ranks: int, directory: Path, peer_timeout_s: float
) -> Callable[[Say], None]:
    def work(say: Say) -> None:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ["INFINITY_TIMEOUT_S"] = str(peer_timeout_s)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=peer_timeout_s),
        )
        say(json.dumps(judge_one(directory / "shared").as_json()))

    return work
