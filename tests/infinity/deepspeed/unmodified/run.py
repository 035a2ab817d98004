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
import os
import re
import signal
import socket
import sys
import tempfile
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


def answer(name: str, setting: str) -> dict[str, Any]:
    """What the program returns in a process of its own, or its error."""
    with tempfile.TemporaryDirectory() as directory:
        pid = os.fork()
        if pid == 0:
            _child(name, setting, Path(directory))
        os.waitpid(pid, 0)
        path = Path(directory) / "answer.pt"
        if not path.exists():
            return {"error": "the process ended", "log": (Path(directory) / "log").read_text()[-3000:]}
        return torch.load(path, weights_only=False)


def _child(name: str, setting: str, directory: Path) -> None:
    os.chdir(directory)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    Path("swap").mkdir()
    log = os.open("log", os.O_WRONLY | os.O_CREAT)
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
    torch.save(found, "answer.pt")
    sys.stdout.flush()
    os._exit(0)


def _give_up(_number: int, _frame: object) -> None:
    raise TimeoutError(f"no answer within {TIMEOUT_S} s")


def differences(plain: Any, ours: Any, place: str = "") -> list[str]:
    """Where the bits are others."""
    if isinstance(plain, Mapping):
        missing = [f"{place}.{key}: only in one" for key in plain.keys() ^ ours.keys()]
        return missing + [
            line for key in plain if key in ours for line in differences(plain[key], ours[key], f"{place}.{key}")
        ]
    if isinstance(plain, (list, tuple)):
        if len(plain) != len(ours):
            return [f"{place}: {len(plain)} entries, found {len(ours)}"]
        pairs = enumerate(zip(plain, ours, strict=True))
        return [line for at, (each, other) in pairs for line in differences(each, other, f"{place}[{at}]")]
    if isinstance(plain, torch.Tensor):
        if plain.shape != ours.shape or plain.dtype != ours.dtype:
            return [f"{place}: {plain.dtype} {tuple(plain.shape)}, found {ours.dtype} {tuple(ours.shape)}"]
        if torch.equal(plain, ours):
            return []
        return [f"{place}: tensors differ by {(plain.double() - ours.double()).abs().max().item():.2e}"]
    return [] if plain == ours or (plain != plain and ours != ours) else [f"{place}: {plain!r} != {ours!r}"]


def undecided(name: str, lines: list[str]) -> list[str]:
    """Of the lines those that no decision speaks of."""
    pattern = DECIDED.get(name, ("(?!)", ""))[0]
    return [line for line in lines if not re.match(pattern, line)]


def verdict(plain: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Empty if the bits are the same."""
    if "error" in plain:
        return [f"plain: {plain['error']}"]
    return [ours["error"]] if "error" in ours else differences(plain, ours)


def main() -> int:
    use_if_told()
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--traces", action="store_true")
    parser.add_argument("--json", type=Path, help="verdicts are added to it; those that it has are not run again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load_programs()
    kept = options.json is not None and options.json.exists()
    found: dict[str, dict[str, list[str]]] = json.loads(options.json.read_text()) if kept else {}
    for name in [each for each in PROGRAMS if not options.names or each.startswith(tuple(options.names))]:
        missing = [setting for setting in options.settings if setting not in found.setdefault(name, {})]
        plain = answer(name, "plain") if missing else {}
        for setting in missing:
            ours = answer(name, setting)
            found[name][setting] = lines = verdict(plain, ours)
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
