"""What autograd saved: changed in place it is an error as in plain torch, and the user's own hooks go on working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.odd.nets import ROWS, WIDTH, Net, Rule, batch, square, trains
from tests.support.cases import DEFAULT, EACH, EACH_BF16, GROUPED, GROUPED_BF16, NVME, STAGE_2, Case, Cases
from tests.support.functions import MadeAgain
from tests.support.world import Setting

cases = Cases(__name__)


def spoilt(name: str, rule: Any) -> None:
    def script(world: Any) -> None:
        trains(world, Rule(rule), num_steps=2)

    script.__name__ = name
    script.__doc__ = f"A saved tensor is changed in place: {name.replace('_', ' ')}."
    cases(script)


def _in_place(change: Any) -> Any:
    """``change`` spoils what the linear saved."""

    def rule(net: Any, x: Tensor) -> Any:
        h = torch.tanh(x)
        y = net.a(h)
        change(h, y)
        return net.b(y)

    return rule


spoilt("an_input_of_a_linear", _in_place(lambda h, _y: h.mul_(2)))
spoilt("an_output_that_is_not_saved", _in_place(lambda _h, y: y.mul_(2)))
spoilt("a_view_of_an_input", _in_place(lambda h, _y: h[0].zero_()))
spoilt("an_input_under_no_grad", _in_place(lambda h, _y: h.detach().zero_()))
spoilt("an_input_by_index", _in_place(lambda h, _y: h.__setitem__((0, 0), 1.0)))
spoilt("an_input_by_copy", _in_place(lambda h, y: h.copy_(y)))
spoilt("an_input_through_data", _in_place(lambda h, _y: h.data.mul_(2)))


def _saved_result(net: Any, x: Tensor) -> Any:
    y = torch.exp(net.a(x) * 0.1)
    y.add_(1)
    return net.b(y)


spoilt("a_saved_result", _saved_result)


@cases
def the_users_input_is_changed_after_forward(world: Any) -> None:
    """A buffer of the loader's that is filled again before backward."""
    engine = world.initialize(Net())
    x = batch(world, 0)
    loss = square(engine(x))
    x.zero_()
    world.backward(engine, loss)
    engine.step()


@cases
def a_mask_is_changed_after_forward(world: Any) -> None:
    mask = torch.ones(ROWS, WIDTH)
    engine = world.initialize(Rule(lambda net, x: net.a(x) * mask.to(x.dtype)))
    loss = square(engine(batch(world, 0)))
    mask.zero_()
    world.backward(engine, loss)
    engine.step()


@cases
def a_buffer_that_was_saved_is_changed(world: Any) -> None:
    class Scaled(Rule):
        def __init__(self) -> None:
            super().__init__(lambda net, x: net.a(x) * net.scale)
            self.register_buffer("scale", torch.ones(WIDTH))

    model = Scaled()
    engine = world.initialize(model)
    loss = square(engine(batch(world, 0)))
    model.scale.mul_(2)
    world.backward(engine, loss)
    engine.step()


