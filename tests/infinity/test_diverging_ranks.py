"""Ranks that do not do the same: all of them end, in time, with every rank's module by name. Leaves, which may differ
inside, train as DDP does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.plan.grouping import group_params
from tests.support.ranks import run_ranks

PRELUDE = """
import contextlib, copy, itertools, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
import infinity
from infinity.errors import WorldError

rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 10,
        "stage3_prefetch_bucket_size": 4096,
        "stage3_max_live_parameters": 0,
    },
}

class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(24, 48)
        self.down = nn.Linear(48, 24)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(24, 4)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])

    def forward(self, x, chosen):
        weights = self.router(x).softmax(-1)
        y = x
        for number in chosen:
            y = y + self.experts[number](x) * weights[:, number : number + 1]
        return y

class Model(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Linear(24, 24)
        self.layers = nn.ModuleList([Choosing() for _ in range(2)])
        self.head = nn.Linear(24, 1)

    def forward(self, x, chosen):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, chosen, use_reentrant=False) if self.checkpointed else layer(x, chosen)
        return self.head(x).square().mean()

def build(**options):
    torch.manual_seed(0)
    return Model(**options)

def start(model, **changes):
    return infinity.initialize(model=model, config={**CONFIG, **changes})[0]

def batch(seed=0):
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(seed * 10 + rank))
"""

DIVERGING = """
def train(engine, chosen, backwards=1, steps=1):
    for _ in range(steps):
        loss = engine(batch(), chosen)
        for more in reversed(range(backwards)):
            engine.backward(loss)
        engine.step()

def drops(engine):
    engine.backward(engine(batch(), [0]))
    if rank:
        engine.zero_grad()
    train(engine, [0])

def goes_wrong(engine):
    # without gathers nothing stops the other rank's reductions
    engine = start(build(), zero_optimization={"stage": 2})
    everything = [0, 1, 2, 3]
    loss = engine(batch(), everything)
    if rank:
        loss.register_hook(lambda _: 1 / 0)
    with contextlib.suppress(WorldError):
        with contextlib.suppress(ZeroDivisionError):
            engine.backward(loss)
        engine(batch(), everything)
    engine.zero_grad()
    try:
        train(engine, everything)
    finally:
        engine.destroy()

MINE = {
    "different experts": lambda engine: train(engine, [rank]),
    "an expert on one rank only": lambda engine: train(engine, [0] if rank == 0 else []),
    "more experts on one rank": lambda engine: train(engine, [0, 1] if rank == 0 else [0]),
    "a step on one rank only": lambda engine: train(engine, [0], steps=2 - rank),
    "an evaluation on one rank only": lambda engine: (
        train(engine, [0]), engine.eval()(batch(), [0]) if rank else engine.train(), train(engine, [0])),
    "an export on one rank only": lambda engine: (
        train(engine, [0]), engine.full_state_dict() if rank else None, train(engine, [0])),
    "another learning rate on one rank": lambda engine: (
        train(engine, [0]), engine.optimizer.param_groups[0].update(lr=1e-2 + rank), train(engine, [0])),
    "another clipping on one rank": lambda engine: (
        engine.backward(engine(batch(), [0])), engine.clip_grad_norm_(1.0 + rank * 1e-9), engine.step()),
    "gradients dropped on one rank": lambda engine: drops(engine),
    "a smaller sum on one rank": lambda engine: (
        engine.set_gradient_accumulation_boundary(bool(rank)), engine.backward(engine(batch(), [0]))),
    "an error in one rank's backward": lambda engine: goes_wrong(engine),
    "no backward on one rank": lambda engine: (
        train(engine, [0]) if rank == 0 else engine(batch(), [0]), engine(batch(), [0])),
}
found = {}
for name, run in MINE.items():
    engine = start(build())
    try:
        run(engine)
        found[name] = "nothing was raised"
    except WorldError as error:
        found[name] = str(error)
    engine.destroy()

engine = start(build())
if rank == 0:
    engine.get_global_grad_norm()
train(engine, [0])
found["norm"] = engine.get_global_grad_norm()
engine.offload_states(["hp_params"])
try:
    infinity.utils.safe_get_full_fp32_param(engine.module.head.bias)
except infinity.errors.EngineStateError as error:
    found["away"] = str(error)
engine.reload_states()
directory = sys.argv[1]
engine.save_checkpoint(directory, "late", asynchronous=True)
try:
    engine(batch(), [0]) if rank == 0 else engine.step()
    found["within a save"] = "nothing was raised"
except WorldError as error:
    found["within a save"] = str(error)
