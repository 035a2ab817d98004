"""What the daemon and its tenants did, as data: for `io-daemon status` and for ``Client.stats``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict


class Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Figure:
    """All that is said of a figure beside its value: the field that it annotates is the one place where it is declared,
    and the JSON, the lines for people and Prometheus' exposition follow from that."""

    kind: Literal["counter", "gauge"]
    help: str
    text: str = ""
    """How the lines for people call it; those without are left out there."""
    num_bytes: bool = False
    metric: str = ""
    """In Prometheus, behind what it is a figure of; by default the field's name. Several fields may share one, told
    apart by ``label``."""
    label: tuple[str, str] = ("", "")


def figures_of(values: Figures) -> Iterator[tuple[str, Figure, Any]]:
    """(name, declaration, value) of each, in order."""
    for name, declared in type(values).model_fields.items():
        for figure in declared.metadata:
            if isinstance(figure, Figure):
                yield name, figure, getattr(values, name)


_MOVED, _ACCESSES = "Bytes swapped by tenant and object kind", "Objects acquired for read by outcome"
_BLOCKS = "Bytes of block I/O by swap directory"


class IoTotals(Figures):
    """Since the tenant attached, counted by ``policy.counters`` under the same names. Tuples are indexed by
    ``ObjectKind``."""

    bytes_read: Annotated[
        tuple[int, ...], Figure("counter", _MOVED, "read", True, metric="bytes", label=("direction", "read"))
    ]
    """Swapped in, NVMe to arena."""
    bytes_written: Annotated[
        tuple[int, ...], Figure("counter", _MOVED, "written", True, metric="bytes", label=("direction", "write"))
    ]
    """Swapped out, arena to NVMe."""
    hits: Annotated[int, Figure("counter", _ACCESSES, "hits", metric="accesses", label=("outcome", "hit"))]
    """Objects acquired for read that were resident since an earlier use."""
    prefetch_hits: Annotated[
        int, Figure("counter", _ACCESSES, "prefetched", metric="accesses", label=("outcome", "prefetch_hit"))
    ]
    """… whose swap-in had been started ahead."""
    misses: Annotated[int, Figure("counter", _ACCESSES, "missed", metric="accesses", label=("outcome", "miss"))]
    """… that had to be swapped in on demand."""
    evictions: Annotated[int, Figure("counter", "Objects that lost their frames to another")]
    waits: Annotated[int, Figure("counter", "Leases that were short of frames when they were asked for")]
    rejected: Annotated[int, Figure("counter", "Submissions refused as malformed")]
    io_errors: Annotated[int, Figure("counter", "Swap-ins and swap-outs that failed", "I/O errors")]
    io_s: Annotated[
        float, Figure("counter", "Seconds in which I/O of the tenant was queued or running", metric="io_seconds")
    ]


class TenantStats(Figures):
    """One attached rank."""

    job: str
    rank: int
    pid: int
    page_locked: bool
    arena_bytes: Annotated[int, Figure("gauge", "Bytes of the frames", "arena", True)]
    num_frames: Annotated[int, Figure("gauge", "Frames of the arena", metric="frames")]
    frames_free: Annotated[int, Figure("gauge", "Frames that nothing holds")]
    resident_bytes: Annotated[tuple[int, ...], Figure("gauge", "Bytes in frames by object kind", "resident", True)]
    """In frames now, by ``ObjectKind``."""
    num_chunks: Annotated[int, Figure("gauge", "Chunks registered", "chunks", metric="chunks")]
    num_plans: Annotated[int, Figure("counter", "Plans made from this rank's traces", metric="plans")]
    num_leases: Annotated[int, Figure("gauge", "Leases outstanding, granted or not", "leases", metric="leases")]
    num_in_flight: Annotated[int, Figure("gauge", "I/O requests with the swap devices", metric="in_flight")]
    swap_bytes: Annotated[int, Figure("gauge", "Bytes reserved on disk, header pages included", "swap", True)]
    swap_files: tuple[str, ...]
    total: IoTotals


class DeviceStatus(Figures):
    """One swap directory and its reactor. Bytes and counts of I/O are of blocks, since the daemon started."""

    path: str
    engine: str
    direct: bool
    filesystem: str
    free_bytes: Annotated[int, Figure("gauge", "Free space by swap directory", "free", True)]
    bytes_read: Annotated[int, Figure("counter", _BLOCKS, "read", True, metric="bytes", label=("direction", "read"))]
    bytes_written: Annotated[
        int, Figure("counter", _BLOCKS, "written", True, metric="bytes", label=("direction", "write"))
    ]
    num_reads: Annotated[int, Figure("counter", "Block I/Os", metric="ios", label=("direction", "read"))]
    num_writes: Annotated[int, Figure("counter", "Block I/Os", metric="ios", label=("direction", "write"))]
    num_short: Annotated[int, Figure("counter", "Block I/Os that moved less than asked for", metric="short_ios")]
    num_in_flight: Annotated[int, Figure("gauge", "Requests with the reactor", "in flight", metric="in_flight")]
    num_queued: Annotated[int, Figure("gauge", "Requests that wait for their turn", "queued", metric="queued")]


class DaemonStatus(Figures):
    protocol_version: int
    pid: int
    socket_path: str
    uptime_s: float
    block_bytes: int
    queue_depth: int
    verify_checksums: bool
    private: bool
    devices: tuple[DeviceStatus, ...]
    tenants: tuple[TenantStats, ...]


def status_lines(daemon: DaemonStatus) -> Iterator[str]:
    """The status in lines for people."""
    yield (
        f"io-daemon pid {daemon.pid} on {daemon.socket_path}, up {daemon.uptime_s:.0f} s, "
        f"{size_text(daemon.block_bytes)} blocks, queue depth {daemon.queue_depth}, "
        f"checksums {'verified' if daemon.verify_checksums else 'not verified'}"
    )
    for device in daemon.devices:
        how = f"{device.filesystem}, {device.engine}, {'direct' if device.direct else 'buffered'}"
        yield f"  {device.path} ({how}): {_figures_text(device)}"
    if not daemon.tenants:
        yield "  no tenants"
    for tenant in daemon.tenants:
        locked = ", page-locked" if tenant.page_locked else ""
        yield f"  {tenant.job} rank {tenant.rank} (pid {tenant.pid}{locked}): {_figures_text(tenant)}"
        yield f"    {_figures_text(tenant.total)}"


def _figures_text(values: Figures) -> str:
    texts = []
    for _, figure, value in figures_of(values):
        if figure.text:
            number = sum(value) if isinstance(value, tuple) else value
            texts.append(f"{figure.text} {size_text(number) if figure.num_bytes else number}")
    return ", ".join(texts)


def size_text(num_bytes: int) -> str:
    """Four digits and a binary unit, for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
