"""Parameters frozen, replaced, added, resized, tied, aliased or re-parametrised, before and after initialize."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, skip_init

from tests.odd.nets import ROWS, WIDTH, Block, Net, batch, square, trains
from tests.support.cases import (
    DEFAULT,
    EACH,
    GROUPED,
    STAGE_2,
    STAGE_2_BF16,
    STAGE_2_NVME,
    WHOLE,
    Case,
    Cases,
)

cases = Cases(__name__)


def goes_on(world: Any, engine: Any, num_steps: int = 2) -> None:
    world.train(engine, lambda step: square(engine(batch(world, step + 20))), num_steps=num_steps)


def changed(name: str, change: Any, **kwargs: Any) -> None:
    """Cases that make a change after Init, after initialize, after a step, and between micro-batches."""

    def after_init(world: Any) -> None:
        model = world.build(Net)
        change(world, model)
        goes_on(world, world.initialize(model))

    def after_initialize(world: Any) -> None:
        model = Net()
        engine = world.initialize(model)
        change(world, model)
        goes_on(world, engine)

    def after_a_step(world: Any) -> None:
        model = Net()
        engine = trains(world, model, num_steps=1)
        change(world, model)
        goes_on(world, engine)

    def between_forward_and_backward(world: Any) -> None:
        model = Net()
        engine = world.initialize(model)
        loss = square(engine(batch(world, 0)))
        change(world, model)
        world.backward(engine, loss)
        engine.step()
        goes_on(world, engine)

    for script in (after_init, after_initialize, after_a_step, between_forward_and_backward):
        script.__name__ = f"{name}_{script.__name__}"
        script.__doc__ = script.__name__.replace("_", " ")
        cases(writes=True, slow=script is after_a_step, **kwargs)(script)


def _freeze(_world: Any, model: Any) -> None:
    model.blocks[1].requires_grad_(False)


def _replace(world: Any, model: Any) -> None:
    model.head.weight = nn.Parameter(torch.eye(WIDTH, dtype=world.dtype))


def _replace_layer(world: Any, model: Any) -> None:
    torch.manual_seed(3)
    model.head = nn.Linear(WIDTH, WIDTH, bias=False).to(world.dtype)


def _add(world: Any, model: Any) -> None:
    torch.manual_seed(3)
    model.blocks.append(Block().to(world.dtype))


def _remove(_world: Any, model: Any) -> None:
    del model.blocks[2]


def _tie(_world: Any, model: Any) -> None:
    model.blocks[2].expand.weight = model.blocks[0].expand.weight


def _untie(_world: Any, model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def _alias(_world: Any, model: Any) -> None:
    """A module under a second name."""
    model.again = model.blocks[0]


def _write_data(world: Any, model: Any) -> None:
    model.head.weight.data.copy_(torch.eye(WIDTH, dtype=world.dtype))


def _set_data(world: Any, model: Any) -> None:
    model.head.weight.data = torch.eye(WIDTH, dtype=world.dtype)


def _init(_world: Any, model: Any) -> None:
    nn.init.constant_(model.head.weight, 0.01)


def _in_place(_world: Any, model: Any) -> None:
    with torch.no_grad():
        model.head.weight.mul_(0.5)
        model.blocks[0].norm.weight[0] = 2.0


def _rename(_world: Any, model: Any) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))


def _delete(_world: Any, model: Any) -> None:
    model.blocks[0].expand.bias = None


def _swap(_world: Any, model: Any) -> None:
    """torch swaps nothing that somebody refers to weakly, and owners do."""
    torch.utils.swap_tensors(model.blocks[0].expand.weight, model.blocks[1].expand.weight)


def _resize(_world: Any, model: Any) -> None:
    with torch.no_grad():
        model.head.weight.resize_(2 * WIDTH, WIDTH)


def _cast_one(_world: Any, model: Any) -> None:
    model.head.weight.data = model.head.weight.data.double()


def _reset(_world: Any, model: Any) -> None:
    torch.manual_seed(4)
    model.blocks[0].expand.reset_parameters()


def _weight_norm(_world: Any, model: Any) -> None:
    parametrizations.weight_norm(model.blocks[0].expand)


def _old_weight_norm(_world: Any, model: Any) -> None:
    nn.utils.weight_norm(model.blocks[0].expand)


def _spectral_norm(_world: Any, model: Any) -> None:
    torch.manual_seed(4)
    nn.utils.spectral_norm(model.blocks[0].expand)


def _parametrize(_world: Any, model: Any) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    parametrize.register_parametrization(model.head, "weight", Symmetric())


def _prune(_world: Any, model: Any) -> None:
    torch.manual_seed(4)
    prune.random_unstructured(model.head, "weight", amount=0.3)


def _wrap(_world: Any, model: Any) -> None:
    """Another Parameter over the same memory, as torch's parametrizations make them."""
    model.head.weight = nn.Parameter(model.head.weight)