engine.zero_grad()
engine.wait_for_checkpoint()
found["saved"] = engine.load_checkpoint(directory, "late")[0]
apart = bool(rank)
own = os.path.join(directory, str(rank)) if rank else directory
for name, call in {
    "states loaded on one rank": lambda: engine.load_checkpoint(directory, "late", load_optimizer_states=apart),
    "weights alone on one rank": lambda: engine.load_checkpoint(directory, "late", load_module_only=apart),
    "schedule on one rank": lambda: engine.load_checkpoint(directory, "late", load_lr_scheduler_states=apart),
    "no latest on one rank": lambda: engine.load_checkpoint(own),
    "strict on one rank": lambda: engine.load_checkpoint(directory, "late", load_module_strict=apart),
    "frozen weights on one rank": lambda: engine.save_checkpoint(directory, "no", exclude_frozen_parameters=apart),
    "latest on one rank": lambda: engine.save_checkpoint(directory, "no", save_latest=apart),
}.items():
    try:
        call()
        found[name] = "nothing was raised"
    except WorldError as error:
        found[name] = str(error)
engine.destroy()

# where every rank has everything, rank 0 alone writes it
engine = start(build(), zero_optimization={"stage": 0})
engine.offload_states()
try:
    engine.save_checkpoint(directory, "away")
except Exception as error:
    found["save"] = f"{type(error).__name__}: {error}"
engine.destroy()

# of one more evaluation, ranks take turns otherwise in sending buffers
engine = start(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)))
engine.eval()
with torch.set_grad_enabled(rank == 0):
    loss = engine(batch()).square().mean()
with contextlib.suppress(WorldError):
    engine.backward(loss) if rank == 0 else engine(batch())
engine.zero_grad()
engine.train()
for step in range(2):
    engine.backward(engine(batch(step)).square().mean())
    engine.step()
engine.eval()(batch())
found["buffers"] = engine.module[1].running_mean.tolist()
engine.destroy()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    directory = tmp_path_factory.mktemp("diverging")
    ranks = run_ranks(
        PRELUDE + DIVERGING, directory, num_ranks=2, words=[str(directory)], variables={"INFINITY_TIMEOUT_S": "60"}
    )
    return [rank.answer for rank in ranks]


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("different experts", "gather the weight of layers.0.experts.0", "gather the weight of layers.0.experts.1"),
        (
            "an expert on one rank only",
            "gather the weight of layers.0.experts.0",
            "gather the weight of layers.1.router",
        ),
        ("more experts on one rank", "gather the weight of layers.0.experts.1", "gather the weight of layers.1.router"),
        ("a step on one rank only", "begin a training forward", "the end: destroy()"),
        ("an evaluation on one rank only", "begin a training forward", "begin an evaluating forward"),
        ("an export on one rank only", "begin a training forward", "gather the weight of"),
        ("no backward on one rank", "begin a backward", "begin a training forward"),
        ("another learning rate on one rank", "update 16 parameters in step 2, with lr 0.01 ", "update 16"),
        ("another clipping on one rank", "update 16 parameters clipped to 1.0 in step 1", "update 16"),
        ("gradients dropped on one rank", "begin a backward (micro-batch 1, the last of step 1, after", "begin"),
        (
            "a smaller sum on one rank",
            "begin a backward (micro-batch 1 of step 1",
            "begin a backward (micro-batch 1, the",
        ),
        ("an error in one rank's backward", "begin a backward (micro-batch 1, the last of step 1, after", "begin"),
        ("states loaded on one rank", "load the checkpoint", "load the checkpoint"),
        ("weights alone on one rank", "load the checkpoint", "load the checkpoint"),
        ("schedule on one rank", "load the checkpoint", "load the checkpoint"),
        ("strict on one rank", "load the checkpoint", "load the checkpoint"),
        ("frozen weights on one rank", "save the checkpoint no", "save the checkpoint no"),
        ("latest on one rank", "save the checkpoint no", "save the checkpoint no"),
    ],
)
def test_every_rank_names_what_each_was_about_to_do(
    case: str, first: str, second: str, diverged: list[dict[str, str]]
) -> None:
    for rank, found in enumerate(diverged):
        if case == "a step on one rank only" and rank == 1:
            assert found[case] == "nothing was raised", "it had left already"
            continue
        assert found[case].startswith("the ranks diverge"), found[case]
        assert f"rank 0: {first}" in found[case]
        assert f"rank 1: {second}" in found[case]
        assert ("by engine.module(...)" in found[case]) == (case == "an evaluation on one rank only")
        if "expert" in case:
            assert "called by Choosing" in found[case]
            assert "infinity.zero.set_leaf_modules(model, [" in found[case]


