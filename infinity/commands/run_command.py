"""``infinity run``: one I/O daemon for the node, then torchrun."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from infinity.commands.running import environment_of, torchrun
from io_daemon.command.options import parse_name
from io_daemon.command.outcome import EXIT_FAULT
from io_daemon.config import BLOCK_BYTES, QUEUE_DEPTH, DaemonSettings
from io_daemon.shared.metrics import size_text

RUN_USAGE = "infinity run [--as-deepspeed] [--swap-dir DIR ...] [daemon options] [torchrun options] script.py ..."
RUN_DESCRIPTION = """\
Start one I/O daemon for this node, then torchrun (python -m torch.distributed.run) with all arguments from the first
one that is not listed here. The daemon ends after the ranks. Without --swap-dir no daemon is started here: the library
starts a private one where its configuration asks for it. On several nodes, run it on each, as with torchrun."""


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity run",
        usage=RUN_USAGE,
        description=RUN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--as-deepspeed", action="store_true", help="`import deepspeed` is infinity, in the ranks and all they start"
    )
    parser.add_argument(
        "--swap-dir",
        action="append",
        type=parse_name,
        default=[],
        metavar="DIR",
        help="where swap files go; repeatable",
    )
    parser.add_argument(
        "--socket", type=parse_name, metavar="PATH", help="the daemon's socket (default: a private one)"
    )
    parser.add_argument("--engine", metavar="ENGINE", help="auto (default) or require:NAME")
    parser.add_argument(
        "--block-size",
        metavar="BYTES",
        help=f"of one I/O (default: auto, what `io-daemon bench` found best here, else {size_text(BLOCK_BYTES)})",
    )
    parser.add_argument(
        "--queue-depth", metavar="N", help=f"I/Os in flight (default: auto, as --block-size, else {QUEUE_DEPTH})"
    )
    parser.add_argument(
        "--no-verify-checksums",
        dest="verify_checksums",
        action="store_false",
        help="do not check blocks that are read back",
    )
    return parser


def split_run_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(words of ``infinity run``, words of torchrun): the second list starts at the first word not known here."""
    actions = _run_parser()._actions
    lone = {name for action in actions if action.nargs == 0 for name in action.option_strings}
    paired = {name for action in actions for name in action.option_strings} - lone
    i = 0
    while i < len(words):
        name, equals, _ = words[i].partition("=")
        if name in lone or (name in paired and equals):
            i += 1
        elif name in paired:
            i += 2
        else:
            break
    return list(words[:i]), list(words[i:])


def run(words: Sequence[str]) -> int:
    """The command. Raises ConfigError and WorldError where no daemon can be started."""
    own, rest = split_run_words(words)
    parser = _run_parser()
    parsed = parser.parse_args(own)
    if not rest:
        parser.error("no script given")
    ours = {option for action in parser._actions for option in action.option_strings}
    for word in itertools.takewhile(lambda word: word != "-m" and not word.endswith(".py"), rest):
        if word.partition("=")[0] in ours - {"-h", "--help"}:
            parser.error(
                f"{word} is infinity's own: write it before torchrun's options, of which {rest[0]} is the first"
            )
    if not parsed.swap_dir:
        of_daemon = [word for word in own if word != "--as-deepspeed"]
        if of_daemon:
            parser.error(f"{of_daemon[0]} has no effect without --swap-dir")
        return torchrun(rest, environment_of(as_deepspeed=parsed.as_deepspeed))

    from io_daemon.rank.process import DaemonProcess

    options: list[str] = []
    for action in parser._actions:
        value: Any = getattr(parsed, action.dest, None)
        if action.dest in DaemonSettings.model_fields and value is not action.default:
            options += action.option_strings[:1] if action.nargs == 0 else [action.option_strings[0], value]
    with DaemonProcess(swap_dirs=parsed.swap_dir, socket=parsed.socket, options=options, private=False) as daemon:
        socket = {"INFINITY_IO_SOCKET": str(daemon.socket)}
        code = torchrun(rest, environment_of(socket, as_deepspeed=parsed.as_deepspeed))
        if (status := daemon.poll()) is not None:
            print(
                f"infinity: the I/O daemon ended before the ranks did, with status {status}",
                file=sys.stderr,
            )
            return code or EXIT_FAULT
    return code
