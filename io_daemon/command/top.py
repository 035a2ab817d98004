"""``io-daemon top``: what a running daemon does, looked at again and again."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Group
from rich.live import Live
from rich.table import Table

from io_daemon.command.console import open_console, redraws
from io_daemon.command.rates import DeviceRates, Rates, TenantRates, rates
from io_daemon.command.units import UNKNOWN, binary_bytes_text, count_text, decimal_bytes_text, rate_text, share_text
from io_daemon.shared.metrics import DaemonStatus

PIPE_WIDTH: Final = 1000
"""Who reads a pipe looks for names that are whole."""

Show = Callable[[DaemonStatus, Rates], None]


def watch(ask: Callable[[], DaemonStatus], interval_s: float, num_looks: int | None, *, as_json: bool) -> None:
    """Show rates every ``interval_s`` seconds, ``num_looks`` times or until Ctrl-C: in place at a terminal, one below
    the other elsewhere, or as JSON, an object a line. Raises what ``ask`` does: DaemonLostError when the daemon has
    gone."""
    before = ask()
    with contextlib.suppress(KeyboardInterrupt), _screen(as_json=as_json) as show:
        for _ in itertools.count() if num_looks is None else range(num_looks):
            time.sleep(interval_s)
            now = ask()
            show(now, rates(before, now))
            before = now


@contextlib.contextmanager
def _screen(*, as_json: bool) -> Iterator[Show]:
    console = open_console()
    if as_json:
        yield lambda _, found: print(found.model_dump_json(), flush=True)
    elif not redraws(console):
        console.width = PIPE_WIDTH
        yield lambda now, found: console.print(_page(now, found))
    else:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda now, found: live.update(_page(now, found), refresh=True)


def _page(now: DaemonStatus, found: Rates) -> Group:
    title = f"io-daemon pid {now.pid} on {now.socket_path}, the last {found.seconds:.1f} s"
    devices = _table("directory", "read", "written", "iops", "in flight", "queued", "free")
    for device in found.devices:
        devices.add_row(*_device_cells(device))
    tenants = _table("tenant", "read", "written", "acquired", "ready", "I/O", "resident", "leases")
    for tenant in found.tenants:
        tenants.add_row(*_tenant_cells(tenant))
    return Group(title, devices, tenants if found.tenants else "no tenants")


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _device_cells(device: DeviceRates) -> tuple[str, ...]:
    return (
        device.path,
        rate_text(device.bytes_read_per_s),
        rate_text(device.bytes_written_per_s),
        count_text(device.reads_per_s + device.writes_per_s),
        str(device.num_in_flight),
        str(device.num_queued),
        decimal_bytes_text(device.free_bytes),
    )


def _tenant_cells(tenant: TenantRates) -> tuple[str, ...]:
    return (
        f"{tenant.job} rank {tenant.rank} (pid {tenant.pid})",
        rate_text(tenant.bytes_read_per_s),
        rate_text(tenant.bytes_written_per_s),
        f"{count_text(tenant.acquired_per_s)}/s",
        UNKNOWN if tenant.ready_share is None else share_text(tenant.ready_share),
        share_text(tenant.io_share),
        binary_bytes_text(tenant.resident_bytes),
        str(tenant.num_leases),
    )
