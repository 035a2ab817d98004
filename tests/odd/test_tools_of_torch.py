"""What torch brings along: schedules, averages of weights, pruning and norms by parametrization, transforms, copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler, swa_utils

from tests.odd.nets import ROWS, WIDTH, Net, Rule, square, trains
from tests.support.cases import EACH, EACH_BF16, GROUPED, STAGE_2, STAGE_2_BF16, WHOLE, Case, Cases

cases = Cases(__name__)
SETTINGS = (EACH, STAGE_2)


def one(world: Any, engine: Any, step: int = 0) -> None:
    world.train(engine, lambda n: square(engine(world.randn(ROWS, WIDTH, seed=step + n))), num_steps=1)


# Schedules


def scheduled(name: str, make: Any, *, metric: bool = False) -> None:
    def script(world: Any) -> None:
        engine = world.initialize(Net())
        schedule = make(engine.optimizer)
        for step in range(4):
            one(world, engine, step)
            schedule.step(*([1.0] if metric else []))
            world.observe("rates", [group["lr"] for group in engine.optimizer.param_groups])

    script.__name__, script.__doc__ = name, name.replace("_", " ")
    cases(must="equal", settings=(EACH, STAGE_2_BF16))(script)


scheduled("one_cycle", lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=8))
scheduled("reduce_on_plateau", lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0), metric=True)
scheduled(
    "sequential",
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
)
scheduled("cosine_with_warm_restarts", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2))
scheduled("cyclic", lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2))
scheduled(
    "chained", lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)])
)
scheduled("swa_rates", lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=2))


# Averages


@cases(settings=SETTINGS)
def an_ema_of_torch_of_the_module(world: Any) -> None:
    torch.manual_seed(3)
    model = Net()
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    engine = world.initialize(model)
    for step in range(3):
        one(world, engine, step)
        averaged.update_parameters(model)
    with torch.no_grad():
        world.observe("averaged", averaged(torch.ones(2, WIDTH)))


@cases(settings=SETTINGS)
def update_bn_of_the_engine(world: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    engine = world.initialize(model)
    one(world, engine)
    swa_utils.update_bn([world.randn(ROWS, WIDTH, seed=s) for s in range(3)], engine)
    engine.eval()
    with torch.no_grad():
        world.observe("output", engine(world.randn(ROWS, WIDTH, seed=9)))


# Norms, pruning, parametrizations


def remade(name: str, change: Any, *, settings: Any = SETTINGS, after: bool = False, **options: Any) -> None:
    """Cases that change a linear before, or after, ``initialize``, and train on."""

    def script(world: Any) -> None:
        model = Net()
        if not after:
            torch.manual_seed(4)
            change(model)
        engine = world.initialize(model)
        one(world, engine)
        if after:
            torch.manual_seed(4)
            change(model)
        for step in range(2):
            one(world, engine, step + 1)
        engine.eval()
        with torch.no_grad():
            world.observe("output", engine(world.randn(ROWS, WIDTH, seed=9)))

    script.__name__, script.__doc__ = name, name.replace("_", " ")
    cases(settings=settings, **options)(script)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


CHANGES: dict[str, Any] = {
    "spectral_norm_old": lambda m: torch.nn.utils.spectral_norm(m.head),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m.head),
    "weight_norm_old": lambda m: torch.nn.utils.weight_norm(m.head),
    "weight_norm": lambda m: parametrizations.weight_norm(m.head),
    "orthogonal": lambda m: parametrizations.orthogonal(m.head),
    "symmetric": lambda m: parametrize.register_parametrization(m.head, "weight", Symmetric()),
    "pruned_by_size": lambda m: prune.l1_unstructured(m.head, "weight", amount=0.3),
    "pruned_by_chance": lambda m: prune.random_unstructured(m.head, "weight", amount=0.3),
    "pruned_globally": lambda m: prune.global_unstructured(
        [(m.head, "weight"), (m.blocks[0].expand, "weight")], prune.L1Unstructured, amount=0.3
    ),
    "pruned_for_good": lambda m: (prune.l1_unstructured(m.head, "weight", amount=0.3), prune.remove(m.head, "weight")),
}
for _name, _change in CHANGES.items():
    remade(_name, _change)
    remade(f"{_name}_after_initialize", _change, after=True)


class Adapted(nn.Module):
    """A frozen linear with a low-rank addition, which parametrizes it for the length of each call, as PEFT's
    ``target_parameters`` does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH) * 0.1), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        added = self.up @ self.down
        parametrize.register_parametrization(self.base, "weight", Added(added))
        try:
            with parametrize.cached():
                return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class Added(nn.Module):
    def __init__(self, what: Tensor) -> None:
        super().__init__()
        self.what = what

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.what


