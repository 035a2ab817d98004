"""What the configuration says of the daemon reaches it: the one that is named, found or started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import Environment, parse_config
from infinity.errors import ConfigError
from infinity.plan.memory_plan import MemoryPlan
from infinity.tiers import connection as module
from infinity.tiers.collectives import Collectives
from infinity.tiers.connection import DaemonConnection, NodePlace

PLACE = NodePlace(node="here", local_rank=0, local_world_size=1)
PLAN = MemoryPlan(
    chunk_numel=16_384,
    frame_bytes=65_536,
    num_frames=4,
    pinned_frames=0,
    demand_frames=1,
    swap_bytes=0,
    chunks_max=16,
)


class StandIn:
    """A daemon's process, and a client of it, that only note what they are asked for."""

    def __init__(self, tmp_path: Path) -> None:
        self.socket = tmp_path / "io.sock"
        self.started: list[dict[str, Any]] = []
        self.attached: list[dict[str, Any]] = []
        self.connected: list[str] = []
        self.swap_dirs = (str(tmp_path),)

    def process(self, **options: Any) -> StandIn:
        self.started.append(options)
        return self

    def connect(self, path: str, **_options: Any) -> StandIn:
        self.connected.append(path)
        return self

    def attach(self, **options: Any) -> None:
        self.attached.append(options)
        raise ConnectionAbortedError("far enough")

    def close(self) -> None:
        pass


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(tmp_path)
    monkeypatch.setattr(module, "DaemonProcess", stand_in.process)
    monkeypatch.setattr(module, "Client", stand_in)
    return stand_in


def _connected(tmp_path: Path, *, pin_memory: bool | None = None, **io_daemon: Any) -> DaemonConnection:
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": pin_memory}
    config = parse_config(
        {
            "train_batch_size": 1,
            "zero_optimization": {"stage": 3, "offload_optimizer": offload},
            "io_daemon": io_daemon,
        }
    )
    environment = Environment(temp_dir=tmp_path, runtime_dir=tmp_path)
    return DaemonConnection(config, environment, Collectives.join(None), PLACE)


def test_settings_reach_the_daemon_that_is_started(daemon: StandIn, tmp_path: Path) -> None:
    _connected(tmp_path, engine="require:posix", block_size=65536, queue_depth=4, verify_checksums=False)
    (started,) = daemon.started
    options = started["options"]
    assert started["swap_dirs"] == (tmp_path,)
    for words in (["--engine", "require:posix"], ["--block-size", "65536"], ["--queue-depth", "4"]):
        assert options[options.index(words[0]) + 1] == words[1]
    assert "--no-verify-checksums" in options


def test_a_daemon_that_is_named_is_the_one(daemon: StandIn, tmp_path: Path) -> None:
    connection = _connected(tmp_path, socket="/somewhere/io.sock")
    assert (connection.socket_path, daemon.started) == ("/somewhere/io.sock", [])
    with pytest.raises(ConfigError, match="has settings of its own") as caught:
        _connected(tmp_path, socket="/somewhere/io.sock", queue_depth=4)
    assert (caught.value.key, caught.value.value) == ("io_daemon.queue_depth", 4)


def test_no_daemon_is_started_where_none_may_be(daemon: StandIn, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none may be started") as caught:
        _connected(tmp_path, start="never")
    assert (caught.value.key, daemon.started) == ("io_daemon.start", [])


@pytest.mark.parametrize(("pin_memory", "asked"), [(True, "require"), (False, "auto"), (None, "auto")])
def test_pin_memory_asks_for_locked_memory_or_none(
    pin_memory: bool | None, asked: str, daemon: StandIn, tmp_path: Path
) -> None:
    connection = _connected(tmp_path, pin_memory=pin_memory)
    with pytest.raises(ConnectionAbortedError):
        connection.open(PLAN, job="job", pinned_mask=0, device=torch.device("cpu"))
    assert [attached["lock_memory"] for attached in daemon.attached] == [asked]
