"""Runs unmodified programs with a DeepSpeed configuration and without one, and compares what they return bit for bit.

``infinity as-deepspeed python -m tests.infinity.deepspeed.unmodified.run [NAME…] [--settings SETTING…]``: each program
runs in a process of its own, which is forked from one that has imported all libraries. A name is a beginning.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.warm_daemons import use_if_told

Program = Callable[[dict[str, Any] | None], Mapping[str, Any]]
"""It gets what a script would read from the file of ``--deepspeed``, or None, and returns numbers and tensors."""
PROGRAMS: Final[dict[str, Program]] = {}
TOPICS: Final = ("trainers", "accelerated", "adapters", "loaded", "loops")
TIMEOUT_S: Final = 200
WITHIN: Final = 1e-4
"""Of the largest: an optimizer that divides by the size of gradients makes much of the last bits of small ones."""
PARTING_S: Final = 30.0
"""A rank waits so long for the others' answers before it ends."""
_CPU, _NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "swap"}
_SMALL = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 10_000, "reduce_bucket_size": 10_000}
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "z2": {"stage": 2},
    "z2-cpu": {"stage": 2, "offload_optimizer": _CPU},
    "z3": {"stage": 3, **_SMALL},
    "z3-cpu": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU},
    "z3-nvme": {"stage": 3, "offload_optimizer": _NVME, "offload_param": _NVME, **_SMALL},
}


DECIDED: Final[dict[str, tuple[str, str]]] = {
    "adapters.adalora": (
        "TypeError: .*NoneType|RuntimeError: The size of tensor a",
        "PEFT asks for gradients when Accelerate's backward has stepped; it is logged, and the real one fails, too",
    ),
    "adapters.trained_as[embeddings]": (
        r".*base_layer.weight: only in one",
        "at stage 3 the Trainer saves adapters without what is frozen, with the real one, too",
    ),
    "adapters.two_adapters": (
        "WeightsError: .* was frozen when the model was sharded",
        "what is unfrozen behind initialize is refused with the remedy",
    ),
    "trainers.with_the_optim_itself[adafactor]": (
        "ConfigError: optimizer = 'Adafactor': keeps exp_avg_sq_row",
        "its states are of rows: it is refused",
    ),
    "trainers.with_arguments[compiled]": (
        r"EngineStateError: compile\(\): .* use zero_optimization.stage 2",
        "stage 3 is refused with the remedy",
    ),
    "trainers.with_arguments[unclipped]": (
        r"\.history\[\d\]\.grad_norm: only in one",
        "without clipping plain torch has no norm to log",
    ),
    "trainers.trained_twice": (
        "EngineStateError: the engine of LlamaForCausalLM was destroyed, .* write trainer.model_wrapped",
        "the Trainer goes on with the engine that Accelerate has destroyed: it is refused with the remedy",
    ),
    "trainers.an_optimizer_that_is_passed": (
        r"ConfigError: trainer.optimizer = 'AdamW': under .* in a subclass whose create_optimizer\(\) returns it",
        "the Trainer drops it and trains with one of its arguments: it is refused with the remedy",
    ),
    **{
        f"accelerated.stepped_by[{kind}]": (
            f'ConfigError: optimizer = .* {problem}.* write "zero_force_ds_cpu_optimizer": false',
            "Accelerate would step by an Adam of its groups: it is refused with the remedy",
        )
        for kind, problem in {"a_subclass": "is none of", "sgd": "is none of", "hooked": "has hooks"}.items()
    },
    "accelerated.stepped_by[stepped_before]": (
        "ConfigError: optimizer = .* has state",
        "state is sharded from step 0 on: it is refused",
    ),
    "accelerated.clipped_to[another_norm]": (
        r"ConfigError: gradient_clipping = 1.0: .* write \"gradient_clipping\": 0.3",
        "Accelerate passes the norm on to nobody: it is refused with the remedy",
    ),
    "accelerated.clipped_to[not_configured]": (
        r"ConfigError: gradient_clipping = 0.0: .* write \"gradient_clipping\": 1 ",
        "Accelerate passes the norm on to nobody: it is refused with the remedy",
    ),
    "accelerated.clipped_to[another_type]": (
        "ConfigError: norm_type = inf: .* leave norm_type out",
        "Accelerate passes the type on to nobody: it is refused with the remedy",
    ),
    "accelerated.clipped_to[a_part]": (
        "ConfigError: parameters = 'without lm_head.weight': .* pass model.parameters",
        "Accelerate passes the parameters on to nobody: it is refused with the remedy",
    ),
    **{
        f"accelerated.two_models_one_accelerator[{which}]": (
            "EngineStateError: the backward of .* make one Accelerator for each model",
            "Accelerate steps the first engine alone: it is refused with the remedy",
        )
        for which in ("the_second", "both")
    },
    "accelerated.prepared_apart": (
        r"EngineStateError: backward\(\) needs an optimizer, .* prepare\(model, optimizer\)",
        "the engine is made without the optimizer: it is refused with the remedy",
    ),
    "loaded.from_a_config": (
        r"\.(history|logits|weights)",
        "under ZeRO-3 Transformers makes all weights anew, with other random numbers; the real one's losses are ours",
    ),
    "loaded.of_another_shape": (
        "RuntimeError: Error.s. in loading state_dict",
        "under ZeRO-3 Transformers heeds no ignore_mismatched_sizes, with the real one, too",
    ),
}
"""What differs by the program's name: by which pattern each line is known, and why."""