@cases(settings=(EACH, WHOLE, GROUPED, EACH_BF16, STAGE_2), must="equal")
def a_weight_is_parametrized_within_each_call(world: Any) -> None:
    """A frozen one, as PEFT adapts experts that are one parameter."""
    model: Any = Net()
    torch.manual_seed(4)
    model.head = Adapted(model.head)
    engine = world.initialize(model)
    for step in range(3):
        one(world, engine, step)


# Writes midway


def written(name: str, write: Any, **options: Any) -> None:
    remade(name, write, after=True, writes=True, **options)


def _no_grad(write: Any) -> Any:
    def run(model: Any) -> None:
        with torch.no_grad():
            write(model)

    return run


written("reset_parameters_midway", lambda m: m.head.reset_parameters())
written("xavier_midway", lambda m: nn.init.xavier_uniform_(m.head.weight))
written("apply_init_midway", lambda m: m.apply(lambda x: isinstance(x, nn.Linear) and nn.init.normal_(x.weight)))
written("a_copy_midway", _no_grad(lambda m: m.head.weight.copy_(m.blocks[0].contract.weight[:, :WIDTH])))
written("a_row_midway", _no_grad(lambda m: m.head.weight[0].zero_()))
written("a_bias_midway", _no_grad(lambda m: m.blocks[0].norm.bias.fill_(1.0)))
written("data_of_a_bias_midway", lambda m: m.blocks[0].norm.bias.data.fill_(1.0))
written(
    "data_is_replaced_midway",
    lambda m: setattr(m.head.weight, "data", torch.ones(WIDTH, WIDTH).to(m.head.weight.dtype)),
)
written(
    "vector_to_parameters_midway",
    lambda m: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()) * 0.5, m.parameters()),
)
written("load_state_dict_of_a_child_midway", lambda m: m.head.load_state_dict({"weight": torch.eye(WIDTH)}))


@cases(settings=SETTINGS, writes=True)
def weights_are_copied_between_two_engines(world: Any) -> None:
    """A target network."""
    first, second = Net(1), Net(1)
    learner, target = world.initialize(first), world.initialize(second)
    for step in range(2):
        one(world, learner, step)
        with torch.no_grad():
            for source, goal in zip(first.parameters(), second.parameters(), strict=True):
                goal.lerp_(source, 0.5)
        with torch.no_grad():
            world.observe("target", target(world.randn(ROWS, WIDTH)))


@cases(settings=SETTINGS, writes=True)
def weights_of_an_engine_go_into_a_plain_model(world: Any) -> None:
    first, second = Net(1), Net(1).requires_grad_(False)
    learner = world.initialize(first)
    second.to(world.dtype)
    for step in range(2):
        one(world, learner, step)
        with torch.no_grad():
            for source, goal in zip(first.parameters(), second.parameters(), strict=True):
                goal.data.mul_(0.5).add_(source.data, alpha=0.5)
        with torch.no_grad():
            world.observe("target", second(world.randn(ROWS, WIDTH)))


# Freezing each step


