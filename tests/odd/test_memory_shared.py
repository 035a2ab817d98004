"""Weights are written through memory that they share with others, which leaves no trace in torch: kept, or refused."""

from __future__ import annotations

import copy
import ctypes
import pickle
from typing import Any

import numpy as np
import torch

import infinity
from tests.odd.nets import ROWS, WIDTH, Net, square
from tests.support.cases import DEFAULT, EACH, NVME, STAGE_2, STAGE_2_BF16, WHOLE, Case, Cases

cases = Cases(__name__)
SETTINGS = (DEFAULT, STAGE_2, EACH, WHOLE, NVME)


def one(world: Any, engine: Any, step: int = 0) -> None:
    world.train(engine, lambda n: square(engine(world.randn(ROWS, WIDTH, seed=step + n))), num_steps=1)


def flat_of(param: Any) -> Any:
    with torch.no_grad():
        return param.view(-1)


WAYS: dict[str, Any] = {
    "data": lambda p: p.data.numpy(),
    "detach": lambda p: p.detach().numpy(),
    "asarray": lambda p: np.asarray(p.data),
    "a_row": lambda p: p.data[0].numpy() if p.dim() > 1 else p.data.numpy(),
    "a_flat_view_without_gradients": lambda p: flat_of(p).numpy(),
    "a_memoryview": lambda p: memoryview(p.data.numpy()),
    "dlpack": lambda p: np.from_dlpack(p.data),
    "an_array_that_is_forced": lambda p: p.numpy(force=True),
    "a_capsule": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.data)),
}


def scribble(view: Any) -> None:
    """Its first numbers become others."""
    if isinstance(view, torch.Tensor):
        view.view(-1)[:3] = 0.5
    else:
        np.asarray(view).reshape(-1)[:3] = 0.5


def told(model: Any) -> Any:
    """A large weight, and one that stays in memory at every setting but the first."""
    return (model.head.weight, model.blocks[0].norm.bias)


def between_steps(view_of: Any, world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    one(world, engine)
    for param in told(model):
        scribble(view_of(param))
    one(world, engine, 1)
    world.observe("weights", engine.full_state_dict())
    one(world, engine, 2)


def in_forward(view_of: Any, world: Any) -> None:
    model = Net()
    model.head.register_forward_pre_hook(lambda *_: scribble(view_of(model.head.weight)))
    engine = world.initialize(model)
    one(world, engine)
    one(world, engine, 1)


def while_gathered(view_of: Any, world: Any, modifier_rank: int | None = 0) -> None:
    model = Net()
    engine = world.initialize(model)
    one(world, engine)
    with infinity.zero.GatheredParameters(told(model), modifier_rank=modifier_rank):
        for param in told(model):
            scribble(view_of(param))
    one(world, engine, 1)
    one(world, engine, 2)


def while_gathered_to_be_read(view_of: Any, world: Any) -> None:
    while_gathered(view_of, world, None)


def while_gathered_before_initialize(view_of: Any, world: Any) -> None:
    model: Any = world.build(Net)
    with infinity.zero.GatheredParameters([model.head.weight], modifier_rank=0):
        scribble(view_of(model.head.weight))
    one(world, world.initialize(model))


def way(name: str, view_of: Any, use: Any) -> None:
    def script(world: Any) -> None:
        use(view_of, world)

    script.__name__ = f"{name}_{use.__name__}"
    script.__doc__ = script.__name__.replace("_", " ")
    is_kept = use in (while_gathered, while_gathered_before_initialize)
    cases(settings=SETTINGS, writes=True, by_torch="read-only", must="equal" if is_kept else "either")(script)


def over_address(param: Any) -> Any:
    numbers = (ctypes.c_byte * param.nbytes).from_address(param.data_ptr())
    return torch.frombuffer(numbers, dtype=param.dtype)


def over_storage(storage: Any, param: Any) -> Any:
    return torch.empty(0, dtype=param.dtype).set_(storage)


def over_data(param: Any, given: Any) -> Any:
    other = torch.empty(0, dtype=param.dtype)
    other.data = given
    return other


MEMORIES: dict[str, Any] = {
    "a_tensor_of_its_data": lambda p: over_data(p, p.data),
    "a_tensor_of_a_rows_data": lambda p: over_data(p, p.data[0] if p.dim() > 1 else p.detach()),
    "a_storage": lambda p: over_storage(p.untyped_storage(), p),
    "a_storage_of_data": lambda p: over_storage(p.data.untyped_storage(), p),
    "a_typed_storage": lambda p: over_storage(p.data.storage(), p),
    "a_tensor_set_to_it": lambda p: torch.empty(0, dtype=p.dtype).set_(p.data),
    "an_address": over_address,
}


def write_storage(param: Any) -> Any:
    param.untyped_storage().copy_(torch.full_like(param.data, 0.25).untyped_storage())
    return torch.zeros(3)


def write_one_by_one(param: Any) -> Any:
    param.data.apply_(lambda _: 0.5)
    return torch.zeros(3)


for _name, _view_of in {**WAYS, **MEMORIES}.items():
    way(_name, _view_of, between_steps)
for _use in (in_forward, while_gathered, while_gathered_to_be_read, while_gathered_before_initialize):
    way("data", WAYS["data"], _use)
way("dlpack", WAYS["dlpack"], while_gathered_to_be_read)
for _use in (in_forward, while_gathered, while_gathered_to_be_read, while_gathered_before_initialize):
    way("a_storage", MEMORIES["a_storage"], _use)
    way("a_storage_that_is_copied_to", write_storage, _use)
    way("a_tensor_of_its_data", MEMORIES["a_tensor_of_its_data"], _use)
    way("a_tensor_of_a_rows_data", MEMORIES["a_tensor_of_a_rows_data"], _use)
for _use in (between_steps, in_forward, while_gathered):
    way("numbers_one_by_one", write_one_by_one, _use)
way("an_address", MEMORIES["an_address"], while_gathered)
way("an_address", MEMORIES["an_address"], while_gathered_to_be_read)


@cases(settings=(DEFAULT, STAGE_2, NVME), must="equal")
def arrays_are_read(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(2):
        one(world, engine, step)
        world.observe("arrays", [torch.from_numpy(p.data.numpy().copy()) for p in model.parameters()])


@cases(settings=(DEFAULT, EACH, STAGE_2, STAGE_2_BF16, WHOLE), writes=True)
def a_shallow_copy_is_written(world: Any) -> None:
    """It is another parameter of the same memory."""
    model = Net()
    engine = world.initialize(model)
    one(world, engine)
    for param in told(model):
        with torch.no_grad():
            copy.copy(param).mul_(0.5)
    one(world, engine, 1)
    one(world, engine, 2)


@cases(settings=(DEFAULT, STAGE_2, STAGE_2_BF16, WHOLE), must="equal")
def a_copy_has_the_users_attributes(world: Any) -> None:
    """A shallow one, and one that was pickled."""
    model = Net()
    for param in told(model):
        param.gain = 0.5
    engine = world.initialize(model)
    one(world, engine)
    for param in told(model):
        for copied in (copy.copy(param), pickle.loads(pickle.dumps(param))):
            world.observe("kind", (type(copied).__name__, copied.requires_grad, dict(copied.__dict__)))
            world.observe("scaled", copied.detach() * copied.gain)


@cases.parametrized()
def test_memory_shared(case: Case, judged: Any) -> None:
    judged(__name__, case)
