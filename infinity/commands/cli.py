"""The ``infinity`` command. Each subcommand imports what it needs when it runs, so that ``--help`` is quick.

Exit codes: 0 done, 1 a check or a run failed, 2 wrong usage or configuration, 3 the daemon was lost. ``infinity run``
passes on the exit code of what it ran; a process ended by signal n counts as 128 + n, as in a shell.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from io_daemon.command.interrupt import quiet_interrupt
from io_daemon.command.options import parse_name, parse_path
from io_daemon.command.outcome import outcome
from io_daemon.command.sizes import parse_bytes
from io_daemon.config import from_root

_LAUNCHERS = ("run", "as-deepspeed", "deepspeed")
"""Commands whose words are mostly another command's."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)

    def work() -> int:
        from_root(Path(), "working directory")  # without one torch ends the process in words of its own
        if words[:1] and words[0] in _LAUNCHERS:
            return _launched(words[0], words[1:])
        if words[:1] == ["demo"]:
            return _demo(words[1:])
        parsed = _parser().parse_args(words)
        code: int = parsed.function(parsed)
        return code

    return outcome("infinity", work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="infinity", description="Train models larger than memory from NVMe.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("run", help="torchrun with an I/O daemon for this node", add_help=False)
    commands.add_parser("as-deepspeed", help="a command whose `import deepspeed` is infinity", add_help=False)
    commands.add_parser("deepspeed", help="DeepSpeed's launcher: hostfile, --num_gpus, --include …", add_help=False)
    commands.add_parser(
        "demo",
        help="train a GPT from NVMe in less memory than its state",
        add_help=False,
    )

    doctor = commands.add_parser(
        "doctor",
        help="what this machine offers, and a remedy for each no",
        description="Exit code 1 if a check failed.",
    )
    doctor.add_argument("directories", nargs="*", type=parse_name, metavar="DIR", help="where swap files would go")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(function=_doctor)

    _add_trace(commands)
    _add_plan(commands)
    _add_export(commands)
    _add_import(commands)
    _add_checkpoint(commands)
    config = commands.add_parser(
        "config",
        help="check a configuration, list its keys, print its schema",
        description="What a training configuration may say, and what it comes to.",
    ).add_subparsers(required=True, metavar="COMMAND")
    check = config.add_parser(
        "check",
        help="check a JSON file",
        description="Print it as it is read, and where each value comes from. Exit code 2 if it is refused.",
    )
    check.add_argument("file", metavar="FILE")
    check.add_argument(
        "--world-size",
        type=_count,
        default=1,
        metavar="N",
        help="ranks that will run it (default 1)",
    )
    check.add_argument(
        "--skip-paths",
        action="store_true",
        help="do not look for its directories on this machine",
    )
    check.add_argument(
        "--json",
        action="store_true",
        help="print the configuration as resolved, and where each value comes from, as JSON",
    )
    check.set_defaults(function=_config_check)
    keys = config.add_parser(
        "keys",
        help="every key of the dialect and what becomes of it",
        description="List every key of the dialect: whether it works, is subsumed or refused, and why.",
    )
    keys.add_argument("--json", action="store_true", help="print one JSON array")
    keys.set_defaults(function=_config_keys)
    schema = config.add_parser(
        "schema",
        help="the JSON Schema of the dialect",
        description='Write it to a file and name that in "$schema": editors then complete and check keys.',
    )
    schema.set_defaults(function=_config_schema)
    return parser


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Its arguments; what runs them needs torch and is imported then."""
    trace = commands.add_parser(
        "trace",
        help="write down a training step for `io-daemon bench step`",
        description="What one optimizer step asks of the I/O daemon of a node, and the work between its requests. A "
        "model that fits into memory is trained for a few steps and measured; with --meta or --model-params nothing is "
        "run, and FLOPs are counted. Of several ranks one is recorded, here, without the others.",
    )
    _add_step_arguments(trace)
    trace.add_argument(
        "--host-budget-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="instead of the configuration's, e.g. 64G or 64e9",
    )
    trace.add_argument(
        "--out", type=parse_name, metavar="FILE", help="default: the model's name and .json.gz, in this directory"
    )
    trace.add_argument("--json", action="store_true", help="print what was written as one JSON object")
    trace.set_defaults(function=_trace)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="step time, traffic and memory at several host budgets, before training",
        description="For each host budget, trace a step of the model and replay it on the disk that training will use. "
        "Exit code 1 if none of them can be trained with.",
    )
    _add_step_arguments(plan)
    plan.add_argument("--swap-dir", required=True, type=parse_name, metavar="DIR", help="where swap files will go")
    plan.add_argument(
        "--host-budget-bytes", type=parse_bytes, nargs="+", required=True, metavar="BYTES", help="e.g. 512M 1G 64e9"
    )
    plan.add_argument("--compute-tflops", type=_positive, metavar="N", help="of the accelerators; default: this CPU")
    plan.add_argument(
        "--size", type=parse_bytes, default=8 << 30, metavar="BYTES", help="most bytes to write (default 8G)"
    )
    plan.add_argument("--steps", type=_steps, default=5, metavar="N", help="replayed and measured (default 5)")
    plan.add_argument(
        "--plot",
        type=parse_path,
        metavar="FILE",
        help="step time and traffic against the budget, a picture (.svg, .png)",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON array")
    plan.set_defaults(function=_plan)


def _add_step_arguments(trace: argparse.ArgumentParser) -> None:
    """Which step of which model."""
    trace.add_argument("--config", required=True, metavar="FILE", help="the training configuration (JSON)")
    what = trace.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model-params", type=_positive, metavar="N", help="a Llama-like model of about N parameters, e.g. 70e9"
    )
    what.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="FACTORY() returns (model, batch); model(batch), or model(*batch) of a tuple, returns the loss or "
        "something with .loss",
    )
    trace.add_argument(
        "--meta", action="store_true", help="do not run the model, count its FLOPs (always so with --model-params)"
    )
    trace.add_argument(
        "--sequence", type=_count, default=4096, metavar="N", help="tokens a sample, with --model-params (default 4096)"
    )
    trace.add_argument(
        "--nnodes", type=_count, default=1, metavar="N", help="nodes that will train it, as for torchrun (default 1)"
    )
    trace.add_argument(
        "--nproc-per-node", type=_count, default=1, metavar="L", help="ranks on each node, as for torchrun (default 1)"
    )
    trace.add_argument(
        "--threads",
        type=_count,
        metavar="N",
        help="that compute in a rank (default: as training does: torch's own number, and 1 with several ranks a node)",
    )
    trace.add_argument(
        "--no-init",
        action="store_true",
        help="training builds the model without infinity.Init, whose staging area takes an eighth of the budget",
    )


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = commands.add_parser(
        "export",
        help="a checkpoint to files of weights that others load",
        description="Write the weights of a checkpoint as files that from_pretrained() and load_pretrained() read. "
        "Nothing is loaded whole: it takes the same memory for any model.",
    )
    export.add_argument(
        "checkpoint", type=parse_name, metavar="CHECKPOINT", help="a directory of checkpoints, or one of them"
    )
    export.add_argument("out", type=parse_name, metavar="OUT", help="a directory, made where it is not there")
    export.add_argument("--tag", help="which checkpoint of the directory (default: the one called latest)")
    export.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: fp32")
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default 5GB)")
    export.add_argument("--format", choices=("safetensors", "torch"), default="safetensors", help="of the files")
    export.add_argument("--json", action="store_true", help="print what was written as one JSON object")
    export.set_defaults(function=_export)


def _add_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    importing = commands.add_parser(
        "import-deepspeed",
        help="a checkpoint of DeepSpeed's, to go on with",
        description="Rewrite a checkpoint that DeepSpeed 0.16 to 0.19 wrote with ZeRO 1, 2 or 3, on any number of "
        "ranks, as one that engine.load_checkpoint(OUT) takes: fp32 weights, optimizer states, steps, schedule, loss "
        "scale, client state. DeepSpeed is not needed, and no code in its files is run.",
    )
    importing.add_argument(
        "directory", type=parse_name, metavar="DIR", help="a directory of DeepSpeed's checkpoints, or one of them"
    )
    importing.add_argument(
        "out", type=parse_name, metavar="OUT", help="a directory of checkpoints, made where it is not there"
    )
    importing.add_argument("--tag", help="which checkpoint of the directory (default: the one called latest)")
    importing.add_argument("--json", action="store_true", help="print what was written as one JSON object")
    importing.set_defaults(function=_import_deepspeed)


def _import_deepspeed(parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.import_command import import_deepspeed

    return import_deepspeed(parsed)


def _export(parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.export_command import export

    return export(parsed)


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    described = (
        ("info", "what a checkpoint holds", "Tensors, kinds, bytes, files and checksums.", _checkpoint_info),
        ("verify", "read it all, check every checksum", "Exit code 1 if anything is damaged.", _checkpoint_verify),
    )
    checkpoint = commands.add_parser(
        "checkpoint", help="look into a checkpoint, check it", description="What engine.save_checkpoint() has written."
    ).add_subparsers(required=True, metavar="COMMAND")
    for name, summary, description, function in described:
        command = checkpoint.add_parser(name, help=summary, description=description)
        command.add_argument(
            "directory", type=parse_name, metavar="DIR", help="a directory of checkpoints, or one of them"
        )
        command.add_argument("--tag", help="which checkpoint of the directory (default: the one called latest)")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(function=function)


def _checkpoint_info(parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.checkpoint_command import info

    return info(parsed)


def _checkpoint_verify(parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.checkpoint_command import verify

    return verify(parsed)


def _plan(parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.plan_command import plan

    return plan(parsed)


def _trace(parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.trace_command import trace

    return trace(parsed)


def _doctor(parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.doctor import doctor

    return doctor(parsed.directories, as_json=parsed.json)


def _config_check(parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.config_command import check

    return check(parsed.file, world_size=parsed.world_size, check_paths=not parsed.skip_paths, as_json=parsed.json)


def _config_keys(parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.config_command import keys

    return keys(as_json=parsed.json)


def _config_schema(_parsed: argparse.Namespace) -> int:
    with quiet_interrupt():
        from infinity.commands.config_command import schema

    return schema()


def _launched(command: str, words: list[str]) -> int:
    if command == "run":
        from infinity.commands.run_command import run

        return run(words)
    if command == "as-deepspeed":
        from infinity.commands.as_deepspeed_command import as_deepspeed

        return as_deepspeed(words)
    from infinity.commands.deepspeed_command import deepspeed

    return deepspeed(words)


def _demo(words: list[str]) -> int:
    with quiet_interrupt():
        from infinity.commands.demo import main as demo

    code: int = demo(words)
    return code


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0: write 70e9 or 0.5")
    return value


def _steps(text: str) -> int:
    """Fewer have no median worth the name: `io-daemon bench step` refuses them, after the model was run."""
    return _whole(text, at_least=3)


def _count(text: str) -> int:
    return _whole(text, at_least=1)


def _whole(text: str, *, at_least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {at_least}")
    return value


if __name__ == "__main__":
    sys.exit(main())
