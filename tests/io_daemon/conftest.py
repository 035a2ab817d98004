from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from io_daemon.rank.client import Client
from tests.support.daemon import DEADLINE_S, WEIGHT, ServedDaemon, chunk_is_intact, eventually, specs, write_chunk

Serve = Callable[..., ServedDaemon]


@pytest.fixture
def swap_dir(tmp_path: Path) -> Path:
    path = tmp_path / "swap"
    path.mkdir()
    return path


@pytest.fixture
def serve(swap_dir: Path) -> Iterator[Serve]:
    """Start daemons, by default over ``swap_dir``; all are gone after the test."""
    daemons: list[ServedDaemon] = []

    def start(*options: str, swap_dirs: list[Path] | None = None, wait_ready: bool = True) -> ServedDaemon:
        daemons.append(ServedDaemon(swap_dirs or [swap_dir], *options, wait_ready=wait_ready))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def daemon(serve: Serve) -> ServedDaemon:
    return serve()


@pytest.fixture
def bystander(daemon: ServedDaemon) -> Iterator[Client]:
    """Another tenant, whose data must be whole and whose daemon must answer after the test."""
    with daemon.attached(job="bystander", num_frames=2) as client:
        for chunk in client.register(specs(6)):
            write_chunk(client, chunk, WEIGHT)
        yield client
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in range(6))
        assert client.echo() < DEADLINE_S
        eventually(lambda: len(daemon.files()) == 1, "only the bystander is left")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    image, mount_point = tmp_path / "disk", tmp_path / "mnt"
    mount_point.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    if subprocess.run(
        ["mount", "-o", "loop", str(image), str(mount_point)], capture_output=True, check=False
    ).returncode:
        pytest.skip("this machine mounts no loop devices")
    yield mount_point
    subprocess.run(["umount", "-l", str(mount_point)], check=True)