def test_a_rank_whose_directory_has_no_checkpoint_is_named(diverged: list[dict[str, str]]) -> None:
    for found in diverged:
        assert "has late as its latest on rank 0, and no checkpoint on rank 1" in found["no latest on one rank"]


def test_a_norm_that_one_rank_wants_is_everybodys(diverged: list[dict[str, Any]]) -> None:
    first, second = diverged
    assert first["norm"] == second["norm"] > 0


def test_what_one_rank_has_no_part_of_is_refused_by_all(diverged: list[dict[str, str]]) -> None:
    assert [found["away"] for found in diverged] == [diverged[0]["away"]] * 2
    assert "engine.reload_states()" in diverged[0]["away"]


def test_a_save_of_what_is_away_is_refused_alike_by_all(diverged: list[dict[str, str]]) -> None:
    assert diverged[0]["save"] == diverged[1]["save"]
    assert diverged[0]["save"].startswith("EngineStateError: ")
    assert "engine.reload_states()" in diverged[0]["save"]


def test_ranks_that_have_diverged_send_buffers_together_again(diverged: list[dict[str, Any]]) -> None:
    assert diverged[0]["buffers"] == diverged[1]["buffers"]
    assert any(diverged[0]["buffers"])


def test_a_save_outlives_ranks_that_diverge(diverged: list[dict[str, str]]) -> None:
    for found in diverged:
        assert "rank 0: begin a training forward; rank 1: see how far a save is" in found["within a save"]
        assert found["saved"].endswith("late")


ALONE = """
def trained(evaluates):
    engine = start(build(), zero_optimization={"stage": STAGE})
    for step in range(3):
        engine.backward(engine(batch(step), [0]))
        engine.step()
        if evaluates and rank == 0:
            with torch.no_grad():
                engine.eval().module(batch(step), [0])
            engine.train()
    return engine.full_state_dict()

mine, others = trained(True), trained(False)
print(json.dumps([torch.equal(mine[name], others[name]) for name in mine]))
"""


@pytest.mark.parametrize("stage", [0, 2])
def test_below_stage_3_one_rank_alone_evaluates_by_the_module(stage: int, tmp_path: Path) -> None:
    code = PRELUDE + ALONE.replace("STAGE", str(stage))
    for rank in run_ranks(code, tmp_path, num_ranks=2, variables={"INFINITY_TIMEOUT_S": "60"}):
        assert all(rank.answer)


SAVED_BY_ONE = """
save = {"checkpoint": engine.save_checkpoint, "files": engine.save_16bit_model}[sys.argv[1]]
told = ""
try:
    if rank == 0:
        save(sys.argv[2])
    engine(torch.ones(4, 24), [0])
except WorldError as error:
    told = str(error)
print(json.dumps(told))
"""


@pytest.mark.parametrize("what", ["checkpoint", "files"])
def test_a_save_by_one_rank_alone_is_told_to_be_all_ranks(what: str, tmp_path: Path) -> None:
    """``if rank == 0: engine.save_checkpoint(...)``: DeepSpeed would wait for the others for ever."""
    started = f"{PRELUDE}\nengine = start(build())\n"
    for rank in run_ranks(started + SAVED_BY_ONE, tmp_path, num_ranks=2, words=[what, str(tmp_path / "saved")]):
        assert "saved by all ranks together: call it on every rank" in rank.answer


TWO_IN_ANOTHER_ORDER = """
def said_by(call):
    try:
        call()
        return "nothing"
    except WorldError as error:
        return str(error)

twins = [start(build()) for _ in range(2)]
mine, other = twins if rank == 0 else reversed(twins)
heard = [said_by(lambda: mine(batch(), [0])), said_by(lambda: mine.full_state_dict())]
heard.append(said_by(lambda: mine.save_checkpoint(sys.argv[1], "here")))
for engine in twins:
    engine.backward(engine(batch(), [0]))
    engine.step()
heard.append(said_by(lambda: infinity.utils.safe_get_full_fp32_param(mine.module.head.bias)))
print(json.dumps(heard))
"""


def test_engines_that_take_turns_otherwise_on_another_rank_are_told_apart(tmp_path: Path) -> None:
    """All of two engines of one model, of a teacher and its student say, have the same names."""
    ranks = run_ranks(
        PRELUDE + TWO_IN_ANOTHER_ORDER,
        tmp_path,
        num_ranks=2,
        words=[str(tmp_path / "saved")],
        variables={"INFINITY_TIMEOUT_S": "60"},
    )
    for forward, export, save, read in (rank.answer for rank in ranks):
        assert "rank 0: begin a training forward of engine 1; rank 1: begin a training forward of engine 2" in forward
        for heard in (export, save, read):
            assert heard.startswith("the ranks diverge")
            assert "of engine 1; rank 1: " in heard