@cases(settings=SETTINGS)
def unfreezing_a_layer_a_step(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    model.requires_grad_(False)
    for step, layer in enumerate([model.head, *reversed(model.blocks)]):
        layer.requires_grad_(True)
        one(world, engine, step)


@cases(settings=SETTINGS)
def freezing_in_turn(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    for step in range(4):
        model.head.requires_grad_(step % 2 == 0)
        model.blocks.requires_grad_(step % 2 == 1)
        one(world, engine, step)


@cases(settings=SETTINGS)
def frozen_at_initialize_and_unfrozen_later(world: Any) -> None:
    model = Net()
    model.blocks.requires_grad_(False)
    engine = world.initialize(model)
    one(world, engine)
    model.blocks.requires_grad_(True)
    one(world, engine, 1)


@cases(settings=SETTINGS)
def a_gan_of_two_engines(world: Any) -> None:
    made, judge = Net(1), Net(1)
    generator, critic = world.initialize(made), world.initialize(judge)
    for step in range(2):
        fake = generator(world.randn(ROWS, WIDTH, seed=step))
        world.backward(critic, square(critic(fake.detach())) - square(critic(world.randn(ROWS, WIDTH, seed=step + 50))))
        critic.step()
        judge.requires_grad_(False)
        world.backward(generator, -square(critic(fake)))
        generator.step()
        judge.requires_grad_(True)


# Hooks


@cases(settings=SETTINGS)
def a_hook_clamps_gradients(world: Any) -> None:
    model = Net()
    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    engine = world.initialize(model)
    for step in range(2):
        one(world, engine, step)


@cases(settings=SETTINGS)
def a_hook_masks_the_gradient_of_rows(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)

    def mask(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:5] = 0
        return grad

    handle = model.head.weight.register_hook(mask)
    one(world, engine)
    handle.remove()
    one(world, engine, 1)


@cases(settings=SETTINGS)
def a_post_accumulate_hook_steps_an_optimizer(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    made = torch.optim.SGD([model.head.weight], lr=0.1)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: (made.step(), made.zero_grad()))
    one(world, engine)


@cases(settings=SETTINGS)
def a_forward_hook_swaps_the_output(world: Any) -> None:
    model = Net()
    model.blocks[1].register_forward_hook(lambda m, args, out: out * 0.5 + args[0])
    engine = world.initialize(model)
    model.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    for step in range(2):
        one(world, engine, step)


@cases(settings=SETTINGS)
def a_multi_grad_hook(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(model.head.parameters()), lambda grads: seen.append([None if g is None else g.norm() for g in grads])
    )
    one(world, engine)
    world.observe("seen", seen)


# Optimizers made outside


@cases(settings=SETTINGS)
def an_optimizer_of_the_users_over_the_weights(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    world.backward(engine, square(engine(world.randn(ROWS, WIDTH))))
    made.step()
    engine.step()


@cases(settings=SETTINGS)
def an_optimizer_made_before_and_forgotten(world: Any) -> None:
    model = Net()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = world.initialize(model)
    world.backward(engine, square(engine(world.randn(ROWS, WIDTH))))
    engine.step()
    made.step()
    made.zero_grad()
    world.observe("groups", len(made.param_groups[0]["params"]))
    one(world, engine, 1)


@cases(settings=SETTINGS)
def lbfgs_is_given(world: Any) -> None:
    trains(world, Net(1), optimizer=lambda params: torch.optim.LBFGS(params, lr=0.1))


def _given(name: str, make: Any) -> None:
    def script(world: Any) -> None:
        trains(world, Net(2), optimizer=make)

    script.__name__, script.__doc__ = name, name.replace("_", " ")
    cases(settings=(EACH, STAGE_2_BF16), about="optimizer")(script)


for _class in ("RAdam", "NAdam", "Adamax", "ASGD", "Rprop", "RMSprop", "Adadelta", "Adagrad", "Adafactor", "SGD"):
    _given(f"{_class.lower()}_is_given", lambda p, c=_class: getattr(torch.optim, c)(p, lr=1e-3))
_given("adamw_with_amsgrad_is_given", lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, foreach=False))
_given("adam_that_maximizes_is_given", lambda p: torch.optim.Adam(p, lr=1e-3, maximize=True, foreach=True))
_given("sgd_with_nesterov_is_given", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True))
_given("a_rate_that_is_a_tensor", lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False))


