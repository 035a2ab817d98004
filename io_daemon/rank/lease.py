"""A lease as the rank has it, the answer to it, and what an answer that grants nothing says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from io_daemon.errors import DaemonLostError, DeviceIOError, IntegrityError, ProtocolError, WorldError
from io_daemon.shared.protocol import Cqe, ObjectKind, Status, kinds_of


@dataclass(frozen=True, slots=True)
class Grant:
    """``frames``: per kind of the lease, frame numbers in byte order. ``born_mask``: kinds never written so far."""

    frames: dict[int, tuple[int, ...]]
    born_mask: int


@dataclass(slots=True)
class Lease:
    chunk: int
    read: int
    write: int
    state: Literal["issued", "granted", "failed"] = "issued"


def error_of(completion: Cqe, lease: Lease, swap_files: Sequence[str]) -> WorldError:
    """Why a lease was not granted; ``swap_files`` as their indexes go."""
    path = swap_files[completion.file] if completion.file < len(swap_files) else "?"
    match completion.status:
        case Status.IO_ERROR | Status.SHORT_IO:
            return DeviceIOError(
                errno=completion.error_number,
                path=path,
                offset=completion.offset,
                expected_bytes=completion.expected,
                actual_bytes=completion.actual,
                operation=f"I/O for {_kind_name(completion.kind)} of chunk {completion.chunk}",
            )
        case Status.INTEGRITY:
            return IntegrityError(
                path=path,
                offset=completion.offset,
                expected_checksum=completion.expected,
                actual_checksum=completion.actual,
            )
        case Status.SHUTTING_DOWN:
            return DaemonLostError(f"the I/O daemon is shutting down; {describe(completion.seq, lease)} was refused")
        case _:
            return ProtocolError(f"the daemon refused {describe(completion.seq, lease)} as malformed")


def describe(seq: int, lease: Lease) -> str:
    """The lease in the text of an error."""
    return f"lease {seq} (chunk {lease.chunk}, read {_mask_names(lease.read)}, write {_mask_names(lease.write)})"


def _kind_name(kind: int) -> str:
    return ObjectKind(kind).name if kind < len(ObjectKind) else f"kind {kind}"


def _mask_names(mask: int) -> str:
    return "|".join(_kind_name(kind) for kind in kinds_of(mask)) or "nothing"