def _wrap_data(_world: Any, model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.data)


def _set(_world: Any, model: Any) -> None:
    with torch.no_grad():
        model.head.weight.set_(torch.eye(WIDTH, dtype=model.head.weight.dtype))


def _grad_flags(_world: Any, model: Any) -> None:
    """Frozen and trained again."""
    model.requires_grad_(False)
    model.requires_grad_(True)


for label, function in {
    "frozen": _freeze,
    "replaced": _replace,
    "layer_replaced": _replace_layer,
    "added": _add,
    "removed": _remove,
    "tied": _tie,
    "untied": _untie,
    "aliased": _alias,
    "written_through_data": _write_data,
    "data_set": _set_data,
    "initialised_again": _init,
    "changed_in_place": _in_place,
    "registered": _rename,
    "deleted": _delete,
    "swapped": _swap,
    "resized_in_place": _resize,
    "cast_by_data": _cast_one,
    "reset": _reset,
    "weight_norm": _weight_norm,
    "old_weight_norm": _old_weight_norm,
    "spectral_norm": _spectral_norm,
    "parametrised": _parametrize,
    "pruned": _prune,
    "wrapped": _wrap,
    "data_wrapped": _wrap_data,
    "set": _set,
    "frozen_and_unfrozen": _grad_flags,
}.items():
    changed(label, function, by_torch="has weakref associated with it" if label == "swapped" else "")


def _unfrozen(when: str) -> None:
    def script(world: Any) -> None:
        def make() -> nn.Module:
            model = Net()
            model.blocks[1].requires_grad_(False)
            return model

        model: Any = world.build(make) if when == "after_init" else make()
        if when == "after_init":
            model.blocks[1].requires_grad_(True)
        engine = world.initialize(model)
        if when != "after_init":
            goes_on(world, engine, 1)
            model.blocks[1].requires_grad_(True)
        goes_on(world, engine)

    script.__name__ = f"unfrozen_{when}"
    script.__doc__ = f"A frozen block is to be trained {when.replace('_', ' ')}."
    cases(script)


_unfrozen("after_init")
_unfrozen("after_a_step")


class Words(nn.Module):
    """A tied embedding that can be resized, as Transformers' are."""

    def __init__(self, num_words: int = 11) -> None:
        super().__init__()
        self.words, self.net = nn.Embedding(num_words, WIDTH), Net(1)
        self.head = nn.Linear(WIDTH, num_words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.net(self.words(tokens)))

    def resize(self, num_words: int) -> None:
        old = self.words.weight
        self.words = nn.Embedding(num_words, WIDTH, dtype=old.dtype)
        with torch.no_grad():
            self.words.weight.zero_()
            self.words.weight[: len(old)] = old
        self.head = nn.Linear(WIDTH, num_words, bias=False)
        self.head.weight = self.words.weight


@cases(writes=True)
def resize_token_embeddings_after_init(world: Any) -> None:
    model: Any = world.build(Words)
    model.resize(17)
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(world.tokens(ROWS, below=17, seed=step))))