@cases(writes=True)
def a_weight_is_changed_between_forward_and_backward(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    loss = square(engine(batch(world, 0)))
    with torch.no_grad():
        model.head.weight.mul_(2)
    world.backward(engine, loss)
    engine.step()


@cases(writes=True)
def a_weight_is_clamped_in_forward(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Any:
        with torch.no_grad():
            net.a.weight.clamp_(-0.05, 0.05)
        return net.a(x)

    trains(world, Rule(rule))


@cases(writes=True)
def a_weight_is_normalised_between_steps(world: Any) -> None:
    """As StyleGAN and word2vec do."""
    model = Rule(lambda net, x: net.a(x))
    engine = world.initialize(model)
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        with torch.no_grad():
            model.a.weight.div_(model.a.weight.norm(dim=1, keepdim=True))


@cases(writes=True)
def weights_are_clipped_between_steps(world: Any) -> None:
    """WGAN's clipping, through ``data``."""
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        for param in model.parameters():
            param.data.clamp_(-0.1, 0.1)


@cases(writes=True)
def an_embedding_with_max_norm(world: Any) -> None:
    """Its forward renormalises the weight in place."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.net = nn.Embedding(11, WIDTH, max_norm=1.0), Net(1)

        def forward(self, x: Tensor) -> Any:
            return self.net(self.words(x))

    engine = world.initialize(Words())
    world.train(engine, lambda step: square(engine(world.tokens(ROWS, below=11, seed=step))))


def _noted(log: list[int]) -> Any:
    def pack(tensor: Tensor) -> Any:
        log.append(tensor.numel())
        return tensor

    return pack


@cases(must="equal", also=(NVME,))
def save_on_cpu_outside(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(3):
        with save_on_cpu():
            loss = square(engine(batch(world, step)))
        world.backward(engine, loss)
        engine.step()


@cases(must="equal")
def save_on_cpu_inside(world: Any) -> None:
    class Saves(Net):
        def forward(self, x: Tensor) -> Any:
            with save_on_cpu():
                for block in self.blocks:
                    x = block(x)
            return self.head(x)

    trains(world, Saves())


@cases(must="equal")
def save_on_cpu_of_what_nobody_differentiates(world: Any) -> None:
    """Torch never frees a graph whose hooks kept an output, which holds its node: weights are not among what stays."""

    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            with save_on_cpu():
                start = self.cell(x[None])[1]
                return self.cell(x[None], start.detach())[0]

    trains(world, Warm())


@cases
def packed_to_bytes_outside(world: Any) -> None:
    """Activations are compressed by the user: here, copied through numpy."""
    engine = world.initialize(Net())
    for step in range(3):
        with saved_tensors_hooks(
            lambda t: (t.detach().float().numpy().copy(), t.dtype), lambda p: torch.from_numpy(p[0]).to(p[1])
        ):
            loss = square(engine(batch(world, step)))
        world.backward(engine, loss)
        engine.step()


@cases
def packed_clones_inside(world: Any) -> None:
    class Saves(Net):
        def forward(self, x: Tensor) -> Any:
            with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                for block in self.blocks:
                    x = block(x)
            return self.head(x)

    trains(world, Saves())


@cases
def packing_that_only_counts(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(2):
        with saved_tensors_hooks(_noted([]), lambda t: t):
            loss = square(engine(batch(world, step)))
        world.backward(engine, loss)
        engine.step()


@cases
def hooks_around_backward_only(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(2):
        loss = square(engine(batch(world, step)))
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            world.backward(engine, loss)
        engine.step()


@cases
def packing_that_is_disabled(world: Any) -> None:
    """``disable_saved_tensors_hooks``: nobody may have hooks here, the user says."""
    engine = world.initialize(Net())
    for step in range(2):
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            loss = square(engine(batch(world, step)))
        world.backward(engine, loss)
        engine.step()


@cases
def allowed_mutation_of_saved_tensors(world: Any) -> None:
    engine = world.initialize(Rule(_in_place(lambda h, _y: h.mul_(2))))
    for step in range(2):
        with allow_mutation_on_saved_tensors():
            world.backward(engine, square(engine(batch(world, step))))
        engine.step()


@cases
def saved_tensors_are_read_from_the_graph(world: Any) -> None:
    """A visualiser walks ``grad_fn`` and looks at what was saved."""
    engine = world.initialize(Rule(lambda net, x: torch.sigmoid(net.a(x))))
    output = engine(batch(world, 0))
    node = output.grad_fn
    seen: list[Tensor] = []
    while node is not None and len(seen) < 8:
        seen.extend(
            getattr(node, name).clone()
            for name in dir(node)
            if name.startswith("_saved_") and isinstance(getattr(node, name), Tensor)
        )
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    world.observe("saved", seen)
    world.backward(engine, square(output))
    engine.step()


@cases(must="equal")
def anomaly_detection(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(2):
        with torch.autograd.detect_anomaly(check_nan=True):
            world.backward(engine, square(engine(batch(world, step))))
        engine.step()


@cases(must="equal", settings=(EACH, GROUPED, DEFAULT, EACH_BF16, NVME))
def checkpointed_blocks(world: Any) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    trains(world, Checkpointed())


@cases(must="equal")
def checkpointed_blocks_with_reentrance(world: Any) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    engine = world.initialize(Checkpointed())
    world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step, requires_grad=True))))


@cases(must="equal")
def save_on_cpu_around_checkpoints(world: Any) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    engine = world.initialize(Checkpointed())
    for step in range(3):
        with save_on_cpu():
            loss = square(engine(batch(world, step)))
        world.backward(engine, loss)
        engine.step()


def whole(reentrant: bool) -> None:
    def script(world: Any) -> None:
        engine = world.initialize(nn.Sequential(Net(), nn.Dropout(0.2), Net(1)))
        for step in range(3):
            x = batch(world, step).requires_grad_()
            world.backward(engine, square(checkpoint(engine, x, use_reentrant=reentrant)))
            engine.step()

    script.__name__ = f"the_engine_itself_under_a_{'reentrant ' if reentrant else ''}checkpoint".replace(" ", "_")
    script.__doc__ = "It is called again in backward."
    cases(must="equal")(script)


whole(True)
whole(False)


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
KEEPING = Setting(thresholds="20000,6000,0,20000")
"""Weights that forward has used are there in backward."""


def selective(name: str, saves: Callable[[Any], bool], **settings: Any) -> None:
    def policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saves(op) else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(Net):
        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = checkpoint(
                    block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
                )
            return self.head(x)

    def script(world: Any) -> None:
        trains(world, Selective(), **settings)

    script.__name__ = f"selective_checkpointing{name}"
    script.__doc__ = "Of the operations in a block, and of no others, some are not done again."
    cases(also=(KEEPING, NVME), must="equal")(script)


selective("", lambda op: op in PRODUCTS)
selective("_of_all", lambda op: True)
selective("_of_all_but_products", lambda op: op not in PRODUCTS)
selective("_with_accumulation", lambda op: op in PRODUCTS, accumulation=2)


@cases(must="equal")
def a_checkpoint_that_stops_early_is_switched_off(world: Any) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Any:
            with torch.utils.checkpoint.set_checkpoint_early_stop(False):
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    trains(world, Checkpointed())


@cases(must="equal")
def in_place_activations(world: Any) -> None:
    trains(world, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))


@cases(must="equal")
def a_residual_added_in_place(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Any:
        h = net.a(x)
        h += x
        return net.b(F.gelu(h))

    trains(world, Rule(rule))


class Borrowed(nn.Module):
    """Uses its children's weights by operations that give the parameter itself back where there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = F.linear(torch.tanh(self.b(x)), self.a.weight.to(x.dtype))
        return y * self.a.weight.contiguous().square().mean() + self.b.bias.to(x.device).sigmoid()


def borrowed(name: str, call: Any) -> None:
    def script(world: Any) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.head = Borrowed(), nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Any:
                return self.head(torch.tanh(call(self.inner, x)))

        engine = world.initialize(Outer())
        world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step, requires_grad=True))))

    script.__name__, script.__doc__ = name, f"Borrowed weights are used again in backward: {name.replace('_', ' ')}."
    cases(settings=(EACH, GROUPED, DEFAULT, EACH_BF16, NVME))(script)


