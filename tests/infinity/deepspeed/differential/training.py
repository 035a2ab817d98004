"""Training as the documentation's loop does it, at every stage."""

# mypy: ignore-errors
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start, sums, train

CPU = {"device": "cpu", "pin_memory": False}
STAGES: dict[str, dict[str, Any]] = {
    "0": config(0),
    "1": config(1),
    "2": config(2),
    "3": config(3),
    "1-offload": config(1, zero={"offload_optimizer": CPU}),
    "2-offload": config(2, zero={"offload_optimizer": CPU}),
    "3-offload": config(3, zero={"offload_optimizer": CPU, "offload_param": CPU}),
    "3-sub-groups": config(3, zero={"sub_group_size": 100}),
    "3-persistent": config(3, zero={"stage3_param_persistence_threshold": 10_000}),
    "3-threshold-without-prefix": config(3, zero={"param_persistence_threshold": 0}),
    "2-no-scatter": config(2, zero={"reduce_scatter": False}),
    "2-not-contiguous": config(2, zero={"contiguous_gradients": False}),
    "2-small-buckets": config(2, zero={"reduce_bucket_size": 50, "allgather_bucket_size": 50}),
    "2-overlap": config(2, zero={"overlap_comm": True}),
    "3-small-buckets": config(3, zero={"reduce_bucket_size": 50, "stage3_prefetch_bucket_size": 0}),
    "2-round-robin": config(2, zero={"round_robin_gradients": True}),
    "3-fetch-by-all-reduce": config(3, zero={"stage3_use_all_reduce_for_fetch_params": True}),
    "2-boolean-old-form": {**config(0), "zero_optimization": True},
    "2-cpu-offload-old-name": config(2, zero={"cpu_offload": True}),
    "1-no-all-gather": config(1, zero={"allgather_partitions": False}),
    "3-live-0": config(3, zero={"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}),
}


@cases_over(STAGES)
def one_rank(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    losses = train(engine, 4)
    return losses, sums(engine)


@cases_over({key: value for key, value in STAGES.items() if key[1:2] in ("", "-")}, ranks=2)
def two_ranks(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    losses = train(engine, 4)
    return losses, sums(engine)


@cases_over({str(stage): stage for stage in range(4)}, ranks=2, relative=1e-5)  # sums that cancel
def accumulation_and_clipping(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_accumulation_steps=2, gradient_clipping=0.1))
    losses = train(engine, 6)
    facts = [engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps]
    return losses, sums(engine), float(engine.get_global_grad_norm() or 0), facts


@cases_over({str(stage): stage for stage in range(4)})
def boundaries(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_accumulation_steps=3))
    seen = []
    for x, y in batches(6):
        engine.backward(engine(x, y))
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.step()
        seen.append((engine.was_step_applied(), engine.global_steps, engine.micro_steps))
    return seen


@cases_over({str(stage): stage for stage in range(4)})
def boundary_by_hand(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_accumulation_steps=4))
    seen = []
    for number, (x, y) in enumerate(batches(4)):
        engine.set_gradient_accumulation_boundary(is_boundary=number % 2 == 1)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        seen.append((loss.item(), engine.is_gradient_accumulation_boundary(), engine.global_steps))
    return seen


@cases_over({str(stage): stage for stage in range(4)})
def returned_loss(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_accumulation_steps=2))
    x, y = batches(1)[0]
    loss = engine(x, y)
    returned = engine.backward(loss)
    engine.step()
    x, y = batches(2)[1]
    unscaled = engine.backward(engine(x, y), scale_wrt_gas=False)
    engine.step()
    return loss.item(), returned.item(), unscaled.item()


@cases_over({str(stage): stage for stage in range(4)}, ranks=2)
def unused_parameters(_directory: Path, stage: int) -> Any:
    engine = start(stack(unused=True), config(stage))
    return train(engine, 3), sums(engine)


@cases_over({str(stage): stage for stage in range(1, 4)}, ranks=2)
def frozen_parameters(_directory: Path, stage: int) -> Any:
    model = stack()
    for param in model.layers[0].parameters():
        param.requires_grad_(False)
    engine = start(model, config(stage), model_parameters=[p for p in model.parameters() if p.requires_grad])
    return train(engine, 3), sums(engine)


GROUPS = {
    "left-out": lambda model: [{"params": list(model.layers.parameters())}],
    "empty": lambda model: [{"params": [], "lr": 0.3}, {"params": list(model.parameters())}],
    "both": lambda model: [{"params": []}, {"params": [layer.weight for layer in model.layers], "weight_decay": 0.1}],
}


@cases_over({f"{stage}-{name}": (stage, make) for stage in range(4) for name, make in GROUPS.items()})
def groups_that_lack_some(_directory: Path, given: tuple[int, Any]) -> Any:
    stage, make = given
    model = stack()
    engine = start(model, config(stage, gradient_clipping=0.05), model_parameters=make(model))
    return train(engine), sums(engine)


@case(ranks=2)
def gradients_that_are_reduced_by_hand(_directory: Path) -> Any:
    engine = start(stack(), config(3))
    losses = []
    for x, y in batches(2):
        losses.append(float(loss := engine(x, y)))
        engine.backward(loss)
        engine.allreduce_gradients()
        engine.step()
    return losses, sums(engine)