@cases(writes=True)
def resize_token_embeddings_after_initialize(world: Any) -> None:
    model = Words()
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(world.tokens(ROWS, below=11, seed=step))), num_steps=1)
    model.resize(17)
    world.train(engine, lambda step: square(engine(world.tokens(ROWS, below=17, seed=step))), num_steps=2)


@cases(writes=True)
def load_state_dict_after_init(world: Any) -> None:
    model, donor = world.build(Net), Net()
    model.load_state_dict(donor.state_dict())
    goes_on(world, world.initialize(model))


@cases(writes=True)
def load_state_dict_with_assign_after_init(world: Any) -> None:
    model, donor = world.build(Net), Net()
    model.load_state_dict(donor.state_dict(), assign=True)
    goes_on(world, world.initialize(model))


@cases(writes=True)
def load_state_dict_with_assign_before_initialize(world: Any) -> None:
    model, donor = Net(), Net()
    model.load_state_dict(donor.state_dict(), assign=True)
    goes_on(world, world.initialize(model))


@cases(must="equal")
def load_state_dict_inside_init(world: Any) -> None:
    def make() -> nn.Module:
        model, donor = Net(), Net()
        model.load_state_dict(donor.state_dict())
        return model

    goes_on(world, world.initialize(world.build(make)))


@cases
def a_deep_copy_after_init(world: Any) -> None:
    model = world.build(Net)
    twin = copy.deepcopy(model)
    goes_on(world, world.initialize(twin))


@cases
def a_deep_copy_after_init_of_which_the_original_trains(world: Any) -> None:
    """A target network."""
    model = world.build(Net)
    twin = copy.deepcopy(model)
    engine = world.initialize(model)
    goes_on(world, engine)
    with torch.no_grad():
        world.observe("twin", twin.to(world.dtype)(batch(world, 1)))


@cases
def a_deep_copy_after_initialize(world: Any) -> None:
    model = Net()
    engine = trains(world, model, num_steps=1)
    twin = copy.deepcopy(model)
    goes_on(world, engine)
    with torch.no_grad():
        world.observe("twin", twin(batch(world, 1)))


@cases(settings=(STAGE_2, STAGE_2_BF16, WHOLE, STAGE_2_NVME), must="equal")
def a_deep_copy_of_whole_weights(world: Any) -> None:
    """It is the user's own: it follows the model by averaging, trains by itself, and can be copied again."""
    model = Net()
    engine = trains(world, model, num_steps=1)
    twin = copy.deepcopy(model)
    for step in range(2):
        world.backward(engine, square(engine(batch(world, step))))
        engine.step()
        with torch.no_grad():
            for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.1)
    own = torch.optim.SGD(twin.parameters(), lr=0.1)
    square(twin(batch(world, 3))).backward()
    own.step()
    again = copy.deepcopy(twin)
    with torch.no_grad():
        world.observe("twin", twin(batch(world, 1)))
        world.observe("again", again(batch(world, 2)))
    world.observe("weights", dict(again.state_dict()))
    goes_on(world, engine)


@cases(settings=(STAGE_2, WHOLE), must="equal")
def a_deep_copy_of_an_encoder_of_whole_weights(world: Any) -> None:
    """Its layers leave torch's fast path where somebody has hung a hook on them."""
    model = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(world.randn(2, 4, WIDTH, seed=step))), num_steps=1)
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        world.observe("twin", twin(world.randn(2, 4, WIDTH, seed=9)))


@cases
def a_deep_copy_of_a_parameter(world: Any) -> None:
    model = Net()
    engine = trains(world, model, num_steps=1)
    twin = copy.deepcopy(model.head.weight)
    goes_on(world, engine)
    world.observe("twin", twin + 0)


@cases
def a_shallow_copy_of_the_module(world: Any) -> None:
    model = Net()
    engine = trains(world, model, num_steps=1)
    twin = copy.copy(model)
    with torch.no_grad():
        world.observe("twin", twin(batch(world, 1)))
    goes_on(world, engine)


