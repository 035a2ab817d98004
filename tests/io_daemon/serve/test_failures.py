"""What fails inside the daemon while it serves one rank ends that rank alone, and ends it whole."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from io_daemon.errors import DaemonLostError, WorldError
from io_daemon.policy.scheduler import TenantScheduler
from io_daemon.rank.client import Client
from io_daemon.serve.holdings import Rings
from io_daemon.serve.tenant import Tenant
from io_daemon.shared.protocol import Access
from tests.support.daemon import FRAME_BYTES, WEIGHT, chunk_is_intact, eventually, specs, write_chunk
from tests.support.in_process import while_serving


def attach(socket_path: str, job: str) -> Client:
    client = Client.connect(socket_path, job=job, rank=0)
    client.attach(num_frames=2, frame_bytes=FRAME_BYTES, swap_dirs=client.swap_dirs, lock_memory="off")
    return client


def only_files_of(swap_dir: Path, job: str) -> bool:
    return all(f"-{job}-" in path.name for path in swap_dir.iterdir())


def provoke(socket_path: str, name: str, arm: Callable[[], None]) -> None:
    """Attach a tenant and have ``name`` called on its behalf once it is armed."""
    with contextlib.closing(Client.connect(socket_path, job="victim", rank=0)) as victim:
        if name == "__init__":
            arm()
        victim.attach(num_frames=2, frame_bytes=FRAME_BYTES, swap_dirs=victim.swap_dirs, lock_memory="off")
        chunks = victim.register(specs(1))
        arm()
        victim.upload_trace(1, [Access(chunks[0], WEIGHT, 0, 0)])
        victim.register(specs(1))
        victim.unregister(chunks)


@pytest.mark.parametrize("error", [MemoryError, OverflowError, KeyError])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Tenant, "register"),
        (TenantScheduler, "plan_request"),
        (TenantScheduler, "__init__"),
        (TenantScheduler, "unregister"),
    ],
)
def test_an_unexpected_failure_while_answering_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch, swap_dir: Path, error: type[Exception], kind: type, name: str
) -> None:
    armed = threading.Event()
    original = getattr(kind, name)

    def failing(self: object, *args: object, **options: object) -> object:
        if armed.is_set():
            raise error("made up")
        return original(self, *args, **options)

    monkeypatch.setattr(kind, name, failing)

    def use(socket_path: str) -> None:
        with contextlib.closing(attach(socket_path, "bystander")) as bystander:
            (chunk,) = bystander.register(specs(1))
            write_chunk(bystander, chunk, WEIGHT)
            with pytest.raises((DaemonLostError, WorldError), match="the daemon failed"):
                provoke(socket_path, name, armed.set)
            eventually(lambda: only_files_of(swap_dir, "bystander"), "the victim's swap file is gone")
            armed.clear()
            assert chunk_is_intact(bystander, chunk, WEIGHT)
            attach(socket_path, "next").close()

    assert while_serving(monkeypatch, [swap_dir], use) == 0


def test_one_part_that_cannot_be_given_back_keeps_no_other(monkeypatch: pytest.MonkeyPatch, swap_dir: Path) -> None:
    original = Rings.close

    def failing(self: Rings) -> None:
        original(self)
        raise OSError(5, "made up")

    def use(socket_path: str) -> None:
        attach(socket_path, "victim").close()
        eventually(lambda: not list(swap_dir.iterdir()), "the swap file is gone all the same")
        attach(socket_path, "next").close()

    monkeypatch.setattr(Rings, "close", failing)
    while_serving(monkeypatch, [swap_dir], use)