def program(made: Program) -> Program:
    """Register it by its module and name."""
    PROGRAMS[f"{made.__module__.rpartition('.')[2]}.{made.__name__}"] = made
    return made


def programs_over(**values: Any) -> Callable[[Any], Any]:
    """One program for each value, which it gets behind the configuration."""

    def register(made: Any) -> Any:
        for label, value in values.items():

            def bound(given: dict[str, Any] | None, value: Any = value) -> Any:
                return made(given, value)

            bound.__module__, bound.__name__ = made.__module__, f"{made.__name__}[{label}]"
            program(bound)
        return made

    return register


def config_of(setting: str) -> dict[str, Any] | None:
    """The configuration as a file has it, with the "auto"s of trainers; None for ``plain``."""
    if setting == "plain":
        return None
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {**SETTINGS[setting], "stage3_gather_16bit_weights_on_model_save": True}
    return {**dict.fromkeys(auto, "auto"), "zero_optimization": zero}


def load_programs() -> None:
    """Fill ``PROGRAMS``."""
    for topic in TOPICS:
        importlib.import_module(f"tests.infinity.deepspeed.unmodified.{topic}")


def answer(name: str, setting: str, num_ranks: int = 1) -> dict[str, Any]:
    """What the program returns on rank 0, in processes of its own, or the first rank's error."""
    with tempfile.TemporaryDirectory() as place, socket.socket() as probe:
        directory = Path(place)
        (directory / "swap").mkdir()
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": f"{num_ranks}", "LOCAL_WORLD_SIZE": f"{num_ranks}", "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(probe.getsockname()[1])
        probe.close()
        pids = []
        for rank in range(num_ranks):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.environ |= {**world, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
                if setting == "plain":
                    os.environ["ACCELERATE_USE_CPU"] = "true"  # it starts several ranks on GPUs alone otherwise
                _child(name, setting, directory)
        _wait(pids, directory)
        answers = []
        for rank in range(num_ranks):
            path = directory / f"answer-{rank}.pt"
            ended = {"error": "the process ended", "log": (directory / f"log-{rank}").read_text()[-3000:]}
            answers.append(torch.load(path, weights_only=False) if path.exists() else ended)
        return next((each for each in answers if "error" in each), answers[0])


def _wait(pids: list[int], directory: Path) -> None:
    """Until all have ended, or one has answered and the others have had time to: what waits inside a library for a rank
    that is gone hears no alarm."""
    left, until, has_answer = set(pids), time.monotonic() + TIMEOUT_S + PARTING_S, False
    while left and time.monotonic() < until:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        if not has_answer and any(directory.glob("answer-*")):
            has_answer, until = True, time.monotonic() + 2 * PARTING_S
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(name: str, setting: str, directory: Path) -> None:
    os.chdir(directory)
    rank = os.environ["RANK"]
    log = os.open(f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(TIMEOUT_S)
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = dict(PROGRAMS[name](config_of(setting)))
    except BaseException as error:  # noqa: BLE001 (it is the answer)
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    torch.save(found, f"answer-{rank}.pt")
    until = time.monotonic() + PARTING_S
    while len(list(Path().glob("answer-*"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < until:
        time.sleep(0.01)  # others may still be in the last collective, of which plain torch leaves nobody out
    sys.stdout.flush()
    os._exit(0)


def _give_up(_number: int, _frame: object) -> None:
    raise TimeoutError(f"no answer within {TIMEOUT_S} s")


def differences(plain: Any, ours: Any, place: str = "", *, within: float = 0.0) -> list[str]:
    """Where the bits are others, or the values, by more than ``within`` of the largest."""
    if isinstance(plain, Mapping):
        missing = [f"{place}.{key}: only in one" for key in plain.keys() ^ ours.keys()]
        return missing + [
            line
            for key in plain
            if key in ours
            for line in differences(plain[key], ours[key], f"{place}.{key}", within=within)
        ]
    if isinstance(plain, (list, tuple)):
        if len(plain) != len(ours):
            return [f"{place}: {len(plain)} entries, found {len(ours)}"]
        pairs = enumerate(zip(plain, ours, strict=True))
        return [
            line for at, (each, other) in pairs for line in differences(each, other, f"{place}[{at}]", within=within)
        ]
    if isinstance(plain, torch.Tensor):
        if plain.shape != ours.shape or plain.dtype != ours.dtype:
            return [f"{place}: {plain.dtype} {tuple(plain.shape)}, found {ours.dtype} {tuple(ours.shape)}"]
        if torch.equal(plain, ours):
            return []
        apart = (plain.double() - ours.double()).abs().max().item()
        allowed = within * plain.double().abs().max().item()
        return [] if apart <= allowed else [f"{place}: tensors differ by {apart:.2e}"]
    if plain == ours or (plain != plain and ours != ours):
        return []
    is_close = isinstance(plain, float) and isinstance(ours, float) and math.isclose(plain, ours, rel_tol=within)
    return [] if is_close else [f"{place}: {plain!r} != {ours!r}"]


def undecided(name: str, lines: list[str]) -> list[str]:
    """Of the lines those that no decision speaks of."""
    pattern = DECIDED.get(name, ("(?!)", ""))[0]
    return [line for line in lines if not re.match(pattern, line)]


def verdict(plain: Mapping[str, Any], ours: Mapping[str, Any], num_ranks: int = 1) -> list[str]:
    """Empty if the bits are the same. On several ranks gradients of micro-batches are summed in another order."""
    if "error" in plain:
        return [f"plain: {plain['error']}"]
    return [ours["error"]] if "error" in ours else differences(plain, ours, within=0.0 if num_ranks == 1 else WITHIN)


def main() -> int:
    use_if_told()
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--num-ranks", type=int, default=1, help="plain is then torch's DistributedDataParallel")
    parser.add_argument("--traces", action="store_true")
    parser.add_argument("--json", type=Path, help="verdicts are added to it; those that it has are not run again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load_programs()
    kept = options.json is not None and options.json.exists()
    found: dict[str, dict[str, list[str]]] = json.loads(options.json.read_text()) if kept else {}
    for name in [each for each in PROGRAMS if not options.names or each.startswith(tuple(options.names))]:
        missing = [setting for setting in options.settings if setting not in found.setdefault(name, {})]
        plain = answer(name, "plain", options.num_ranks) if missing else {}
        for setting in missing:
            ours = answer(name, setting, options.num_ranks)
            found[name][setting] = lines = verdict(plain, ours, options.num_ranks)
            told = f"{len(lines)} differ" if undecided(name, lines) else f"as decided: {DECIDED.get(name, ('', ''))[1]}"
            print(f"{name} {setting}: {told if lines else 'equal'}", flush=True)
            for line in lines[:4]:
                print(f"    {line[:600]}", flush=True)
            if options.traces:
                print(ours.get("trace", plain.get("trace", "")), ours.get("log", ""), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    every = [(lines, undecided(name, lines)) for name, each in found.items() for lines in each.values()]
    equal, open_ = sum(not lines for lines, _ in every), sum(bool(rest) for _, rest in every)
    print(f"{len(every)} runs: {equal} equal, {len(every) - equal - open_} as decided, {open_} open")
    return int(bool(open_))


if __name__ == "__main__":
    from tests.infinity.deepspeed.unmodified import run  # whose list the programs fill, not __main__'s

    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(run.main())