@cases_over({str(stage): stage for stage in range(1, 4)})
def gradients_in_the_optimizer(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    found = []
    for x, y in batches(2):
        engine.backward(engine(x, y))
        of_groups = engine.optimizer.averaged_gradients
        found.append([sorted(of_groups), sum(float(part.double().sum()) for part in of_groups[0])])
        engine.step()
    return found


@cases_over({str(stage): stage for stage in range(4)})
def tied_weights(_directory: Path, stage: int) -> Any:
    model = stack()
    model.layers[1].weight = model.layers[0].weight
    engine = start(model, config(stage))
    return train(engine, 3), sums(engine)


@cases_over({str(stage): stage for stage in range(4)})
def several_outputs(_directory: Path, stage: int) -> Any:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x).pow(2).mean(), self.b(x).pow(2).mean()

    torch.manual_seed(1)
    engine = start(Two(), config(stage, gradient_accumulation_steps=2))
    out = []
    for _ in range(4):
        first, second = engine(torch.ones(4, 6))
        engine.backward(first + 0.5 * second)
        engine.step()
        out.append([first.item(), second.item()])
    return out


@cases_over({str(stage): stage for stage in range(4)})
def engines_in_turn(_directory: Path, stage: int) -> Any:
    first, second = start(stack(seed=1), config(stage)), start(stack(seed=2), config(stage))
    losses = []
    for _ in range(2):
        losses += train(first, 1) + train(second, 1)
    first.destroy()
    return losses + train(second, 1)


@cases_over({str(stage): stage for stage in range(4)})
def evaluation_between(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    losses = train(engine, 1)
    engine.eval()
    with torch.no_grad():
        x, y = batches(3)[2]
        losses.append(engine(x, y).item())
    engine.train()
    return [*losses, *train(engine, 2), engine.training]


@case(ranks=2)
def no_sync_at_stage_0_and_1(_directory: Path) -> Any:
    out = []
    for stage in (0, 1):
        engine = start(stack(), config(stage, gradient_accumulation_steps=1))
        pairs = batches(4)
        with engine.no_sync():
            for x, y in pairs[:3]:
                engine.backward(engine(x, y), scale_wrt_gas=False)
        x, y = pairs[3]
        engine.backward(engine(x, y), scale_wrt_gas=False)
        engine.step()
        out.append(sums(engine))
    return out


@cases_over({"2": 2, "3": 3})
def no_sync_is_refused(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))

    def inside() -> None:
        with engine.no_sync():
            pass

    return raised(inside)


@cases_over({"0": 0, "1": 1})
def step_in_no_sync_is_refused(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    x, y = batches(1)[0]
    with engine.no_sync():
        engine.backward(engine(x, y))
        return raised(engine.step)


@cases_over({str(stage): stage for stage in range(4)})
def zero_grad_drops(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_accumulation_steps=1))
    train(engine, 1)
    engine.zero_grad()
    engine.optimizer.zero_grad()
    return train(engine, 2)


@case()
def unused_are_named_where_asked(_directory: Path) -> Any:
    engine = start(stack(unused=True), config(2, zero={"ignore_unused_parameters": False}))
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    return raised(engine.step)


@case()
def managed_accumulation_off(_directory: Path) -> Any:
    engine = start(stack(), config(2, managed_gradient_accumulation=False))
    return engine.managed_gradient_accumulation(), train(engine, 3), engine.global_steps


@cases_over({str(stage): stage for stage in range(4)})
def parameters_change(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    before = sums(engine)
    train(engine, 1)
    after = sums(engine)
    return [before[name] != after[name] for name in before]


@case()
def checkpointed_activations(_directory: Path) -> Any:
    out = []
    for stage in (2, 3):
        model = stack()
        inner = model.layers[0].forward
        model.layers[0].forward = lambda x, inner=inner: deepspeed.checkpointing.checkpoint(inner, x)
        engine = start(model, config(stage))
        deepspeed.checkpointing.configure(None, partition_activations=False)
        losses = []
        for x, y in batches(2):
            loss = engine(x.requires_grad_(), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        out.append(losses)
    return out


def _sizes(engine: Any) -> list[int]:
    return [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()]


@cases_over({str(stage): stage for stage in range(4)})
def batch_sizes_change(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_accumulation_steps=2))
    before = _sizes(engine)
    engine.set_train_batch_size(16)
    between = _sizes(engine)
    engine.set_train_micro_batch_size(2)
    after = _sizes(engine)
    return before, between, after, raised(lambda: engine.set_train_batch_size(15))


@case()
def losses_of_stages_are_alike(_directory: Path) -> Any:
    runs = [train(start(stack(), config(stage)), 5) for stage in range(4)]
    return runs[0], [max(abs(a - b) for a, b in zip(run, runs[0], strict=True)) < 1e-6 for run in runs]


@case()
def order_of_a_dataset(_directory: Path) -> Any:
    model, args = stack(), argparse.Namespace(local_rank=-1)
    data = TensorDataset(torch.arange(22).float())
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data, config=config(1)
    )
    epochs = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
    evaluated = [batch.tolist() for (batch,) in engine.deepspeed_io(data, batch_size=4, route="eval")]
    return epochs, evaluated, len(loader), args.local_rank == engine.local_rank
