"""Machine facts from a made-up /proc and /sys, and once from the real ones."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from io_daemon.disk.mounts import Mount
from io_daemon.machine.block_device import BlockDevice, PcieLink
from io_daemon.machine.facts import DirectoryFacts, MachineFacts, cached_loops_below, describe_machine
from io_daemon.machine.meminfo import available_bytes, cgroup_ram_max_bytes
from tests.support.kernel_tree import KernelTree, write


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelTree:
    fake_smartctl(tmp_path, monkeypatch, {"smartctl": {"messages": [{"string": "no such device"}]}})
    return KernelTree(tmp_path)


def fake_smartctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    write(tmp_path / "log.json", json.dumps(log))
    program = tmp_path / "bin" / "smartctl"
    # warnings of the drive set bits of smartctl's exit code
    write(program, f'#!/bin/sh\n[ $# = 3 ] && read -r line < {tmp_path}/log.json; echo "$line"; exit 64\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent))


def directory_of(tree: KernelTree, path: Path) -> DirectoryFacts:
    return describe_machine([path], proc=tree.proc, sys=tree.sys).directories[0]


def device_of(tree: KernelTree, path: Path) -> BlockDevice:
    device = directory_of(tree, path).device
    assert device is not None
    return device


def test_the_machine_itself(tree: KernelTree) -> None:
    facts = describe_machine([], proc=tree.proc, sys=tree.sys)
    assert (facts.kernel, facts.processor, facts.numa_nodes) == ("6.8.0-test", "ACME 9000", "0-1")
    assert (facts.ram_bytes, facts.ram_available_bytes, facts.swap_bytes) == (1 << 30, 1 << 29, 0)
    assert (facts.aio_nr, facts.aio_max_nr, facts.io_uring_disabled) == (12, 65536, 0)
    assert facts.cgroup_ram_max_bytes is None
    assert any(engine.name == "posix" and engine.works for engine in facts.engines)


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "4096", 4096),
        ("memory.max", "max", None),
        ("memory/memory.limit_in_bytes", "8192", 8192),
        ("memory/memory.limit_in_bytes", "9223372036854771712", None),
    ],
)
def test_the_limit_of_the_cgroup(tree: KernelTree, name: str, text: str, limit: int | None) -> None:
    write(tree.sys / "fs" / "cgroup" / name, text)
    assert describe_machine([], proc=tree.proc, sys=tree.sys).cgroup_ram_max_bytes == limit


@pytest.mark.parametrize(
    ("own", "limits", "least"),
    [
        ("0::/slurm/job_7/step_0", {"memory.max": "max", "slurm/job_7/memory.max": "4096"}, 4096),
        ("0::/slurm/job_7", {"slurm/memory.max": "4096", "slurm/job_7/memory.max": "8192"}, 4096),
        ("0::/slurm/job_7", {"slurm/memory.max": "max", "slurm/job_8/memory.max": "4096"}, None),
        ("0::/", {"memory.max": "8192"}, 8192),
        ("0::/../outside", {"memory.max": "8192", "outside/memory.max": "4096"}, 8192),
        ("5:cpu,memory:/job\n1:name=systemd:/other", {"memory/job/memory.limit_in_bytes": "4096"}, 4096),
        ("5:cpu:/job\n0::/", {"memory/job/memory.limit_in_bytes": "4096"}, None),
        ("5:memory:/docker/abc", {"memory/memory.limit_in_bytes": "4096"}, 4096),
        ("what is this", {"memory.max": "4096"}, 4096),
    ],
)
def test_the_limits_of_the_cgroups_above(tree: KernelTree, own: str, limits: dict[str, str], least: int | None) -> None:
    """A batch system puts a job some levels below the root, and shows it all of them."""
    write(tree.proc / "self" / "cgroup", own + "\n")
    for name, text in limits.items():
        write(tree.sys / "fs" / "cgroup" / name, text)
    assert cgroup_ram_max_bytes(tree.sys, tree.proc) == least


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/", {"memory.max": "8192"}, 8192),
        ("0::/", {"memory.max": "8192", "memory.current": "5000"}, 3192),
        ("0::/", {"memory.max": "8192", "memory.current": "5000", "memory.stat": "file 9\ninactive_file 1000"}, 4192),
        ("0::/", {"memory.max": "8192", "memory.current": "10", "memory.stat": "inactive_file 1000"}, 8192),
        ("0::/", {"memory.max": "8192", "memory.current": "8000", "memory.stat": "active_file 5000\nanon 9"}, 5192),
        ("0::/", {"memory.max": "8192", "memory.current": "9000"}, 0),
        ("0::/", {"memory.max": "max", "memory.current": "5000"}, 1 << 29),
        ("0::/job", {"memory.max": "9000", "memory.current": "8000", "job/memory.max": "5000"}, 1000),
        ("0::/job", {"memory.max": "9000", "job/memory.max": "5000", "job/memory.current": "4000"}, 1000),
        (
            "5:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": "8192",
                "memory/job/memory.usage_in_bytes": "5000",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 1000",
            },
            4192,
        ),
    ],
)
def test_what_a_cgroup_has_left(tree: KernelTree, own: str, files: dict[str, str], left: int) -> None:
    """The page cache of files that were just written, say, counts as used and is given up for whoever asks."""
    write(tree.proc / "self" / "cgroup", own + "\n")
    for name, text in files.items():
        write(tree.sys / "fs" / "cgroup" / name, text)
    assert available_bytes(tree.sys, tree.proc) == left


def test_an_nvme_partition(tree: KernelTree, tmp_path: Path) -> None:
    tree.partition(tree.nvme(1), "259:9")
    facts = directory_of(tree, tree.mount(tmp_path / "a swap", "ext4", "/dev/nvme1n1p1", "259:9", "rw,discard"))
    assert facts.filesystem == "ext4"
    assert facts.mount_options == ["rw", "noatime", "discard"]
    assert facts.mount_point == str((tmp_path / "a swap").resolve())
    assert facts.device is not None
    assert (facts.device.name, facts.device.kind, facts.device.logical_block_bytes) == ("nvme1n1p1", "partition", 512)
    (disk,) = facts.device.disks()
    assert (disk.name, disk.model, disk.numa_node) == ("nvme1n1", "ACME Turbo 3840", 1)
    assert disk.pcie == PcieLink(gt_per_s=16.0, num_lanes=4, gt_per_s_max=16.0, num_lanes_max=4)
    assert (disk.scheduler, disk.rotational, disk.nr_requests) == ("none", False, 1023)
    assert (disk.physical_block_bytes, disk.write_cache) == (4096, "write back")
    assert disk.size_bytes == 7501476528 * 512
    assert disk.notes == ["nvme1n1: drive health unknown: smartctl: no such device"] or "root" in disk.notes[0]


@pytest.mark.parametrize(
    ("level", "shares"),
    [
        ("raid0", [0.5, 0.5]),
        ("raid1", [1.0, 1.0]),
        ("raid10", [None, None]),  # how many copies there are, the level does not say
        ("raid5", [None, None]),
        ("linear", [None, None]),
    ],
)
def test_what_a_raid_writes_to_its_drives(
    tree: KernelTree, tmp_path: Path, level: str, shares: list[float | None]
) -> None:
    md = tree.virtual("md0", "9:0", tree.nvme(1), tree.nvme(2))
    write(md / "md" / "level", f"{level}\n")
    crypt = tree.virtual("dm-0", "253:0", md)
    write(crypt / "dm" / "uuid", "CRYPT-LUKS2-1")
    device = device_of(tree, tree.mount(tmp_path / "swap", "xfs", "/dev/dm-0", "253:0"))
    assert [(disk.name, share) for disk, share in device.write_shares()] == [
        ("nvme1n1", shares[0]), ("nvme2n1", shares[1]),
    ]  # fmt: skip


def test_raid0_over_two_drives(tree: KernelTree, tmp_path: Path) -> None:
    md = tree.virtual("md0", "9:0", tree.nvme(1), tree.nvme(2))
    write(md / "md" / "level", "raid0\n")
    write(md / "md" / "chunk_size", "524288\n")
    device = device_of(tree, tree.mount(tmp_path / "swap", "xfs", "/dev/md0", "9:0"))
    assert (device.kind, device.layer, device.raid_chunk_bytes) == ("raid", "raid0", 512 << 10)
    assert [disk.name for disk in device.disks()] == ["nvme1n1", "nvme2n1"]
    assert device.health is None
    assert device.model is None
    assert not device.notes  # what a RAID has none of is not missing


def test_dm_crypt(tree: KernelTree, tmp_path: Path) -> None:
    mapping = tree.virtual("dm-0", "252:0", tree.partition(tree.nvme(1), "259:9"))
    write(mapping / "dm" / "uuid", "CRYPT-LUKS2-0123-swap\n")
    device = device_of(tree, tree.mount(tmp_path / "swap", "ext4", "/dev/mapper/swap", "252:0"))
    assert (device.kind, device.layer) == ("mapping", "dm-crypt")
    assert [below.name for below in device.below] == ["nvme1n1p1"]
    assert [disk.name for disk in device.disks()] == ["nvme1n1"]


@pytest.mark.parametrize(("dio", "names"), [("0", ["loop3"]), ("1", []), (None, [])])
def test_a_loop_device_that_goes_through_the_page_cache(
    dio: str | None, names: list[str], tree: KernelTree, tmp_path: Path
) -> None:
    """Also below a mapping of a partition of it. A kernel that does not tell is not accused."""
    loop = tree.virtual("loop3", "7:3")
    write(loop / "loop" / "backing_file", "/srv/disk.img\n")
    if dio is not None:
        write(loop / "loop" / "dio", dio + "\n")
    mapping = tree.virtual("dm-0", "252:0", tree.partition(loop, "259:9"), tree.nvme(1))
    write(mapping / "dm" / "uuid", "LVM-0123\n")
    for source, number in (("/dev/loop3", "7:3"), ("/dev/mapper/swap", "252:0")):
        swap = tree.mount(tmp_path / number, "ext4", source, number)
        assert cached_loops_below(swap, proc=tree.proc, sys=tree.sys) == names
    assert cached_loops_below(tmp_path, proc=tree.proc, sys=tree.sys) == []


def test_a_narrow_link_is_noted(tree: KernelTree, tmp_path: Path) -> None:
    tree.nvme(1, width="2")
    device = device_of(tree, tree.mount(tmp_path / "swap", "ext4", "/dev/nvme1n1", "259:1"))
    assert any("16 GT/s x2 of 16 GT/s x4" in note for note in device.notes)


def test_a_path_of_an_nvme_subsystem_finds_its_controller(tree: KernelTree, tmp_path: Path) -> None:
    disk = tree.nvme(1)
    head = tree.virtual("nvme0n1", "259:50")
    subsystem = tree.sys / "devices" / "virtual" / "nvme-subsystem" / "nvme-subsys0"
    write(subsystem / "model", "ACME Multipath\n")
    (subsystem / "nvme1").symlink_to(disk.parent)
    (head / "device").symlink_to(subsystem)
    device = device_of(tree, tree.mount(tmp_path / "swap", "ext4", "/dev/nvme0n1", "259:50"))
    assert (device.model, device.numa_node) == ("ACME Multipath", 1)
    assert device.pcie is not None


def test_btrfs_has_a_number_of_its_own_and_names_its_source(tree: KernelTree, tmp_path: Path) -> None:
    tree.nvme(7)
    device = device_of(tree, tree.mount(tmp_path / "swap", "btrfs", "/dev/nvme7n1", "0:44"))
    assert device.name == "nvme7n1"


@pytest.mark.parametrize(("filesystem", "word"), [("tmpfs", "lies in memory"), ("overlay", "hides its drive")])
def test_what_has_no_device_says_so(tree: KernelTree, tmp_path: Path, filesystem: str, word: str) -> None:
    facts = directory_of(tree, tree.mount(tmp_path / "swap", filesystem, filesystem, "0:50"))
    assert facts.device is None
    assert any(word in note for note in facts.notes)


def test_smart(tree: KernelTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = {
        "temperature": {"current": 41},
        "power_on_time": {"hours": 900},
        "nvme_smart_health_information_log": {
            "percentage_used": 3, "available_spare": 100, "data_units_written": 10, "data_units_read": 20,
            "media_errors": 0, "critical_warning": 4},
    }  # fmt: skip
    fake_smartctl(tmp_path, monkeypatch, log)
    tree.nvme(1)
    health = device_of(tree, tree.mount(tmp_path / "swap", "ext4", "/dev/nvme1n1", "259:1")).health
    assert health is not None
    assert (health.temperature_c, health.percent_used, health.power_on_hours) == (41, 3, 900)
    assert (health.written_bytes, health.read_bytes) == (5_120_000, 10_240_000)
    assert (health.media_errors, health.critical_warning) == (0, 4)


@pytest.mark.parametrize("log", [[], {"temperature": 3}, {"smartctl": {"messages": []}}, "text"])
def test_without_smart_the_sensor_is_read(
    tree: KernelTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    fake_smartctl(tmp_path, monkeypatch, log)
    disk = tree.nvme(1)
    write((disk / "device").resolve() / "hwmon3" / "temp1_input", "38850\n")
    device = device_of(tree, tree.mount(tmp_path / "swap", "ext4", "/dev/nvme1n1", "259:1"))
    assert device.health is not None
    assert (device.health.source, device.health.temperature_c) == ("hwmon", 38.85)
    assert any("wear unknown" in note for note in device.notes)


def test_nothing_to_read_is_no_failure(tmp_path: Path) -> None:
    facts = describe_machine([tmp_path, tmp_path / "missing"], proc=tmp_path / "none", sys=tmp_path / "none")
    assert facts.kernel is None
    assert facts.ram_bytes is None
    assert any("does not tell" in note and "kernel" in note for note in facts.notes)
    here, missing = facts.directories
    assert here.free_bytes is not None
    assert here.device is None
    assert missing.free_bytes is None
    assert missing.direct is None
    assert any("cannot be looked at" in note for note in missing.notes)


def test_a_device_that_tells_nothing(tree: KernelTree, tmp_path: Path) -> None:
    bare = tree.sys / "devices" / "bare"
    bare.mkdir(parents=True)
    (tree.sys / "dev" / "block").mkdir(parents=True)
    (tree.sys / "dev" / "block" / "8:0").symlink_to(bare)
    device = device_of(tree, tree.mount(tmp_path / "swap", "ext4", "/dev/bare", "8:0"))
    assert device.logical_block_bytes is None
    assert any("logical_block_bytes" in note and "model" in note for note in device.notes)


def test_this_machine(tmp_path: Path) -> None:
    facts = describe_machine([tmp_path])
    assert facts.num_cores >= 1
    assert facts.ram_bytes
    assert facts.directories[0].filesystem
    assert facts.directories[0].total_bytes
    assert MachineFacts.model_validate_json(facts.model_dump_json()) == facts


def test_mount_lines_are_unescaped() -> None:
    mount = Mount.parse(r"1 2 0:5 / /mnt/a\040b\134040 rw,relatime - fuse.sshfs host:/x rw,user_id=0")
    assert (str(mount.mount_point), mount.filesystem, mount.source) == (r"/mnt/a b\040", "fuse", "host:/x")


def test_a_directory_whose_name_is_no_utf8_has_facts_in_json(tree: KernelTree, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/swap\xff"))
    tree.nvme(1)
    write(tree.proc / "self" / "mountinfo", "")
    path.mkdir()
    facts = describe_machine([path], proc=tree.proc, sys=tree.sys)
    assert facts.directories[0].path.endswith(r"/swap\xff")
    assert facts.directories[0].free_bytes is not None
    assert MachineFacts.model_validate_json(facts.model_dump_json()) == facts