borrowed("borrowed_under_a_checkpoint", lambda inner, x: checkpoint(inner, x, use_reentrant=False))
borrowed("borrowed_under_a_reentrant_checkpoint", lambda inner, x: checkpoint(inner, x, use_reentrant=True))
borrowed("borrowed_by_a_function_that_calls_again", lambda inner, x: MadeAgain.apply(inner, x, *inner.parameters()))


@cases(settings=(EACH_BF16, GROUPED_BF16), must="equal")
def a_cast_read_as_complex_numbers(world: Any) -> None:
    """A spectral layer: what backward needs has not the elements of the cast that it is a view of."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(1)
            self.weight = nn.Parameter(torch.randn(WIDTH, 5, 2) * 0.1)

        def forward(self, x: Tensor) -> Any:
            found = torch.fft.rfft(self.net(x).float()[:, :, None].expand(-1, -1, 8))
            found = found * torch.view_as_complex(self.weight.float())
            return torch.fft.irfft(found, n=8).to(x.dtype)

    trains(world, Spectral())


@cases(settings=(EACH_BF16, GROUPED_BF16), must="equal")
def a_cast_from_before_an_update(world: Any) -> None:
    """A model that keeps the cast which it made in its last forward, and goes through it once more."""

    class Delayed(nn.Module):
        last: Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.net = Net(1)
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)

        def forward(self, x: Tensor) -> Any:
            now = self.weight.float()
            last, self.last = now if self.last is None else self.last, now
            return self.net(x).float() @ (last + now) @ last

    engine = world.initialize(Delayed())
    for step in range(3):
        world.backward(engine, square(engine(batch(world, step))), retain_graph=True)
        engine.step()


def halve(cast: Tensor) -> None:
    cast.data.mul_(0.5)


def take_signs(cast: Tensor) -> None:
    cast.data = cast.data.sign()


def negate_a_row(cast: Tensor) -> None:
    cast[0].data.neg_()


def halve_an_aliass_data(cast: Tensor) -> None:
    cast.detach().data.mul_(0.5)


def zero_an_array(cast: Tensor) -> None:
    cast.detach().numpy()[:2] = 0


def zero_an_array_that_is_forced(cast: Tensor) -> None:
    torch.from_numpy(cast.numpy(force=True))[3].zero_()


def zero_a_storage(cast: Tensor) -> None:
    torch.empty(0, dtype=cast.dtype).set_(cast.detach().untyped_storage())[:7].zero_()


def halve_a_tensor_over_it(cast: Tensor) -> None:
    other = torch.empty(0, dtype=cast.dtype)
    other.data = cast.detach()
    other.mul_(0.5)


def halve_by_dlpack(cast: Tensor) -> None:
    torch.from_dlpack(cast.detach()).mul_(0.5)


def halve_one_by_one(cast: Tensor) -> None:
    cast.detach().apply_(lambda value: value / 2)


def quantised(change: Callable[[Tensor], None], *, late: bool) -> None:
    """A straight-through estimator changes what it cast, out of autograd's sight, before it is used or afterwards."""

    def rule(net: Any, x: Tensor) -> Any:
        weight = net.a.weight.to(torch.float64)
        if not late:
            change(weight)
        y = F.linear(x.double(), weight)
        if late:
            change(weight)
        return net.b(y.to(x.dtype))

    def script(world: Any) -> None:
        trains(world, Rule(rule))

    script.__name__ = f"a_cast_through_data_{'after' if late else 'before'}_its_use_{change.__name__}"
    cases(also=(STAGE_2, NVME), must="either" if late and change is take_signs else "equal")(script)