@cases
def a_deep_copy_inside_init(world: Any) -> None:
    """Transformer layers are deep copies of one."""

    def make() -> nn.Module:
        layer = Block()
        return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))

    goes_on(world, world.initialize(world.build(make)))


@cases
def adapters_added_between_init_and_initialize(world: Any) -> None:
    """PEFT: layers are wrapped, the base is frozen."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Any:
            return self.base(x) + self.up(self.down(x))

    model: Any = world.build(Net)
    torch.manual_seed(2)
    model.head = Adapter(model.head)
    goes_on(world, world.initialize(model))


@cases
def dora_added_between_init_and_initialize(world: Any) -> None:
    """DoRA takes the norm of the base's weight when it is added."""

    class Dora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1))

        def forward(self, x: Tensor) -> Any:
            return F.linear(x, self.magnitude[:, None] * F.normalize(self.base.weight, dim=1))

    model: Any = world.build(Net)
    model.head = Dora(model.head)
    goes_on(world, world.initialize(model))


# Constructors under Init, and tensors of odd kinds


def built(name: str, make: Any, **kwargs: Any) -> None:
    """Cases that train what ``make()`` gives, built plainly and under Init."""

    def plainly(world: Any) -> None:
        model = make()
        engine = world.initialize(model)
        world.train(engine, lambda step: square(engine(batch(world, step))))

    def under_init(world: Any) -> None:
        engine = world.initialize(world.build(make))
        world.train(engine, lambda step: square(engine(batch(world, step))))

    for script in (plainly, under_init):
        script.__name__ = f"{name}_{script.__name__}"
        script.__doc__ = script.__name__.replace("_", " ")
        cases(**kwargs)(script)


class WithTensor(nn.Module):
    """A linear and a tensor made by a function from its weight."""

    def __init__(self, make: Any, *, buffer: bool = False) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        made = make(self)
        if buffer:
            self.register_buffer("made", made)
        elif isinstance(made, nn.Parameter):
            self.register_parameter("made", made)
        else:
            self.kept = made

    def forward(self, x: Tensor) -> Any:
        made = self.made if hasattr(self, "made") else self.kept
        return self.other(self.linear(x)) * (1 + 0.01 * made.float().sum().to(x.dtype))


