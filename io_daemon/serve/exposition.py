"""A daemon's status in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from io_daemon.shared.metrics import DaemonStatus
from io_daemon.shared.protocol import ObjectKind


class StatusCollector(Collector):
    def __init__(self, daemon: DaemonStatus) -> None:
        self._daemon = daemon

    def collect(self) -> Iterator[Metric]:
        device_bytes = CounterMetricFamily(
            "io_daemon_device_bytes", "Bytes of block I/O by swap directory", labels=["path", "direction"]
        )
        device_free = GaugeMetricFamily("io_daemon_device_free_bytes", "Free space by swap directory", labels=["path"])
        for device in self._daemon.devices:
            device_bytes.add_metric([device.path, "read"], device.bytes_read)
            device_bytes.add_metric([device.path, "write"], device.bytes_written)
            device_free.add_metric([device.path], device.free_bytes)
        yield device_bytes
        yield device_free
        who = ["job", "rank", "pid"]
        moved = CounterMetricFamily(
            "io_daemon_tenant_bytes", "Bytes swapped by tenant and object kind", labels=[*who, "kind", "direction"]
        )
        resident = GaugeMetricFamily(
            "io_daemon_tenant_resident_bytes", "Bytes in frames by object kind", labels=[*who, "kind"]
        )
        accesses = CounterMetricFamily(
            "io_daemon_tenant_accesses", "Objects acquired for read by outcome", labels=[*who, "outcome"]
        )
        errors = CounterMetricFamily("io_daemon_tenant_io_errors", "Swap-ins and swap-outs that failed", labels=who)
        for tenant in self._daemon.tenants:
            names = [tenant.job, str(tenant.rank), str(tenant.pid)]
            for kind in ObjectKind:
                label = kind.name.lower()
                moved.add_metric([*names, label, "read"], tenant.total.bytes_read[kind])
                moved.add_metric([*names, label, "write"], tenant.total.bytes_written[kind])
                resident.add_metric([*names, label], tenant.resident_bytes[kind])
            accesses.add_metric([*names, "hit"], tenant.total.hits)
            accesses.add_metric([*names, "prefetch_hit"], tenant.total.prefetch_hits)
            accesses.add_metric([*names, "miss"], tenant.total.misses)
            errors.add_metric(names, tenant.total.io_errors)
        yield from (moved, resident, accesses, errors)


def exposition(daemon: DaemonStatus) -> str:
    """Prometheus' text format; figures are taken when it is called."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(daemon))
    return generate_latest(registry).decode()