for _change in (
    *(halve, take_signs, negate_a_row, halve_an_aliass_data, zero_an_array, zero_an_array_that_is_forced),
    *(zero_a_storage, halve_a_tensor_over_it, halve_by_dlpack, halve_one_by_one),
):
    quantised(_change, late=False)
    quantised(_change, late=True)


@cases(also=(STAGE_2, NVME), must="equal")
def a_cast_is_written_between_forward_and_backward(world: Any) -> None:
    """By whoever kept it, out of autograd's sight."""
    kept: list[Tensor] = []

    def rule(net: Any, x: Tensor) -> Any:
        kept.append(net.a.weight.double())
        return net.b(F.linear(x.double(), kept[-1]).to(x.dtype))

    engine = world.initialize(Rule(rule))
    for step in range(3):
        loss = square(engine(batch(world, step)))
        kept.pop().detach().data.mul_(0.5)
        world.backward(engine, loss)
        engine.step()


@cases(also=(STAGE_2, NVME))
def a_cast_that_was_made_past_the_parameters_methods(world: Any) -> None:
    def rule(net: Any, x: Tensor) -> Any:
        weight = torch.as_tensor(net.a.weight, dtype=torch.float64)
        weight.detach().data.mul_(0.5)
        return net.b(F.linear(x.double(), weight).to(x.dtype))

    trains(world, Rule(rule))


def _narrowed(tensor: Tensor) -> Any:
    return (tensor.dtype, tensor.to(torch.float16))


def _narrowed_unless_a_parameter(tensor: Tensor) -> Any:
    return (tensor.dtype, tensor if isinstance(tensor, nn.Parameter) else tensor.to(torch.float16))


def _narrowed_unless_of_a_parameter(tensor: Tensor) -> Any:
    return (tensor.dtype, tensor) if isinstance(tensor._base, nn.Parameter) else _narrowed_unless_a_parameter(tensor)


def _widened(packed: Any) -> Tensor:
    made: Tensor = packed[1].to(packed[0])
    return made


def compressed(pack: Any) -> None:
    """What is saved is rounded, weights too, unless the hook leaves them out, as it can in torch."""

    def outside(world: Any) -> None:
        engine = world.initialize(Net())
        for step in range(3):
            with saved_tensors_hooks(pack, _widened):
                loss = square(engine(batch(world, step)))
            world.backward(engine, loss)
            engine.step()

    def inside(world: Any) -> None:
        class Compresses(Net):
            def forward(self, x: Tensor) -> Any:
                with saved_tensors_hooks(pack, _widened):
                    for block in self.blocks:
                        x = block(x)
                return self.head(x)

        trains(world, Compresses())

    for script in (outside, inside):
        script.__name__ = f"what_is_saved_is{pack.__name__}_{script.__name__}"
        cases(also=(STAGE_2, NVME), must="equal")(script)


for _pack in (_narrowed, _narrowed_unless_a_parameter, _narrowed_unless_of_a_parameter):
    compressed(_pack)


@cases.parametrized()
def test_saved_activations(case: Case, judged: Any) -> None:
    judged(__name__, case)