built("a_buffer_that_aliases_a_parameter", lambda: WithTensor(lambda m: m.linear.weight.data, buffer=True))
built("a_buffer_that_is_a_view_of_a_parameter", lambda: WithTensor(lambda m: m.linear.weight.data[0], buffer=True))
built("a_kept_view_of_data", lambda: WithTensor(lambda m: m.linear.weight.data.view(-1)))
built("a_kept_detached_weight", lambda: WithTensor(lambda m: m.linear.weight.detach()))
built("a_kept_transpose", lambda: WithTensor(lambda m: m.linear.weight.t()))
built("a_kept_copy", lambda: WithTensor(lambda m: m.linear.weight.detach().clone()))
built("a_parameter_over_the_storage_of_another", lambda: WithTensor(lambda m: nn.Parameter(m.linear.weight.data)))
built("a_parameter_that_is_a_view_of_another", lambda: WithTensor(lambda m: nn.Parameter(m.linear.weight.data[:3])))
built("an_expanded_parameter", lambda: WithTensor(lambda m: nn.Parameter(torch.ones(1).expand(WIDTH))), about="made")
built("a_transposed_parameter", lambda: WithTensor(lambda m: nn.Parameter(torch.randn(WIDTH, 3).t())))
built("a_strided_parameter", lambda: WithTensor(lambda m: nn.Parameter(torch.randn(WIDTH, 6)[:, ::2])))
built("an_empty_parameter", lambda: WithTensor(lambda m: nn.Parameter(torch.zeros(0, 3))))
built("a_scalar_parameter", lambda: WithTensor(lambda m: nn.Parameter(torch.tensor(0.5))))
built("a_parameter_of_one_element", lambda: WithTensor(lambda m: nn.Parameter(torch.tensor([[0.5]]))))
built("two_slices_of_one_flat_tensor", lambda: Flat())
built("weight_norm_in_a_constructor", lambda: parametrized_net(parametrizations.weight_norm))
built("old_weight_norm_in_a_constructor", lambda: parametrized_net(nn.utils.weight_norm))
built("spectral_norm_in_a_constructor", lambda: parametrized_net(parametrizations.spectral_norm))
built("old_spectral_norm_in_a_constructor", lambda: parametrized_net(nn.utils.spectral_norm), must="equal")
built("orthogonal_in_a_constructor", lambda: parametrized_net(parametrizations.orthogonal))
built("tied_in_a_constructor", lambda: tied_net(), must="equal")
built("orthogonal_initialisation", lambda: initialised(nn.init.orthogonal_), must="equal")
built("initialisation_through_data", lambda: initialised(lambda w: w.data.normal_(0, 0.02)), must="equal")
built("initialisation_by_assigning_data", lambda: initialised(_assign_data))
built("initialisation_by_detached_copy", lambda: initialised(lambda w: w.detach().copy_(torch.eye(WIDTH))))
built("initialisation_by_index", lambda: initialised(_assign_rows))
built("initialisation_by_numpy", lambda: initialised(lambda w: w.data.numpy().fill(0.01)))
built("weights_widened_by_data", lambda: widened(_assign), must="equal")
built("weights_widened_by_set", lambda: widened(_set_memory), must="equal")
built("a_model_cast_and_cast_back", lambda: Net().double().float(), must="equal")
built("initialisation_by_apply", lambda: Net().apply(_normal), must="equal")
built("skip_init", lambda: skipped())
built("a_parameter_list", lambda: Listed(nn.ParameterList), must="equal")
built("a_parameter_dict", lambda: Listed(nn.ParameterDict), must="equal")
built("a_model_moved_in_its_constructor", lambda: Net().to("cpu"), must="equal")
built("a_frozen_part", lambda: frozen_part(), must="equal")
built("a_meta_parameter", lambda: WithTensor(lambda m: nn.Parameter(torch.empty(3, device="meta"))))
built("a_lazy_layer", lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH)))
built("a_sparse_parameter", lambda: WithTensor(lambda m: nn.Parameter(torch.eye(3).to_sparse())))
built("a_subclassed_parameter", lambda: WithTensor(lambda m: MyParameter(torch.ones(3))))


class MyParameter(nn.Parameter):
    """A class of the user's own."""

    def doubled(self) -> Tensor:
        return self * 2


class Doubling(nn.Parameter):
    """Its products are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is Tensor.mul else result


class OfOwnKind(Net):
    """Scales its input as a parameter of that class says."""

    def __init__(self, kind: type[nn.Parameter]) -> None:
        super().__init__()
        self.scale = kind(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        scale = self.scale
        return super().forward(x * scale.doubled() if isinstance(scale, MyParameter) else scale * x)


built("a_parameter_with_a_method", lambda: OfOwnKind(MyParameter), must="equal")
built("a_parameter_with_operations_of_its_own", lambda: OfOwnKind(Doubling), must="refused", about="Doubling|scale")


class OfMine(torch.optim.SGD):
    """Steps parameters of one class otherwise, as on a manifold."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1 if isinstance(param, MyParameter) else 0.01)


@cases(must="refused", about="OfMine")
def an_optimizer_asks_for_a_class_of_parameters(world: Any) -> None:
    engine = world.initialize(OfOwnKind(MyParameter), optimizer=lambda params: OfMine(params, lr=0.1))
    world.train(engine, lambda step: square(engine(batch(world, step))))


