"""A training that was stopped and gone on with equals one that was not, whatever the engine that goes on with it."""

from __future__ import annotations

import argparse
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.errors import CheckpointError, ConfigError, EngineStateError
from infinity.loader import PlacedLoader, make_loader
from tests.support.resumed import config_of, differing, everything_of, started, train

NUM_STEPS = 20
PAIRS = [
    # precision, from (tier, stage), to (tier, stage)
    ("fp32", ("none", 3), ("nvme", 2)),
    ("bf16", ("cpu", 1), ("none", 3)),
    ("fp16", ("nvme", 2), ("cpu", 3)),
]


@pytest.mark.parametrize(("precision", "before", "after"), PAIRS)
def test_twenty_steps_and_twenty_are_forty(
    precision: str, before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    swap, saved = tmp_path / "swap", tmp_path / "saved"
    swap.mkdir()
    engine = started(config_of(before[0], precision, before[1], swap))
    train(engine, NUM_STEPS)
    assert engine.save_checkpoint(saved, client_state={"epoch": 3, "best": torch.ones(2)})
    losses, state = train(engine, NUM_STEPS), everything_of(engine)
    counted = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.cur_scale, engine.module.calls)
    engine.destroy()

    config = config_of(after[0], precision, after[1], swap)
    config["zero_optimization"]["sub_group_size"] = 32768
    engine = started(config, seed=7)
    train(engine, 2)
    path, client_state = engine.load_checkpoint(saved)
    assert path == str(saved / f"global_step{NUM_STEPS}")
    assert client_state["epoch"] == 3
    assert torch.equal(client_state["best"], torch.ones(2))
    assert train(engine, NUM_STEPS) == losses
    assert not differing(everything_of(engine), state)
    assert counted == (
        engine.global_steps, engine.global_samples, engine.skipped_steps, engine.cur_scale, engine.module.calls
    )  # fmt: skip
    engine.destroy()
    assert not list(swap.iterdir())
    assert sorted(path.name for path in saved.iterdir()) == [f"global_step{NUM_STEPS}", "latest"]


def test_the_loader_gives_the_batch_that_would_have_come_next(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(39, 16, generator=torch.Generator().manual_seed(5)))

    def steps(engine: Any, epochs: int, *, stop_after: int = 0) -> list[float]:
        losses: list[float] = []
        for _ in range(epochs):
            for (batch,) in engine.training_dataloader:
                loss = engine(batch).square().mean()
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
                if len(losses) == stop_after:
                    return losses
        return losses

    engine = started(config_of(), training_data=data)
    whole = steps(engine, 3)
    weights = engine.full_state_dict()
    engine.destroy()
    for stop_after in (10, 14):  # the end of an epoch, the middle of one
        engine = started(config_of(), training_data=data)
        assert steps(engine, 3, stop_after=stop_after) == whole[:stop_after]
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        engine = started(config_of(), seed=9, training_data=data)
        engine.load_checkpoint(tmp_path)
        assert steps(engine, 3 - (stop_after > 10))[: len(whole) - stop_after] == whole[stop_after:]
        if stop_after > 10:
            found = engine.full_state_dict()
            assert all(torch.equal(value, found[name]) for name, value in weights.items() if torch.is_tensor(value))
        engine.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_goes_on_where_it_was_and_keeps_torchs_order(num_ranks: int, num_workers: int) -> None:
    ranks: Any = types.SimpleNamespace(world_size=num_ranks, rank=num_ranks - 1)
    data: Any = list(range(50))

    def loader() -> PlacedLoader:
        return make_loader(
            data, batch_size=3, shuffle=True, drop_last=False, collectives=ranks, num_workers=num_workers
        )

    torch.manual_seed(3)
    running = loader()
    first = [batch.tolist() for batch in running]
    if num_ranks == 1:
        torch.manual_seed(3)
        plain: Any = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
        assert first == [batch.tolist() for batch in plain]
    batches = iter(running)
    for _ in range(4):
        next(batches)
    running.note_step()
    state, drawn = running.state_dict(), torch.get_rng_state()
    expected = [batch.tolist() for batch in batches]
    torch.set_rng_state(drawn)
    again = loader()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == expected
    assert torch.equal(torch.get_rng_state(), drawn), "an epoch that goes on draws nothing"
    assert len(list(again)) == len(first), "the next one is whole"


