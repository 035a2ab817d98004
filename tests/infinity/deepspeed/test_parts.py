"""Optimizer classes, loss scalers, fp32 weights of checkpoints and what else works without an engine."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity.deepspeed as deepspeed
from infinity.deepspeed.delivery import DIRECTORY
from infinity.deepspeed.loss_scalers import CreateLossScaler
from infinity.deepspeed.optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion
from infinity.errors import ConfigError
from infinity.update.algorithms import Lion
from tests.support.ranks import quiet_environment, run_script
from tests.support.signals import heed_signals

Make = Callable[[Any], torch.optim.Optimizer]
CLASSES: dict[str, tuple[Make, Make]] = {
    "FusedAdam": (
        lambda params: FusedAdam(params, 1e-2, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, 1e-2, weight_decay=0.1),
    ),
    "FusedAdam with L2": (
        lambda params: FusedAdam(params, 1e-2, adam_w_mode=False, weight_decay=0.1),
        lambda params: torch.optim.Adam(params, 1e-2, weight_decay=0.1),
    ),
    "DeepSpeedCPUAdam": (
        lambda params: DeepSpeedCPUAdam(params, 1e-2, amsgrad=True),
        lambda params: torch.optim.AdamW(params, 1e-2, amsgrad=True, weight_decay=0.0),
    ),
    "DeepSpeedCPUAdagrad": (lambda params: DeepSpeedCPUAdagrad(params), lambda params: torch.optim.Adagrad(params)),
    "FusedLion": (lambda params: FusedLion(params, 1e-3), lambda params: Lion(params, 1e-3)),
    "DeepSpeedCPULion": (lambda params: DeepSpeedCPULion(params, 1e-3), lambda params: Lion(params, 1e-3)),
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 32, generator=generator) for _ in range(5)]


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_class_works_by_itself_and_in_an_engine_with_the_same_bits(name: str) -> None:
    theirs, torchs = CLASSES[name]
    alone, plain, sharded = _net(), _net(), _net()
    optimizers = theirs(alone.parameters()), torchs(plain.parameters())
    engine, *_ = deepspeed.initialize(
        model=sharded,
        optimizer=theirs(sharded.parameters()),
        config={"train_batch_size": 4, "zero_optimization": {"stage": 3}},
    )
    for batch in _batches():
        for model, optimizer in zip((alone, plain), optimizers, strict=True):
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.backward(engine(batch).pow(2).mean())
        engine.step()
    assert _differing(plain.state_dict(), alone.state_dict()) == set()
    assert _differing(plain.state_dict(), engine.full_state_dict()) == set()
    engine.destroy(keep_weights=False)


def test_adam_without_bias_correction_uses_the_moments_as_they_are() -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = FusedAdam([param], lr=1.0, bias_correction=False, eps=0.0)
    param.grad = torch.tensor([1.0, 2.0, -3.0])
    optimizer.step()
    torch.testing.assert_close(param.detach(), -0.1 / 0.001**0.5 * torch.tensor([1.0, 1.0, -1.0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda params: FusedAdam(params, amsgrad=True),
        lambda params: DeepSpeedCPUAdagrad(params, amsgrad=True),
        lambda params: DeepSpeedCPUAdagrad(params, adamw_mode=True),
        lambda params: DeepSpeedCPUAdam(params, fp32_optimizer_states=False),
        lambda params: DeepSpeedCPULion(params, fp32_optimizer_states=False),
    ],
)
def test_variants_that_are_not_built_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"amsgrad|adamw_mode|fp32_optimizer_states"):
        make([nn.Parameter(torch.zeros(1))])


Replace = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replace]:
    """What Accelerate does to an optimizer under offload_optimizer."""
    monkeypatch.syspath_prepend(str(DIRECTORY))
    before = set(sys.modules)
    yield importlib.import_module("accelerate.utils.deepspeed").map_pytorch_optim_to_deepspeed
    for name in [each for each in sys.modules if each.partition(".")[0] == "deepspeed" and each not in before]:
        del sys.modules[name]


class OfOnesOwn(torch.optim.AdamW):
    """One that steps otherwise, by the groups of AdamW."""


OTHERS: dict[str, Make] = {
    **{
        name: lambda params, name=name: getattr(torch.optim, name)(params, lr=0.1)  # type: ignore[misc]
        for name in ("SGD", "RMSprop", "NAdam", "Adamax", "RAdam", "ASGD", "Rprop", "Adadelta")
    },
    "a subclass": OfOnesOwn,
    "Lion": FusedLion,
    "uncorrected": lambda params: FusedAdam(params, bias_correction=False),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_optimizer_is_not_replaced_by_adam(kind: str, replace: Replace) -> None:
    """Accelerate makes a DeepSpeedCPUAdam of its groups, and says nothing."""
    with pytest.raises(ConfigError, match='"zero_force_ds_cpu_optimizer": false'):
        replace(OTHERS[kind]([nn.Parameter(torch.zeros(1))]))


def test_neither_hooks_nor_state_are_lost_where_an_optimizer_is_replaced(replace: Replace) -> None:
    param = nn.Parameter(torch.zeros(3))
    hooked, stepped = torch.optim.AdamW([param]), torch.optim.Adam([param])
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r'AdamW.*has hooks.*"zero_force_ds_cpu_optimizer": false'):
        replace(hooked)
    param.grad = torch.ones(3)
    stepped.step()
    with pytest.raises(ConfigError, match=r"Adam.*has state: pass it before its first step"):
        replace(stepped)


def test_groups_of_adam_and_names_of_ones_own_are_taken() -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        groups = kind([{"params": [nn.Parameter(torch.zeros(1))], "lr_scale": 0.5}]).param_groups
        assert DeepSpeedCPUAdam(groups).param_groups[0]["lr_scale"] == 0.5


def test_adagrad_begins_where_that_which_it_replaces_would(replace: Replace) -> None:
    param = nn.Parameter(torch.zeros(3))
    made = replace(torch.optim.Adagrad([param], initial_accumulator_value=0.5))
    assert isinstance(made, DeepSpeedCPUAdagrad)
    assert torch.equal(made.state[param]["sum"], torch.full((3,), 0.5))


def test_gradients_are_zeroed_where_that_is_asked_for() -> None:
    for make, is_none in ((FusedAdam, True), (lambda params: FusedAdam(params, set_grad_none=False), False)):
        param = nn.Parameter(torch.zeros(1))
        param.grad = torch.ones(1)
        make([param]).zero_grad()
        assert (param.grad is None) is is_none


def test_loss_scalers_fall_and_rise() -> None:
    scaler = CreateLossScaler(torch.float16, 1.0, True, {"init_scale": 8, "scale_window": 2, "min_scale": 1})
    assert (scaler.dynamic, scaler.loss_scale) == (True, 8.0)
    scaler.update_scale(True)
    assert scaler.cur_scale == 4.0
    for _ in range(3):
        scaler.update_scale(False)
    assert scaler.cur_scale == 8.0
    loss = torch.tensor(2.0, requires_grad=True)
    scaler.backward(loss * 3)
    assert loss.grad is not None
    assert loss.grad.item() == 24.0
    assert CreateLossScaler(torch.float16, 128.0, False, None).loss_scale == 128.0
    assert CreateLossScaler(torch.bfloat16, 128.0, True, None).loss_scale == 1.0


def test_fp32_weights_of_a_checkpoint(tmp_path: Path) -> None:
    model = _net()
    model.get_parameter("2.weight").requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
        },
    )
    for batch in _batches():
        engine.backward(engine(batch.bfloat16()).float().pow(2).mean())
        engine.step()
    engine.save_checkpoint(tmp_path)
    masters = engine.full_master_state_dict()
    frozen = engine.full_state_dict()["2.weight"].float()
    engine.destroy(keep_weights=False)
    expected = {**masters, "2.weight": frozen}

    tools = deepspeed.utils.zero_to_fp32
    found = tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == expected.keys()
    assert _differing(expected, found) == set()
    trained = tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "global_step5", exclude_frozen_parameters=True)
    assert trained.keys() == masters.keys()
    loaded = tools.load_state_dict_from_zero_checkpoint(_net(), tmp_path)
    assert _differing(expected, loaded.state_dict()) == set()
    subprocess.run(
        [sys.executable, str(tmp_path / "zero_to_fp32.py"), str(tmp_path), str(tmp_path / "out")],
        env=quiet_environment(), check=True, timeout=300,
    )  # fmt: skip
    assert _differing(expected, torch.load(tmp_path / "out" / "pytorch_model.bin")) == set()
    subprocess.run(
        [sys.executable, tmp_path / "zero_to_torch.py", tmp_path, tmp_path / "halves", "--dtype", "bf16"],
        env=quiet_environment(), check=True, timeout=300,
    )  # fmt: skip
    halves = {name: values.bfloat16() for name, values in expected.items()}
    assert _differing(halves, torch.load(tmp_path / "halves" / "pytorch_model.bin")) == set()


def test_a_checkpoint_is_saved_where_its_scripts_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was published by then, and the other ranks have returned."""
    engine, *_ = deepspeed.initialize(
        model=_net(), config={"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    )
    engine.save_checkpoint(tmp_path, "first")
    script = (tmp_path / "zero_to_fp32.py").read_text()
    write_text = Path.write_text

    def full(path: Path, text: str) -> int:
        write_text(path, text[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        assert engine.save_checkpoint(tmp_path, "second")
    assert (tmp_path / "zero_to_fp32.py").read_text() == script
    assert sorted(os.listdir(tmp_path)) == ["first", "latest", "second", "zero_to_fp32.py", "zero_to_torch.py"]
    assert "zero_to_fp32.py cannot be written" in caplog.text
    engine.destroy()


TERMINATED = """
import os, signal, sys
import infinity.deepspeed.fp32_weights as fp32_weights

class Terminated:
    def __init__(self, path, tag):
        pass

    def write(self, directory, *, states):
        assert directory.name in os.listdir(os.environ["TMPDIR"])
        (directory / "piece").write_text("x")
        signal.raise_signal(signal.SIGTERM)

fp32_weights.Import = Terminated
fp32_weights.get_fp32_state_dict_from_zero_checkpoint(sys.argv[1], "global_step1")
"""


def test_sigterm_while_a_checkpoint_is_imported_leaves_no_copy(tmp_path: Path) -> None:
    aside, checkpoint = tmp_path / "aside", tmp_path / "checkpoint"
    aside.mkdir()
    (checkpoint / "global_step1").mkdir(parents=True)
    environment = {**quiet_environment(), "TMPDIR": str(aside)}
    words = [sys.executable, "-c", TERMINATED, str(checkpoint)]
    ended = subprocess.run(words, env=environment, preexec_fn=heed_signals, timeout=300, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert list(aside.glob("infinity-import-*")) == []


@pytest.mark.parametrize(("told", "found", "remedy"), [("xpu", None, "unset it"), ("cpu", "cuda", "hide the devices")])
def test_another_accelerator_than_the_one_that_is_used_is_refused(
    told: str, found: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", told)
    device = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    deepspeed.get_accelerator.cache_clear()
    for start in (deepspeed.get_accelerator, deepspeed.init_distributed, deepspeed.zero.Init().__enter__):
        with pytest.raises(ConfigError, match=f"DS_ACCELERATOR = '{told}'.*{remedy}"):
            start()
    assert not torch.distributed.is_initialized()


def test_the_accelerator_is_torchs() -> None:
    accelerator = deepspeed.get_accelerator()
    tensor = torch.zeros(1, device=accelerator.current_device_name())
    assert accelerator.on_accelerator(tensor)
    assert accelerator.device_count() >= 1
    assert accelerator.total_memory() > accelerator.memory_allocated() >= 0
    with accelerator.device(0), accelerator.stream(accelerator.current_stream()):
        accelerator.synchronize()
    state = accelerator.get_rng_state()
    first = torch.rand(3, device=tensor.device)
    accelerator.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device=tensor.device))
    assert accelerator.create_op_builder("AsyncIOBuilder").is_compatible()
    assert deepspeed.ops.__compatible_ops__["cpu_adam"] is True
    with pytest.raises(ImportError, match="has no extension"):
        accelerator.create_op_builder("FusedAdamBuilder").load()
    with pytest.raises(ConfigError, match="NoSuchBuilder"):
        accelerator.create_op_builder("NoSuchBuilder")


def test_copies_hold_their_own_memory_alone() -> None:
    whole = torch.arange(100.0)
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"part": [whole[:2]], "number": (1,)})
    assert copied["part"][0].untyped_storage().nbytes() == 8
    assert copied["number"] == (1,)


def test_on_device_makes_tensors_there() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(4, 4)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.bfloat16)
    assert nn.Linear(1, 1).weight.dtype is torch.float32


def test_a_loader_repeats() -> None:
    repeating = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_init_starts_torch_distributed_for_a_rank_that_is_alone(tmp_path: Path) -> None:
    """Transformers asks for its rank while it loads at stage 3."""
    code = """
    import torch, torch.distributed as dist
    import infinity.deepspeed as d
    with d.zero.Init():
        rank = dist.get_rank()
        model = torch.nn.Linear(2, 2)
    print([rank, dist.get_world_size()])
    """
    assert run_script(code, tmp_path).answer == [0, 1]


def test_torch_distributed_starts_by_a_file_and_stays_the_callers(tmp_path: Path) -> None:
    """As test suites start their ranks: by ``init_method``, ``rank`` and ``world_size``."""
    code = (
        "import sys, torch, infinity.deepspeed as d\n"
        "d.init_distributed(dist_backend=d.get_accelerator().communication_backend_name(),\n"
        "                   init_method='file://' + sys.argv[1] + '/store', rank=int(sys.argv[2]), world_size=2)\n"
        "total = torch.ones(1) * (d.comm.get_rank() + 1)\n"
        "d.comm.all_reduce(total)\n"
        "engine = d.initialize(model=torch.nn.Linear(2, 2), config={'train_micro_batch_size_per_gpu': 1})[0]\n"
        "engine.destroy()\n"
        "print(total.item(), d.comm.get_world_size(), d.comm.is_initialized())\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(rank)],
            env=quiet_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        output, errors = rank.communicate(timeout=250)
        assert output.split() == ["3.0", "2", "True"], errors
