"""A daemon's status in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from io_daemon.shared.metrics import DaemonStatus, Figures, figures_of
from io_daemon.shared.protocol import ObjectKind

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class StatusCollector(Collector):
    def __init__(self, daemon: DaemonStatus) -> None:
        self._daemon = daemon

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for device in self._daemon.devices:
            _add(families, "io_daemon_device", device, {"path": device.path})
        for tenant in self._daemon.tenants:
            who = {"job": tenant.job, "rank": str(tenant.rank), "pid": str(tenant.pid)}
            _add(families, "io_daemon_tenant", tenant, who)
            _add(families, "io_daemon_tenant", tenant.total, who)
        yield from families.values()


def _add(
    families: dict[str, CounterMetricFamily | GaugeMetricFamily], what: str, values: Figures, owner: Mapping[str, str]
) -> None:
    """Each figure, by its owner; one that is counted by object kind has a sample for each."""
    for field, figure, value in figures_of(values):
        name, (label, word) = f"{what}_{figure.metric or field}", figure.label
        by_kind = isinstance(value, tuple)
        if name not in families:
            names = [*owner, *(["kind"] if by_kind else []), *([label] if label else [])]
            families[name] = _FAMILIES[figure.kind](name, figure.help, labels=names)
        for kind in ObjectKind if by_kind else (None,):
            labels = [*owner.values(), *([] if kind is None else [kind.name.lower()]), *([word] if label else [])]
            families[name].add_metric(labels, value if kind is None else value[kind])


def exposition(daemon: DaemonStatus) -> str:
    """Prometheus' text format; figures are taken when it is called."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(daemon))
    return generate_latest(registry).decode()
