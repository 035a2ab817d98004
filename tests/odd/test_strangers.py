"""What strangers' scripts do: write to views, change the optimizer's groups, edit its state, choose modes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import infinity
from tests.odd.nets import WIDTH, Made, Net, batch, loop, square
from tests.support.cases import DEFAULT, EACH, EACH_BF16, NVME, STAGE_2, STAGE_2_BF16, STAGE_2_NVME, Case, Cases

cases = Cases(__name__)
SETTINGS = (EACH, STAGE_2, NVME, EACH_BF16, STAGE_2_BF16, STAGE_2_NVME, DEFAULT)
IN_MEMORY, ON_NVME = (EACH, STAGE_2, EACH_BF16, STAGE_2_BF16, DEFAULT), (NVME, STAGE_2_NVME)


def without_masters(packed: dict[str, Any]) -> dict[str, Any]:
    """What torch's optimizers have: with the fp32 weights of 16-bit ones it would be these that go back, too."""
    return {name: packed[name] for name in ("state", "param_groups")}


# Memory that is taken over


@cases(settings=SETTINGS)
def a_tensor_that_took_the_data_is_shared(world: Any) -> None:
    model = Net()
    world.initialize(model)
    plain = torch.zeros(1)
    plain.data = model.head.weight
    plain.share_memory_()
    world.observe("sum", plain.sum())


@cases(settings=SETTINGS)
def a_tensor_that_took_the_data_is_saved(world: Any) -> None:
    model = Net()
    world.initialize(model)
    plain = torch.zeros(1)
    plain.data = model.head.weight.data
    stream = io.BytesIO()
    torch.save(plain, stream)
    stream.seek(0)
    world.observe("saved", torch.load(stream))


# Writes to what an operation gave

VIEWS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda m: m.head.weight.contiguous().mul_(0.5),
    "flatten": lambda m: m.head.weight.flatten().mul_(0.5),
    "transpose": lambda m: m.head.weight.t().mul_(0.5),
    "index": lambda m: m.head.weight[0].mul_(0.5),
    "chunk": lambda m: m.head.weight.chunk(2)[1].zero_(),
    "split, as out": lambda m: torch.mul(m.head.weight.split(5)[0], 2, out=m.head.weight.split(5)[0]),
    "data.view": lambda m: m.head.weight.data.view(-1)[:3].fill_(1),
    "data of a view": lambda m: m.head.weight.view(-1).data.mul_(0.5),
    "data of a row": lambda m: m.head.weight[0].data.zero_(),
    "data of data": lambda m: m.head.weight.data.data.mul_(0.5),
    "another dtype": lambda m: m.head.weight.view(torch.int16).zero_(),
    "foreach": lambda m: torch._foreach_mul_([p.view(-1) for p in m.parameters()], 0.5),
    "setitem": lambda m: m.head.weight.view(-1).__setitem__(slice(0, 4), 0.0),
    "as_strided": lambda m: m.head.weight.as_strided((3,), (1,)).zero_(),
}


def _write_to(name: str, write: Callable[[Any], Any]) -> None:
    def script(world: Any) -> None:
        model = Net()
        engine = world.initialize(model)
        loop(world, engine, 1)
        with torch.no_grad():
            write(model)
        loop(world, engine, 1)

    script.__name__ = f"a_write_to_what_{name.replace(', ', '_').replace('.', '_').replace(' ', '_')}_gave"
    cases(settings=SETTINGS, writes=True)(script)


for _name, _write in VIEWS.items():
    _write_to(_name, _write)


@cases(settings=SETTINGS, must="equal")
def data_of_views_is_written_while_gathered(world: Any) -> None:
    """As a part of a weight is initialised, the gate of a recurrent layer, say."""
    model = Net()
    engine = world.initialize(model)
    with infinity.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        model.head.weight[:8].data.fill_(0.25)
        model.head.weight.t().data.mul_(0.5)
    loop(world, engine, 2)


