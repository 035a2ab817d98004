"""Weights used where no module's call owns them: in backward, in threads, by regularisers, between steps, as views."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import infinity
from tests.odd.nets import ROWS, WIDTH, Net, Rule, batch, square, trains
from tests.support.cases import (
    DEFAULT,
    EACH,
    EACH_BF16,
    GROUPED,
    NVME,
    POISON,
    STAGE_2,
    STAGE_2_BF16,
    WHOLE,
    Case,
    Cases,
)
from tests.support.functions import KeepsOnContext

cases = Cases(__name__)


class SavesForBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@cases(also=(POISON,))
def a_custom_function_keeps_a_weight_on_ctx(world: Any) -> None:
    trains(world, Rule(lambda net, x: KeepsOnContext.apply(x, net.a.weight)))


@cases
def a_custom_function_keeps_a_view_on_ctx(world: Any) -> None:
    trains(world, Rule(lambda net, x: KeepsOnContext.apply(x, net.a.weight.t())))


@cases(must="equal")
def a_custom_function_saves_a_weight(world: Any) -> None:
    trains(world, Rule(lambda net, x: SavesForBackward.apply(x, net.a.weight)))


class Gained(nn.Parameter):
    """A class of the user's, with a method of its own."""

    gain: float

    def doubled(self) -> float:
        return 2 * self.gain


