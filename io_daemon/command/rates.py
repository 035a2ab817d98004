"""What a daemon did between two looks at it, per second. Pure."""

from __future__ import annotations

from collections.abc import Hashable

from io_daemon.shared.metrics import DaemonStatus, DeviceStatus, Figures, TenantStats


class DeviceRates(Figures):
    """One swap directory. Bytes and counts are of blocks, each second."""

    path: str
    bytes_read_per_s: float
    bytes_written_per_s: float
    reads_per_s: float
    writes_per_s: float
    num_in_flight: int
    num_queued: int
    free_bytes: int


class TenantRates(Figures):
    """One attached rank. Bytes are those of objects, each second."""

    job: str
    rank: int
    pid: int
    bytes_read_per_s: float
    bytes_written_per_s: float
    acquired_per_s: float
    """Objects acquired for read."""
    ready_share: float | None
    """The part of these that was in the arena, or on its way there; None where nothing was acquired."""
    io_share: float
    """The part of the time in which I/O of the tenant was queued or running, 0 to 1."""
    arena_bytes: int
    resident_bytes: int
    swap_bytes: int
    num_leases: int


class Rates(Figures):
    """``seconds``: between the two looks, by the daemon's own clock."""

    seconds: float
    devices: tuple[DeviceRates, ...]
    tenants: tuple[TenantRates, ...]


def rates(before: DaemonStatus, now: DaemonStatus) -> Rates:
    """A tenant that came in between counts from its first second, and so does a daemon that is not the one of
    ``before``."""
    is_same = before.pid == now.pid and before.uptime_s < now.uptime_s
    seconds = now.uptime_s - before.uptime_s if is_same else now.uptime_s
    devices = {device.path: device for device in before.devices} if is_same else {}
    tenants = {_name(tenant): tenant for tenant in before.tenants} if is_same else {}
    return Rates(
        seconds=seconds,
        devices=tuple(_of_device(devices.get(device.path), device, seconds) for device in now.devices),
        tenants=tuple(_of_tenant(tenants.get(_name(tenant)), tenant, seconds) for tenant in now.tenants),
    )


def _name(tenant: TenantStats) -> Hashable:
    """Two engines of one process may have one job and rank, and never a file."""
    return tenant.job, tenant.rank, tenant.pid, tenant.swap_files


def _of_device(before: DeviceStatus | None, now: DeviceStatus, seconds: float) -> DeviceRates:
    def per_s(name: str) -> float:
        return _since(0 if before is None else getattr(before, name), getattr(now, name)) / seconds

    return DeviceRates(
        path=now.path,
        bytes_read_per_s=per_s("bytes_read"),
        bytes_written_per_s=per_s("bytes_written"),
        reads_per_s=per_s("num_reads"),
        writes_per_s=per_s("num_writes"),
        num_in_flight=now.num_in_flight,
        num_queued=now.num_queued,
        free_bytes=now.free_bytes,
    )


def _of_tenant(before: TenantStats | None, now: TenantStats, seconds: float) -> TenantRates:
    def grown(name: str) -> float:
        values = (0 if tenant is None else getattr(tenant.total, name) for tenant in (before, now))
        return _since(*(sum(value) if isinstance(value, tuple) else value for value in values))

    ready = grown("hits") + grown("prefetch_hits")
    acquired = ready + grown("misses")
    return TenantRates(
        job=now.job,
        rank=now.rank,
        pid=now.pid,
        bytes_read_per_s=grown("bytes_read") / seconds,
        bytes_written_per_s=grown("bytes_written") / seconds,
        acquired_per_s=acquired / seconds,
        ready_share=ready / acquired if acquired else None,
        io_share=min(1.0, grown("io_s") / seconds),
        arena_bytes=now.arena_bytes,
        resident_bytes=sum(now.resident_bytes),
        swap_bytes=now.swap_bytes,
        num_leases=now.num_leases,
    )


def _since(before: float, now: float) -> float:
    """What was counted in between: of who has begun anew, all that it has counted."""
    return now - before if now >= before else now