@cases(settings=SETTINGS, writes=True)
def a_write_to_a_view_before_an_export(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    with torch.no_grad():
        model.head.weight.view(-1)[:5] = 0
    world.observe("weights", engine.full_state_dict())


@cases(settings=SETTINGS, writes=True)
def a_write_to_a_view_before_the_weight_is_read(world: Any) -> None:
    model = Net()
    world.initialize(model)
    with torch.no_grad():
        model.head.weight.view(-1)[:5] = 0
    world.observe("sum", model.head.weight.sum() + model.head.weight.view(-1).sum())


@cases(settings=SETTINGS)
def training_goes_on_after_a_refused_write(world: Any) -> None:
    """On infinity the write is refused once and undone; plain torch is spared it."""
    model = Net()
    engine = world.initialize(model)
    loop(world, engine, 1)
    if world.name == "infinity" and world.setting.stage == 3:
        model.head.weight.data.view(-1)[:5].zero_()
        stays = world.setting.thresholds != "each"  # in memory: who exports, saves or steps finds it
        find = engine.full_state_dict if stays else lambda: engine(batch(world))
        with pytest.raises(RuntimeError, match=r"head\.weight .*changed in place"):
            find()
    loop(world, engine, 2)


# Data that is replaced


def _averaged(world: Any, *, gathers: bool) -> None:
    """An average takes the weights' place for an evaluation, whose own data is put aside, not copied."""

    def together() -> AbstractContextManager[None]:
        return infinity.zero.GatheredParameters(model.parameters(), 0) if gathers else nullcontext()

    model = Net()
    engine = world.initialize(model)
    average: dict[str, Tensor] = {}
    for _ in range(3):
        loop(world, engine, 1)
        with together():
            for name, param in model.named_parameters():
                average[name] = 0.5 * param.data + 0.5 * average.get(name, param.data)
            aside = {name: param.data for name, param in model.named_parameters()}
            for name, param in model.named_parameters():
                param.data = average[name].clone()
            with torch.no_grad():
                world.observe("averaged", engine.module(batch(world, 9)))
            for name, param in model.named_parameters():
                param.data = aside[name]
            del aside, param
    world.observe("average", average)


@cases(settings=SETTINGS, writes=True)
def an_average_takes_the_place_of_data(world: Any) -> None:
    _averaged(world, gathers=False)


@cases(settings=SETTINGS, must="equal")
def an_average_takes_the_place_of_gathered_data(world: Any) -> None:
    _averaged(world, gathers=True)


@cases(settings=SETTINGS, writes=True)
def two_weights_change_places(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    loop(world, engine, 1)
    one, other = model.blocks[0].expand.weight, model.blocks[1].expand.weight
    one.data, other.data = other.data, one.data
    loop(world, engine, 2)


@cases(settings=SETTINGS, writes=True)
def data_that_was_given_follows_the_weight(world: Any) -> None:
    """And the weight follows it."""
    model = Net()
    engine = world.initialize(model)
    given = torch.ones(WIDTH, WIDTH).to(world.dtype)
    model.head.weight.data = given
    given.mul_(0.1)
    loop(world, engine, 2)
    world.observe("given", given)


# Optimizers


@cases(settings=SETTINGS, must="equal")
def a_trained_parameter_is_in_no_group(world: Any) -> None:
    model = Net()
    engine = world.initialize(model, parameters=list(model.blocks.parameters()))
    loop(world, engine)


@cases(settings=SETTINGS, must="equal")
def what_is_in_no_group_counts_in_no_norm(world: Any) -> None:
    model = Net()
    engine = world.initialize(model, parameters=list(model.blocks.parameters()), clipping=0.01, accumulation=2)
    loop(world, engine)
    world.observe("norm", engine.get_global_grad_norm())


@cases(settings=SETTINGS, must="equal")
def groups_are_empty_or_lack_half_a_layer(world: Any) -> None:
    """Filters that match nothing leave such groups behind."""
    model = Net()
    weights = [param for param in model.blocks.parameters() if param.dim() > 1]
    groups = [{"params": [], "weight_decay": 0.1}, {"params": weights}, {"params": [], "lr": 0.5}]
    engine = world.initialize(model, parameters=groups)
    loop(world, engine)


@cases(settings=SETTINGS, must="equal")
def a_torch_optimizer_lacks_a_layer(world: Any) -> None:
    model = Net()
    engine = world.initialize(
        model,
        parameters=list(model.head.parameters()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )
    loop(world, engine)


@cases(settings=SETTINGS, must="refused", about="optimizer")
def the_optimizers_state_is_edited(world: Any) -> None:
    engine = world.initialize(Net())
    loop(world, engine, 1)
    for entry in engine.optimizer.state.values():
        entry["exp_avg"].zero_()
    loop(world, engine, 1)


@cases(settings=ON_NVME, must="refused", about="optimizer")
def the_optimizers_state_is_saved_from_nvme(world: Any) -> None:
    engine = world.initialize(Net())
    loop(world, engine, 1)
    torch.save({"optimizer": engine.optimizer.state_dict()}, io.BytesIO())


@cases(settings=IN_MEMORY, must="equal")
def the_optimizers_state_goes_back_to_what_was_saved(world: Any) -> None:
    engine = world.initialize(Net())
    loop(world, engine, 1)
    file = io.BytesIO()
    torch.save({"optimizer": engine.optimizer.state_dict()}, file)
    loop(world, engine, 2)
    file.seek(0)
    engine.optimizer.load_state_dict(without_masters(torch.load(file, weights_only=True)["optimizer"]))
    loop(world, engine, 2)


@cases(settings=ON_NVME, must="refused", about="optimizer")
def the_optimizers_state_is_loaded_to_nvme(world: Any) -> None:
    engine = world.initialize(Net())
    loop(world, engine, 1)
    groups = copy.deepcopy(engine.optimizer.state_dict()["param_groups"])
    engine.optimizer.load_state_dict({"state": {}, "param_groups": groups})
    loop(world, engine, 1)


@cases(settings=IN_MEMORY, must="equal")
def the_optimizers_state_is_dropped(world: Any) -> None:
    engine = world.initialize(Net())
    loop(world, engine, 1)
    groups = copy.deepcopy(engine.optimizer.state_dict()["param_groups"])
    engine.optimizer.load_state_dict({"state": {}, "param_groups": groups})
    loop(world, engine, 1)


@cases(settings=SETTINGS, must="equal")
def the_optimizers_groups_go_round(world: Any) -> None:
    engine = world.initialize(Net())
    loop(world, engine, 1)
    found = engine.optimizer.state_dict()
    found["param_groups"][0]["lr"] = 1e-4
    engine.optimizer.load_state_dict(found)
    world.observe("lr", engine.optimizer.param_groups[0]["lr"])
    loop(world, engine, 1)


@cases(settings=ON_NVME, must="refused", about="optimizer")
def the_given_optimizers_state_is_saved_from_nvme(world: Any) -> None:
    made = Made()
    engine = world.initialize(Net(), optimizer=made)
    loop(world, engine, 1)
    torch.save(made.optimizer.state_dict(), io.BytesIO())


@cases(settings=IN_MEMORY, must="equal")
def the_given_optimizers_state_goes_back_to_what_was_saved(world: Any) -> None:
    made = Made()
    engine = world.initialize(Net(), optimizer=made)
    loop(world, engine, 1)
    saved = copy.deepcopy(made.optimizer.state_dict())
    loop(world, engine, 2)
    made.optimizer.load_state_dict(without_masters(saved))
    loop(world, engine, 2)


@cases(settings=SETTINGS, must="refused", about="SGD that was passed")
def the_given_optimizer_is_stepped(world: Any) -> None:
    made = Made()
    engine = world.initialize(Net(), optimizer=made)
    world.backward(engine, square(engine(batch(world))))
    made.optimizer.step()


@cases(settings=SETTINGS, must="equal")
def the_implementation_is_the_users_choice(world: Any) -> None:
    engine = world.initialize(Net(), optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False))
    loop(world, engine, 3)


@cases(settings=SETTINGS, must="refused", about="add_param_group")
def a_losss_parameters_join_late(world: Any) -> None:
    centers = nn.Parameter(torch.zeros(WIDTH, dtype=world.dtype))
    engine = world.initialize(Net())
    engine.optimizer.add_param_group({"params": [centers], "lr": 0.5})
    world.train(engine, lambda step: square(engine(batch(world, step)) - centers))


@cases(settings=SETTINGS, must="refused", about="param_groups")
def a_group_is_appended_by_hand(world: Any) -> None:
    centers = nn.Parameter(torch.zeros(WIDTH, dtype=world.dtype))
    engine = world.initialize(Net())
    groups = engine.optimizer.param_groups
    groups.append({**groups[0], "params": [centers], "lr": 0.5})
    world.train(engine, lambda step: square(engine(batch(world, step)) - centers))


@cases(settings=SETTINGS, must="refused", about="param_groups")
def a_parameter_moves_to_another_group(world: Any) -> None:
    model = Net()
    groups = [{"params": list(model.blocks.parameters())}, {"params": [model.head.weight], "lr": 0.1}]
    engine = world.initialize(model, parameters=groups)
    loop(world, engine, 1)
    first, second = engine.optimizer.param_groups
    second["params"].append(first["params"].pop())
    loop(world, engine, 1)


@cases(settings=SETTINGS, must="refused", about="param_groups")
def a_parameter_is_taken_out_of_its_group(world: Any) -> None:
    engine = world.initialize(Net())
    loop(world, engine, 1)
    engine.optimizer.param_groups[0]["params"].pop()
    loop(world, engine, 1)


# Modes


@cases(settings=[setting for setting in SETTINGS if not setting.bf16], must="equal")
def initialize_in_inference_mode(world: Any) -> None:
    """In bf16 it is the reference whose casts are inference tensors."""
    model = Net()
    with torch.inference_mode():
        engine = world.initialize(model)
    loop(world, engine, 3)


@cases(settings=SETTINGS, about="inference")
def a_model_built_in_inference_mode(world: Any) -> None:
    with torch.inference_mode():
        model = Net()
    engine = world.initialize(model)
    loop(world, engine)


@cases(settings=SETTINGS, must="equal")
def the_fast_path_of_an_encoder(world: Any) -> None:
    """It asks for the classes of its first layer's weights, and makes nested tensors only of plain ones'."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
    engine = world.initialize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=True))
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for step in range(2):
        world.backward(engine, square(engine(world.randn(2, 5, WIDTH, seed=step), src_key_padding_mask=mask)))
        engine.step()
        engine.eval()
        with torch.no_grad():
            world.observe("fast", engine(world.randn(2, 5, WIDTH, seed=9), src_key_padding_mask=mask))
        engine.train()


class Layered(nn.Module):
    """An encoder's layer by itself, whose fast path asks for hooks, and which gets a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        return self.layer(x, src_key_padding_mask=mask)


def _evaluated(world: Any, engine: Any, name: str) -> None:
    engine.eval()
    with torch.no_grad():
        world.observe(name, engine(world.randn(2, 5, WIDTH, seed=9)))
    engine.train()


@cases(settings=SETTINGS, must="equal")
def the_fast_path_of_one_layer(world: Any) -> None:
    """It is left where any part of the layer has a hook, of the user's as well."""
    model = Layered()
    engine = world.initialize(model)
    for step in range(2):
        world.backward(engine, square(engine(world.randn(2, 5, WIDTH, seed=step))))
        engine.step()
        _evaluated(world, engine, "fast")
    with world.autocast():
        _evaluated(world, engine, "fast, under autocast")
    handle = model.layer.linear1.register_forward_hook(lambda *_: None)
    _evaluated(world, engine, "slow")
    handle.remove()
    _evaluated(world, engine, "fast again")


# Between Init and initialize


@cases(settings=SETTINGS, must="equal")
def a_gathered_weight_is_parametrized(world: Any) -> None:
    """As Transformers' models of sound do where weights are staged: a parameter is made of one that is gathered."""
    model: Any = world.build(Net)
    with infinity.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        parametrizations.weight_norm(model.head)
    with infinity.zero.GatheredParameters([model.blocks[0].expand.weight], modifier_rank=0):
        model.blocks[0].expand.weight = nn.Parameter(model.blocks[0].expand.weight, requires_grad=False)
    loop(world, world.initialize(model), 3)


@cases.parametrized()
def test_strangers(case: Case, judged: Any) -> None:
    judged(__name__, case)
