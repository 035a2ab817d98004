"""Runs the cases in one process a rank, whatever ``import deepspeed`` is there, and prints what they returned as JSON.

``python -m tests.infinity.deepspeed.differential.run [NAME…]`` under a real DeepSpeed's Python gives the facts,
under ``infinity as-deepspeed`` what is held against them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.multiprocessing.spawn import spawn

from tests.infinity.deepspeed.differential.case import CASES, Case, plain
from tests.support.warm_daemons import use_if_told

TOPICS: Final = (
    "configuration", "schedules", "starting", "training", "backwards", "precision", "buffers", "parameters", "state",
    "leaves", "checkpoints", "moments", "defaults", "parts", "collectives", "found", "names", "tools",
    "idioms", "published",
)  # fmt: skip
TIMEOUT_S: Final = 60


def load_cases() -> None:
    """Fill ``CASES``."""
    for topic in TOPICS:
        importlib.import_module(f"tests.infinity.deepspeed.differential.{topic}")


def main(words: Sequence[str]) -> None:
    """The command."""
    use_if_told()
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="beginnings of the names of cases; by default all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, choices=(1, 2))
    parser.add_argument("--quiet", action="store_true", help="do not list the cases that failed")
    parser.add_argument("--plain", action="store_true", help="an engine of plain torch, in the cases that it can run")
    parser.add_argument("--exact", action="store_true", help="the names are whole ones")
    options = parser.parse_args(words)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    load_cases()
    if options.exact:
        chosen = [CASES[name] for name in options.names]
    else:
        chosen = [each for each in CASES.values() if not options.names or each.name.startswith(tuple(options.names))]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for ranks in (1, 2) if options.ranks is None else (options.ranks,):
            names = [each.name for each in chosen if each.ranks == ranks]
            if names:
                found |= _run_ranks(names, ranks, Path(directory) / str(ranks), plainly=options.plain)
    options.out.write_text(json.dumps(found, indent=0, sort_keys=True))
    failed = [name for name, each in found.items() if "error" in each]
    print(f"{len(found)} cases, {len(failed)} failed", file=sys.stderr)
    for name in [] if options.quiet else failed:
        print(name, found[name]["error"].strip().splitlines()[-1][:300], file=sys.stderr)


def _run_ranks(names: list[str], ranks: int, directory: Path, *, plainly: bool) -> dict[str, Any]:
    directory.mkdir()
    if ranks == 1:
        _rank(0, 1, names, str(directory), plainly)
    else:
        with contextlib.suppress(Exception):  # ranks that end early leave the cases that they have answered
            spawn(_rank, (ranks, names, str(directory), plainly), nprocs=ranks)  # type: ignore[no-untyped-call]
    logs = [_read_log(directory / f"rank-{rank}") for rank in range(ranks)]
    return {name: _together([log.get(name) for log in logs]) for name in names}


def _read_log(path: Path) -> dict[str, Any]:
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def _together(answers: list[Any]) -> dict[str, Any]:
    """Of one rank its answer, of two both; an error, or an end before the answer, is the whole case's."""
    errors = [each["error"] if each else "the process ended" for each in answers if each is None or "error" in each]
    if errors:
        return {"error": errors[0]}
    values = [each["value"] for each in answers]
    return {"value": values[0] if len(values) == 1 else values, "seconds": round(max(a["seconds"] for a in answers), 2)}


def _rank(rank: int, ranks: int, names: list[str], directory: str, plainly: bool) -> None:
    """As test suites start ranks: no launcher, and the process group begun by hand before any engine."""
    import deepspeed  # type: ignore[import-not-found]

    load_cases()
    importlib.import_module("torch._dynamo")  # as the first optimizer does
    gc.freeze()  # between cases only what cases have made is looked at: 5 ms, and not 300
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    torch.set_num_threads(1)
    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=f"file://{directory}/rendezvous",  # a port may be another's by the time that it is asked for
        rank=rank,
        world_size=ranks,
        auto_mpi_discovery=False,
    )
    signal.signal(signal.SIGALRM, _give_up)
    with (Path(directory) / f"rank-{rank}").open("w", buffering=1) as log:
        for name in names:
            own = Path(directory) / re.sub(r"\W", "-", name)  # DeepSpeed looks for its files by patterns
            own.mkdir(exist_ok=True)
            print(json.dumps([name, _answer(CASES[name], own, plainly=plainly)]), file=log)
            gc.collect()
    os._exit(0) if ranks > 1 else None


def _answer(each: Case, directory: Path, *, plainly: bool) -> dict[str, Any]:
    from tests.infinity.deepspeed.differential import nets

    nets.MADE = [] if plainly else None
    torch.manual_seed(0)
    start = time.monotonic()
    try:
        with _deadline():
            value = plain(each.program(directory))
    except (Exception, SystemExit):  # noqa: BLE001 (the other cases go on)
        return {"error": traceback.format_exc()}
    if nets.MADE == []:
        return {"error": "no engine of plain torch was asked for"}
    return {"value": value, "seconds": time.monotonic() - start}


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    signal.alarm(TIMEOUT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def _give_up(_number: int, _frame: object) -> None:
    raise TimeoutError(f"no answer within {TIMEOUT_S} s")


if __name__ == "__main__":
    main(sys.argv[1:])
