"""torch.compile of a block and of the model, and torch.func over the model: works, or is refused with the reason."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.odd.nets import ROWS, WIDTH, Net, Rule, batch, square
from tests.support.cases import (
    DEFAULT,
    EACH,
    EACH_BF16,
    GROUPED,
    NVME,
    SETTINGS,
    STAGE_2,
    STAGE_2_BF16,
    WHOLE,
    Case,
    Cases,
)
from tests.support.judge import Script
from tests.support.world import Setting

cases = Cases(__name__)
FEW = (EACH, GROUPED, DEFAULT)
DEFAULT_NVME = Setting(thresholds="default", nvme=True, bf16=True)


def where_weights_stay(script: Script) -> Script:
    """Below stage 3, and where nothing is above the threshold, the script's bits are equal; else it is refused."""

    @wraps(script)
    def of_sharded_weights(world: Any) -> None:
        script(world)

    of_sharded_weights.__name__ = f"{script.__name__}_of_sharded_weights"
    cases(settings=(EACH, GROUPED, EACH_BF16, NVME), must="refused")(of_sharded_weights)
    return cases(settings=(WHOLE, DEFAULT_NVME, STAGE_2, STAGE_2_BF16, DEFAULT), must="equal")(script)


def compiled(name: str, compile_part: Any, *, slow: bool) -> None:
    """The reference is compiled as well: a compiler may fuse."""

    def script(world: Any) -> None:
        torch._dynamo.reset()
        model = Net(2)
        engine = compile_part(world, model)
        world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=2)
        with torch.no_grad():
            world.observe("evaluation", engine(batch(world, 5)))

    script.__name__ = name
    script.__doc__ = name.replace("_", " ")
    cases(settings=FEW, slow=slow)(script)


def _block(backend: str) -> Any:
    def part(world: Any, model: Any) -> Any:
        model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
        return world.initialize(model)

    return part


def _block_in_place(backend: str) -> Any:
    def part(world: Any, model: Any) -> Any:
        for block in model.blocks:
            block.compile(backend=backend)
        return world.initialize(model)

    return part


def _model_before(backend: str) -> Any:
    return lambda world, model: world.initialize(torch.compile(model, backend=backend))


def _model_after(backend: str) -> Any:
    def part(world: Any, model: Any) -> Any:
        engine = world.initialize(model)
        model.compile(backend=backend)
        return engine

    return part


for backend in ("eager", "aot_eager", "inductor"):
    compiled(f"a_block_compiled_by_{backend}", _block(backend), slow=backend != "eager")
    compiled(f"blocks_compiled_in_place_by_{backend}", _block_in_place(backend), slow=backend != "eager")
    compiled(f"the_model_compiled_before_initialize_by_{backend}", _model_before(backend), slow=backend != "eager")
    compiled(f"the_model_compiled_after_initialize_by_{backend}", _model_after(backend), slow=backend != "eager")


@cases(settings=FEW)
def the_engine_compiled(world: Any) -> None:
    torch._dynamo.reset()
    engine = world.initialize(Net(2))
    call = torch.compile(engine, backend="eager")
    for step in range(2):
        world.backward(engine, square(call(batch(world, step))))
        engine.step()


