"""Typed errors. The world's faults carry errno, path, offset, expected and actual; a user's mistake carries key,
value and remedy. Nothing here is raised through ``assert``."""

from __future__ import annotations

import json
import os
import pickle
import sys
from errno import EDQUOT, EFBIG, EIO, ENOENT, ENOSPC, EROFS
from typing import Any, Final

VALUE_CHARACTERS_MAX: Final = 400
"""So much of a value stands in an error's text: a wrong one may be a whole file."""


REMEDIES: Final = {
    EDQUOT: "free some of what this user has there, raise the quota, name another directory, or add one",
    EFBIG: "no file may be so long: raise `ulimit -f`, name a directory of another filesystem, or add one",
    EIO: "the drive or its filesystem fails: see `dmesg`, name another directory",
    ENOENT: "somebody has removed it: leave swap directories to the daemon",
    ENOSPC: "free some space (`df -h`) or inodes (`df -i`) there, name another directory, or add one",
    EROFS: "remount it for writing (`dmesg` says whether the kernel has found it damaged), or name another directory",
}
"""What helps against the system's errors about files of ours."""


def remedy_against(number: int | None, otherwise: str) -> str:
    """What helps against the system's error; ``otherwise`` where that is a matter of the place."""
    return REMEDIES.get(number or 0, otherwise)


class Portable:
    """An error that goes from process to process is made again of what it holds, and not by its ``__init__``."""

    def __reduce__(self) -> tuple[Any, ...]:
        kind = next(each for each in type(self).__mro__ if _named(each.__module__, each.__qualname__) is each)
        fields = {name: value if _is_portable(value) else repr(value) for name, value in vars(self).items()}
        return made_again, (kind, getattr(self, "args", ()), fields)


def _named(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _is_portable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 -- a user's value may raise anything
        return False
    return True


def made_again(kind: Any, args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    """An error of ``kind`` with what another one holds."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(fields)
    return error


class ConfigError(Portable, ValueError):
    """A setting that cannot work. ``key`` is the dotted path in the JSON, ``remedy`` what to write instead."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        self.key, self.value, self.remedy = key, value, remedy
        name = key if key.isprintable() and key.strip() else json.dumps(key)
        super().__init__(f"{_cut(name)} = {_shown(value)}: {remedy}")


def _shown(value: object) -> str:
    """The value as Python writes it, cut short; its type where Python does not write it (too many digits, too deep)."""
    try:
        return _cut(repr(value))
    except (ValueError, RecursionError):
        return f"({type(value).__name__}, too large to be shown)"


def _cut(text: str) -> str:
    if len(text) <= VALUE_CHARACTERS_MAX:
        return text
    return f"{text[:VALUE_CHARACTERS_MAX]}... ({len(text)} characters)"


class WorldError(Portable, RuntimeError):
    """Base of faults that no configuration caused."""


class DeviceIOError(WorldError):
    """An I/O failed or was short. ``remedy`` says what helps."""

    def __init__(
        self, *, errno: int, path: str, offset: int, expected_bytes: int, actual_bytes: int, operation: str
    ) -> None:
        self.errno, self.path, self.offset = errno, path, offset
        self.expected_bytes, self.actual_bytes, self.operation = expected_bytes, actual_bytes, operation
        cause = f"{os.strerror(errno)} (errno {errno})" if errno else "short transfer"
        moved = f"; {actual_bytes} of {expected_bytes} bytes moved" if expected_bytes else ""
        cut = "somebody has cut the file short, or its filesystem fails: see `dmesg`"
        self.remedy = remedy_against(errno, "see `dmesg`, name another directory" if errno else cut)
        super().__init__(f"{operation} of {path} at offset {offset}: {cause}{moved}; {self.remedy}")


class IntegrityError(WorldError):
    """Bytes read back are not the bytes that were written."""

    def __init__(self, *, path: str, offset: int, expected_checksum: int, actual_checksum: int) -> None:
        self.path, self.offset = path, offset
        self.expected_checksum, self.actual_checksum = expected_checksum, actual_checksum
        super().__init__(
            f"checksum mismatch in {path} at offset {offset}: "
            f"expected {expected_checksum:#010x}, found {actual_checksum:#010x}; somebody else has written there, or "
            "the drive has lost or changed what it holds: see `dmesg`, and go on from a checkpoint"
        )


class SwapSpaceError(WorldError):
    """The swap directory cannot hold what the job needs; found before step 0."""

    def __init__(self, *, path: str, needed_bytes: int, free_bytes: int, errno: int = 0, remedy: str = "") -> None:
        self.path, self.needed_bytes, self.free_bytes, self.errno = path, needed_bytes, free_bytes, errno
        super().__init__(
            f"swap space in {path}: needs {needed_bytes} bytes, {free_bytes} bytes are free"
            + (f" ({os.strerror(errno)})" if errno else "")
            + (f"; {remedy}" if remedy else "")
        )


class SwapBusyError(WorldError):
    """A dead daemon's swap file stays locked: its I/O may still be landing, so nothing may be handed out yet."""

    def __init__(self, *, path: str, owner_pid: int, timeout_s: float) -> None:
        self.path, self.owner_pid, self.timeout_s = path, owner_pid, timeout_s
        super().__init__(
            f"{path} of dead daemon {owner_pid} is still locked after {timeout_s:g} s: its I/O has not landed, "
            "or a daemon in another container serves this directory; wait, or name another directory"
        )


class BudgetError(WorldError):
    """A memory budget too small for the model. ``smallest_bytes`` is the least that works, ``remedy`` says so."""

    def __init__(self, *, key: str, budget_bytes: int, smallest_bytes: int, reason: str) -> None:
        self.key, self.budget_bytes, self.smallest_bytes = key, budget_bytes, smallest_bytes
        self.remedy = f"is too small: {reason}; the smallest that works is {smallest_bytes} bytes"
        super().__init__(f"{key} = {budget_bytes} {self.remedy}")


class LimitError(WorldError):
    """A limit that the system sets this process is too low. ``limit`` is its option of ``ulimit``, ``value`` what it
    is, ``remedy`` what to raise it to."""

    def __init__(self, *, errno: int, operation: str, limit: str, value: int, remedy: str) -> None:
        self.errno, self.operation, self.limit, self.value, self.remedy = errno, operation, limit, value, remedy
        super().__init__(
            f"cannot {operation}: {os.strerror(errno)} (errno {errno}): `ulimit {limit}` is {value}: raise it {remedy}"
        )


class DaemonLostError(WorldError):
    """The I/O daemon is gone or does not answer. The message holds what was being waited for."""


class ProtocolError(WorldError):
    """The two sides do not speak the same protocol, or one of them sent what it must not."""
