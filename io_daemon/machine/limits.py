"""The limits that the system sets this process (``ulimit``): which of them an error comes from, and which are too low
for any command of ours."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from io_daemon.errors import LimitError, WorldError

COMMAND_BYTES: Final = 128 << 20
"""Addresses that a command takes before it does anything: most of them are for NumPy's OpenBLAS."""
OPEN_FILES_MIN: Final = 12
"""A daemon of one directory that nobody uses has so many; whoever attaches hears of more."""


@dataclass(frozen=True)
class Limit:
    """One that ``ulimit`` shows by ``option``, in units of ``unit_bytes`` where it counts bytes."""

    option: str
    number: int
    unit_bytes: int = 1

    def value(self, *, hard: bool = False) -> int | None:
        """What it is now, in the unit of ``ulimit``, or the most that this process may raise it to (``hard``); None
        where there is none, or where it may not be asked for."""
        with contextlib.suppress(OSError):
            found = resource.getrlimit(self.number)[hard]
            return None if found == resource.RLIM_INFINITY else found // self.unit_bytes
        return None

    def too_low(self, number: int, operation: str, value: int, remedy: str) -> LimitError:
        """The error of an ``operation`` that ends with errno ``number``."""
        return LimitError(errno=number, operation=operation, limit=self.option, value=value, remedy=remedy)


OPEN_FILES: Final = Limit("-n", resource.RLIMIT_NOFILE)
THREADS: Final = Limit("-u", resource.RLIMIT_NPROC)
ADDRESSES: Final = Limit("-v", resource.RLIMIT_AS, unit_bytes=1024)
FILE_SIZE: Final = Limit("-f", resource.RLIMIT_FSIZE, unit_bytes=1024)
BEHIND: Final = {errno.EMFILE: OPEN_FILES, errno.ENOMEM: ADDRESSES, errno.EFBIG: FILE_SIZE}
"""What may be too low where the system says so."""
ENOUGH: Final = {
    OPEN_FILES: "to 1024 or more",
    ADDRESSES: "to 1000000 or more, or to `unlimited`",
    FILE_SIZE: "to `unlimited`",
}


def check_addresses() -> None:
    """Raises LimitError where no command of ours, and so no daemon, can be loaded: OpenBLAS would end the process in
    words of its own, and a thread whose stack finds room but nothing else keeps its starter waiting for ever."""
    value = ADDRESSES.value()
    if value is not None and value < COMMAND_BYTES // ADDRESSES.unit_bytes:
        raise ADDRESSES.too_low(errno.ENOMEM, "load io-daemon", value, ENOUGH[ADDRESSES])


def check_open_files() -> None:
    """Raises LimitError where a daemon could not even start. It raises its own limit to the hard one later."""
    value = OPEN_FILES.value(hard=True)
    if value is not None and value < OPEN_FILES_MIN:
        remedy = "to 1024 or more where the daemon is started, or LimitNOFILE= in its unit"
        raise OPEN_FILES.too_low(errno.EMFILE, "start the daemon", value, remedy)


def limit_behind(error: BaseException) -> str:
    """What to add to an error's text where a limit is behind it, or behind what it came from: which, and what it is.
    The empty string where none is, or where the text says so already."""
    for each in _causes(error):
        number = errno.ENOMEM if isinstance(each, MemoryError) else getattr(each, "errno", None)
        limit = BEHIND.get(number) if isinstance(number, int) else None
        value = None if limit is None else limit.value()
        if limit is not None and value is not None and f"ulimit {limit.option}" not in str(error):
            return f"; raise `ulimit {limit.option}` (it is {value})"
    return ""


@contextlib.contextmanager
def naming_limits(operation: str) -> Iterator[None]:
    """Inside, the system's refusal of one more file, process or address is a WorldError that names the limit."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        if number == errno.EAGAIN:
            raise too_few_threads(error, f"it is needed to {operation}") from error
        limit = BEHIND.get(number)
        value = None if limit is None else limit.value()
        if limit is None or value is None:
            raise
        raise limit.too_low(number, operation, value, ENOUGH[limit]) from error


def too_few_threads(error: RuntimeError | OSError, needed: str) -> WorldError:
    """The ``error`` of a thread or process that could not be started, with what may be behind it: the stacks of threads
    take addresses, and the system says the same of both."""
    threads, addresses = THREADS.value(), ADDRESSES.value()
    problem = error.strerror if isinstance(error, OSError) else error
    found = "" if threads is None else f" (ulimit -u is {threads})"
    other = "" if addresses is None else f", or `ulimit -v unlimited` (it is {addresses})"
    return WorldError(
        f"[Errno {errno.EAGAIN}] {problem}{found}: raise ulimit -u, or the container's pids.max{other}; {needed}"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it came from, and so on: each once, whoever tied them into a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