def test_another_precision_takes_the_master_weights(tmp_path: Path) -> None:
    engine = started(config_of(precision="bf16"))
    train(engine, 3)
    engine.save_checkpoint(tmp_path, tag="x")
    masters, states = engine.full_master_state_dict(), everything_of(engine)
    engine.destroy()
    for precision, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        engine = started(config_of(precision=precision), seed=1)
        engine.load_checkpoint(tmp_path, tag="x")
        weights, found = engine.full_state_dict(), everything_of(engine)
        assert all(torch.equal(weights[name], master.to(dtype)) for name, master in masters.items())
        assert all(torch.equal(found[name], value) for name, value in states.items() if name.startswith("exp_avg"))
        engine.destroy()


OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}},
    {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}},
    {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
    {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
]


@pytest.mark.parametrize("section", OPTIMIZERS, ids=lambda section: str(next(iter(section.values())))[:24])
def test_every_kind_of_optimizer_goes_on(section: dict[str, Any], tmp_path: Path) -> None:
    """Histories, states made in the first step, a momentum of whole matrices, a scale that torch keeps."""
    engine = started(config_of(**section))
    train(engine, 4)
    engine.save_checkpoint(tmp_path)
    losses, state, scale = train(engine, 4), everything_of(engine), engine.cur_scale
    engine.destroy()
    engine = started(config_of(**section), seed=5)
    train(engine, 1)
    engine.load_checkpoint(tmp_path)
    assert train(engine, 4) == losses
    assert not differing(everything_of(engine), state)
    assert engine.cur_scale == scale
    engine.destroy()


def test_a_rate_that_the_script_set_is_the_next_steps(tmp_path: Path) -> None:
    """Whatever the schedule would have: what a checkpoint's schedule says of its rate is of the last step."""
    engine = started(config_of())
    train(engine, 3)
    for group in engine.optimizer.param_groups:
        group["lr"] = 3e-3
    engine.save_checkpoint(tmp_path)
    losses, state = train(engine, 3), everything_of(engine)
    engine.destroy()
    engine = started(config_of(), seed=5)
    engine.load_checkpoint(tmp_path)
    assert engine.get_lr() == [3e-3]
    assert train(engine, 3) == losses
    assert not differing(everything_of(engine), state)
    engine.destroy()


def test_what_is_accumulated_is_in_no_checkpoint_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saved within a step, which goes on as if it had not been; who resumes begins that step anew. Buffers are as
    the forward left them."""
    config = config_of(gradient_accumulation_steps=2)

    def rows(step: int) -> torch.Tensor:
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))

    def micro(engine: Any, step: int) -> None:
        engine.backward(engine(rows(step)).square().mean())
        engine.step()

    runs: dict[str, Any] = {}
    for saves in (False, True):
        engine = started(config)
        for step in range(6):
            micro(engine, step)
            if step == 1:
                runs["begun"] = everything_of(engine)
            if step == 2 and saves:
                with caplog.at_level("WARNING"):
                    engine.save_checkpoint(tmp_path)
                assert "gradients of the step that is not over are in no checkpoint" in caplog.text
        runs[f"saves {saves}"] = everything_of(engine)
        engine.destroy()
    assert not differing(runs["saves True"], runs["saves False"])
    engine = started(config, seed=5)
    engine.load_checkpoint(tmp_path)
    buffers = {f"{kind} {name}" for kind in ("weight", "buffer") for name, _ in engine.module.named_buffers()}
    assert set(differing(everything_of(engine), runs["begun"])) < buffers
    assert engine.micro_steps == 0
    engine.destroy()


def test_a_step_that_is_not_over_is_not_overwritten(tmp_path: Path) -> None:
    engine = started(config_of(gradient_accumulation_steps=2))
    engine.save_checkpoint(tmp_path)
    engine.backward(engine(torch.ones(4, 16)).square().mean())
    for _ in range(2):
        with pytest.raises(EngineStateError, match=r"within a step.*zero_grad"):
            engine.load_checkpoint(tmp_path)
        engine.step()
    engine.load_checkpoint(tmp_path)
    engine.backward(engine(torch.ones(4, 16)).square().mean())
    engine.zero_grad()
    engine.load_checkpoint(tmp_path)
    engine.backward(engine(torch.ones(4, 16)).square().mean())
    engine.step()
    engine.optimizer.zero_grad()
    engine.load_checkpoint(tmp_path)
    assert not engine.is_gradient_accumulation_boundary()  # the step began anew
    engine.destroy()


class Other(torch.nn.Module):
    """Shares some names with the model that is saved, and less else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 96)
        self.frozen = torch.nn.Linear(96, 96)
        self.norm = torch.nn.Linear(5, 96)
        self.extra = torch.nn.Linear(4, 4)