class Flat(nn.Module):
    """As flattened models keep them: two parameters over one storage."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * WIDTH * WIDTH) * 0.1
        self.a = nn.Parameter(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH))
        self.b = nn.Parameter(flat[WIDTH * WIDTH :].view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.a)), self.b)


class Listed(nn.Module):
    """Weights in a ParameterList or ParameterDict, which is never called."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        weights = {f"w{i}": nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2) for i in range(3)}
        self.weights = container(weights if container is nn.ParameterDict else weights.values())

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights.values() if isinstance(self.weights, nn.ParameterDict) else self.weights
        for weight in weights:
            x = torch.tanh(F.linear(x, weight))
        return x


def parametrized_net(change: Any) -> nn.Module:
    torch.manual_seed(6)
    model = Net(1)
    change(model.head)
    change(model.blocks[0].expand)
    return model


def tied_net() -> nn.Module:
    model = Net()
    model.blocks[2].expand.weight = model.blocks[0].expand.weight
    return model


def initialised(init: Any) -> nn.Module:
    model = Net()
    init(model.head.weight)
    return model


def _assign_data(weight: Tensor) -> None:
    weight.data = torch.eye(WIDTH)


def _assign_rows(weight: Tensor) -> None:
    with torch.no_grad():
        weight[0] = 0.5
        weight[:, 1] = -0.5


def widened(assign: Any) -> nn.Module:
    """Weights that are staged by then get other shapes."""
    model = Net()
    torch.manual_seed(8)
    block: Any = model.blocks[0]
    for param, shape in (
        (block.expand.weight, (3 * WIDTH, WIDTH)),
        (block.expand.bias, (3 * WIDTH,)),
        (block.contract.weight, (WIDTH, 3 * WIDTH)),
    ):
        assign(param, torch.randn(shape) * 0.1)
    return model


def _assign(param: nn.Parameter, value: Tensor) -> None:
    param.data = value


def _set_memory(param: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        param.set_(value)


def _normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


def skipped() -> nn.Module:
    layer = skip_init(nn.Linear, WIDTH, WIDTH)
    nn.init.normal_(layer.weight, std=0.1)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.Linear(WIDTH, WIDTH))


def frozen_part() -> nn.Module:
    model = Net()
    model.blocks[0].requires_grad_(False)
    return model


@cases
def parametrization_cached(world: Any) -> None:
    model = parametrized_net(parametrizations.orthogonal)
    engine = world.initialize(model)
    for step in range(3):
        with parametrize.cached():
            world.backward(engine, square(engine(batch(world, step))))
        engine.step()


@cases
def parametrizations_removed_after_training(world: Any) -> None:
    model: Any = parametrized_net(parametrizations.weight_norm)
    engine = trains(world, model, num_steps=1)
    parametrize.remove_parametrizations(model.head, "weight")
    with torch.no_grad():
        world.observe("output", model(batch(world, 1)))
    del engine


@cases
def fuse_conv_and_batch_norm_after_training(world: Any) -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Any:
            return self.norm(self.conv(x))

    model = Convolved()
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(world.randn(ROWS, 3, WIDTH, seed=step))), num_steps=2)
    engine.eval()
    fused = nn.utils.fuse_conv_bn_eval(model.conv, model.norm)
    with torch.no_grad():
        world.observe("fused", fused(world.randn(ROWS, 3, WIDTH)))


@cases
def optimizer_groups_that_leave_a_parameter_out(world: Any) -> None:
    model = Net()
    model.head.requires_grad_(False)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1 and p.requires_grad], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    trains(world, model, parameters=groups)


@cases(settings=(EACH, GROUPED, DEFAULT))
def a_parameter_in_two_optimizer_groups(world: Any) -> None:
    """torch refuses it. (In bf16 the reference steps masters, two of one parameter.)"""
    model = Net()
    trains(world, model, parameters=[{"params": list(model.parameters())}, {"params": [model.head.weight]}])


@cases.parametrized()
def test_parameters_that_change(case: Case, judged: Any) -> None:
    judged(__name__, case)
