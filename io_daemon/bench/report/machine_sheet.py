"""The machine's facts as sheets of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from io_daemon.bench.report.sheet import Sheet
from io_daemon.command.units import UNKNOWN, binary_bytes_text, decimal_bytes_text
from io_daemon.machine.block_device import BlockDevice, link_text
from io_daemon.machine.drive_health import DriveHealth
from io_daemon.machine.facts import DirectoryFacts, MachineFacts


def machine_sheets(facts: MachineFacts) -> list[Sheet]:
    """The machine, then each directory down to its drives."""
    return [_machine_sheet(facts), *(_directory_sheet(directory) for directory in facts.directories)]


def directory_line(directory: DirectoryFacts) -> str:
    """What a directory lies on, in one line."""
    place = directory.filesystem or "an unknown filesystem"
    if directory.device is not None:
        place += f" on {_device_line(directory.device)}"
    parts = [place, "O_DIRECT" if directory.direct else f"no O_DIRECT ({directory.direct_refusal})"]
    if directory.free_bytes is not None:
        parts.append(f"{decimal_bytes_text(directory.free_bytes)} free")
    return f"{directory.path}: {', '.join(parts)}"


def _device_line(device: BlockDevice) -> str:
    below = " + ".join(_device_line(each) for each in device.below)
    what = device.layer or device.model
    name = f"{device.name} ({what})" if what else device.name
    return f"{name} over {below}" if below else name


def _machine_sheet(facts: MachineFacts) -> Sheet:
    rows = [
        ("program", f"{facts.version or UNKNOWN}, Python {facts.python}"),
        ("kernel", facts.kernel or UNKNOWN),
        ("processor", f"{facts.processor or facts.architecture}, {facts.num_cores} of {facts.num_cores_online} cores"),
        ("NUMA nodes", facts.numa_nodes or UNKNOWN),
        ("RAM", f"{_memory(facts.ram_available_bytes)} of {_memory(facts.ram_bytes)} available"),
        ("swap", _memory(facts.swap_bytes)),
        ("page", binary_bytes_text(facts.page_bytes)),
        ("memlock", "unlimited" if facts.memlock_bytes == "unlimited" else binary_bytes_text(facts.memlock_bytes)),
        ("aio", f"{_word(facts.aio_nr)} of {_word(facts.aio_max_nr)} in use"),
        ("io_uring_disabled", _word(facts.io_uring_disabled)),
    ]
    if facts.cgroup_ram_max_bytes is not None:
        rows.append(("RAM of this cgroup", binary_bytes_text(facts.cgroup_ram_max_bytes)))
    rows += [
        (f"engine {engine.name}", "works" if engine.works else engine.reason or UNKNOWN) for engine in facts.engines
    ]
    rows += [("note", note) for note in facts.notes]
    return Sheet("machine", (), tuple(rows))


def _directory_sheet(directory: DirectoryFacts) -> Sheet:
    free, total = directory.free_bytes, directory.total_bytes
    rows = [
        ("filesystem", f"{directory.filesystem or UNKNOWN} from {directory.source or UNKNOWN}"),
        ("mount point", directory.mount_point or UNKNOWN),
        ("mount options", ",".join(directory.mount_options) or UNKNOWN),
        (
            "free",
            UNKNOWN if free is None or total is None else f"{decimal_bytes_text(free)} of {decimal_bytes_text(total)}",
        ),
        ("O_DIRECT", "works" if directory.direct else f"no: {directory.direct_refusal}"),
    ]
    if directory.device is not None:
        rows += _device_rows(directory.device, depth=0)
    rows += [("note", note) for note in _notes(directory)]
    return Sheet(directory.path, (), tuple(rows))


def _device_rows(device: BlockDevice, depth: int) -> Iterator[tuple[str, str]]:
    parts = [device.layer or device.kind]
    if device.model:
        parts.append(device.model)
    if device.size_bytes is not None:
        parts.append(decimal_bytes_text(device.size_bytes))
    parts.append(f"blocks {_word(device.logical_block_bytes)}/{_word(device.physical_block_bytes)}")
    parts.append(f"scheduler {device.scheduler or UNKNOWN}, nr_requests {_word(device.nr_requests)}")
    if device.rotational is not None:
        parts.append("rotating" if device.rotational else "not rotating")
    if device.write_cache:
        parts.append(device.write_cache)
    if device.raid_chunk_bytes is not None:
        parts.append(f"chunk {binary_bytes_text(device.raid_chunk_bytes)}")
    if device.pcie is not None:
        parts.append(f"PCIe {link_text(device.pcie)}")
    if device.numa_node is not None:
        parts.append(f"NUMA node {device.numa_node}")
    if device.health is not None:
        parts.append(_health_text(device.health))
    yield "└ " * min(depth, 1) + device.name, "; ".join(parts)
    for below in device.below:
        yield from _device_rows(below, depth + 1)


def _health_text(health: DriveHealth) -> str:
    parts = []
    if health.temperature_c is not None:
        parts.append(f"{health.temperature_c:g} °C")
    if health.percent_used is not None:
        parts.append(f"{health.percent_used} % of its life used")
    if health.written_bytes is not None:
        parts.append(f"{decimal_bytes_text(health.written_bytes)} written so far")
    if health.media_errors:
        parts.append(f"{health.media_errors} MEDIA ERRORS")
    if health.critical_warning:
        parts.append(f"CRITICAL WARNING {health.critical_warning:#04x}")
    return ", ".join(parts)


def _notes(directory: DirectoryFacts) -> Iterator[str]:
    yield from directory.notes
    pending = [directory.device] if directory.device is not None else []
    while pending:
        device = pending.pop(0)
        yield from device.notes
        pending += device.below


def _memory(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else binary_bytes_text(num_bytes)


def _word(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)