def test_all_that_does_not_fit_is_told_at_once_and_nothing_changes(tmp_path: Path) -> None:
    engine = started(config_of())
    train(engine, 1)
    engine.save_checkpoint(tmp_path)
    masters = engine.full_master_state_dict()
    engine.destroy()

    config = config_of(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    del config["scheduler"]
    model = Other()
    engine = infinity.initialize(model=model, config=config)[0]
    before = engine.full_state_dict()
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(tmp_path)
    text = str(raised.value)
    assert str(tmp_path / "global_step1") in text
    for words in (
        "first.weight, first.bias, norm.bias: was saved with the optimizer states exp_avg, exp_avg_sq, this optimizer",
        "norm.weight: was saved with shape 96, the model's is 96x5",
        "extra.weight, extra.bias: the model has it, the checkpoint has not",
        "image, tied.weight, again.bias and 3 more: the checkpoint has it, the model has not",
        "the schedule was WarmupLR, it is None",
        "load_lr_scheduler_states=False",
    ):
        assert words in text
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())

    with pytest.raises(CheckpointError, match=r"1 difference:\n +norm.weight: was saved with shape"):
        engine.load_checkpoint(tmp_path, load_module_strict=False, load_module_only=True)
    engine.destroy()
    model = Other()
    del model.norm
    engine = infinity.initialize(model=model, config=config)[0]
    extra = engine.full_state_dict()["extra.weight"]
    engine.load_checkpoint(tmp_path, load_module_strict=False, load_module_only=True)
    found = engine.full_state_dict()
    assert torch.equal(found["first.weight"], masters["first.weight"])
    assert torch.equal(found["extra.weight"], extra)
    engine.destroy()


