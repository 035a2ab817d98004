"""The block devices below a filesystem, from /sys: a disk, or a RAID, mapping or partition and what it lies upon.

Of the kernel's documentation: ABI/stable/sysfs-block for queues, ABI/testing/sysfs-bus-pci for PCIe links.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from io_daemon.disk.kernel_text import read_integer, read_text
from io_daemon.disk.mounts import Mount
from io_daemon.machine.drive_health import DriveHealth, read_health
from io_daemon.shared.record import Record

SECTOR_BYTES: Final = 512
"""The unit of sysfs's sizes, whatever the device's own blocks are."""
DEPTH_MAX: Final = 8
"""Devices lie upon devices no deeper: no machine has more, and a loop in a broken /sys ends."""
KEYS: Final = ("wwid", "device/wwid", "device/serial", "serial", "dm/uuid", "md/uuid")
"""Files of a device that tell it from all others, the best first."""
MAPPER_KINDS: Final = {"CRYPT": "dm-crypt", "LVM": "LVM", "mpath": "multipath"}

Kind = Literal["disk", "partition", "raid", "mapping", "loop"]


class PcieLink(Record):
    """``num_lanes`` at ``gt_per_s``: as it runs, and the most that drive and slot could do."""

    gt_per_s: float
    num_lanes: int
    gt_per_s_max: float | None
    num_lanes_max: int | None

    @property
    def slowed(self) -> bool:
        return (self.gt_per_s_max or 0) > self.gt_per_s or (self.num_lanes_max or 0) > self.num_lanes


class BlockDevice(Record):
    """One device and those below it. None: the kernel does not tell; ``notes`` says which."""

    name: str
    kind: Kind
    layer: str | None
    """What a RAID or mapping is: ``raid0``, ``dm-crypt``, ``LVM``; of a loop device its file."""
    model: str | None
    size_bytes: int | None
    logical_block_bytes: int | None
    physical_block_bytes: int | None
    scheduler: str | None
    rotational: bool | None
    nr_requests: int | None
    write_cache: str | None
    """``write back``: a write is durable only after a flush."""
    numa_node: int | None
    pcie: PcieLink | None
    raid_chunk_bytes: int | None
    health: DriveHealth | None
    below: list[BlockDevice]
    notes: list[str]

    def disks(self) -> Iterator[BlockDevice]:
        """The devices at the bottom: themselves, for a disk."""
        if not self.below:
            yield self
        for device in self.below:
            yield from device.disks()

    def write_shares(self) -> Iterator[tuple[BlockDevice, float | None]]:
        """The disks, each with the bytes that are written to it for every one that is written to this device. None:
        that depends on what is written (parity) or on what the kernel does not tell here (copies, LVM's volumes)."""
        if not self.below:
            yield self, 1.0
            return
        share = self._share_of_each_below()
        for device in self.below:
            for disk, part in device.write_shares():
                yield disk, None if share is None or part is None else share * part

    def _share_of_each_below(self) -> float | None:
        if len(self.below) == 1 or (self.kind, self.layer) == ("raid", "raid1"):
            return 1.0
        return 1 / len(self.below) if (self.kind, self.layer) == ("raid", "raid0") else None


def find_block_device(mount: Mount, sys: Path) -> BlockDevice | None:
    """The device that ``mount`` lies on, or None if there is none or this namespace does not show it."""
    node = _node_of(mount, sys)
    return None if node is None else _describe(node, depth=0)


def cached_loops(mount: Mount, sys: Path) -> list[str]:
    """The names of loop devices that ``mount`` lies on, however deep, and whose file is read and written through this
    machine's page cache, whatever is asked of them."""
    node = _node_of(mount, sys)
    return [] if node is None else list(dict.fromkeys(_cached_loops(node, depth=0)))


def _cached_loops(node: Path, depth: int) -> Iterator[str]:
    if read_integer(node / "loop" / "dio") == 0:
        yield _name(node)
    for below in _below(node) if depth < DEPTH_MAX else []:
        yield from _cached_loops(below, depth + 1)


def _node_of(mount: Mount, sys: Path) -> Path | None:
    by_number = sys / "dev" / "block" / mount.device
    by_name = sys / "class" / "block" / Path(os.path.realpath(mount.source)).name
    if by_number.exists():
        node = by_number
    elif mount.source.startswith("/dev/") and by_name.exists():  # btrfs: a number of its own, a source in /dev
        node = by_name
    else:
        return None
    return node.resolve()


def _below(node: Path) -> list[Path]:
    """What a device lies upon; nothing for a disk."""
    if (node / "partition").exists():
        return [node.parent]
    return sorted(entry.resolve() for entry in node.glob("slaves/*"))


def _name(node: Path) -> str:
    return node.name.replace("!", "/")  # cciss!c0d0 is cciss/c0d0 in /dev


def device_key(directory: Path, sys: Path = Path("/sys")) -> str | None:
    """Names the block device below ``directory`` so that it is known again after a reboot: its serial number or
    unique id where the kernel has one, else its name, and its size, since virtual drives share serial numbers; the
    filesystem's id where there is no block device; None if that says nothing either."""
    number = directory.stat().st_dev
    node = sys / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if not node.exists():
        fsid = os.statvfs(directory).f_fsid
        return f"fsid:{fsid:x}" if fsid else None
    disk = node.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    num_sectors = read_integer(disk / "size")
    for name in KEYS:
        if value := read_text(disk / name):
            return f"{name.rpartition('/')[2]}:{value}:{num_sectors}"
    return f"name:{disk.name}:{num_sectors}"


def _describe(node: Path, depth: int) -> BlockDevice:
    is_partition = (node / "partition").exists()
    below = [_describe(entry, depth + 1) for entry in _below(node)] if depth < DEPTH_MAX else []
    queue = (node.parent if is_partition else node) / "queue"
    kind, layer = ("partition", None) if is_partition else _kind(node)
    sectors = read_integer(node / "size")
    chunk = read_integer(node / "md" / "chunk_size")
    # what lies on other devices has no model, node, link or health of its own
    bottom = kind == "disk" and not below
    model = read_text(node / "device" / "model") or read_text(node / "device" / "name") if bottom else None
    numa_node = _numa_node(node) if bottom else None
    pcie = _pcie_link(node) if bottom else None
    health, health_note = read_health(node, _name(node)) if bottom else (None, None)
    device = BlockDevice(
        name=_name(node),
        kind=kind,
        layer=layer,
        model=model,
        size_bytes=None if sectors is None else sectors * SECTOR_BYTES,
        logical_block_bytes=read_integer(queue / "logical_block_size"),
        physical_block_bytes=read_integer(queue / "physical_block_size"),
        scheduler=_chosen(read_text(queue / "scheduler")),
        rotational=_flag(queue / "rotational"),
        nr_requests=read_integer(queue / "nr_requests"),
        write_cache=read_text(queue / "write_cache"),
        numa_node=numa_node,
        pcie=pcie,
        raid_chunk_bytes=chunk or None,
        health=health,
        below=below,
        notes=[],
    )
    return device.model_copy(update={"notes": list(_notes(device, health_note))})


def _kind(node: Path) -> tuple[Kind, str | None]:
    if (node / "md").is_dir():
        return "raid", read_text(node / "md" / "level")
    if (node / "dm").is_dir():
        uuid = read_text(node / "dm" / "uuid") or ""
        return "mapping", MAPPER_KINDS.get(uuid.partition("-")[0], "device mapper")
    if (node / "loop").is_dir():
        return "loop", read_text(node / "loop" / "backing_file")
    return "disk", None


def _notes(device: BlockDevice, health_note: str | None) -> Iterator[str]:
    told = ["size_bytes", "logical_block_bytes", "physical_block_bytes", "scheduler", "rotational", "nr_requests",
            "write_cache"]  # fmt: skip
    if device.kind == "disk" and not device.below:
        told += ["model", "numa_node", "pcie"]
    unknown = [name for name in told if getattr(device, name) is None]
    if unknown:
        yield f"{device.name}: the kernel does not tell {', '.join(unknown)}"
    if device.pcie is not None and device.pcie.slowed:
        yield (
            f"{device.name}: its PCIe link runs at {link_text(device.pcie)} of "
            f"{device.pcie.gt_per_s_max:g} GT/s x{device.pcie.num_lanes_max}: look at the slot"
        )
    if device.kind == "loop":
        yield f"{device.name}: lies in the file {device.layer}, and I/O to it passes that file's filesystem as well"
    if health_note is not None:
        yield f"{device.name}: {health_note}"


def link_text(link: PcieLink) -> str:
    return f"{link.gt_per_s:g} GT/s x{link.num_lanes}"


def _controllers(node: Path) -> Iterator[Path]:
    """Where to look for the PCI function of a disk: above it, or, for a path of an NVMe subsystem, above that."""
    yield node
    for controller in sorted((node / "device").glob("nvme[0-9]*")):
        if controller.is_symlink():
            yield controller.resolve()


def _numa_node(node: Path) -> int | None:
    for controller in _controllers(node):
        for place in (controller, *controller.parents):
            number = read_integer(place / "numa_node")
            if number is not None:
                return number if number >= 0 else None  # -1: the firmware does not say
    return None


def _pcie_link(node: Path) -> PcieLink | None:
    for controller in _controllers(node):
        for place in (controller, *controller.parents):
            speed, width = _speed(place / "current_link_speed"), read_integer(place / "current_link_width")
            if speed is not None and width is not None:
                return PcieLink(
                    gt_per_s=speed,
                    num_lanes=width,
                    gt_per_s_max=_speed(place / "max_link_speed"),
                    num_lanes_max=read_integer(place / "max_link_width"),
                )
    return None


def _speed(path: Path) -> float | None:
    """``16.0 GT/s PCIe`` as 16.0; ``Unknown`` as None."""
    try:
        return float((read_text(path) or "").partition(" ")[0])
    except ValueError:
        return None


def _chosen(scheduler: str | None) -> str | None:
    """``[none] mq-deadline`` is ``none``."""
    if scheduler is None or "[" not in scheduler:
        return scheduler
    return scheduler.partition("[")[2].partition("]")[0]


def _flag(path: Path) -> bool | None:
    number = read_integer(path)
    return None if number is None else number != 0
