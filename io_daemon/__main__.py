"""The entry point of ``io-daemon``: the commands of the daemon, and the benchmark above them."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # where `python -m` was typed: modules that lie there are not ours

from collections.abc import Sequence
from typing import Any

from io_daemon.command.interrupt import hear_of_children, quiet_interrupt
from io_daemon.command.outcome import EXIT_OK, outcome
from io_daemon.command.standard_files import fill_standard_files
from io_daemon.machine.limits import check_addresses


def main(argv: Sequence[str] | None = None) -> int:
    fill_standard_files()
    hear_of_children()
    if exit_code := outcome("io-daemon", _check):
        return exit_code
    with quiet_interrupt():
        from io_daemon.config import use_one_blas_thread

        use_one_blas_thread()
        from io_daemon.command.cli import run
    return run(argv, add_bench=_add_bench)


def _check() -> int:
    check_addresses()
    return EXIT_OK


def _add_bench(parser: Any) -> None:
    from io_daemon.bench.cli import add_bench  # only now: a daemon needs none of it

    add_bench(parser)


if __name__ == "__main__":
    sys.exit(main())
