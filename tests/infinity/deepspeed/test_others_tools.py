"""What other libraries do with an engine beside training it: hooks taken off, figures written, states moved away."""

from __future__ import annotations

import csv
import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity.deepspeed as deepspeed
from infinity.deepspeed import collectives, optimizer_kinds, questions
from infinity.deepspeed.logs import logger
from infinity.deepspeed.monitors import MonitorMaster
from infinity.deepspeed.optimizer_kinds import ABSENT
from infinity.errors import ConfigError, WeightsError


def _config(stage: int = 3, **sections: object) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }


def _engine(**words: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return deepspeed.initialize(model=model, config=_config(**words))[0]


def _step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_hooks_that_are_taken_off_and_put_on_change_nothing(device: str, tmp_path: Path) -> None:
    """As trainers do it around generate(): all weights are gathered, and whatever is hooked is removed."""
    place = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": place, "offload_optimizer": place}
    found = []
    for taken_off in (True, False):
        engine = _engine(zero_optimization=zero, io_daemon={"host_budget_bytes": 64 << 20})
        outputs = []
        for _ in range(3):
            _step(engine)
            with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
                hooks = engine.optimizer.parameter_offload
                if taken_off:
                    assert hooks.module is engine.module
                    of_others = hooks.module.ds_external_parameters()
                    for _, param in itertools.chain(hooks.module.named_parameters(), of_others):
                        param.ds_active_sub_modules.clear()
                    for hook in [*hooks.forward_hooks, *hooks.backward_hooks]:
                        hook.remove()
                    hooks.forward_hooks, hooks.backward_hooks = [], []
                outputs.append(engine.module(torch.ones(2, 16)))
                if taken_off:
                    hooks._register_deepspeed_module(hooks.module)
        found.append([*outputs, *engine.full_state_dict().values()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_below_stage_3_there_are_no_hooks_to_take_off() -> None:
    engine = _engine(stage=2)
    assert not hasattr(engine.optimizer, "parameter_offload")
    assert not hasattr(engine.module, "ds_external_parameters")


def test_figures_of_a_script_stand_beside_the_engines_own(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = _engine(csv_monitor=section, steps_per_print=1)
    _step(engine)
    assert engine.monitor.enabled
    engine.monitor.write_events([("Eval/Loss", torch.tensor(0.5), 2), ("Train/Samples/lr", 7, 4)])
    engine.destroy()
    rows = {path.stem: list(csv.reader(path.read_text().splitlines())) for path in (tmp_path / "job").iterdir()}
    assert rows["Eval_Loss"] == [["step", "Loss"], ["2", "0.5"]]
    assert rows["Train_Samples_lr"][1:] == [["2", "0.01"], ["4", "7.0"]]
    assert not _engine().monitor.enabled


def test_the_first_rank_writes_and_the_others_know_that_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = deepspeed.DeepSpeedConfig(_config(csv_monitor=section)).monitor_config
    for rank in (1, 0):
        with monkeypatch.context() as patched:
            patched.setattr(dist, "is_initialized", lambda: True)
            patched.setattr(dist, "get_rank", lambda rank=rank: rank)
            monitor = MonitorMaster(config)
        assert monitor.enabled
        monitor.write_events([("Eval/Loss", rank, 4)])
    assert (tmp_path / "job" / "Eval_Loss.csv").read_text().splitlines() == ["step,Loss", "4,0.0"]


def test_the_summary_of_collectives_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    engine = _engine(comms_logger={"enabled": True})
    _step(engine)
    comm = importlib.import_module("infinity.deepspeed.comm")
    comm.log_summary()
    assert engine.comms_summary() in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"return_dict = True: engine\.comms_summary"):
        comm.log_summary(return_dict=True)


def test_a_gradient_that_is_asked_for_behind_the_step_is_none_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    engine = _engine()
    weight = engine.module[0].weight
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    assert deepspeed.utils.safe_get_full_grad(weight) is not None
    assert caplog.messages == []
    engine.step()
    assert deepspeed.utils.safe_get_full_grad(weight) is None
    assert any("0.weight has no gradient now: a step uses gradients up" in message for message in caplog.messages)


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_what_an_optimizer_has_not_is_refused_in_words(name: str) -> None:
    optimizer = object.__new__(optimizer_kinds.DeepSpeedZeroOptimizer_Stage3)
    assert not hasattr(optimizer, name)
    with pytest.raises(AttributeError, match=f"infinity's DeepSpeedZeroOptimizer_Stage3 has no {name}: .{{10}}"):
        getattr(optimizer, name)


def test_what_an_engine_has_not_is_refused_in_words() -> None:
    engine = _engine()
    for name, why in questions.ABSENT.items():
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"infinity's engine has no {name}: ") as caught:
            getattr(engine, name)
        assert why in str(caught.value)


def test_small_calls_of_scripts_that_need_no_care_elsewhere() -> None:
    accelerator = deepspeed.accelerator.get_accelerator()
    assert accelerator.LongTensor([1, 2]).dtype is torch.int64
    assert accelerator.BFloat16Tensor([1.0]).dtype is torch.bfloat16
    assert accelerator.is_fp64_supported()
    with pytest.raises(AttributeError, match="call torch itself"):
        accelerator.create_graph  # noqa: B018
    engine = _engine()
    with deepspeed.zero.GatheredParameters(nn.Linear(2, 2, bias=False).bias):
        pass
    with torch.no_grad():
        loss = engine(torch.ones(2, 16)).square().mean()
    with pytest.raises(AssertionError, match="a loss with a graph"):
        engine.backward(loss)
    _step(engine)
    engine.destroy()


def test_how_a_collective_is_logged_is_no_argument_of_torchs() -> None:
    function = collectives._logged(lambda tensor, op=None: (tensor, op))
    assert function(1, op=2, prof=True, log_name="mine", debug="here") == (1, 2)
    assert deepspeed.comm.all_reduce is collectives.all_reduce


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_was_frozen_may_require_a_gradient_where_nothing_is_differentiated(stage: int) -> None:
    """As an adapter that is the reference of another: it is switched on for a forward without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model[0].weight.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=_config(stage=stage))
    with torch.no_grad():
        expected = engine(torch.ones(2, 16))
    model[0].weight.requires_grad_(True)
    with torch.no_grad():
        assert torch.equal(engine(torch.ones(2, 16)), expected)
    with pytest.raises(WeightsError, match=r"^0\.weight was frozen"):
        engine(torch.ones(2, 16))
    model[0].weight.requires_grad_(False)
    _step(engine)
    engine.destroy()


def test_what_the_trainer_made_itself_is_not_taken_for_its_users() -> None:
    """A ``train()`` that failed after it leaves it there for the next one."""

    class Trainer:
        optimizer: object = None
        lr_scheduler: object = None

    names: dict[str, Any] = {"__name__": "transformers.integrations.deepspeed", "logger": logger}
    exec("def deepspeed_init(trainer, inference=False): logger.setLevel('WARNING')", names)
    trainer, given = Trainer(), Trainer()
    names["deepspeed_init"](trainer)
    trainer.optimizer = torch.optim.AdamW([torch.zeros(1)])
    names["deepspeed_init"](trainer)
    given.optimizer = trainer.optimizer
    with pytest.raises(ConfigError, match=r"trainer\.optimizer.*leave it out of Trainer\(optimizers="):
        names["deepspeed_init"](given)