# Copies


@cases(settings=SETTINGS)
def a_model_is_pickled_before_and_trained(world: Any) -> None:
    model = torch.load(io.BytesIO(_pickled(Net())), weights_only=False)
    trains(world, model, num_steps=2)


def _pickled(model: nn.Module) -> bytes:
    stream = io.BytesIO()
    torch.save(model, stream)
    return stream.getvalue()


@cases(settings=SETTINGS)
def the_whole_state_goes_into_a_model_built_anew(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    one(world, engine)
    fresh = Net().to(world.dtype)
    fresh.load_state_dict(engine.full_state_dict())
    again = copy.deepcopy(fresh)
    world.observe("output", again(world.randn(ROWS, WIDTH)))


# Shapes of memory and kinds of layers


@cases(settings=SETTINGS)
def channels_last(world: Any) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    engine = world.initialize(model.to(memory_format=torch.channels_last))
    for step in range(3):
        x = world.randn(2, 3, 6, 6, seed=step).contiguous(memory_format=torch.channels_last)
        world.backward(engine, square(engine(x)))
        engine.step()
    engine.eval()
    with torch.no_grad():
        world.observe("output", engine(world.randn(2, 3, 6, 6, seed=9)))


@cases(settings=SETTINGS)
def channels_last_after_initialize(world: Any) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1))
    engine = world.initialize(model)
    model.to(memory_format=torch.channels_last)
    world.backward(engine, square(engine(world.randn(2, 3, 6, 6))))
    engine.step()


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    """It takes sparse gradients, in plain torch."""
    return torch.optim.SGD(params, lr=0.1)


class Sparse(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, sparse=True, **options)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.words(x))


@cases(settings=SETTINGS, must="refused")
def sparse_gradients(world: Any) -> None:
    engine = world.initialize(Sparse(), optimizer=sgd)
    for step in range(2):
        world.backward(engine, square(engine(world.tokens(2, 4, below=20, seed=step))))
        engine.step()


@cases(settings=SETTINGS, must="refused")
def sparse_gradients_with_clipping(world: Any) -> None:
    engine = world.initialize(Sparse(), optimizer=sgd, clipping=0.01)
    for step in range(4):
        world.backward(engine, square(engine(world.tokens(2, 4, below=20, seed=step))))
        engine.step()
    world.observe("norm", engine.get_global_grad_norm(), tolerance=1e-6)


@cases(settings=SETTINGS, must="refused")
def an_embedding_bag(world: Any) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, WIDTH, mode="sum", sparse=True)
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.bag(x))

    engine = world.initialize(Bag(), optimizer=sgd)
    for step in range(2):
        world.backward(engine, square(engine(world.tokens(2, 4, below=20, seed=step))))
        engine.step()


@cases(settings=SETTINGS)
def weights_as_complex_numbers(world: Any) -> None:
    """A Fourier layer: pairs of a real parameter are viewed as complex numbers."""

    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            spectrum = torch.fft.rfft(x.float()) * torch.view_as_complex(self.filter.float())
            return self.head(torch.fft.irfft(spectrum, n=WIDTH).to(x.dtype))

    trains(world, Fourier())


@cases(settings=SETTINGS)
def skip_init(world: Any) -> None:
    layer = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    nn.init.zeros_(layer.bias)
    trains(world, nn.Sequential(layer, Net(1)))


@cases(settings=SETTINGS)
def fused_convolution_and_norm(world: Any) -> None:
    torch.manual_seed(5)
    conv, norm = nn.Conv1d(WIDTH, WIDTH, 1).eval(), nn.BatchNorm1d(WIDTH).eval()
    model = nn.Sequential(torch.nn.utils.fuse_conv_bn_eval(conv, norm), nn.Conv1d(WIDTH, WIDTH, 1))
    engine = world.initialize(model.train())
    for step in range(2):
        world.backward(engine, square(engine(world.randn(2, WIDTH, 5, seed=step))))
        engine.step()


