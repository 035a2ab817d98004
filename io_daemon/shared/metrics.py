"""What the daemon and its tenants did, as data: for `io-daemon status` and for ``Client.stats``."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class IoTotals(Figures):
    """Counts since some start. Tuples are indexed by ``ObjectKind``."""

    bytes_read: tuple[int, ...]
    """Swapped in, NVMe to arena."""
    bytes_written: tuple[int, ...]
    """Swapped out, arena to NVMe."""
    hits: int
    """Objects acquired for read that were resident since an earlier use."""
    prefetch_hits: int
    """… whose swap-in had been started ahead."""
    misses: int
    """… that had to be swapped in on demand."""
    evictions: int
    waits: int
    """Leases that were short of frames when they were asked for."""
    rejected: int
    """Submissions refused as malformed."""
    io_errors: int
    io_s: float
    """Wall-clock seconds in which at least one request of the tenant was queued or running."""


class TenantStats(Figures):
    """One attached rank."""

    job: str
    rank: int
    pid: int
    page_locked: bool
    arena_bytes: int
    """The size of the frames together."""
    num_frames: int
    frames_free: int
    resident_bytes: tuple[int, ...]
    """In frames now, by ``ObjectKind``."""
    num_chunks: int
    num_plans: int
    """Plans made from this rank's traces so far."""
    num_leases: int
    """Outstanding, granted or not."""
    num_in_flight: int
    """I/O requests of this tenant with the reactors."""
    swap_bytes: int
    """Space that is reserved on disk, header pages included."""
    swap_files: tuple[str, ...]
    total: IoTotals
    last_step: IoTotals | None
    """What was moved between the last two ``mark`` calls."""


class DeviceStatus(Figures):
    """One swap directory and its reactor. Bytes and counts of I/O are of blocks, since the daemon started."""

    path: str
    engine: str
    direct: bool
    filesystem: str
    free_bytes: int
    bytes_read: int
    bytes_written: int
    num_reads: int
    num_writes: int
    num_short: int
    num_in_flight: int
    num_queued: int


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
        yield (
            f"  {device.path} ({device.filesystem}, {device.engine}, {'direct' if device.direct else 'buffered'}): "
            f"read {size_text(device.bytes_read)}, written {size_text(device.bytes_written)}, "
            f"{device.num_in_flight} in flight, {size_text(device.free_bytes)} free"
        )
    if not daemon.tenants:
        yield "  no tenants"
    for tenant in daemon.tenants:
        yield (
            f"  {tenant.job} rank {tenant.rank} (pid {tenant.pid}): arena {size_text(tenant.arena_bytes)}"
            f"{' page-locked' if tenant.page_locked else ''}, {size_text(sum(tenant.resident_bytes))} resident, "
            f"{tenant.num_chunks} chunks in {size_text(tenant.swap_bytes)} of swap, {tenant.num_leases} leases"
        )
        total = tenant.total
        yield (
            f"    read {size_text(sum(total.bytes_read))}, written {size_text(sum(total.bytes_written))}; "
            f"hits {total.hits}, prefetched {total.prefetch_hits}, missed {total.misses}, I/O errors {total.io_errors}"
        )


def size_text(num_bytes: int) -> str:
    """Four digits and a binary unit, for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
