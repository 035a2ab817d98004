"""Stages on several ranks: what travels when, the bits of DDP, and between stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks

PRELUDE = """
import contextlib, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
import infinity

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADAM = {"lr": 1e-2, "weight_decay": 0.0}

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))

def batch(step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))

def weights_of(tensors):
    return [value.flatten().tolist() for value in tensors.values()]

def engine_of(stage, accumulation=1, dtype="fp32", zero=(), **config):
    return infinity.initialize(model=build(), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation, "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": ADAM}, "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **dict(zero)}, **config,
    })[0]

def train(stage, accumulation=1, dtype="fp32", num_steps=3, **config):
    engine = engine_of(stage, accumulation, dtype, **config)
    for step in range(num_steps * accumulation):
        engine.backward(engine(batch(step).to(engine.module[0].weight.dtype)).square().mean())
        engine.step()
    weights = weights_of(engine.full_master_state_dict())
    engine.destroy()
    return weights

def in_order(state, bucket):
    # the mean over ranks, added up in their order: what gloo adds first depends on where an element lies
    parts = [torch.empty_like(bucket.buffer()) for _ in range(world_size)]
    dist.all_gather(parts, bucket.buffer() / world_size)
    future = torch.futures.Future()
    future.set_result(sum(parts[1:], parts[0]))
    return future

def ddp(accumulation=1, every=True, num_steps=3):
    # "every": each micro-batch is averaged, and what was averaged is summed; else with no_sync()
    model = build()
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, in_order)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    for step in range(num_steps):
        sums = {}
        for micro in range(accumulation):
            is_last = micro == accumulation - 1
            with contextlib.nullcontext() if every or is_last else wrapped.no_sync():
                (wrapped(batch(step * accumulation + micro)).square().mean() / accumulation).backward()
            for param in model.parameters() if every else ():
                sums[param] = sums[param] + param.grad if param in sums else param.grad
                param.grad = sums[param] if is_last else None
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model.state_dict())
"""

BITS = """
equal = {}
reference = train(3)  # starts torch.distributed, too
keep = engine_of(0)
equal["DDP"] = ddp() == reference
if world_size > 2:  # what more ranks have alone is an order in which they are added up
    equal.update({stage: train(stage) == reference for stage in (0, 1, 2)})
    keep.destroy()
    print(json.dumps(equal))
    raise SystemExit

once, every = ddp(3, every=False), ddp(3)
equal["orders differ"] = once != every
for stage in range(4):
    zero = {"reduce_bucket_size": 1100} if stage == 2 else {}
    equal[f"{stage}"] = train(stage, zero=zero) == reference
    equal[f"{stage}, accumulating"] = train(stage, 3, zero=zero) == (every if stage >= 2 else once)
equal["1 on the cpu"] = train(1, zero={"offload_optimizer": {"device": "cpu"}}) == reference
narrow = train(0, 3, "bf16")
equal["bf16 at 1"] = train(1, 3, "bf16", zero={"offload_optimizer": {"device": "cpu"}}) == narrow
equal["bf16 at 3"] = train(2, 1, "bf16") == train(3, 1, "bf16") == train(0, 1, "bf16")

def on(engine, first):
    engine.backward(engine(batch(first).bfloat16()).square().mean())
    engine.step()
    return weights_of(engine.full_master_state_dict()), weights_of(engine.module.state_dict())

saving, loading = engine_of(0, dtype="bf16"), engine_of(2, dtype="bf16")
on(saving, 0)
saving.save_checkpoint(sys.argv[1], "first")
loading.load_checkpoint(sys.argv[1], "first")
equal["saved at 0, loaded at 2"] = on(saving, 1) == on(loading, 1)
loading.save_checkpoint(sys.argv[1], "second")
saving.load_checkpoint(sys.argv[1], "second")
equal["and back"] = on(saving, 2) == on(loading, 2)
saving.destroy()
loading.destroy()

engine = keep  # a step before the boundary, and gradients that are looked at before it
engine.set_gradient_accumulation_boundary(is_boundary=False)
engine.backward(engine(batch(0)).square().mean())
engine.step()
first = engine.module[0].weight
try:
    infinity.utils.safe_get_local_grad(first)
except RuntimeError as error:
    equal["refused"] = "not reduced" in str(error)
whole = infinity.utils.safe_get_full_grad(first)
copies = [torch.empty_like(whole) for _ in range(world_size)]
dist.all_gather(copies, whole)
equal["settled"] = all(torch.equal(copy, whole) for copy in copies)
engine.backward(engine(batch(1)).square().mean())
engine.set_gradient_accumulation_boundary(is_boundary=True)
engine.step()
copies = [None] * world_size
dist.all_gather_object(copies, weights_of(engine.module.state_dict()))
equal["as one"] = all(copy == copies[0] for copy in copies)
engine.destroy()
print(json.dumps(equal))
"""


def test_two_ranks_train_alike_at_every_stage_and_as_ddp(tmp_path: Path) -> None:
    for rank in run_ranks(PRELUDE + BITS, tmp_path, num_ranks=2, words=[str(tmp_path / "checkpoints")]):
        assert rank.answer == dict.fromkeys(rank.answer, True)
        assert len(rank.answer) == 18


def test_three_ranks_add_up_in_one_order_at_every_stage(tmp_path: Path) -> None:
    """With more than two ranks the order of a sum has bits of its own."""
    for rank in run_ranks(PRELUDE + BITS, tmp_path, num_ranks=3):
        assert rank.answer == dict.fromkeys(rank.answer, True)


NO_SYNC = """
def put_off(stage, bf16):
    engine = engine_of(stage, dtype="bf16" if bf16 else "fp32")
    for step in range(2):
        with engine.no_sync():
            for micro in range(2):
                engine.backward(engine(batch(3 * step + micro).to(engine.module[0].weight.dtype)).square().mean())
            try:
                engine.step()
            except RuntimeError as error:
                assert "no_sync" in str(error)
            else:
                raise AssertionError("step() inside no_sync() passed")
        engine.backward(engine(batch(3 * step + 2).to(engine.module[0].weight.dtype)).square().mean())
        engine.step()
    weights = weights_of(engine.full_master_state_dict())
    engine.destroy()
    return weights