class ScalesTheGradient(SavesForBackward):
    """As kernels of quantised layers do: what they need to know of a weight hangs on it, and what they find does."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _x, weight = ctx.saved_tensors
        by_x, by_weight = SavesForBackward.backward(ctx, *gradients)
        weight.num_passes += 1
        return by_x * weight.gain, by_weight * weight.doubled() if isinstance(weight, nn.Parameter) else None


def scaled(name: str, *, trained: bool) -> None:
    def script(world: Any) -> None:
        model = Rule(lambda net, x: ScalesTheGradient.apply(x, net.a.weight))
        model.a.weight = Gained(model.a.weight.detach(), requires_grad=trained)
        model.a.weight.gain, model.a.weight.num_passes = 0.75, 0
        trains(world, model)
        world.observe("passes", model.a.weight.num_passes)

    script.__name__ = name
    cases(also=(STAGE_2, NVME), must="equal")(script)


scaled("a_custom_function_reads_attributes_of_a_weight_that_it_saved", trained=True)
scaled("a_custom_function_reads_attributes_of_a_frozen_weight_that_it_saved", trained=False)


@cases(must="equal")
def a_custom_function_reads_attributes_of_what_it_saved(world: Any) -> None:
    """Of an activation, of a view of a weight, and of what it made itself."""

    class ReadsThem(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, rows: Any) -> Any:
            made: Any = x.sign()
            x.scale, rows.scale, made.scale = 0.5, 0.25, 2.0
            ctx.save_for_backward(x, rows, None, made)
            return x @ rows.t()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            (gradient,) = gradients
            x, rows, _none, made = ctx.saved_tensors
            return gradient @ rows * (rows.scale * made.scale), gradient.t() @ (x * x.scale + made)

    trains(world, Rule(lambda net, x: ReadsThem.apply(x * 1, net.a.weight[:])))


def does_in_backward(name: str, use: Any) -> None:
    """A function that does something to the weight which it finds in its context, and gives it no gradient."""

    class Uses(SavesForBackward):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            by_x, by_weight = SavesForBackward.backward(ctx, *gradients)
            use(ctx.saved_tensors[1], by_weight)
            return by_x, None

    def script(world: Any) -> None:
        model = Rule(lambda net, x: Uses.apply(x, net.a.weight))
        model.a.weight.main_grad = torch.zeros(WIDTH, WIDTH)
        engine = world.initialize(model)
        for step in range(3):
            world.backward(engine, square(engine(batch(world, step))))
            if model.a.weight.main_grad.any():
                model.a.weight.grad = model.a.weight.main_grad.to(model.a.weight.dtype)
                model.a.weight.main_grad.zero_()
            engine.step()
            world.observe("weight", model.a.weight)

    script.__name__ = f"a_custom_function_{name}"
    settings, adds = (STAGE_2, STAGE_2_BF16, WHOLE, NVME), name.startswith("adds")
    cases(also=settings, must="equal" if adds else "either", writes=not adds, by_torch="read-only")(script)


def put(weight: Any, gradient: Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


def replace_data(weight: Any, gradient: Tensor) -> None:
    weight.data = weight.data - gradient


does_in_backward("adds_to_what_hangs_on_a_weight", lambda weight, gradient: weight.main_grad.add_(gradient.float()))
does_in_backward("gives_a_weight_its_gradient", put)
does_in_backward("steps_a_weight", lambda weight, gradient: weight.sub_(gradient))
does_in_backward("steps_a_weight_through_data", lambda weight, gradient: weight.data.sub_(gradient))
does_in_backward("steps_a_row_of_a_weight", lambda weight, gradient: weight.detach()[0].sub_(gradient[0]))
does_in_backward("steps_a_weight_by_setting_data", replace_data)
does_in_backward("zeroes_an_array_of_a_weight", lambda weight, _: weight.view(torch.int16).numpy().fill(0))


@cases(must="equal")
def tensors_are_made_of_a_weights_kind(world: Any) -> None:
    """As scripts older than ``new_zeros`` make their hidden states, from a weight that is in memory or is not."""

    class Old(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            bias: Any = self.weight.new([0.25, 0.5] * (WIDTH // 2))
            return super().forward(x) + bias * self.weight.new_tensor(2.0)

    def rule(net: Any, x: Tensor) -> Tensor:
        weight: Any = next(net.parameters())
        hidden = weight.new(ROWS, WIDTH).zero_() + weight.new_tensor(0.5) + weight.data.new_tensor([0.5] * WIDTH)
        return torch.as_tensor(net.old(torch.tanh(net.a(x) + hidden)))

    net = Rule(rule)
    net.old = Old(WIDTH, WIDTH)
    trains(world, net)


@cases
def a_tensor_hook_uses_a_weight_in_backward(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        h.register_hook(lambda gradient: gradient + 0.1 * (gradient @ net.b.weight))
        return torch.as_tensor(net.b(h))

    trains(world, Rule(rule))


@cases
def a_tensor_hook_uses_a_weight_of_another_layer(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.a(x))
        h.register_hook(lambda gradient: gradient * net.last.weight.detach().norm())
        return h

    trains(world, Rule(rule))


@cases
def a_module_backward_hook_reads_its_weight(world: Any) -> None:
    model = Net()
    norms: list[Tensor] = []
    model.blocks[1].register_full_backward_hook(lambda m, _i, _o: norms.append(m.expand.weight.detach().norm().clone()))
    trains(world, model, num_steps=2)
    world.observe("norms", norms)


@cases
def a_checkpointed_function_over_raw_weights(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Any:
        return checkpoint(lambda h: F.linear(F.gelu(F.linear(h, net.a.weight)), net.b.weight), x, use_reentrant=False)

    trains(world, Rule(rule))


@cases
def a_reentrant_checkpoint_over_raw_weights(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Any:
        return checkpoint(lambda h: F.linear(F.gelu(F.linear(h, net.a.weight)), net.b.weight), x, use_reentrant=True)

    trains(world, Rule(rule))


@cases
def a_checkpointed_function_that_takes_the_weight(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Any:
        return checkpoint(F.linear, x, net.a.weight, use_reentrant=False)

    trains(world, Rule(rule))


@cases
def a_checkpoint_with_determinism_check_and_rng(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Any:
        return checkpoint(lambda h: F.dropout(net.b(net.a(h)), 0.2), x, use_reentrant=False, preserve_rng_state=True)

    trains(world, Rule(rule))


@cases
def a_regulariser_after_forward(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        loss = square(engine(batch(world, step)))
        world.backward(engine, loss + 1e-3 * sum(p.float().square().sum() for p in model.parameters()))
        engine.step()


@cases
def an_l1_penalty_on_one_layer_after_forward(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        loss = square(engine(batch(world, step)))
        world.backward(engine, loss + 1e-2 * model.blocks[1].expand.weight.abs().float().mean())
        engine.step()


@cases
def a_penalty_before_forward(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        penalty = model.head.weight.float().square().sum()
        world.backward(engine, square(engine(batch(world, step))) + 1e-2 * penalty)
        engine.step()


@cases
def the_penalty_alone_is_differentiated(world: Any) -> None:
    """A step without a forward."""
    model = Net()
    engine = world.initialize(model)
    for _ in range(2):
        world.backward(engine, model.head.weight.float().square().sum())
        engine.step()


@cases
def orthogonality_of_a_weight_after_forward(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        loss = square(engine(batch(world, step)))
        weight = model.head.weight.float()
        world.backward(engine, loss + 1e-2 * (weight @ weight.t() - torch.eye(WIDTH)).square().sum())
        engine.step()


@cases
def ema_by_hand_between_steps(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    average = {name: value.clone() for name, value in engine.full_state_dict().items()}
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                average[name].mul_(0.9).add_(param.to(average[name].dtype), alpha=0.1)
    world.observe("average", average)


@cases
def ema_by_lerp_on_data(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    average = [value.clone() for value in engine.full_state_dict().values()]
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        for old, param in zip(average, model.parameters(), strict=True):
            old.lerp_(param.data, 0.1)
    world.observe("average", average)


@cases
def ema_by_foreach(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    average = [value.clone() for value in engine.full_state_dict().values()]
    for step in range(2):
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.1)
    world.observe("average", average)


@cases
def averaged_model_made_before_initialize(world: Any) -> None:
    """SWA: ``update_parameters`` reads every weight."""
    model = Net().to(world.dtype)
    average = AveragedModel(model)
    engine = world.initialize(model)
    for step in range(2):
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        average.update_parameters(model)
    world.observe("average", {k: v.clone() for k, v in average.module.state_dict().items()})


@cases(also=(STAGE_2, WHOLE))
def averaged_model_made_after_initialize(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(2):
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        average.update_parameters(model)
    world.observe("average", {k: v.clone() for k, v in average.module.state_dict().items()})


@cases
def norms_are_logged_between_steps(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        world.observe("norms", [p.detach().float().norm() for p in model.parameters()])


@cases
def norms_are_logged_between_forward_and_backward(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        loss = square(engine(batch(world, step)))
        with torch.no_grad():
            world.observe("norms", [p.float().norm() for p in model.parameters()])
        world.backward(engine, loss)
        engine.step()


@cases
def norms_through_data(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
    world.observe("norms", [p.data.float().norm() for p in model.parameters()])


@cases
def weights_as_numpy(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
    if world.dtype is torch.float32:
        world.observe("array", torch.from_numpy(model.head.weight.detach().numpy().copy()))
    world.observe("array of data", torch.from_numpy(model.head.weight.data.float().cpu().numpy().copy()))


@cases
def a_histogram_of_a_weight(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
    world.observe("histogram", torch.histc(model.head.weight.detach().float(), bins=8, min=-1, max=1))


@cases
def parameters_to_vector(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
    world.observe("vector", nn.utils.parameters_to_vector(model.parameters()))


@cases(writes=True)
def vector_to_parameters(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    numel = sum(p.numel() for p in model.parameters())
    nn.utils.vector_to_parameters(world.randn(numel) * 0.1, model.parameters())
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@cases
def a_weight_is_used_in_a_worker_thread(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Any:
        results: dict[str, Tensor] = {}
        threads = [
            threading.Thread(target=lambda name=name: results.__setitem__(name, F.linear(x, getattr(net, name).weight)))
            for name in ("a", "b")
        ]
        for thread in threads:
            thread.start()
            thread.join()
        return results["a"] + results["b"]

    trains(world, Rule(rule))


@cases
def modules_are_called_in_worker_threads(world: Any) -> None:
    """Two branches at once."""

    def rule(net: Any, x: Tensor) -> Any:
        with ThreadPoolExecutor(2) as pool:
            left, right = pool.submit(net.a, x), pool.submit(net.b, x)
            return left.result() + right.result()

    trains(world, Rule(rule))


@cases
def the_engine_is_called_in_a_thread(world: Any) -> None:
    engine = world.initialize(Net())
    with ThreadPoolExecutor(1) as pool:
        for step in range(3):
            loss = pool.submit(lambda step=step: square(engine(batch(world, step)))).result()
            world.backward(engine, loss)
            engine.step()


@cases
def backward_is_called_in_a_thread(world: Any) -> None:
    engine = world.initialize(Net())
    with ThreadPoolExecutor(1) as pool:
        for step in range(3):
            loss = square(engine(batch(world, step)))
            pool.submit(world.backward, engine, loss).result()
            engine.step()


@cases
def weights_are_read_in_a_thread_beside_forward_and_backward(world: Any) -> None:
    """A monitor's, which takes turns with the update. An operation of its that is under way just when a forward ends
    holds the parameter as autograd does, and has the forward refused."""
    model = Net()
    engine = world.initialize(model)
    is_over, turn = threading.Event(), threading.Lock()

    def read() -> None:
        while not is_over.is_set():
            with turn, torch.no_grad():
                (model.head.weight.detach() * 2).float().norm()

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            for step in range(8):
                world.backward(engine, square(engine(batch(world, step))))
                with turn:
                    engine.step()
        finally:
            is_over.set()
        reading.result()


@cases
def a_weight_is_read_in_a_thread_between_steps(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
    with ThreadPoolExecutor(1) as pool:
        world.observe("norm", pool.submit(lambda: model.head.weight.detach().float().norm()).result())


@cases(must="equal")
def a_parent_uses_its_childs_weight(world: Any) -> None:
    trains(world, Rule(lambda net, x: F.linear(torch.sin(x), net.a.weight)))


@cases
def a_parent_uses_its_childs_weight_in_eval(world: Any) -> None:
    engine = trains(world, Rule(lambda net, x: F.linear(torch.sin(x), net.a.weight)))
    with torch.no_grad():
        world.observe("evaluation", engine.module(batch(world, 40)))
        world.observe("raw", F.linear(batch(world, 41), engine.module.b.weight))


@cases
def a_weights_data_is_used_in_forward(world: Any) -> None:
    """A straight-through target: the value without a gradient."""
    trains(world, Rule(lambda net, x: F.linear(x, net.a.weight) + 0.1 * F.linear(x, net.b.weight.data)))


@cases
def a_weight_of_a_module_that_is_not_called_in_data(world: Any) -> None:
    trains(world, Rule(lambda net, x: F.linear(x, net.a.weight.data) * net.b.weight.detach().abs().mean()))


@cases
def a_weights_shape_and_stride_in_forward(world: Any) -> None:
    trains(world, Rule(lambda net, x: net.a(x) * (net.a.weight.stride(0) + net.a.weight.shape[1]) / 64))


@dataclass
class Output:
    hidden: Tensor
    weight: Tensor


@dataclass
class Nest:
    inner: Any


@cases
def a_view_of_a_weight_in_a_dataclass(world: Any) -> None:
    class Returns(Rule):
        def forward(self, x: Tensor) -> Any:
            return Output(self.last(self.a(self.first(x))), self.a.weight[:2])

    engine = world.initialize(Returns(lambda net, x: x))
    for step in range(3):
        output = engine(batch(world, step))
        world.observe("view", output.weight)
        world.backward(engine, square(output.hidden) + square(output.weight))
        engine.step()


@cases
def a_view_of_a_weight_deep_inside_an_output(world: Any) -> None:
    class Returns(Rule):
        def forward(self, x: Tensor) -> Any:
            return {"nest": Nest([Output(self.last(self.a(self.first(x))), self.b.weight.t())])}

    engine = world.initialize(Returns(lambda net, x: x))
    for step in range(3):
        output = engine(batch(world, step))["nest"].inner[0]
        world.observe("view", output.weight)
        world.backward(engine, square(output.hidden) + square(output.weight))
        engine.step()


@cases
def a_weight_itself_is_an_output(world: Any) -> None:
    class Returns(Rule):
        def forward(self, x: Tensor) -> Any:
            return self.last(self.a(self.first(x))), self.a.weight

    engine = world.initialize(Returns(lambda net, x: x))
    for step in range(3):
        output, weight = engine(batch(world, step))
        world.observe("weight", weight)
        world.backward(engine, square(output) + square(weight))
        engine.step()


@cases
def a_weight_kept_on_the_module_as_an_attribute(world: Any) -> None:
    """A view taken in one forward, used in the next."""

    class Keeps(Rule):
        kept: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            h = self.a(self.first(x))
            if self.kept is not None:
                h = h + F.linear(x, self.kept)
            self.kept = self.b.weight.detach()[:, :]
            return self.last(h)

    engine = world.initialize(Keeps(lambda net, x: x))
    world.train(engine, lambda step: square(engine(batch(world, step))))


@cases
def a_weight_in_a_list_of_the_module(world: Any) -> None:
    """``self._flat = [self.a.weight, ...]``, as recurrent layers keep them."""

    class Listed(Rule):
        def __init__(self) -> None:
            super().__init__(lambda net, x: x)
            self._flat = [self.a.weight, self.b.weight]

        def forward(self, x: Tensor) -> Any:
            for weight in self._flat:
                x = torch.tanh(F.linear(x, weight))
            return self.last(x)

    trains(world, Listed())


@cases
def a_generator_of_outputs(world: Any) -> None:
    """Forward is a generator: weights are used after the call has returned."""

    class Yields(Rule):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            x = self.first(x)
            yield x
            x = self.a(x)
            yield x
            yield self.last(x)

    engine = world.initialize(Yields(lambda net, x: x))
    for step in range(3):
        world.backward(engine, sum((square(y) for y in engine(batch(world, step))), torch.zeros(())))
        engine.step()


@cases
def a_generator_of_outputs_over_raw_weights(world: Any) -> None:
    class Yields(Rule):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            for weight in (self.a.weight, self.b.weight):
                x = F.linear(x, weight)
                yield x

    engine = world.initialize(Yields(lambda net, x: x))
    for step in range(3):
        world.backward(engine, sum((square(y) for y in engine(batch(world, step))), torch.zeros(())))
        engine.step()


@cases
def a_closure_of_forward_is_called_later(world: Any) -> None:
    class Delays(Rule):
        def forward(self, x: Tensor) -> Any:
            h = self.a(self.first(x))
            return lambda: self.last(torch.tanh(self.b(h)))

    engine = world.initialize(Delays(lambda net, x: x))
    world.train(engine, lambda step: square(engine(batch(world, step))()))


@cases(must="equal")
def a_forward_hook_replaces_the_output(world: Any) -> None:
    model = Net()
    model.blocks[1].register_forward_hook(lambda _m, _i, output: output * 0.5)
    trains(world, model)


@cases(must="equal")
def a_forward_hook_added_after_initialize_replaces_the_output(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    model.blocks[1].register_forward_hook(lambda _m, _i, output: output * 0.5)
    model.blocks[0].register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
    world.train(engine, lambda step: square(engine(batch(world, step))))


@cases
def a_forward_hook_uses_the_weight(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    model.head.register_forward_hook(lambda m, _i, output: output + m.weight.mean())
    world.train(engine, lambda step: square(engine(batch(world, step))))


@cases
def a_forward_hook_of_a_child_uses_anothers_weight(world: Any) -> None:
    model = Net()
    model.blocks[2].register_forward_hook(lambda _m, _i, output: output + model.blocks[0].expand.weight.mean())
    trains(world, model)


@cases
def a_global_module_hook_reads_weights(world: Any) -> None:
    """A profiler's: every module, every call."""
    norms: list[Tensor] = []

    def hook(module: nn.Module, _inputs: Any, _output: Any) -> None:
        norms.extend(p.detach().float().norm() for p in module.parameters(recurse=False))

    handle: RemovableHandle = nn.modules.module.register_module_forward_hook(hook)
    try:
        trains(world, Net(), num_steps=2)
    finally:
        handle.remove()
    world.observe("norms", norms)


