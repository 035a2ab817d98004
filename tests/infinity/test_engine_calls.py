"""The calls of the dialect's engine beside forward, backward and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, EngineStateError, WeightsError
from infinity.utils import safe_set_full_fp32_param

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def make(**changes: Any) -> Engine:
    return infinity.initialize(model=build(), config={**CONFIG, **changes})[0]


def micro_batch(engine: Engine, number: int) -> None:
    engine.backward(engine(torch.full((2, 8), 1.0 + number)).square().mean())
    engine.step()


def test_the_user_may_decide_which_step_updates() -> None:
    engine, counted = make(), make()
    for number in range(4):
        engine.set_gradient_accumulation_boundary(number % 4 == 3)
        assert engine.is_gradient_accumulation_boundary() is (number == 3)
        micro_batch(engine, number)
        assert engine.was_step_applied() is (number == 3)
    assert engine.global_steps == 1
    counted.set_train_batch_size(8)
    for number in range(4):  # the loss was divided by 2 there, by 4 here: Adam's first step does not mind
        micro_batch(counted, number)
        assert counted.was_step_applied() is (number == 3)
    mine, theirs = engine.full_state_dict(), counted.full_state_dict()
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-6) for name in theirs)


def test_a_boundary_may_be_called_without_steps_in_between() -> None:
    engine, counted = make(), make()
    for number in range(2):
        engine.set_gradient_accumulation_boundary(is_boundary=number == 1)
        engine.backward(engine(torch.full((2, 8), 1.0 + number)).square().mean())
        micro_batch(counted, number)
    engine.step()
    mine, theirs = engine.full_state_dict(), counted.full_state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("phase", ["FORWARD", "BACKWARD"])
def test_a_save_from_inside_a_phase_is_told_where_it_belongs(phase: str, tmp_path: Path) -> None:
    """As one in a signal's handler, which runs between any two lines; nothing is saved, and training goes on."""
    engine = make()
    told = []

    def save(*_: object) -> None:
        with pytest.raises(EngineStateError, match=f"is in {phase}: call what saves .* between steps") as raised:
            engine.save_checkpoint(tmp_path / "saved")
        told.append(raised.value)

    if phase == "FORWARD":
        engine.module.get_submodule("1").register_forward_hook(save)
    else:
        engine.module.get_submodule("1").register_full_backward_hook(save)
    for number in range(2):
        micro_batch(engine, number)
    assert len(told) == 2
    assert not (tmp_path / "saved").exists()
    assert engine.global_steps == 1
    engine.destroy()


def test_batch_sizes_change_between_steps() -> None:
    engine = make()
    assert engine.get_batch_info() == (4, 2, 2)
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (15, 5, 3)
    for number in range(3):
        micro_batch(engine, number)
    assert (engine.global_steps, engine.global_samples) == (1, 15)
    micro_batch(engine, 3)
    with pytest.raises(EngineStateError, match="between steps"):
        engine.set_train_batch_size(5)


@pytest.mark.parametrize("size", [0, 3])
def test_batch_sizes_that_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 2"):
        make().set_train_batch_size(size)
    with pytest.raises(ConfigError, match="at least 1"):
        make().set_train_micro_batch_size(0)


def test_gradients_in_16_bits_are_not_accumulated_later() -> None:
    engine = make(bf16={"enabled": True}, gradient_accumulation_steps=1)
    with pytest.raises(EngineStateError, match="16 bits"):
        engine.set_train_batch_size(4)


def test_on_one_rank_no_sync_changes_nothing() -> None:
    engine, counted = make(zero_optimization={"stage": 1}), make(zero_optimization={"stage": 1})
    with engine.no_sync():
        engine.backward(engine(torch.full((2, 8), 1.0)).square().mean())
        with pytest.raises(EngineStateError, match=r"inside no_sync context manager.*outside"):
            engine.step()
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    micro_batch(engine, 1)
    for number in range(2):
        micro_batch(counted, number)
    mine, theirs = engine.full_state_dict(), counted.full_state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_no_sync_says_what_to_do_instead() -> None:
    with pytest.raises(
        EngineStateError, match=r"^no_sync context manager is incompatible.*gradient_accumulation_steps"
    ):
        make().no_sync()


def test_what_is_kept_for_the_next_use_can_be_given_up() -> None:
    engine = make()
    micro_batch(engine, 0)
    weight = engine.module.get_parameter("0.weight")
    engine.empty_partition_cache()
    assert "sharded=True" in repr(weight)
    micro_batch(engine, 1)
    assert engine.global_steps == 1


def test_what_the_engine_says_of_itself() -> None:
    engine = make(gradient_clipping=0.5)
    assert (engine.global_rank, engine.world_size, engine.zero_optimization_stage()) == (0, 1, 3)
    assert engine.zero_optimization()
    assert engine.gradient_clipping() == 0.5
    assert not engine.bfloat16_enabled()
    assert not engine.fp16_enabled()
    assert not engine.wall_clock_breakdown()
    assert engine.steps_per_print() == 10
    assert len(engine.comms_summary().splitlines()) == 1


def test_loaders_deal_out_micro_batches() -> None:
    data = TensorDataset(torch.arange(7.0)[:, None].repeat(1, 8))
    engine, _, loader, _ = infinity.initialize(
        model=build(),
        config={**CONFIG, "dataloader_drop_last": True},
        training_data=data,
        collate_fn=lambda samples: torch.stack([sample[0] for sample in samples]) + 1,
    )
    assert loader is not None
    batches = list(loader)
    assert [tuple(batch.shape) for batch in batches] == [(2, 8)] * 3
    assert all(1 <= float(batch.min()) for batch in batches)
    ordered = engine.deepspeed_io(data, batch_size=3, route="eval")
    assert [batch[0][:, 0].tolist() for batch in ordered] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with pytest.raises(ConfigError, match="train, eval, predict"):
        engine.deepspeed_io(data, route="sideways")


