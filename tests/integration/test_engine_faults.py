"""What a user meets when the engine cannot work or its daemon dies: typed errors that say what to do."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.commands.demo.footprint import process_name, process_tree
from infinity.errors import BudgetError, ConfigError, DaemonLostError, SwapSpaceError
from io_daemon.rank import client
from tests.support.matrix import TIERS
from tests.support.models import batches, decay_groups, everything, loss_of, seeded
from tests.support.parity import engine_config, least_budget_bytes, train_engine
from tests.support.reference import Recipe

RECIPE = Recipe(num_steps=2)
DAEMON_LOSS_NOTICED_S = 10.0
DESTROYED_S = 20.0
"""A minute and a half where each call waits for the hung daemon anew."""


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.cold_daemons]


def nvme_config(swap_dir: Path, *, param_tier: str = "nvme", optimizer_tier: str = "nvme") -> dict[str, Any]:
    return engine_config(RECIPE, param_tier=param_tier, optimizer_tier=optimizer_tier, swap_dir=str(swap_dir))


def initialize(config: dict[str, Any]) -> infinity.Engine:
    model = seeded(everything)
    engine, *_ = infinity.initialize(model=model, model_parameters=decay_groups(model), config=config)
    return engine


@pytest.mark.parametrize("param_tier", TIERS)
@pytest.mark.parametrize("optimizer_tier", TIERS[1:])
def test_too_small_a_budget_names_the_smallest_that_works(param_tier: str, optimizer_tier: str, tmp_path: Path) -> None:
    config = nvme_config(tmp_path, param_tier=param_tier, optimizer_tier=optimizer_tier)
    least = least_budget_bytes(everything, config)
    below = copy.deepcopy(config)
    below["io_daemon"]["host_budget_bytes"] = least - 1
    with pytest.raises(BudgetError, match=r"io_daemon\.host_budget_bytes") as caught:
        initialize(below)
    assert str(least) in str(caught.value)
    assert caught.value.smallest_bytes == least
    config["io_daemon"]["host_budget_bytes"] = least
    assert len(train_engine(everything, RECIPE, config).losses) == RECIPE.num_batches
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
def test_nvme_without_a_path_is_refused_with_the_key(section: str, tmp_path: Path) -> None:
    tiers = {"offload_param": {"optimizer_tier": "none"}, "offload_optimizer": {"param_tier": "none"}}[section]
    config = nvme_config(tmp_path, **tiers)
    del config["zero_optimization"][section]["nvme_path"]
    with pytest.raises(ConfigError, match=rf"zero_optimization\.{section}\.nvme_path"):
        initialize(config)


def test_swap_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match="nvme_path") as caught:
        initialize(nvme_config(path))
    assert str(path) in str(caught.value)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small filesystem needs root")
def test_too_little_disk_space_is_found_before_step_zero(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small filesystem here: {mounted.stderr.strip()}")
    try:
        with pytest.raises(SwapSpaceError) as caught:
            initialize(nvme_config(tmp_path))
        assert caught.value.needed_bytes > caught.value.free_bytes
        assert str(tmp_path) in str(caught.value)
        assert list(tmp_path.rglob("*")) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("steps_before", [0, 1], ids=["first step", "later step"])
def test_killed_daemon_is_a_typed_error_and_never_a_hang(steps_before: int, tmp_path: Path) -> None:
    config = nvme_config(tmp_path)
    config["io_daemon"]["host_budget_bytes"] = least_budget_bytes(everything, config)
    before = set(process_tree(os.getpid()))
    engine = initialize(config)
    (daemon,) = [pid for pid in process_tree(os.getpid()) if pid not in before and "io_daemon" in process_name(pid)]

    def step(batch: Any) -> None:
        engine.backward(loss_of(engine(batch)))
        engine.step()

    try:
        stream = batches(steps_before + 1)
        for batch in stream[:steps_before]:
            step(batch)
        os.kill(daemon, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(
            DaemonLostError, match=r"is gone; .*call the engine's destroy\(\), start again, and load the last"
        ):
            step(stream[-1])
        assert time.monotonic() - killed < DAEMON_LOSS_NOTICED_S
        with pytest.raises(RuntimeError, match="half a step ahead"):
            step(stream[-1])
    finally:
        engine.destroy()


def test_a_daemon_that_hung_once_is_not_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LEASE_TIMEOUT_S", 0.5)
    config = nvme_config(tmp_path)
    config["io_daemon"]["host_budget_bytes"] = least_budget_bytes(everything, config)
    before = set(process_tree(os.getpid()))
    engine = initialize(config)
    (daemon,) = [pid for pid in process_tree(os.getpid()) if pid not in before and "io_daemon" in process_name(pid)]
    try:
        os.kill(daemon, signal.SIGSTOP)
        with pytest.raises(DaemonLostError, match=r"within 0\.5 s"):
            engine.backward(loss_of(engine(batches(1)[0])))
    finally:
        start = time.monotonic()
        engine.destroy()
    assert time.monotonic() - start < DESTROYED_S
    assert daemon not in process_tree(os.getpid())