@cases
def functional_call_with_the_models_own_parameters(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(2):
        output = torch.func.functional_call(model, dict(model.named_parameters()), (batch(world, step),))
        world.backward(engine, square(output))
        engine.step()


@cases
def functional_call_with_other_weights(world: Any) -> None:
    """A step of meta-learning: fast weights are the user's own."""
    model = Net()
    engine = world.initialize(model)
    fast = {name: value.clone() * 0.9 for name, value in engine.full_state_dict().items()}
    with torch.no_grad():
        world.observe("fast", torch.func.functional_call(model, fast, (batch(world, 0),)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=2)


@cases
def replicate_of_the_module(world: Any) -> None:
    """As DataParallel does in every forward: a shallow copy of the module whose parameters are its own attributes."""
    model = Net()
    engine = world.initialize(model)
    replica = model._replicate_for_data_parallel()
    replica.head = copy.copy(model.head)
    with torch.no_grad():
        world.observe("replica", replica(batch(world, 1)))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@cases
def data_parallel_around_the_engines_module(world: Any) -> None:
    model = Net()
    engine = world.initialize(nn.DataParallel(model))
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=2)


@cases
def weights_as_another_subclass(world: Any) -> None:
    model = Net(1)
    trains(world, model, num_steps=1)
    with torch.no_grad():
        world.observe(
            "weight", [model.head.weight.as_subclass(Tensor).sum(), model.head.weight.data.as_subclass(Tensor)]
        )


@cases
def torch_jit_trace_of_the_module(world: Any) -> None:
    model = Net(1)
    trains(world, model, num_steps=1)
    with torch.no_grad():
        traced = torch.jit.trace(model, batch(world, 0), check_trace=False)
        world.observe("traced", traced(batch(world, 1)))


@cases
def comparing_two_weights(world: Any) -> None:
    model = Net()
    trains(world, model, num_steps=1)
    first, second = model.blocks[0].expand.weight, model.blocks[1].expand.weight
    world.observe("equal", torch.equal(first, second))
    world.observe("close", torch.allclose(first, first.clone()))
    world.observe("is", first is second)
    world.observe("larger", (first > second).sum())


@cases
def operators_on_a_parameter(world: Any) -> None:
    model = Net()
    trains(world, model, num_steps=1)
    weight = model.head.weight
    with torch.no_grad():
        world.observe("values", [weight + 1, 2 * weight, weight @ weight, -weight, weight[1:3], weight.T, abs(weight)])
        world.observe("float", float(weight.sum()))
        world.observe("bool", bool((weight != 0).any()))
        world.observe("rows", len(weight))
        world.observe("iterated", [row.sum() for row in weight][:2])


@cases(writes=True)
def an_out_argument_that_is_a_parameter(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    with torch.no_grad():
        torch.mul(model.head.weight, 0.5, out=model.head.weight)
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)


@cases
def an_embedding_looked_up_outside(world: Any) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.net = nn.Embedding(11, WIDTH), Net(1)

        def forward(self, x: Tensor) -> Any:
            return self.net(self.words(x))

    model = Words()
    engine = world.initialize(model)
    tokens = world.tokens(ROWS, below=11)
    for _ in range(3):
        world.backward(engine, square(engine(tokens)))
        engine.step()
        with torch.no_grad():
            world.observe("nearest", model.words(tokens) @ model.words.weight.t())


@cases(settings=(EACH, GROUPED, DEFAULT, EACH_BF16, NVME))
def everything_at_once(world: Any) -> None:
    """A regulariser, norms, an EMA and an evaluation in one loop."""
    model = Net()
    engine = world.initialize(model)
    average = {name: value.clone() for name, value in engine.full_state_dict().items()}
    for step in range(3):
        loss = square(engine(batch(world, step))) + 1e-3 * model.head.weight.float().square().sum()
        world.backward(engine, loss)
        engine.step()
        with torch.no_grad():
            world.observe("norm", torch.stack([p.float().norm() for p in model.parameters()]).norm())
            for name, param in model.named_parameters():
                average[name].lerp_(param, 0.25)
            world.observe("evaluation", engine.module(batch(world, 77)))
    world.observe("average", average)


def averaged_weights_take_turns(world: Any, *, at_once: bool) -> None:
    """An average is swapped in for an evaluation, and out: within one block, or with the masters put aside."""
    model = Net(1)
    average = copy.deepcopy(model).requires_grad_(False)
    engine = world.initialize(model)
    params = list(model.parameters())
    for step in range(3):
        world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=1)
        with torch.no_grad():
            for mean, param in zip(average.parameters(), params, strict=True):
                mean.lerp_(param.float(), 0.3)
        has_masters = world.name == "infinity"  # plain torch's stay until the next step
        read = infinity.utils.safe_get_full_fp32_param if has_masters else lambda param: param
        kept = [read(param).detach().clone() for param in params]
        with infinity.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
            for param, mean in zip(params, average.parameters(), strict=True):
                param.copy_(mean)
            if at_once:
                world.observe("averaged", engine.eval()(batch(world, 9)))
                for param, value in zip(params, kept, strict=True):
                    param.copy_(value)
        if not at_once:
            with torch.no_grad():
                world.observe("averaged", engine.eval()(batch(world, 9)))
            for param, value in zip(params, kept, strict=True):
                if has_masters:
                    infinity.utils.safe_set_full_fp32_param(param, value)
                else:
                    param.data.copy_(value)
        engine.train()


@cases(also=(STAGE_2_BF16, NVME), must="equal")
def averaged_weights_take_turns_within_a_block(world: Any) -> None:
    averaged_weights_take_turns(world, at_once=True)


@cases(also=(STAGE_2_BF16, NVME), must="equal")
def averaged_weights_take_turns_with_masters_put_aside(world: Any) -> None:
    averaged_weights_take_turns(world, at_once=False)


@cases.parametrized()
def test_weights_elsewhere(case: Case, judged: Any) -> None:
    judged(__name__, case)