def ddp_put_off():
    model = build()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    for step in range(2):
        with wrapped.no_sync():
            for micro in range(2):
                wrapped(batch(3 * step + micro)).square().mean().backward()
        wrapped(batch(3 * step + 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model.state_dict())

keep = engine_of(0)
reference = ddp_put_off()
equal = {f"no_sync at {stage}": put_off(stage, False) == reference for stage in (0, 1)}
equal["no_sync in bf16"] = put_off(0, True) == put_off(1, True)

def traffic(stage, accumulation=1, **config):
    # what one update sends through gradients and weights, as the comms log counts it
    engine = engine_of(stage, accumulation, comms_logger={
        "enabled": True, "prof_all": False, "prof_ops": ["all_gather", "all_reduce", "reduce_scatter", "broadcast"]
    }, **config)
    def counts():
        found = {}
        for line in engine.comms_summary().splitlines()[1:]:
            name, size, count = line.split()[:3]
            if "all_reduce" != name or int(size) > 64:  # smaller ones are what ranks agree upon
                found[name] = found.get(name, 0) + int(count)
        return found
    before = counts()
    for step in range(accumulation):
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    after = counts()
    weights = weights_of(engine.full_state_dict())
    engine.destroy()
    return {name: n for name, count in after.items() if (n := count - before.get(name, 0))}, weights

counted, weights = {}, {}
for name, stage, accumulation, config in (
    ("0", 0, 3, {}), ("1", 1, 3, {}), ("2", 2, 3, {}), ("2, once", 2, 1, {}), ("3", 3, 1, {}),
    ("1 all-reduced", 1, 3, {"zero": {"reduce_scatter": False}}),
    ("2 all-reduced", 2, 1, {"zero": {"reduce_scatter": False}}),
    ("3 all-reduced", 3, 1, {"zero": {"reduce_scatter": False}}),
    ("2 broadcast", 2, 1, {"zero": {"allgather_partitions": False}}),
    ("3 fetched", 3, 1, {"zero": {"stage3_use_all_reduce_for_fetch_params": True}}),
    ("2 by thirds", 2, 1, {"gradient_predivide_factor": 3.0}),
    ("2 prescaled", 2, 1, {"gradient_predivide_factor": 3.0, "prescale_gradients": True}),
    ("0 by thirds", 0, 1, {"gradient_predivide_factor": 3.0}),
):
    counted[name], weights[name] = traffic(stage, accumulation, **config)
equal["sums first"] = weights["0"] == weights["1"] == weights["1 all-reduced"]
equal["collectives"] = all(
    weights["3"] == weights[name] for name in
    ("2, once", "2 all-reduced", "3 all-reduced", "2 broadcast", "3 fetched", "2 prescaled")
)

def gradients(stage, **config):
    engine = engine_of(stage, **config)
    engine.backward(engine(batch(0)).square().mean())
    found = [infinity.utils.safe_get_full_grad(param) for param in engine.module.parameters()]
    engine.step()
    engine.destroy()
    return found

summed = {"gradient_allreduce_op": "sum", "gradient_predivide_factor": 3.0}
equal["summed"] = all(
    torch.equal(total, 2 * mean)
    for stage in (0, 1, 2, 3) for total, mean in zip(gradients(stage, **summed), gradients(stage), strict=True)
)
equal["thirds"] = weights["2 by thirds"] == weights["0 by thirds"] != weights["3"]
keep.destroy()
print(json.dumps({"equal": equal, "counted": counted}))
"""


def test_what_travels_at_each_stage_and_as_the_keys_say(tmp_path: Path) -> None:
    for rank in run_ranks(PRELUDE + NO_SYNC, tmp_path, num_ranks=2):
        assert rank.answer["equal"] == dict.fromkeys(rank.answer["equal"], True)
        assert len(rank.answer["equal"]) == 7
        counted: dict[str, Any] = rank.answer["counted"]
        gathered = {name: found.pop("all_gather", 0) for name, found in counted.items()}
        assert counted == {
            "0": {"all_reduce": 1},
            "1": {"reduce_scatter": 1},
            "2": {"reduce_scatter": 3},
            "2, once": {"reduce_scatter": 1},
            "3": {"reduce_scatter": 1},
            "1 all-reduced": {"all_reduce": 1},
            "2 all-reduced": {"all_reduce": 1},
            "3 all-reduced": {"all_reduce": 1},
            "2 broadcast": {"reduce_scatter": 1, "broadcast": 2},
            "3 fetched": {"reduce_scatter": 1, "all_reduce": gathered["3"]},
            "2 by thirds": {"reduce_scatter": 1},
            "2 prescaled": {"reduce_scatter": 1},
            "0 by thirds": {"all_reduce": 1},
        }
        assert gathered["0"] == gathered["2 broadcast"] == gathered["3 fetched"] == 0
        assert gathered["1"] == gathered["2"] == gathered["2, once"] == 1