@cases(settings=SETTINGS)
def lazy_layers_after_a_dry_run(world: Any) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.LazyLinear(WIDTH))
    model(torch.randn(ROWS, WIDTH))
    trains(world, model)


@cases(settings=SETTINGS)
def recurrent_layers_of_two_directions(world: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True, batch_first=True, proj_size=8)
            self.gru = nn.GRU(16, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.gru(self.lstm(x)[0])[0]

    engine = world.initialize(Recurrent())
    for step in range(2):
        world.backward(engine, square(engine(world.randn(2, 5, WIDTH, seed=step))))
        engine.step()


@cases(settings=SETTINGS)
def packed_sequences(world: Any) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3])
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])[0]

    engine = world.initialize(Packed())
    for step in range(2):
        world.backward(engine, square(engine(world.randn(5, 2, WIDTH, seed=step))))
        engine.step()


@cases(settings=SETTINGS)
def the_loss_of_an_adaptive_softmax(world: Any) -> None:
    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, WIDTH)
            self.head = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 30, [6, 15])

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.head(self.body(x), y).loss

    engine = world.initialize(Adaptive())
    for step in range(2):
        loss = engine(world.randn(8, WIDTH, seed=step), world.tokens(8, below=30, seed=step))
        world.backward(engine, loss)
        engine.step()


# Functions of one's own


class Straight(torch.autograd.Function):
    """Rounds forward, passes gradients through: quantisation-aware training."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (weight * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0] * (weight.abs() < 1)


@cases(settings=SETTINGS)
def a_straight_through_estimator(world: Any) -> None:
    trains(world, Rule(lambda m, x: F.linear(x, Straight.apply(m.a.weight)) + F.linear(x, Straight.apply(m.b.weight))))


@cases(settings=SETTINGS)
def fake_quantised_weights(world: Any) -> None:
    def quantised(w: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(w.float(), 0.05, 0, -128, 127).to(w.dtype)

    trains(world, Rule(lambda m, x: F.linear(x, quantised(m.a.weight)) + F.linear(x, quantised(m.b.weight))))


@cases(settings=SETTINGS)
def prepared_for_quantisation(world: Any) -> None:
    from torch.ao import quantization

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    model: Any = Quantised().train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    trains(world, quantization.prepare_qat(model))


@cases(settings=SETTINGS)
def a_jvp_of_a_function_of_activations(world: Any) -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        y, tangent = torch.func.jvp(torch.sin, (m.a(x),), (torch.ones_like(x),))
        return y + tangent

    trains(world, Rule(rule))


@cases(settings=SETTINGS)
def vmap_over_activations_and_a_weight(world: Any) -> None:
    trains(world, Rule(lambda m, x: torch.vmap(lambda row: m.a.weight @ row)(x) + m.b(x)))


@cases(settings=SETTINGS)
def the_engine_in_data_parallel(world: Any) -> None:
    engine = world.initialize(Net())
    wrapped = nn.DataParallel(engine)
    world.backward(engine, square(wrapped(world.randn(ROWS, WIDTH))))
    engine.step()


@cases(settings=SETTINGS)
def a_scripted_part(world: Any) -> None:
    model = Net()
    model.blocks[1] = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    trains(world, model)


@cases(settings=SETTINGS)
def tensors_are_compared_and_counted(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    one(world, engine)
    world.observe("count", sum(p.numel() for p in model.parameters() if p.requires_grad))
    world.observe("bytes", sum(p.numel() * p.element_size() for p in model.parameters()))
    world.observe("finite", all(bool(torch.isfinite(p).all()) for p in model.parameters()))
    world.observe("norm", torch.nn.utils.get_total_norm(list(model.parameters())))
    world.observe("largest", max(float(p.abs().max()) for p in model.parameters()))


@cases.parametrized()
def test_tools_of_torch(case: Case, judged: Any) -> None:
    judged(__name__, case)