TWO_ENGINES = """
import json, os
import torch
from torch import nn
import infinity
from infinity.errors import WorldError

rank = int(os.environ["RANK"])

def start(seed):
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0},
    }
    return infinity.initialize(model=nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), config=config)[0]

def step(engine):
    engine.backward(engine(torch.randn(2, 6)).square().mean())
    engine.step()

first, second = start(1), start(2)
for engine in (first, second):
    step(engine)  # from here on reductions are issued while backward goes on

def go_wrong(_grad):
    raise ValueError("in backward")

heard = []
x = torch.randn(2, 6)
y = first(x)
if rank == 1:
    y.register_hook(go_wrong)
calls = [lambda: first.backward(y.square().mean()), lambda: step(second)]
if rank == 1:
    calls.insert(1, first.step)  # while the other is still in backward
for do in calls:
    try:
        do()
        heard.append("nothing")
    except (ValueError, WorldError) as error:
        heard.append(str(error))
print(json.dumps(heard), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_one_engine_left_half_reduced_meets_no_other_engines_gradients(stage: int, tmp_path: Path) -> None:
    """Both reduce in one process group, where what a rank began first meets what the others began first."""
    ranks = run_ranks(
        TWO_ENGINES.replace("STAGE", str(stage)), tmp_path, num_ranks=2, variables={"INFINITY_TIMEOUT_S": "60"}
    )
    for answer in (rank.answer for rank in ranks):
        assert "the ranks diverge" in answer[-1], answer
        assert "reductions" in answer[-1]


def test_a_rank_that_ends_is_said_to_have_ended(tmp_path: Path) -> None:
    code = """
engine = start(build())
if rank == 1:
    os._exit(3)
engine(batch(), [0])
"""
    first, second = run_ranks(PRELUDE + code, tmp_path, num_ranks=2, variables={"INFINITY_TIMEOUT_S": "60"})
    assert (first.code, second.code) == (1, 3)
    assert "rank 0 of 2 was about to begin a training forward; another rank has ended" in first.errors


FAILING = """
from infinity.errors import DeviceIOError
from infinity.update.gradients import GradientChunks
from infinity.weights.param_group import ParamGroup
from infinity.weights.staging import StagedParam
from infinity.weights.state_io import StateIO

def fails(*_arguments, **_options):
    raise DeviceIOError(errno=5, path="swap", offset=0, expected_bytes=1, actual_bytes=0, operation="read")

def said_by(call, kind, name, failing):
    # the first reads of one rank fail
    kept = getattr(kind, name)
    if rank == failing:
        setattr(kind, name, fails)
    try:
        call()
        return "nothing"
    except (DeviceIOError, WorldError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(kind, name, kept)

def train(engine):
    engine.backward(engine(batch(), [0]))
    engine.step()

settings = {"gradient_clipping": 0.01}
engine, other = start(build(), **settings), start(build(), **settings)
other.backward(other(batch(), [0]))
heard = [said_by(lambda: engine(batch(), [0]), ParamGroup, "_read_chunks", 1)]
engine.backward(engine(batch(), [0]))
for failing in (0, 1):
    heard.append(said_by(engine.step, GradientChunks, "_take_lacking", failing))
    other.step() if failing else None
engine.step()
heard.append(said_by(lambda: engine.save_16bit_model(sys.argv[1]), StateIO, "_read_range", 1))
bias = engine.module.head.bias
heard.append(said_by(lambda: infinity.utils.safe_get_full_fp32_param(bias), StateIO, "_read_range", 0))
for each in (engine, other):
    train(each)
mine, others = engine.full_state_dict(), other.full_state_dict()
same = all(torch.equal(mine[name], others[name]) for name in mine)
with infinity.Init(config_dict_or_path=CONFIG):
    model = build()
heard.append(said_by(lambda: model.head.bias.sum(), StagedParam, "_read_into", 1))
print(json.dumps([same, *heard]))
"""


def test_a_rank_that_cannot_do_its_part_is_told_to_those_who_would_wait_for_it(tmp_path: Path) -> None:
    """What failed may be repeated, with the bits that there would have been."""
    first, second = (
        rank.answer
        for rank in run_ranks(
            PRELUDE + FAILING, tmp_path, num_ranks=2, words=[str(tmp_path)], variables={"INFINITY_TIMEOUT_S": "60"}
        )
    )
    assert first[0] is second[0] is True
    for number, (failing, what) in enumerate(
        [
            (1, "all ranks were about to gather the weight of embed, and rank 1 failed: "),
            (0, "rank 0 failed: "),
            (1, "rank 1 failed: "),
            (1, "all ranks were about to stream the weight of embed.weight from 0 on, and rank 1 failed: "),
            (0, "all ranks were about to read the weight of head.bias, and rank 0 failed: "),
            (1, "all ranks were about to bring back parameter "),
        ],
        start=1,
    ):
        own, told = (first, second) if failing == 0 else (second, first)
        assert own[number].startswith("DeviceIOError: "), own[number]
        assert told[number].startswith(f"WorldError: {what}"), told[number]
        assert own[number] in told[number]


LEAVES = """
def chosen_at(step):
    # every rank its own, sometimes none, sometimes all; at step 3 expert 2 is used by nobody
    return [[rank], [], [0, 1, 2, 3], [1, 3], [(rank + 1) % 4, 3]][(step + (rank if step != 3 else 0)) % 5]

def flat(values):
    return [value.detach().float().flatten().tolist() for value in values]

def in_order(state, bucket):
    # the mean over ranks, added up in their order, as ours
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer() / len(parts))
    future = torch.futures.Future()
    future.set_result(sum(parts[1:], parts[0]))
    return future

