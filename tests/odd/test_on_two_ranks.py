"""Scripts whose ranks differ: in data, in what they use, in what they write. Plain torch averages as DDP does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from tests.odd.nets import ROWS, WIDTH, Block, Net, Rule, square, trains
from tests.support.cases import EACH, EACH_BF16, NVME, STAGE_2, STAGE_2_BF16, WHOLE, Case, Cases
from tests.support.forkserver import Judges
from tests.support.world import Setting

cases = Cases(__name__)
STAGE_1 = Setting(stage=1)
STAGE_1_BF16 = Setting(stage=1, bf16=True)
EVERY = (EACH, STAGE_1_BF16, STAGE_2, NVME, EACH_BF16, STAGE_2_BF16, STAGE_1, WHOLE)
WHOLE_WEIGHTS = (STAGE_1_BF16, STAGE_2, STAGE_2_BF16, STAGE_1, WHOLE)


def loop(world: Any, engine: Any, num_steps: int = 3, first: int = 0) -> None:
    world.train(engine, lambda s: square(engine(world.randn(ROWS, WIDTH, seed=first + s))), num_steps=num_steps)


class Routed(nn.Module):
    """A mixture of experts, each row to one of them: which are called depends on the data."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(Block() for _ in range(num_experts))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        scores = self.router(x).float().softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = best == number
            if mine.any():
                out[mine] = expert(x[mine]) * scores[mine, number, None].to(x.dtype)
        return out


def routes(world: Any) -> Any:
    model = Routed()
    infinity.zero.set_leaf_modules(model, [Routed])
    return world.initialize(model)


@cases(slow=True, settings=EVERY, must="equal")
def experts_that_the_data_choose_fifty_times(world: Any) -> None:
    engine = routes(world)
    for step in range(50):
        world.backward(engine, square(engine(world.randn(2, WIDTH, seed=step))))
        engine.step()


@cases(settings=EVERY, must="equal")
def experts_that_the_data_choose(world: Any) -> None:
    engine = routes(world)
    for step in range(4):
        world.backward(engine, square(engine(world.randn(2, WIDTH, seed=step))))
        engine.step()
        engine.eval()
        with torch.no_grad():
            world.observe("evaluation", engine(world.randn(2, WIDTH, seed=90 + step)))
        engine.train()