@pytest.mark.parametrize(("precision", "tier", "stage"), [("fp32", "nvme", 3), ("bf16", "none", 3), ("bf16", "cpu", 2)])
def test_what_was_frozen_when_it_was_saved_trains_with_states_as_new(
    precision: str, tier: str, stage: int, tmp_path: Path
) -> None:
    """An engine that trains all from the start, and another layer's freezing in it, gives the same: as torch does."""
    swap = tmp_path / "swap"
    swap.mkdir()

    def engine_of(*, frozen_at_first: bool) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 96), torch.nn.Tanh(), torch.nn.Linear(96, 16))
        with torch.no_grad():
            for param in model.parameters():  # what is frozen in 16 bits is saved in 16 bits
                param.copy_(param.bfloat16())
        model[0].requires_grad_(not frozen_at_first)
        config = config_of(tier, precision, stage, swap)
        del config["scheduler"]
        return infinity.initialize(model=model, config=config)[0]

    def losses_of(engine: Any, first: int) -> list[float]:
        losses = []
        for step in range(first, first + 3):
            batch = torch.randn(2, 16, generator=torch.Generator().manual_seed(step))
            loss = engine(batch.to(engine.module[0].weight.dtype)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engine = engine_of(frozen_at_first=False)
    engine.module[0].requires_grad_(False)
    expected = losses_of(engine, 0)
    engine.module[0].requires_grad_(True)
    expected += losses_of(engine, 3)
    weights = engine.full_state_dict()
    engine.destroy()

    engine = engine_of(frozen_at_first=True)
    found = losses_of(engine, 0)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    engine = engine_of(frozen_at_first=False)
    losses_of(engine, 7)  # whose states must not stay
    engine.load_checkpoint(tmp_path / "saved")
    assert found + losses_of(engine, 3) == expected
    assert all(torch.equal(value, weights[name]) for name, value in engine.full_state_dict().items())
    engine.destroy()


def test_parts_are_loaded_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = started(config_of())
    train(engine, 3)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    state = everything_of(engine)
    engine.destroy()
    with StoredCheckpoint.open(tmp_path) as stored:
        assert "frozen.weight" not in stored.entries
        assert stored.manifest.left_out == ["frozen.weight", "frozen.bias"]

    engine = started(config_of(), seed=3)
    frozen = engine.full_state_dict()["frozen.weight"]
    train(engine, 1)
    mine = everything_of(engine)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert "frozen.bias, frozen.weight: not in the checkpoint" in caplog.text
    found = everything_of(engine)
    assert engine.global_steps == 1
    assert torch.equal(found["weight frozen.weight"], frozen)
    assert torch.equal(found["master first.weight"], state["master first.weight"])
    assert torch.equal(found["exp_avg first.weight"], mine["exp_avg first.weight"])
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert engine.global_steps == 3
    assert torch.equal(everything_of(engine)["exp_avg first.weight"], mine["exp_avg first.weight"])
    engine.load_checkpoint(tmp_path)
    assert torch.equal(everything_of(engine)["exp_avg first.weight"], state["exp_avg first.weight"])
    engine.destroy()


def test_without_latest_nothing_is_loaded_and_a_tag_that_is_not_there_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started(config_of())
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "no file `latest`" in caplog.text
    engine.save_checkpoint(tmp_path, tag="one", save_latest=False)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(CheckpointError, match=r"two: is not there; checkpoints in .*: one"):
        engine.load_checkpoint(tmp_path, tag="two")
    for tag in ("a/b", "", "latest", ".."):
        with pytest.raises(ConfigError, match="tag"):
            engine.save_checkpoint(tmp_path, tag=tag)
    with pytest.raises(ConfigError, match=r"client_state\.deep\.f"):
        engine.save_checkpoint(tmp_path, client_state={"deep": {"f": Path}})
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    train(engine, 1)
    engine.destroy()


def test_every_value_of_client_state_comes_back(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "numbers": (1, 2.5, float("inf")),
        "array": np.arange(3),
        "scalar": np.float64(1.5),
        "arguments": argparse.Namespace(lr=1.0),
        "nested": {"list": [None, True, "x"]},
    }
    engine = started(config_of())
    engine.save_checkpoint(tmp_path, client_state=values)
    found = engine.load_checkpoint(tmp_path)[1]
    assert (found["array"] == values["array"]).all()
    assert {**found, "array": 0} == {**values, "array": 0}
    engine.destroy()


def test_objects_that_no_checkpoint_can_hold_are_told_with_whose_they_are(tmp_path: Path) -> None:
    engine = started(config_of())
    train(engine, 1)
    group, schedule, module = engine.optimizer.param_groups[0], engine.lr_scheduler, engine.module
    for told, has, lacks in (
        (r"param_groups\[0\]\.tag = 'type'.*leave it out", lambda: group.update(tag=Path), lambda: group.pop("tag")),
        (
            r"lr_scheduler\[1\]\.fn = 'function'.*the schedule's state_dict\(\) .* without it",
            lambda: setattr(schedule, "state_dict", lambda: {"fn": lambda: 1.0}),
            lambda: delattr(schedule, "state_dict"),
        ),
        (
            r"extra_states.* = 'type'.*get_extra_state\(\) .* without it",
            lambda: setattr(module, "calls", Path),
            lambda: setattr(module, "calls", 0),
        ),
    ):
        has()
        with pytest.raises(ConfigError, match=told):
            engine.save_checkpoint(tmp_path)
        lacks()
    engine.save_checkpoint(tmp_path)
    engine.destroy()


def test_readmes_lines_save_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "save_checkpoint(" in block]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"engine": started(config_of())}
    train(names["engine"], 1)
    exec(lines, names)
    assert names["path"] == "checkpoints/late", "which was still being written"
    assert names["client_state"] == {}
    names["engine"].destroy()


def test_between_epochs_the_next_one_is_whole() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0))
    loader = PlacedLoader(data, batch_size=2)
    assert len(list(loader)) == 5
    state = loader.state_dict()
    other = PlacedLoader(data, batch_size=2)
    other.load_state_dict(state)
    assert len(list(other)) == 5


def test_the_second_of_two_normal_numbers_comes_back(engine: Any, tmp_path: Path) -> None:
    np.random.randn()
    engine.save_checkpoint(tmp_path)
    expected = np.random.randn(3)
    engine.load_checkpoint(tmp_path)
    assert (np.random.randn(3) == expected).all()
