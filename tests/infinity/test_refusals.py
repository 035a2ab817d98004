"""What a user may get wrong with a model or an optimizer: refused with what to do, before anything is lost."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, EngineStateError, WeightsError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
WITHOUT_OPTIMIZER = {key: value for key, value in CONFIG.items() if key != "optimizer"}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def assert_untouched(module: nn.Module) -> None:
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_what_is_in_no_group_of_the_optimizer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module = model()
    before = module[1].get_parameter("weight").detach().clone()
    with infinity.initialize(model=module, model_parameters=module[0].parameters(), config=CONFIG)[0] as engine:
        assert "1.weight, 1.bias: in no group of the optimizer" in caplog.text
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        after = engine.full_state_dict()
    assert torch.equal(after["1.weight"], before)
    assert not torch.equal(after["0.weight"], before)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_cast_of_the_model_is_told_of_the_flags_that_cast_it(stage: int) -> None:
    """``bf16_full_eval`` of Transformers is a ``model.to(dtype=...)`` before an evaluation: its user has written none,
    and was told of ``.data``."""
    module = model()
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    with infinity.initialize(model=module, config=config)[0] as engine:
        before = engine.full_state_dict()
        with pytest.raises(WeightsError, match=r"0\.weight .*cannot be cast to torch.bfloat16.*bf16_full_eval"):
            module.to(torch.bfloat16)
        after = engine.full_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_parameter_of_another_model() -> None:
    module = model()
    with pytest.raises(ConfigError, match="does not belong to the model"):
        infinity.initialize(model=module, model_parameters=model().parameters(), config=CONFIG)
    assert_untouched(module)


@pytest.mark.parametrize(
    "given",
    [
        lambda module: module[0].weight,
        lambda module: {"params": module.parameters()},
        lambda module: dict(module.named_parameters()),
        lambda module: module,
        lambda module: [name for name, _ in module.named_parameters()],
        lambda module: [(), *module.parameters()],
        lambda module: [module[0].weight, {"params": module[1].parameters()}],
        lambda module: 3,
    ],
)
def test_what_an_optimizer_does_not_take_for_parameters(given: Callable[[nn.Sequential], Any]) -> None:
    module = model()
    with pytest.raises(ConfigError, match=r"model_parameters = .*pass parameters, \(name, parameter\)"):
        infinity.initialize(model=module, model_parameters=given(module), config=CONFIG)
    assert_untouched(module)


def test_parameters_may_come_with_their_names() -> None:
    module = model()
    module[1].requires_grad_(False)
    with infinity.initialize(model=module, model_parameters=module.named_parameters(), config=CONFIG)[0] as engine:
        optimizer: Any = engine.optimizer
        (group,) = optimizer.param_groups
        assert group["param_names"] == ["0.weight", "0.bias"]
        assert [param is own for param, own in zip(group["params"], module[0].parameters(), strict=True)] == [True] * 2


def test_an_optimizer_with_no_sharded_form() -> None:
    module = model()
    optimizer = torch.optim.Adafactor(module.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Adafactor.*treats each element, or each parameter, by itself"):
        infinity.initialize(model=module, optimizer=optimizer, config=WITHOUT_OPTIMIZER)
    assert_untouched(module)


def test_two_optimizers() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(ConfigError, match="remove one"):
        infinity.initialize(model=module, optimizer=optimizer, config=CONFIG)


def test_no_optimizer() -> None:
    with pytest.raises(ConfigError, match="pass an optimizer"):
        infinity.initialize(model=model(), config=WITHOUT_OPTIMIZER)


def test_a_model_without_parameters() -> None:
    with pytest.raises(ConfigError, match="nothing to"):
        infinity.initialize(model=nn.Identity(), config=CONFIG)


def test_the_state_dict_of_a_sharded_module_has_keys_whose_weights_are_refused() -> None:
    module = model()
    with infinity.initialize(model=module, config=CONFIG)[0] as engine:
        for given in (module.state_dict(), module[0].state_dict(prefix="0.")):
            assert given["0.weight"].shape == (8, 8)
            for use in (torch.Tensor.clone, torch.Tensor.numpy, pickle.dumps, torch.Tensor.data_ptr):
                with pytest.raises(WeightsError, match=r"0\.weight.*engine\.full_state_dict"):
                    use(given["0.weight"])
        assert all(torch.isfinite(value).all() for value in engine.full_state_dict().values())


def test_the_state_dict_inside_gathered_parameters_holds_their_weights() -> None:
    """As PEFT saves adapters; what is kept past the context is refused by the update that it would not follow."""
    module = model()
    with infinity.initialize(model=module, config=CONFIG)[0] as engine:
        with infinity.zero.GatheredParameters(module[0].parameters()):
            given = module.state_dict()
            assert pickle.loads(pickle.dumps(given["0.weight"])).equal(module[0].weight)
            with pytest.raises(WeightsError, match=r"1\.weight.*GatheredParameters"):
                given["1.weight"].clone()
        assert given["0.weight"].equal(engine.full_state_dict()["0.weight"])
        engine.backward(engine(torch.ones(1, 8)).sum())
        with pytest.raises(WeightsError, match=r"0\.(weight|bias).*kept outside the model"):
            engine.step()
        del given
        engine.step()
        assert engine.global_steps == 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_are_pickled_where_their_weights_are_here(stage: int) -> None:
    """As a plain parameter that ties others: on a CPU ``param.cpu()`` is the parameter itself."""
    module = model()
    module[1].weight = module[0].weight
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}}
    with infinity.initialize(model=module, config=config)[0] as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 8)).sum())
            engine.step()
            within = infinity.zero.GatheredParameters(module.parameters()) if stage == 3 else nullcontext()
            with within:
                file = io.BytesIO()
                torch.save({name: param.cpu() for name, param in module.named_parameters(remove_duplicate=False)}, file)
                loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            assert {type(value) for value in loaded.values()} == {nn.Parameter}
            assert loaded["0.weight"] is loaded["1.weight"]
            expected = engine.full_state_dict()
            assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_a_model_whose_engine_was_destroyed() -> None:
    module = model()
    infinity.initialize(model=module, config=CONFIG)[0].destroy()
    with pytest.raises(ConfigError, match="build the model anew"):
        infinity.initialize(model=module, config=CONFIG)


@pytest.mark.parametrize("export", ["full_state_dict", "full_master_state_dict"])
def test_an_export_after_destroy(export: str) -> None:
    engine = infinity.initialize(model=model(), config=CONFIG)[0]
    engine.destroy()
    with pytest.raises(EngineStateError, match=rf"{export}\(\).*before destroy"):
        getattr(engine, export)()


def test_a_parameter_of_sliding_windows() -> None:
    """Its elements share places without being expanded."""
    module = model()
    module.windows = nn.Parameter(torch.randn(10).unfold(0, 4, 2))
    with pytest.raises(ConfigError, match=r"windows.*share a place"):
        infinity.initialize(model=module, config=CONFIG)
    assert_untouched(module)


def test_a_parameter_sliced_out_of_a_larger_one_is_none_that_overlaps() -> None:
    module = model()
    module.every_third = nn.Parameter(torch.randn(8, 9)[:, ::3].t())
    infinity.initialize(model=module, config=CONFIG)[0].destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(made: Callable[[object], object], stage: int) -> None:
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    with infinity.initialize(model=model(), config=config)[0] as engine:
        with pytest.raises(EngineStateError, match=r"^the engine of Sequential cannot be copied.*full_state_dict\(\)"):
            made(engine)
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
