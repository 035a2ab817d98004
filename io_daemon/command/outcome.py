"""How a command ends: with an exit code, and a line on standard error where something was wrong."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Final

from io_daemon.command.interrupt import EXIT_INTERRUPTED
from io_daemon.errors import ConfigError, DaemonLostError, WorldError
from io_daemon.machine.limits import limit_behind

EXIT_OK: Final = 0
EXIT_FAULT: Final = 1
EXIT_USAGE: Final = 2
EXIT_NO_DAEMON: Final = 3


def outcome(program: str, work: Callable[[], int]) -> int:
    """Exit codes: what ``work`` gives, 1 a fault of the world, 2 a wrong setting, 3 no daemon answers, 130 Ctrl-C. An
    error that a limit of this process is behind names it."""

    def complain(error: BaseException, exit_code: int, text: str = "") -> int:
        print(f"{program}: {text or error}{limit_behind(error)}", file=sys.stderr)
        return exit_code

    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # µ and × in a terminal that knows ASCII alone
            sys.stdout.reconfigure(errors="replace")
        exit_code = work()
        sys.stdout.flush()
    except ConfigError as error:
        return complain(error, EXIT_USAGE)
    except DaemonLostError as error:
        return complain(error, EXIT_NO_DAEMON)
    except WorldError as error:
        return complain(error, EXIT_FAULT)
    except BrokenPipeError:  # the reader of our output has gone: nobody is left to complain to
        _drop_output()
        return EXIT_FAULT
    except OSError as error:  # of what is written for the user: a report, say, to a disk that is full by now
        _drop_output()
        return complain(error, EXIT_FAULT)
    except MemoryError as error:
        return complain(error, EXIT_FAULT, "out of memory")
    except KeyboardInterrupt as error:
        return complain(error, EXIT_INTERRUPTED, "interrupted")
    return exit_code


def _drop_output() -> None:
    """What standard output still holds, and does not take: the interpreter's end would try again, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
