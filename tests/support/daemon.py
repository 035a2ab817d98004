"""A real daemon process for tests, and what a rank does to it, in few words."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from io_daemon._native import Region
from io_daemon.rank.client import Client
from io_daemon.rank.lease import Grant
from io_daemon.shared.arena import frame_offset
from io_daemon.shared.protocol import ChunkSpec, ObjectKind

DEADLINE_S: Final = 30.0
"""No test waits longer for anything."""
FRAME_BYTES: Final = 64 << 10
WEIGHT: Final = ObjectKind.WEIGHT.mask
MASTER: Final = ObjectKind.MASTER.mask


class ServedDaemon:
    """``python -m io_daemon serve`` over ``swap_dirs``, ready when the constructor returns."""

    def __init__(
        self, swap_dirs: Sequence[Path], *options: str, wait_ready: bool = True, cwd: Path | None = None
    ) -> None:
        self.swap_dirs = [str(path) for path in swap_dirs]
        self.directory = Path(tempfile.mkdtemp(prefix="iod-"))  # a socket's path must be short
        self.socket = str(self.directory / "s")
        self.stderr_path = self.directory / "stderr"
        command = [sys.executable, "-m", "io_daemon", "serve", "--socket", self.socket, *options]
        for path in self.swap_dirs:
            command += ["--swap-dir", path]
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, cwd=cwd)
        self.ready: dict[str, Any] = {}
        if wait_ready:
            self.wait_ready()

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_ready(self, timeout_s: float) -> bool:
        """Whether the ready line comes within ``timeout_s``."""
        if self.process.stdout is None:
            raise AssertionError("stdout is a pipe")
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            return False
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the daemon ended: {self.stderr()}")
        self.ready = json.loads(line)
        return True

    def wait_ready(self) -> None:
        if not self.is_ready(DEADLINE_S):
            self.kill()
            raise AssertionError(f"the daemon is not ready after {DEADLINE_S} s: {self.stderr()}")

    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def fds(self) -> list[str]:
        """What its open fds are, sorted."""
        links = []
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/{self.pid}/fd/{name}"))
        return sorted(links)

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def mapped(self, what: str) -> int:
        """How many of its mappings are of ``what``."""
        return sum(what in line for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines())

    def children(self) -> list[int]:
        """Pids of its child processes."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def swap_fds(self) -> list[int]:
        """Open flags of every swap file that it holds."""
        flags = []
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                path = os.readlink(f"/proc/{self.pid}/fd/{name}")
                info = Path(f"/proc/{self.pid}/fdinfo/{name}").read_text()
            except FileNotFoundError:  # closed since
                continue
            if path.partition(" ")[0].endswith(".swap"):
                flags.append(next(int(line.split()[1], 8) for line in info.splitlines() if line.startswith("flags:")))
        return flags

    def files(self) -> list[str]:
        """What lies in the swap directories."""
        return sorted(name for path in self.swap_dirs for name in os.listdir(path))

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)

    def terminate(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def connect(self, *, job: str = "job", rank: int = 0) -> Client:
        return Client.connect(self.socket, job=job, rank=rank)

    @contextlib.contextmanager
    def attached(
        self, *, num_frames: int = 8, frame_bytes: int = FRAME_BYTES, job: str = "job", rank: int = 0
    ) -> Iterator[Client]:
        """A client with an arena, closed cleanly at the end."""
        with self.connect(job=job, rank=rank) as client:
            client.attach(num_frames=num_frames, frame_bytes=frame_bytes, swap_dirs=client.swap_dirs, lock_memory="off")
            yield client


def eventually(condition: Callable[[], bool], what: str, *, within_s: float = DEADLINE_S) -> None:
    """Until ``condition`` holds; AssertionError after ``within_s``."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.005)


def specs(count: int, *kinds: ObjectKind, object_bytes: int = FRAME_BYTES, pinned_mask: int = 0) -> list[ChunkSpec]:
    """``count`` equal chunks that have ``kinds`` (default: WEIGHT), each of ``object_bytes``."""
    wanted = kinds or (ObjectKind.WEIGHT,)
    sizes = tuple(object_bytes if kind in wanted else 0 for kind in ObjectKind)
    return [ChunkSpec(sizes, pinned_mask)] * count


def frame(arena: Region, number: int, frame_bytes: int) -> NDArray[np.uint8]:
    start = frame_offset(number, frame_bytes)
    return arena.array()[start : start + frame_bytes]


def contents(client: Client, grant: Grant, kind: int) -> NDArray[np.uint8]:
    """A copy of one kind's whole frames."""
    return np.concatenate([frame(client.arena, number, client.frame_bytes) for number in grant.frames[kind]])


def pattern(num_bytes: int, *seed: int) -> NDArray[np.uint8]:
    """Bytes that no other seed gives."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def write_chunk(client: Client, chunk: int, mask: int, *seed: int) -> None:
    """Fill every kind in ``mask`` with the pattern of (seed, chunk, kind)."""
    seq = client.acquire(chunk, write=mask)
    grant = client.wait(seq, DEADLINE_S)
    for kind, frames in grant.frames.items():
        data = pattern(len(frames) * client.frame_bytes, *seed, chunk, kind)
        for piece, number in enumerate(frames):
            frame(client.arena, number, client.frame_bytes)[:] = data[piece * client.frame_bytes :][
                : client.frame_bytes
            ]
    client.release(seq, dirty=mask)


def chunk_is_intact(client: Client, chunk: int, mask: int, *seed: int) -> bool:
    """Whether every kind in ``mask`` reads as ``write_chunk`` wrote it."""
    seq = client.acquire(chunk, read=mask)
    grant = client.wait(seq, DEADLINE_S)
    intact = all(
        np.array_equal(contents(client, grant, kind), pattern(len(frames) * client.frame_bytes, *seed, chunk, kind))
        for kind, frames in grant.frames.items()
    )
    client.release(seq)
    return intact
