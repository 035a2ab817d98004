"""State dicts of sharded modules, at any level: the keys, or the weights, or a refusal; never a file full of NaN."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import safetensors.torch
import torch
from torch import nn

from tests.odd.nets import ROWS, WIDTH, Net, square, trains
from tests.support.cases import STAGE_2, STAGE_2_BF16, Case, Cases

cases = Cases(__name__)


class Extra(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.linear(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Normed(nn.Module):
    """One batch norm under two names, its buffers too, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.alias = self.norm
        self.register_buffer("seen", torch.zeros(3), persistent=True)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.alias(self.norm(self.mix(x)))


@cases
def the_keys_are_to_be_had(world: Any) -> None:
    model = Net()
    trains(world, model, num_steps=1)
    world.observe("keys", list(model.state_dict()))
    world.observe("shapes", [tuple(value.shape) for value in model.state_dict().values()])


@cases(must="equal")
def keep_vars_gives_the_parameters_themselves(world: Any) -> None:
    model = Net()
    trains(world, model, num_steps=1)
    entries = model.state_dict(keep_vars=True)
    world.observe("same", [entries[name] is param for name, param in model.named_parameters()])


@cases
def values_of_the_whole_state_dict_are_read(world: Any) -> None:
    model = Net()
    trains(world, model)
    world.observe("weights", {name: value.clone() for name, value in model.state_dict().items()})


@cases
def values_of_a_submodules_state_dict_are_read(world: Any) -> None:
    model = Net()
    trains(world, model)
    world.observe("weights", {name: value + 0 for name, value in model.blocks[1].state_dict().items()})


@cases
def a_submodules_state_dict_is_saved_by_torch(world: Any) -> None:
    model = Net()
    trains(world, model)
    file = io.BytesIO()
    torch.save(model.blocks[1].state_dict(), file)
    file.seek(0)
    world.observe("weights", torch.load(file))


@cases
def a_state_dict_is_saved_by_safetensors(world: Any) -> None:
    model = Net()
    trains(world, model)
    world.observe("weights", safetensors.torch.load(safetensors.torch.save(dict(model.blocks[0].state_dict()))))


@cases
def a_state_dict_is_pickled(world: Any) -> None:
    model = Net()
    trains(world, model)
    world.observe("weights", dict(pickle.loads(pickle.dumps(model.head.state_dict()))))


@cases
def a_state_dict_is_deep_copied(world: Any) -> None:
    """As early stopping keeps the best weights."""
    model = Net()
    trains(world, model)
    world.observe("weights", dict(copy.deepcopy(model.state_dict())))


@cases
def values_of_a_state_dict_become_numpy(world: Any) -> None:
    model = Net()
    trains(world, model)
    world.observe("weights", [torch.from_numpy(v.float().cpu().numpy().copy()) for v in model.state_dict().values()])


@cases
def torch_save_of_the_module(world: Any) -> None:
    model = Net()
    trains(world, model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    world.observe("weights", dict(loaded.state_dict()))


@cases
def torch_save_of_the_module_after_destroy(world: Any) -> None:
    model = Net()
    engine = trains(world, model)
    world.retire(engine)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    world.observe("weights", dict(loaded.state_dict()))


@cases
def a_state_dict_after_destroy_is_read(world: Any) -> None:
    model = Net()
    engine = trains(world, model)
    world.retire(engine)
    world.observe("weights", {name: value.clone() for name, value in model.state_dict().items()})


@cases
def pickle_of_a_parameter(world: Any) -> None:
    model = Net()
    trains(world, model)
    world.observe("weight", pickle.loads(pickle.dumps(model.head.weight)))


@cases(must="equal")
def extra_state_is_in_the_full_state_dict(world: Any) -> None:
    model = nn.Sequential(Extra(), nn.Linear(WIDTH, WIDTH))
    engine = trains(world, model)
    world.observe("full", engine.full_state_dict())


@cases(must="equal")
def buffers_of_shared_modules_are_there_under_each_name(world: Any) -> None:
    model = Normed()
    engine = trains(world, model)
    world.observe("keys", list(engine.full_state_dict()))


@cases(must="equal")
def tied_weights_are_there_under_each_name(world: Any) -> None:
    model = Net()
    model.blocks[2].contract.weight = model.blocks[0].contract.weight
    engine = trains(world, model)
    world.observe("keys", list(engine.full_state_dict()))


@cases(must="equal")
def hooks_on_the_state_dict_are_heeded(world: Any) -> None:
    """A module that renames its entries, as quantisers and parallel wrappers do."""

    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, _local: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    model = Net()
    model.head.register_state_dict_post_hook(renamed)
    engine = trains(world, model)
    world.observe("keys", list(engine.full_state_dict()))


@cases(also=(STAGE_2, STAGE_2_BF16), must="equal")
def hooks_on_the_state_dict_turn_entries(world: Any) -> None:
    """A square weight is written transposed, and another as integers, as other formats have them."""

    def turned(module: nn.Module, state: dict[str, Any], prefix: str, _local: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        state[f"{prefix}bits"] = state[f"{prefix}weight"].t().view(torch.int16)

    model = Net()
    model.head.register_state_dict_post_hook(turned)
    engine = trains(world, model)
    world.observe("turned", engine.full_state_dict())


@cases(writes=True)
def load_state_dict_into_a_sharded_module(world: Any) -> None:
    model, donor = Net(), Net()
    engine = trains(world, model, num_steps=1)
    model.load_state_dict(donor.state_dict())
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step + 20))), num_steps=2)


@cases(writes=True)
def load_state_dict_with_assign(world: Any) -> None:
    model, donor = Net(), Net()
    engine = trains(world, model, num_steps=1)
    model.load_state_dict({name: value.to(world.dtype) for name, value in donor.state_dict().items()}, assign=True)
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step + 20))), num_steps=2)


@cases(writes=True)
def load_state_dict_into_a_submodule(world: Any) -> None:
    model, donor = Net(), Net()
    engine = trains(world, model, num_steps=1)
    model.blocks[1].load_state_dict(donor.blocks[1].state_dict())
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step + 20))), num_steps=2)


@cases(writes=True)
def load_state_dict_of_wrong_shapes(world: Any) -> None:
    """Both must refuse, and nothing may have changed."""
    model, donor = Net(), Net(width=2 * WIDTH)
    engine = trains(world, model, num_steps=1)
    try:
        model.load_state_dict(donor.state_dict())
    except RuntimeError:
        world.observe("refused", True)
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step + 20))), num_steps=1)


@cases
def a_parameter_is_copied_out_between_steps(world: Any) -> None:
    model = Net()
    engine = trains(world, model, num_steps=1)
    world.observe("row", model.head.weight[0])
    world.observe("norm", model.head.weight.norm())
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step + 20))), num_steps=1)


@cases
def repr_and_print_of_a_parameter(world: Any) -> None:
    """A user prints a weight to look at it."""
    model = Net()
    trains(world, model, num_steps=1)
    world.observe("printable", bool(repr(model.head.weight)) and bool(str(model.head.weight.data)))
    world.observe("module", repr(model))


@cases
def a_list_of_numbers_from_a_parameter(world: Any) -> None:
    model = Net()
    trains(world, model, num_steps=1)
    world.observe("row", model.head.weight[0].tolist())
    world.observe("item", model.blocks[0].norm.weight[0].item())


@cases.parametrized()
def test_state_dicts(case: Case, judged: Any) -> None:
    judged(__name__, case)