def test_parameters_have_the_models_names_behind_the_modules() -> None:
    engine = make()
    names = [f"module.{name}" for name, _ in engine.module.named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == names
    assert [id(param) for param in engine.parameters()] == [id(param) for param in engine.module.parameters()]
    assert sum(param.numel() for param in engine.parameters()) == sum(p.numel() for p in build().parameters())


def test_backward_may_keep_the_graph_and_leave_the_loss_undivided() -> None:
    engine, counted = make(), make()
    loss = engine(torch.full((2, 8), 1.0)).square().mean()
    assert engine.backward(loss, retain_graph=True) == loss.detach() / 2
    assert engine.backward(loss, False, False) == loss.detach()
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    undivided = counted(torch.full((2, 8), 1.0)).square().mean()
    counted.backward(undivided * 3)
    counted.set_gradient_accumulation_boundary(True)
    counted.step()
    mine, theirs = engine.full_state_dict(), counted.full_state_dict()
    assert all(torch.allclose(mine[name], theirs[name]) for name in theirs)


def test_the_schedules_step_gets_what_step_is_given() -> None:
    class Told(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            told.append(epoch)

    told: list[int | None] = []
    engine = infinity.initialize(
        model=build(), config=CONFIG, lr_scheduler=lambda optimizer: Told(optimizer, lambda _: 1.0)
    )[0]
    told.clear()
    for number in range(4):
        engine.backward(engine(torch.full((2, 8), 1.0)).square().mean())
        engine.step({"epoch": number} if number else None)
    assert told == [1, 3]
    plain = make()
    with pytest.raises(ConfigError, match="there is no schedule") as refusal:
        plain.step(lr_kwargs={"epoch": 1})
    assert refusal.value.key == "lr_kwargs"


@pytest.mark.parametrize(
    "zero", [{"stage": 2}, {"stage": 3, "stage3_param_persistence_threshold": 1000}], ids=["stage 2", "persistent"]
)
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
def test_a_model_whose_weights_stay_is_compiled(zero: dict[str, Any]) -> None:
    torch._dynamo.reset()
    plain, counted, graphs = build(), build(), []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=0.0, fused=True)
    engine, *_ = infinity.initialize(
        model=counted, config={**CONFIG, "gradient_accumulation_steps": 1, "zero_optimization": zero}
    )
    engine.compile(backend=backend, compile_kwargs={"dynamic": False})
    engine.compile(backend="no such backend")  # once is enough
    assert engine.is_compiled
    for number in range(3):
        micro_batch(engine, number)
        plain(torch.full((2, 8), 1.0 + number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert graphs, "nothing was compiled"
    weights = engine.full_state_dict()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
    engine.destroy()
    assert "forward" not in vars(counted)


def test_a_compiled_model_casts_its_weights_within_one_graph() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x.double(), self.layer.weight.double())

    torch._dynamo.reset()
    engine, *_ = infinity.initialize(model=Casts(), config={**CONFIG, "zero_optimization": {"stage": 2}})
    engine.compile("eager", {"fullgraph": True})
    assert engine(torch.ones(2, 8)).dtype is torch.float64
    engine.destroy()


def test_a_destroyed_engine_that_somebody_keeps_keeps_no_arena() -> None:
    def arenas() -> int:
        return Path("/proc/self/maps").read_text().count("infinity-arena")

    before = arenas()
    host = {"device": "cpu"}
    zero = {"stage": 3, "offload_param": host, "offload_optimizer": host}
    engine = make(zero_optimization=zero, io_daemon={"host_budget_bytes": 1 << 24})
    micro_batch(engine, 0)
    assert arenas() == before + 1
    engine.destroy()
    assert arenas() == before


def test_weights_that_come_and_go_are_not_compiled() -> None:
    engine = make()
    with pytest.raises(EngineStateError, match=r"zero_optimization\.stage 2"):
        engine.compile()
    micro_batch(engine, 0)
    assert not engine.is_compiled


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_a_weight_that_is_written_after_forward_is_not_differentiated(threshold: int) -> None:
    engine = make(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": threshold})
    weight = engine.module.get_parameter("2.weight")
    loss = engine(torch.ones(2, 8)).square().mean()
    safe_set_full_fp32_param(weight, torch.zeros(1, 16))
    with pytest.raises(WeightsError, match=r"modified by an inplace operation"):
        engine.backward(loss)
    engine.zero_grad()
    engine.backward(engine(torch.ones(2, 8)).square().mean())


def test_one_refusal_undoes_all_that_was_written() -> None:
    engine = make(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 100_000})
    before = engine.full_state_dict()
    engine.module.load_state_dict({name: value + 1 for name, value in before.items()})
    refused = pytest.raises(WeightsError, match=r"0\.bias.*as were 0\.weight, 2\.weight, 2\.bias")
    with refused, infinity.zero.GatheredParameters(engine.module.get_parameter("0.bias")):
        pass
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_message_does_not_name_thousands() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30)))
    engine = infinity.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": 3}})[0]
    engine.module.load_state_dict({name: value + 1 for name, value in engine.full_state_dict().items()})
    with pytest.raises(WeightsError, match=r"0\.weight.*, 39 more, which sharded weights do not keep"):
        engine.full_state_dict()


def test_an_evaluation_may_come_first_where_the_daemon_has_nothing_of_it() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    engine = make(zero_optimization=zero)
    for _ in range(2):
        with torch.no_grad():
            engine.eval()(torch.ones(2, 8))
    engine.train()
    micro_batch(engine, 0)
    engine.destroy()
