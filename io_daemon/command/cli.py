"""``io-daemon serve | status | top | fsck | gc | bench``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Final, get_args

from pydantic import ValidationError

from io_daemon.command.interrupt import quiet_interrupt
from io_daemon.command.options import as_typed, parse_fault, parse_path, settings_from
from io_daemon.command.outcome import EXIT_FAULT, EXIT_OK, outcome
from io_daemon.command.sizes import DIGITS_MAX, parse_bytes, parse_timeout, shortened
from io_daemon.config import (
    BLOCK_BYTES,
    QUEUE_DEPTH,
    UNLIMITED_BYTES,
    EngineChoice,
    ServeConfig,
    default_socket_path,
    first_problem,
    resolved,
    socket_parents,
)
from io_daemon.disk.swap_dir import check_swap_dirs, reclaim
from io_daemon.errors import ConfigError
from io_daemon.machine.limits import check_open_files
from io_daemon.machine.tuning import choose
from io_daemon.rank.connection import Connection
from io_daemon.rank.private_dir import remove_abandoned
from io_daemon.shared.control import Status, StatusRequest
from io_daemon.shared.metrics import DaemonStatus, size_text, status_lines

AddCommands = Callable[[argparse.ArgumentParser], None]
"""Mounts sub-commands on a parser; called only where one of them was typed."""

BENCH_COMMANDS: Final = ("io", "sweep", "step", "compare")


def run(argv: Sequence[str] | None, *, add_bench: AddCommands) -> int:
    """Exit codes: 0 well, 1 a fault of the world, 2 a wrong setting, 3 no daemon answers."""
    words = sys.argv[1:] if argv is None else list(argv)
    with quiet_interrupt():  # `bench` imports much
        arguments = _parser(words, add_bench).parse_args(with_default_command(words))

    def work() -> int:
        try:
            exit_code: int = arguments.run(arguments)
        except ConfigError as error:
            raise as_typed(error, arguments.parser) from error.__cause__  # may be this very error
        except ValidationError as error:
            raise as_typed(first_problem(error), arguments.parser) from error
        return exit_code

    return outcome("io-daemon", work)


def parse_or_auto(parse: Callable[[str], int]) -> Callable[[str], int | None]:
    """``auto`` is None."""

    def parsed(text: str) -> int | None:
        try:
            return None if text == "auto" else parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is neither a number nor auto") from None

    return parsed


def parse_count(text: str) -> int:
    """The number counts from 1 on."""
    if not (text.isdecimal() and len(text) <= DIGITS_MAX and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is no count: write 1, or more")
    return int(text)


def with_default_command(words: Sequence[str]) -> list[str]:
    """``bench /nvme0`` is ``bench sweep /nvme0``."""
    if words[:1] == ["bench"] and len(words) > 1 and words[1] not in (*BENCH_COMMANDS, "-h", "--help"):
        return ["bench", "sweep", *words[1:]]
    return list(words)


def _parser(words: Sequence[str], add_bench: AddCommands) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="io-daemon", description="Owns a node's NVMe swap space and serves its training ranks."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="run the daemon in the foreground",
        description="Serve this node's ranks from swap files in the directories named, until SIGTERM or Ctrl-C.",
    )
    default_socket = f"default: {default_socket_path()}".replace("%", "%%")  # argparse formats it
    serve.add_argument("--socket", dest="socket_path", type=parse_path, help=default_socket)
    _add_swap_dirs(serve)
    serve.add_argument(
        "--engine",
        default="auto",
        help=f"auto (the best that works) or {', '.join(get_args(EngineChoice)[1:])}; default: auto",
    )
    serve.add_argument(
        "--block-size",
        dest="block_bytes",
        type=parse_or_auto(parse_bytes),
        metavar="BYTES",
        help=f"of one I/O, or auto: what `io-daemon bench` found best here, else {size_text(BLOCK_BYTES)}; "
        "default: auto",
    )
    serve.add_argument(
        "--queue-depth",
        type=parse_or_auto(int),
        metavar="N",
        help=f"I/Os in flight per directory, or auto: as --block-size, else {QUEUE_DEPTH}; default: auto",
    )
    serve.add_argument(
        "--no-verify-checksums",
        dest="verify_checksums",
        action="store_false",
        help="do not verify blocks when they are read",
    )
    serve.add_argument("--private", action="store_true", help="end when the last tenant has left")
    serve.add_argument(
        "--parent-pidfd", type=int, metavar="FD", help="end when the process of this inherited pidfd is gone"
    )
    serve.add_argument(
        "--host-budget-bytes",
        type=parse_bytes,
        default=UNLIMITED_BYTES,
        help="most arena bytes of all tenants together; default: 90%% of the memory",
    )
    serve.add_argument(
        "--swap-budget-bytes",
        type=parse_bytes,
        default=UNLIMITED_BYTES,
        help="most swap bytes of one tenant; default: none",
    )
    serve.add_argument(
        "--lock-timeout",
        dest="lock_timeout_s",
        metavar="TIME",
        type=parse_timeout,
        default=60.0,
        help="wait for a dead daemon's I/O; default: 60s",
    )
    serve.add_argument(
        "--drain-timeout",
        dest="drain_timeout_s",
        metavar="TIME",
        type=parse_timeout,
        default=10.0,
        help="wait for I/O at shutdown; default: 10s",
    )
    serve.add_argument(
        "--inject-fault", dest="faults", type=parse_fault, action="append", default=[], help=argparse.SUPPRESS
    )
    serve.set_defaults(run=_serve, parser=serve)

    status = commands.add_parser(
        "status",
        help="print what a running daemon does",
        description="Print a running daemon's devices, tenants and traffic. Exit code 3 if none answers.",
    )
    status.add_argument("--socket", type=parse_path, help=default_socket)
    shape = status.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print JSON")
    shape.add_argument("--prometheus", action="store_true", help="print in Prometheus' text format")
    status.set_defaults(run=_status, parser=status)

    top = commands.add_parser(
        "top",
        help="watch what a running daemon does",
        description="Show bytes, I/Os and accesses a second by directory and tenant, again and again, until Ctrl-C. "
        "Exit code 3 if no daemon answers, or it ends.",
    )
    top.add_argument("--socket", type=parse_path, help=default_socket)
    top.add_argument(
        "--interval", type=parse_timeout, metavar="TIME", default=1.0, help="between two looks; default: 1s"
    )
    top.add_argument("--count", type=parse_count, metavar="N", help="end after so many; default: never")
    top.add_argument("--json", action="store_true", help="print JSON, an object a line")
    top.set_defaults(run=_top, parser=top)

    fsck = commands.add_parser(
        "fsck",
        help="check the swap files in directories",
        description="Tell of each swap file whose it is, whether its daemon runs, and whether it is whole; changes "
        "nothing. Blocks are not read: a running daemon checks each one that it reads, and nobody needs a dead one's. "
        "Exit code 1 if a file is damaged.",
    )
    _add_swap_dirs(fsck)
    fsck.add_argument("--json", action="store_true", help="print JSON")
    fsck.set_defaults(run=_fsck, parser=fsck)

    gc = commands.add_parser(
        "gc",
        help="remove what killed daemons left",
        description="Swap files in the directories named, and directories of private sockets; prints what it removed.",
    )
    _add_swap_dirs(gc, required=False)
    gc.add_argument(
        "--lock-timeout", type=parse_timeout, metavar="TIME", default=60.0, help="wait for I/O to land; default: 60s"
    )
    gc.set_defaults(run=_gc, parser=gc)

    bench = commands.add_parser(
        "bench",
        help="measure: is this machine fast enough for my model, with which settings, and for how long?",
        description="Without a sub-command: `sweep` with its defaults, under two minutes.",
        usage="io-daemon bench DIRECTORY... | io | sweep | step | compare  [options]",
    )
    if words[:1] == ["bench"]:
        add_bench(bench)
    return parser


def _add_swap_dirs(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "--swap-dir",
        dest="swap_dirs",
        type=parse_path,
        metavar="DIR",
        action="append",
        default=[],
        required=required,
        help="may be given several times",
    )


def _serve(arguments: argparse.Namespace) -> int:
    from io_daemon.serve.server import serve

    # a private daemon's stderr is its user's terminal: only what needs attention
    level = logging.WARNING if arguments.private else logging.INFO
    logging.basicConfig(level=level, format="io-daemon: %(levelname)s %(message)s", stream=sys.stderr)
    check_open_files()
    directories = [checked.path for checked in check_swap_dirs(arguments.swap_dirs)]
    chosen = choose(directories, arguments.engine, arguments.block_bytes, arguments.queue_depth)
    if chosen.note is not None:
        logging.getLogger(__name__).info("%s", chosen.note)
    config = settings_from(
        arguments,
        ServeConfig,
        socket_path=arguments.socket_path or default_socket_path(),
        swap_dirs=tuple(directories),
        engine=chosen.engine,
        block_bytes=chosen.block_bytes,
        queue_depth=chosen.queue_depth,
    )
    return asyncio.run(serve(config))


def _ask(arguments: argparse.Namespace) -> DaemonStatus:
    connection, _ = Connection.open(str(arguments.socket or default_socket_path()), timeout_s=10.0)
    try:
        answer, _ = connection.request(StatusRequest(), Status, timeout_s=10.0)
    finally:
        connection.close()
    return answer.daemon


def _status(arguments: argparse.Namespace) -> int:
    daemon = _ask(arguments)
    if arguments.json:
        print(daemon.model_dump_json(indent=2))
    elif arguments.prometheus:
        from io_daemon.serve.exposition import exposition

        print(exposition(daemon), end="")
    else:
        print("\n".join(status_lines(daemon)))
    return EXIT_OK


def _top(arguments: argparse.Namespace) -> int:
    from io_daemon.command.top import watch  # only now: tables and screens take longer to import than the rest

    watch(lambda: _ask(arguments), arguments.interval, arguments.count, as_json=arguments.json)
    return EXIT_OK


def _fsck(arguments: argparse.Namespace) -> int:
    from io_daemon.command.fsck import check, lines  # only now: a daemon that starts needs none of it

    report = check(dict.fromkeys(resolved(path, "swap_dirs") for path in arguments.swap_dirs))
    print(report.model_dump_json(indent=2) if arguments.json else "\n".join(lines(report)))
    return EXIT_OK if report.is_well else EXIT_FAULT


def _gc(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="io-daemon: %(message)s", stream=sys.stderr)
    directories = [checked.path for checked in check_swap_dirs(arguments.swap_dirs)]
    for path in (*asyncio.run(reclaim(directories, arguments.lock_timeout)), *remove_abandoned(socket_parents())):
        print(path)
    return EXIT_OK