found = []
for checkpointed, accumulation in ((False, 1), (True, 1), (False, 2)):
    model = build(checkpointed=checkpointed)
    infinity.zero.set_leaf_modules(model, [Choosing])
    engine = start(model, gradient_accumulation_steps=accumulation)
    own = nn.parallel.DistributedDataParallel(build(checkpointed=checkpointed), find_unused_parameters=True)
    own.register_comm_hook(None, in_order)
    masters = dict(own.module.named_parameters())
    adam = torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.0, fused=True)
    losses = [[], []]
    for step in range(10 if checkpointed or accumulation > 1 else 50):
        x, chosen = batch(step), chosen_at(step)
        loss = engine(x, chosen)
        engine.backward(loss)
        engine.step()
        losses[0].append(loss)
        loss = own(x, chosen)
        kept = {name: p.grad for name, p in masters.items()}
        adam.zero_grad()
        (loss / accumulation).backward()
        for name, p in masters.items():  # averaged a micro-batch at a time, then added
            if kept[name] is not None:
                p.grad = kept[name] if p.grad is None else kept[name].add_(p.grad)
        if (step + 1) % accumulation == 0:
            adam.step()
            adam.zero_grad()
        losses[1].append(loss)
    full = engine.full_state_dict()
    found.append([flat(losses[0]), flat(losses[1]), flat(full.values()), flat(own.module.state_dict().values())])
    engine.destroy()
print(json.dumps(found))
"""


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_leaves_train_as_under_ddp(num_ranks: int, tmp_path: Path) -> None:
    """Fifty steps, bit for bit; each rank calls experts of its own, and some nobody calls."""
    for rank in run_ranks(PRELUDE + LEAVES, tmp_path, num_ranks=num_ranks, variables={"INFINITY_TIMEOUT_S": "60"}):
        for losses, ddp_losses, weights, ddp_weights in rank.answer:
            assert losses == ddp_losses
            assert weights == ddp_weights


# --- marks


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def layered() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Mixture(), Mixture())


@pytest.mark.parametrize("kind", [Mixture, "Mixture", f"{__name__}.Mixture"])
def test_modules_are_marked_by_class_or_name(kind: Any) -> None:
    model = layered()
    assert infinity.zero.get_leaf_modules(model) == []
    assert infinity.zero.set_leaf_modules(model, [kind]) == [model[1], model[2]]
    assert infinity.zero.get_leaf_modules(model) == [model[1], model[2]]
    assert infinity.zero.unset_leaf_modules(model, [model[1]]) == [model[1]]
    assert infinity.zero.get_leaf_modules(model) == [model[2]]


def test_a_leaf_is_one_group() -> None:
    model = layered()
    infinity.zero.set_leaf_modules(model, [model[1]])
    groups = group_params(model, numel_max=10, persistent_numel_max=0)
    assert [len(group.params) for group in groups if group.anchor is model[1]] == [6]
    assert "2.experts.0, called by Mixture" in [group.name for group in groups]


def test_what_is_nowhere_in_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LSTM.*which has Linear, Mixture, ModuleList, Sequential"):
        infinity.zero.set_leaf_modules(layered(), [nn.LSTM])


def test_marks_that_come_too_late_are_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    model = layered()
    with infinity.initialize(model=model, config=config)[0], pytest.raises(ConfigError, match="comes too late"):
        infinity.zero.set_leaf_modules(model, [Mixture])