@cases(slow=True, settings=EVERY, must="equal")
def experts_under_a_checkpoint(world: Any) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Routed(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return self.last(checkpoint(self.inner, x, use_reentrant=False))

    model = Checkpointed()
    infinity.zero.set_leaf_modules(model, [Routed])
    engine = world.initialize(model, accumulation=2)
    for step in range(4):
        world.backward(engine, square(engine(world.randn(2, WIDTH, seed=step))))
        engine.step()


@cases(slow=True, settings=WHOLE_WEIGHTS, must="equal")
def a_layer_that_one_rank_uses(world: Any) -> None:
    """Below stage 3 nothing is gathered."""
    model = Rule(lambda m, x: m.a(x) if world.rank else m.b(x))
    trains(world, model, accumulation=2)


def in_turn(world: Any) -> nn.Module:
    steps = iter(range(100))
    return Rule(lambda m, x: m.a(x) if (next(steps) + world.rank) % 3 == 0 else x)


@cases(settings=WHOLE_WEIGHTS, must="equal")
def a_layer_that_ranks_use_in_turn(world: Any) -> None:
    trains(world, in_turn(world), accumulation=2, num_steps=3)


@cases(slow=True, settings=WHOLE_WEIGHTS, must="equal")
def a_layer_that_ranks_use_in_turn_and_a_norm(world: Any) -> None:
    trains(world, in_turn(world), accumulation=2, num_steps=3, clipping=0.1)


def loop_that_drops(world: Any, engine: Any, part: nn.Module) -> None:
    for step in range(6):
        world.backward(engine, square(engine(world.randn(ROWS, WIDTH, seed=step))))
        if step % 3 == 1:
            world.zero_grad(part)
        engine.step()


@cases(settings=EVERY, must="equal")
def gradients_of_a_part_are_dropped_between_micro_batches(world: Any) -> None:
    model = Net()
    loop_that_drops(world, world.initialize(model, accumulation=3, clipping=0.05), model.blocks[0])


@cases(slow=True, settings=WHOLE_WEIGHTS, must="equal")
def gradients_of_a_layer_that_ranks_use_in_turn_are_dropped(world: Any) -> None:
    model: Any = in_turn(world)
    loop_that_drops(world, world.initialize(model, accumulation=3), model.a)


def scribble_at_the_end(weight: Any) -> None:
    """What the last rank has a shard of, written through memory where torch counts no writes."""
    weight.data.view(torch.int16).numpy().reshape(-1)[-5:] = 3


@cases(settings=(EACH, NVME, EACH_BF16), must="equal")
def memory_is_written_at_its_end_while_gathered(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    loop(world, engine, 1)
    with infinity.zero.GatheredParameters([model.head.weight], modifier_rank=0):
        if world.rank == 0 or world.name != "infinity":
            scribble_at_the_end(model.head.weight)
    loop(world, engine, 2, first=1)


@cases(settings=WHOLE_WEIGHTS, must="equal")
def memory_is_written_at_its_end_between_steps(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    loop(world, engine, 1)
    scribble_at_the_end(model.head.weight)
    loop(world, engine, 2, first=1)


@cases(settings=EVERY, must="equal")
def running_statistics_and_evaluations(world: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    engine = world.initialize(model, accumulation=2)
    for step in range(4):
        loop(world, engine, 1, step)
        engine.eval()
        with torch.no_grad():
            world.observe("evaluation", engine(world.randn(ROWS, WIDTH, seed=50 + step)))
        engine.train()


@cases(slow=True, settings=EVERY, must="equal")
def clipping_and_norms(world: Any) -> None:
    engine = world.initialize(Net(), accumulation=2, clipping=0.05)
    for step in range(4):
        world.backward(engine, square(engine(world.randn(ROWS, WIDTH, seed=step))))
        engine.step()
    world.observe("norm", engine.get_global_grad_norm(), tolerance=1e-6)


@cases(slow=True, settings=EVERY, must="equal")
def numbers_drawn_by_each_rank(world: Any) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(1)

        def forward(self, x: Tensor) -> Any:
            return F.dropout(self.net(F.dropout(x, 0.3)), 0.3)

    engine = world.initialize(Dropping())
    torch.manual_seed(100 + world.rank)
    loop(world, engine)


@cases(slow=True, settings=EVERY, must="equal")
def several_backwards_a_step(world: Any) -> None:
    engine = world.initialize(Net())
    for step in range(2):
        for part in range(2):
            world.backward(engine, square(engine(world.randn(ROWS, WIDTH, seed=2 * step + part))))
        engine.step()


@cases(slow=True, settings=EVERY, must="equal")
def frozen_layers_and_a_graph_kept_for_a_second_loss(world: Any) -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    engine = world.initialize(model)
    for step in range(2):
        out = engine(world.randn(ROWS, WIDTH, seed=step))
        world.backward(engine, square(out), retain_graph=True)
        world.backward(engine, out.float().abs().mean())
        engine.step()


def _from_rank(source: int, model: nn.Module) -> None:
    if not isinstance(next(model.parameters()), infinity.weights.access.OwnedParameter):
        for param in model.parameters():
            dist.broadcast(param.data, source)


@cases(settings=EVERY, must="equal")
def one_rank_writes_what_is_gathered(world: Any) -> None:
    model = Net()
    engine = world.initialize(model)
    loop(world, engine, 1)
    params = list(model.parameters())
    with infinity.zero.GatheredParameters(params, modifier_rank=1):
        if world.rank == 1:
            with torch.no_grad():
                for param in params:
                    param.mul_(0.5)
    _from_rank(1, model)
    loop(world, engine, 2, 1)


@cases(settings=WHOLE_WEIGHTS, must="equal", writes=True)
def every_rank_writes_between_steps(world: Any) -> None:
    """Clipping of weights, and a layer made anew."""
    model = Net()
    engine = world.initialize(model)
    for step in range(3):
        loop(world, engine, 1, step)
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.1, 0.1)
        world.observe("clamped", engine.full_state_dict())
    torch.manual_seed(7)
    model.head.reset_parameters()
    loop(world, engine, 2, 3)


def talked(name: str, write: Any) -> None:
    """A collective writes to weights: torch counts no write."""

    def between_steps(world: Any) -> None:
        model = Net(1)
        engine = world.initialize(model)
        loop(world, engine, 1)
        for param in (model.head.weight, model.blocks[0].norm.bias):
            write(param.data)
        loop(world, engine, 2, first=1)

    def while_gathered(world: Any) -> None:
        model = Net(1)
        engine = world.initialize(model)
        loop(world, engine, 1)
        written = (model.head.weight, model.blocks[0].norm.bias)
        with infinity.zero.GatheredParameters(written, modifier_rank=0):
            for param in written:
                write(param.data)
        loop(world, engine, 2, first=1)

    for script in (between_steps, while_gathered):
        script.__name__ = f"{name}_{script.__name__}"
        is_kept = script is while_gathered
        cases(settings=EVERY, must="equal" if is_kept else "either", writes=True)(script)


talked("weights_are_summed_over_ranks", dist.all_reduce)
talked("weights_are_the_larger_ones", lambda data: dist.all_reduce(data, op=dist.ReduceOp.MAX))
talked("weights_are_gathered_into", lambda data: dist.all_gather(list(data.view(-1)[:4].split(2)), data.view(-1)[4:6]))


@cases(slow=True, settings=EVERY, must="equal")
def tied_weights_and_a_penalty(world: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, WIDTH)
            self.body = Net(1)
            self.head = nn.Linear(WIDTH, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Any:
            return self.head(self.body(self.words(x)))

    model = Tied()
    engine = world.initialize(model)
    for step in range(3):
        x = world.tokens(2, 5, below=20, seed=step)
        loss = F.cross_entropy(engine(x).float().flatten(0, 1), x.flatten())
        world.backward(engine, loss + 1e-2 * model.head.weight.float().square().sum())
        engine.step()


@cases(settings=EVERY, must="equal")
def re_entrant_checkpoints(world: Any) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(2)

        def forward(self, x: Tensor) -> Any:
            for block in self.net.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.net.head(x)

    engine = world.initialize(Checkpointed(), accumulation=2)
    for step in range(4):
        world.backward(engine, square(engine(world.randn(ROWS, WIDTH, seed=step, requires_grad=True))))
        engine.step()


class Looped(nn.Module):
    """Its one block, in a re-entrant checkpoint each time, gets three gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(1)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = torch.tanh(checkpoint(self.net.blocks[0], x, use_reentrant=True))
        return self.net.head(x)


def loops(world: Any) -> None:
    engine = world.initialize(Looped(), optimizer=lambda params: torch.optim.SGD(params, lr=1.0), accumulation=2)
    for step in range(4):
        world.backward(engine, square(engine(world.randn(ROWS, WIDTH, seed=step, requires_grad=True))))
        engine.step()


@cases(settings=(STAGE_1, STAGE_1_BF16, WHOLE), must="equal")
def a_block_in_several_re_entrant_checkpoints_whose_sum_is_averaged(world: Any) -> None:
    loops(world)


@cases(settings=(EACH, NVME, STAGE_2), must="refused")
def a_block_in_several_re_entrant_checkpoints_averaged_one_by_one(world: Any) -> None:
    loops(world)


@cases(slow=True, settings=EVERY, must="refused")
def sparse_gradients_on_ranks(world: Any) -> None:
    model = nn.Sequential(nn.Embedding(20, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    engine = world.initialize(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), accumulation=2)
    for step in range(4):
        world.backward(engine, square(engine(world.tokens(2, 4, below=20, seed=step))))
        engine.step()


@cases(settings=WHOLE_WEIGHTS, must="equal")
def func_grad_through_the_engine(world: Any) -> None:
    """Ranks agree, and send buffers, within the transform; each has an update behind it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    engine = world.initialize(model)
    for step in range(2):
        loop(world, engine, num_steps=1, first=step)
        engine.eval()
        x = world.randn(ROWS, WIDTH, seed=step + 7)
        world.observe(f"gradient {step}", torch.func.grad(lambda each: square(engine(each)))(x))
        world.observe(f"mapped {step}", torch.func.vmap(lambda each: engine(each[None]))(x).detach())
        engine.train()


@cases(settings=[Setting(thresholds="each", update="in_backward")], must="equal")
def experts_that_are_updated_inside_backward(world: Any) -> None:
    """Of whose parameters some have no gradient on a rank."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed(8))
    infinity.zero.set_leaf_modules(model, [Routed])
    loop(world, world.initialize(model), num_steps=6)


class Behind(nn.Module):
    """The gradient of its input takes the weight once more, when that has all of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(F.linear(x, self.weight.detach()))
        (slope,) = torch.autograd.grad(F.linear(hidden, self.weight).float().square().sum(), x, create_graph=True)
        return F.linear(hidden, self.weight) + slope


@cases(settings=[Setting(thresholds="1000000,6000,0,1000000", update="in_backward")], must="refused")
def weights_that_backward_needs_behind_their_last_gradient(world: Any) -> None:
    """Whether that gradient is reduced by then or not."""
    engine = world.initialize(Behind())
    for step in range(4):
        world.backward(engine, square(engine(world.randn(ROWS, WIDTH, seed=step, requires_grad=True))))
        engine.step()


@cases.parametrized()
def test_on_two_ranks(case: Case, judges: Judges) -> None:
    verdicts = [judges.verdict(__name__, case, setting, num_ranks=2) for setting in case.settings]
    assert [verdict for verdict in verdicts if verdict.outcome == "failed"] == []