@cases(settings=FEW)
def a_function_over_a_weight_compiled(world: Any) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def rule(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight.t())

    engine = world.initialize(Rule(lambda net, x: rule(x, net.a.weight)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=2)


def _loss(model: nn.Module) -> Any:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return square(torch.func.functional_call(model, params, (x,)))

    return loss


@where_weights_stay
def func_grad_over_the_models_parameters(world: Any) -> None:
    model = Net(1)
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
    gradients = torch.func.grad(_loss(model))({k: v.detach() for k, v in model.named_parameters()}, batch(world, 3))
    world.observe("gradients", gradients)


@where_weights_stay
def func_grad_over_a_full_state_dict(world: Any) -> None:
    """The user's own copies: the model only lends its structure."""
    model = Net(1)
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
    params = dict(engine.full_state_dict())
    world.observe("gradients", torch.func.grad(_loss(model))(params, batch(world, 3)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@where_weights_stay
def per_sample_gradients(world: Any) -> None:
    """``vmap(grad)`` over the rows of a batch."""
    model = Net(1)
    engine = world.initialize(model)
    params = {k: v.detach() for k, v in model.named_parameters()}
    world.observe("gradients", torch.func.vmap(torch.func.grad(_loss(model)), (None, 0))(params, batch(world, 3)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@where_weights_stay
def vmap_over_the_model(world: Any) -> None:
    model = Net(1)
    engine = world.initialize(model)
    with torch.no_grad():
        world.observe("mapped", torch.func.vmap(model)(world.randn(3, ROWS, WIDTH)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@where_weights_stay
def vmap_over_the_engine_in_training(world: Any) -> None:
    engine = world.initialize(Net(1))
    for step in range(2):
        output = torch.func.vmap(engine)(world.randn(3, ROWS, WIDTH, seed=step))
        world.backward(engine, square(output))
        engine.step()


@where_weights_stay
def func_vjp_of_the_model(world: Any) -> None:
    model = Net(1)
    engine = world.initialize(model)
    output, pull = torch.func.vjp(model, batch(world, 0))
    world.observe("output", output)
    world.observe("pulled", pull(torch.ones_like(output)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@where_weights_stay
def func_jvp_of_the_model(world: Any) -> None:
    model = Net(1)
    engine = world.initialize(model)
    world.observe("jvp", torch.func.jvp(model, (batch(world, 0),), (batch(world, 1),)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@where_weights_stay
def func_jacrev_of_the_model(world: Any) -> None:
    model = Net(1)
    engine = world.initialize(model)
    world.observe("jacobian", torch.func.jacrev(model)(world.randn(WIDTH)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@where_weights_stay
def func_hessian_of_the_model(world: Any) -> None:
    model = Net(1)
    engine = world.initialize(model)
    world.observe("hessian", torch.func.hessian(lambda x: square(model(x)))(world.randn(WIDTH)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@where_weights_stay
def forward_mode_inside_forward(world: Any) -> None:
    """A directional derivative as a part of the loss."""
    model = Net(1)
    engine = world.initialize(model)
    for step in range(2):
        output, derivative = torch.func.jvp(engine, (batch(world, step),), (batch(world, step + 1),))
        world.backward(engine, square(output) + square(derivative))
        engine.step()


@where_weights_stay
def func_grad_where_the_model_uses_a_childs_weight(world: Any) -> None:
    engine = world.initialize(Rule(lambda net, x: torch.tanh(F.linear(x, net.a.weight)) @ net.a.weight))
    for step in range(2):
        gradient = torch.func.grad(lambda x: square(engine(x)))(batch(world, step))
        world.observe(f"gradient {step}", gradient)
        world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@where_weights_stay
def func_grad_of_a_function_over_a_weight(world: Any) -> None:
    """No module is called inside."""
    model = Net(1)
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
    weight = model.blocks[0].expand.weight
    world.observe("gradient", torch.func.grad(lambda x: square(torch.tanh(F.linear(x, weight))))(batch(world, 0)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@cases
def stack_module_state(world: Any) -> None:
    """An ensemble of two models in one call."""
    models = [Net(1), Net(1)]
    engine = world.initialize(models[0])
    params, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[1]).to("meta")

    def call(p: Any, b: Any, x: Tensor) -> Any:
        return torch.func.functional_call(base, (p, b), (x,))

    with torch.no_grad():
        world.observe("ensemble", torch.func.vmap(call, (0, 0, None))(params, buffers, batch(world, 0)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@cases
def export_of_the_module(world: Any) -> None:
    model = Net(1)
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
    exported = torch.export.export(model, (batch(world, 0),))
    with torch.no_grad():
        world.observe("exported", exported.module()(batch(world, 1)))


@cases
def make_fx_of_the_module(world: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = Net(1)
    engine = world.initialize(model)
    with torch.no_grad():
        world.observe("traced", make_fx(model)(batch(world, 0))(batch(world, 1)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@cases
def symbolic_trace_of_the_module(world: Any) -> None:
    model = Net(1)
    engine = world.initialize(model)
    traced = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        world.observe("traced", traced(batch(world, 1)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@cases
def symbolic_trace_before_initialize(world: Any) -> None:
    engine = world.initialize(torch.fx.symbolic_trace(Net(1)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=2)


@cases
def a_dispatch_mode_around_the_loop(world: Any) -> None:
    """A FLOP counter."""
    from torch.utils.flop_counter import FlopCounterMode

    engine = world.initialize(Net(1))
    with FlopCounterMode(display=False) as counter:
        world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=2)
    world.observe("flops", counter.get_total_flops())


@cases
def a_function_mode_around_the_loop(world: Any) -> None:
    """The user's own TorchFunctionMode: a default device."""
    engine = world.initialize(Net(1))
    with torch.device("cpu"):
        world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=2)


class Operations(TorchDispatchMode):
    """Counts what is done, and may round it to bf16. (Where autograd's hooks stand torch detaches elsewhere.)"""

    def __init__(self, *, rounds: bool) -> None:
        super().__init__()
        self.rounds = rounds
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.names.append(str(func))
        found = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, self._rounded, found) if self.rounds else found

    @staticmethod
    def _rounded(tensor: Tensor) -> Tensor:
        return tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor


class Functions(TorchFunctionMode):
    """Halves what a linear layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(getattr(func, "__name__", func)))
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func is F.linear else found


def within(name: str, mode: Any, *parts: str, of: int = 1, **demands: Any) -> None:
    """A training within a mode of the user's, at the ``parts`` that are told, of ``of`` micro-batches a step."""

    def script(world: Any) -> None:
        entered: Any = mode()
        model = Rule(lambda net, x: net.a(x) + F.linear(torch.tanh(net.b(x)), net.a.weight))
        engine = world.initialize(model, accumulation=of)
        for number in range(2 * of):
            given = batch(world, number)
            with entered if "forward" in parts else nullcontext():
                loss = square(engine(given))
            with entered if "backward" in parts else nullcontext():
                world.backward(engine, loss)
            with entered if "step" in parts else nullcontext():
                engine.step()
        world.observe("operations", entered.names if parts == ("forward",) else [])

    script.__name__ = f"a_mode_that_{name}_around_{'_and_'.join(parts)}{'_of_two_batches' if of > 1 else ''}"
    cases(settings=(*SETTINGS, NVME, STAGE_2, STAGE_2_BF16, WHOLE), **demands)(script)


for _name, _mode in {
    "counts": lambda: Operations(rounds=False),
    "rounds": lambda: Operations(rounds=True),
    "halves": Functions,
}.items():
    within(_name, _mode, "forward", must="equal")
    within(_name, _mode, "forward", "backward", must="equal" if _name == "halves" else "either")
    within(_name, _mode, "forward", "backward", of=2, must="refused")
    within(_name, _mode, "step", must="refused")


@cases
def a_profiler_around_the_loop(world: Any) -> None:
    engine = world.initialize(Net(1))
    with torch.profiler.profile():
        world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=2)


@cases.parametrized()
def test_compile_and_func(case: Case, judged: Any) -> None:
    judged(__name__, case)
