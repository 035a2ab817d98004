"""Which mount holds a path: what the kernel says of it, and what its list says where it does not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from io_daemon.disk.mounts import find_mount, mount_written
from io_daemon.disk.swap_dir import check_swap_dir
from tests.support.kernel_tree import KernelTree, write

MountHere = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> KernelTree:
    return KernelTree(tmp_path / "kernel")


@pytest.fixture
def mount_here(tmp_path: Path) -> Iterator[MountHere]:
    """Mounts the kind of filesystem at a path below the test's directory until it is over."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with ExitStack() as mounted:

        def mount(kind: str, at: Path, options: str = "rw") -> Path:
            at.mkdir(parents=True, exist_ok=True)
            words = ["mount", "-t", kind, "-o", options, kind, str(at)]
            if subprocess.run(words, capture_output=True, check=False).returncode:
                pytest.skip(f"this machine mounts no {kind}")
            mounted.callback(subprocess.run, ["umount", "-l", str(at)], check=True)
            return at

        yield mount


def filesystem(path: Path, tree: KernelTree) -> str | None:
    mount = find_mount(path, tree.proc)
    return None if mount is None else mount.filesystem


def test_the_last_mount_above_a_path_covers_earlier_ones(tree: KernelTree, tmp_path: Path) -> None:
    tree.mount(Path("/"), "xfs", "/dev/sda", "8:0")
    tree.mount(tmp_path / "x" / "y", "ext4", "/dev/loop0", "7:0")
    assert filesystem(tmp_path / "x" / "y" / "z", tree) == "ext4"
    assert filesystem(tmp_path, tree) == "xfs"
    tree.mount(tmp_path / "x", "tmpfs", "none", "0:9")
    assert filesystem(tmp_path / "x" / "y" / "z", tree) == "tmpfs"


def test_only_blanks_part_the_columns(tree: KernelTree, tmp_path: Path) -> None:
    place = tree.mount(tmp_path / "sp\u00a0a\x0bce \\040 of", "tmpfs", "a\\043b", "0:9")
    mount = find_mount(place, tree.proc)
    assert mount is not None
    assert (mount.mount_point, mount.source) == (place, "a#b")


def test_the_kernels_word_counts_where_it_says_one(tree: KernelTree, tmp_path: Path) -> None:
    """As of a mount that was moved, which keeps its place in the list."""
    tree.mount(tmp_path / "x" / "y", "ext4", "/dev/loop0", "7:0")
    tree.mount(tmp_path / "x", "tmpfs", "none", "0:9")
    moved = (tree.proc / "self" / "mountinfo").read_text().replace("36 25 7:0", "35 25 7:0")
    write(tree.proc / "self" / "mountinfo", moved)
    for fd in range(1024):
        write(tree.proc / "self" / "fdinfo" / str(fd), "pos:\t0\nmnt_id:\t35\n")
    assert filesystem(tmp_path / "x" / "y", tree) == "ext4"


def test_an_overlay_lies_where_its_upper_directory_does(tree: KernelTree, tmp_path: Path) -> None:
    upper = tree.mount(tmp_path / "memory", "tmpfs", "none", "0:9") / "up,per"
    upper.mkdir()
    named = str(upper).replace(",", "\\054")
    at = tree.mount(tmp_path / "over", "overlay", "overlay", "0:10", f"rw,lowerdir=/l,upperdir={named},workdir=/w")
    mount = find_mount(at, tree.proc)
    assert mount is not None
    assert (mount.upper, mount_written(mount, tree.proc).filesystem) == (upper, "tmpfs")
    upper.rmdir()
    assert mount_written(mount, tree.proc) == mount, "of another namespace, say"


def test_the_kernels_own_mounts(mount_here: MountHere, tmp_path: Path) -> None:
    outer, inner = tmp_path / "x\u00a0z", tmp_path / "x\u00a0z" / "y"
    before = check_swap_dir(tmp_path).filesystem
    mount_here("ramfs", inner)
    assert check_swap_dir(inner).filesystem == "ramfs"
    mount_here("tmpfs", outer)
    inner.mkdir()
    assert check_swap_dir(inner).filesystem == "tmpfs"
    assert check_swap_dir(tmp_path).filesystem == before


def test_an_overlay_over_memory_is_told(mount_here: MountHere, tmp_path: Path) -> None:
    memory = mount_here("tmpfs", tmp_path / "memory")
    for name in ("lower", "upper", "work"):
        (memory / name).mkdir()
    options = ",".join(f"{name}dir={memory}/{name}" for name in ("lower", "upper", "work"))
    found = check_swap_dir(mount_here("overlay", tmp_path / "over", options))
    assert found.in_memory
    assert any("overlay lies in memory" in note for note in found.notes)
