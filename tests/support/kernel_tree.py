"""A made-up /proc and /sys below a temporary directory: block devices, mounts and what the kernel says of them."""

from __future__ import annotations

import os
from pathlib import Path

QUEUE = {"logical_block_size": "512", "physical_block_size": "4096", "scheduler": "[none] mq-deadline kyber",
         "rotational": "0", "nr_requests": "1023", "write_cache": "write back"}  # fmt: skip


class KernelTree:
    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self._mounts: list[str] = []
        self._num_disks = 0
        write(
            self.proc / "meminfo", "MemTotal:  1048576 kB\nMemAvailable: 524288 kB\nSwapTotal: 0 kB\nHugePages_Total: 3"
        )
        write(self.proc / "cpuinfo", "processor\t: 0\nmodel name\t: ACME 9000\nflags\t: fpu\n")
        write(self.proc / "sys" / "kernel" / "osrelease", "6.8.0-test\n")
        write(self.proc / "sys" / "kernel" / "io_uring_disabled", "0\n")
        write(self.proc / "sys" / "fs" / "aio-nr", "12\n")
        write(self.proc / "sys" / "fs" / "aio-max-nr", "65536\n")
        write(self.sys / "devices" / "system" / "node" / "online", "0-1\n")
        write(self.proc / "self" / "mountinfo", "")

    def mount(self, at: Path, filesystem: str, source: str, number: str, super_options: str = "rw") -> Path:
        """The directory, made if it is not there."""
        at.mkdir(parents=True, exist_ok=True)
        place = str(at.resolve()).replace("\\", "\\134").replace(" ", "\\040")
        self._mounts.append(f"36 25 {number} / {place} rw,noatime shared:1 - {filesystem} {source} {super_options}\n")
        write(self.proc / "self" / "mountinfo", "".join(self._mounts))
        return at

    def nvme(self, number: int, *, width: str = "4") -> Path:
        """nvme<number>n1 behind a PCIe 4.0 x4 slot on NUMA node 1."""
        function = self.sys / "devices" / "pci0000:00" / f"0000:0{number}:00.0"
        for name, text in (("current_link_speed", "16.0 GT/s PCIe"), ("max_link_speed", "16.0 GT/s PCIe"),
                           ("current_link_width", width), ("max_link_width", "4"), ("numa_node", "1")):  # fmt: skip
            write(function / name, text + "\n")
        controller = function / "nvme" / f"nvme{number}"
        write(controller / "model", "ACME Turbo 3840      \n")
        disk = self._disk(controller / f"nvme{number}n1", f"259:{number}")
        link(disk / "device", controller)
        return disk

    def partition(self, disk: Path, number: str) -> Path:
        part = disk / f"{disk.name}p1"
        write(part / "partition", "1\n")
        write(part / "size", "1000\n")
        self._number(part, number)
        return part

    def virtual(self, name: str, number: str, *below: Path) -> Path:
        """A disk that lies on others."""
        disk = self._disk(self.sys / "devices" / "virtual" / "block" / name, number)
        (disk / "slaves").mkdir()
        for slave in below:
            link(disk / "slaves" / slave.name, slave)
        return disk

    def _disk(self, disk: Path, number: str) -> Path:
        for name, text in QUEUE.items():
            write(disk / "queue" / name, text + "\n")
        write(disk / "size", "7501476528\n")
        self._number(disk, number)
        return disk

    def _number(self, device: Path, number: str) -> None:
        link(self.sys / "dev" / "block" / number, device)
        link(self.sys / "class" / "block" / device.name, device)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(os.path.relpath(target, path.parent), path)
