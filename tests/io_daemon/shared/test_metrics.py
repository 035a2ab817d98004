"""A figure is declared once: JSON, lines for people and Prometheus' exposition follow."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import pytest

from io_daemon.policy.counters import Counters
from io_daemon.serve.exposition import exposition
from io_daemon.shared import metrics
from io_daemon.shared.metrics import DaemonStatus, DeviceStatus, Figure, Figures, IoTotals, TenantStats, figures_of


def made_up(model: type[Figures], **given: object) -> dict[str, object]:
    """A number for whatever is a figure, told apart by its place."""
    values: dict[str, object] = dict(given)
    for number, (name, field) in enumerate(model.model_fields.items(), 1):
        if name not in values:
            by_kind = "tuple[int" in str(field.annotation)
            values[name] = (number,) * 8 if by_kind else ("word" if field.annotation is str else number)
    return values


def status_of(device: type[DeviceStatus] = DeviceStatus) -> DaemonStatus:
    total = IoTotals.model_validate(made_up(IoTotals))
    tenant = TenantStats.model_validate(made_up(TenantStats, page_locked=True, swap_files=("file",), total=total))
    devices = (device.model_validate(made_up(device, direct=True)),)
    given = {"devices": devices, "tenants": (tenant,), "verify_checksums": True, "private": False}
    return DaemonStatus.model_validate(made_up(DaemonStatus, **given))


@pytest.mark.parametrize("model", [IoTotals, TenantStats, DeviceStatus])
def test_every_number_is_declared(model: type[Figures]) -> None:
    names = {name for name, field in model.model_fields.items() if field.annotation in (int, float, tuple[int, ...])}
    declared = {
        name for name, field in model.model_fields.items() if any(isinstance(m, Figure) for m in field.metadata)
    }
    assert names - {"rank", "pid"} == declared


def test_what_is_counted_is_what_is_declared() -> None:
    assert {field.name for field in fields(Counters)} | {"io_s"} == set(IoTotals.model_fields)


def test_a_new_figure_needs_its_declaration_alone() -> None:
    class Wider(DeviceStatus):
        num_retries: Annotated[int, Figure("counter", "Block I/Os tried again", "retried", metric="retries")]

    daemon = status_of(Wider)
    (device,) = daemon.devices
    value = {name: value for name, _, value in figures_of(device)}["num_retries"]
    assert f'io_daemon_device_retries_total{{path="word"}} {float(value)}' in exposition(daemon)
    assert any(f"retried {value}" in line for line in metrics.status_lines(daemon))


def test_counters_and_gauges_have_the_names_and_labels_that_dashboards_know() -> None:
    text = exposition(status_of())
    for sample in (
        'io_daemon_device_bytes_total{direction="read",path="word"}',
        'io_daemon_device_free_bytes{path="word"}',
        'io_daemon_tenant_bytes_total{direction="write",job="word",kind="weight",pid="3",rank="2"}',
        'io_daemon_tenant_accesses_total{job="word",outcome="prefetch_hit",pid="3",rank="2"}',
        'io_daemon_tenant_io_errors_total{job="word",pid="3",rank="2"}',
        'io_daemon_tenant_resident_bytes{job="word",kind="state_0",pid="3",rank="2"}',
    ):
        assert sample in text
