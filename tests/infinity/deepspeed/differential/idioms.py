"""What libraries and scripts in the wild do with an engine, call by call, in words of our own."""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import copy
import csv
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus  # type: ignore[import-not-found]
from torch import nn

from tests.infinity.deepspeed.differential.case import case, cases_over
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start, sums, train, weights

STAGES = {str(stage): stage for stage in range(4)}


# --- preference trainers: a model that generates between its steps


def _take_hooks_off(engine: Any) -> None:
    """Where the optimizer has such a thing it is asked, as at stage 3, otherwise the optimizer itself."""
    hooks = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    named = itertools.chain(hooks.module.named_parameters(recurse=True), hooks.module.ds_external_parameters())
    for _, param in named:
        param.ds_active_sub_modules.clear()
    for hook in [*hooks.forward_hooks, *hooks.backward_hooks]:
        hook.remove()
    hooks.forward_hooks, hooks.backward_hooks = [], []


def _put_hooks_on(engine: Any) -> None:
    hooks = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    hooks._register_deepspeed_module(hooks.module)


@case(relative=1e-5)  # sums that cancel
def without_hooks_between_steps(_directory: Path) -> Any:
    engine = start(stack(), config(3))
    seen = train(engine, 2)
    x, y = batches(3)[2]
    for _ in range(2):
        with deepspeed.zero.GatheredParameters(engine.parameters()):
            _take_hooks_off(engine)
            with torch.no_grad():
                seen += [engine.module(x, y).item(), engine.module.head.weight.shape[0]]
            _put_hooks_on(engine)
        seen += train(engine, 2)
    return seen, sums(engine)


@cases_over({"0": 0, "3": 3})
def a_reference_model_beside(_directory: Path, stage: int) -> Any:
    """Sizes of buckets stand at the top, under dotted names and with a fraction."""
    policy = start(stack(), config(stage))
    given = config(stage, optimizer=None)
    given.update({
        "zero_optimization.reduce_bucket_size": 144,
        "zero_optimization.stage3_param_persistence_threshold": 120,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 144,
    })  # fmt: skip
    reference, *_ = deepspeed.initialize(model=stack(), config=given)
    reference.eval()
    seen = []
    for x, y in batches(3):
        with torch.no_grad():
            known = reference(x, y)
        loss = policy(x, y) + 0.1 * known
        policy.backward(loss)
        policy.step()
        seen.append([known.item(), loss.item()])
    return seen


# --- chat: moving averages, weights into files, weights from files


def _absent(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


@cases_over({"0": 0, "2": 2, "3": 3})
def moving_averages(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    average = start(stack(seed=8), config(stage, optimizer=None), model_parameters=None)
    for each in (1, 2):
        train(engine, each)
        with torch.no_grad():
            for param, mean in zip(engine.parameters(), average.parameters(), strict=True):
                gathered = _absent([param, mean]) if stage == 3 else []
                with deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
                    data = param.data
                    mean.data.copy_(torch.lerp(data, mean.data, 0.9))
    return sums(engine), sums(average)


@case(ranks=2)
def weights_one_by_one_into_a_file(directory: Path) -> Any:
    engine = start(stack(), config(3))
    train(engine, 2)
    held = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(_absent([param]), enabled=True):
            value = param.data.cpu()
        if deepspeed.comm.get_rank() == 0:
            held[name] = value.clone()
    if held:
        torch.save(held, directory / "pytorch_model.bin")
    deepspeed.comm.barrier()
    saved = torch.load(directory / "pytorch_model.bin")
    return {name: value.double().sum().item() for name, value in saved.items()}, [
        saved[name].shape == value.shape for name, value in weights(engine).items()
    ]


@case(ranks=2)
def weights_from_a_file_module_by_module(_directory: Path) -> Any:
    state = stack(seed=3).state_dict()
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = stack(seed=5)
    said: list[str] = []

    def load(module: nn.Module, prefix: str) -> None:
        own = dict(module.named_parameters(prefix=prefix[:-1], recurse=False))
        mine = [own[key] for key in state if key in own]
        if mine:
            with deepspeed.zero.GatheredParameters(mine, modifier_rank=0):
                if torch.distributed.get_rank() == 0:
                    module._load_from_state_dict(state, prefix, {}, True, [], [], said)
        for name, child in module._modules.items():
            load(child, f"{prefix}{name}.")

    load(model, "")
    engine = start(model, config(3))
    return said, sums(engine), train(engine, 2)


@cases_over({"0": 0, "3": 3})
def averages_kept_aside(_directory: Path, stage: int) -> Any:
    """As diffusion models keep them: copies that a context with no modifier reads the weights for."""
    engine = start(stack(), config(stage))
    shadow = [value.clone() for value in weights(engine).values()]
    for _ in range(2):
        train(engine, 2)
        for mean, param in zip(shadow, engine.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters(param, modifier_rank=None), torch.no_grad():
                mean.sub_(0.1 * (mean - param))
    return [mean.double().sum().item() for mean in shadow]


@cases_over({"0": 0, "2": 2})
def written_by_copies_below_stage_3(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    train(engine, 1)
    kept = [param.detach().clone() for param in engine.parameters()]
    train(engine, 2)
    for old, param in zip(kept, engine.parameters(), strict=True):
        param.data.copy_(old.data)
    x, y = batches(1)[0]
    with torch.no_grad():
        return engine(x, y).item(), sums(engine)


# --- a framework that owns the loop: schedules, checkpoints and clipping are its own


@cases_over(STAGES)
def a_framework_around(directory: Path, stage: int) -> Any:
    model = stack()
    given = config(stage, optimizer=None, gradient_clipping=0.5, zero_allow_untested_optimizer=True)
    given["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with deepspeed.zero.Init(enabled=stage == 3, remote_device=None, config_dict_or_path=given):
        pass
    engine, made, _, _ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0), config=given, model=model,
        model_parameters=filter(lambda p: p.requires_grad, model.parameters()), optimizer=optimizer,
        lr_scheduler=schedule, dist_init_required=False,
    )  # fmt: skip
    section = given["activation_checkpointing"]
    deepspeed.checkpointing.configure(
        mpu_=None, partition_activations=section.get("partition_activations"),
        contiguous_checkpointing=section.get("contiguous_memory_optimization"),
        checkpoint_in_cpu=section.get("cpu_checkpointing"), profile=section.get("profile"),
    )  # fmt: skip
    kept, engine.lr_scheduler = engine.lr_scheduler, None
    seen = []
    for x, y in batches(3):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        kept.step()
        seen.append([loss.item(), made.param_groups[0]["lr"]])
    engine.save_checkpoint(directory, client_state={"epoch": 7, "global_step": 3}, tag="checkpoint")
    train(engine, 1)
    path, state = engine.load_checkpoint(
        directory, tag="checkpoint", load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=False
    )
    return seen, path is not None, {name: state[name] for name in ("epoch", "global_step")}, sums(engine)


@cases_over({"0": 0, "3": 3})
def evaluation_alone(_directory: Path, stage: int) -> Any:
    given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0), config=given, model=stack(), optimizer=None, lr_scheduler=None,
        model_parameters=[], dist_init_required=False,
    )  # fmt: skip
    engine.eval()
    with torch.no_grad():
        return [engine(x, y).item() for x, y in batches(2)]


# --- reinforcement learning: sections that are written as off, states that wait elsewhere


@cases_over({"2": 2, "3": 3})
def sections_that_are_off(_directory: Path, stage: int) -> Any:
    off = {
        "checkpoint": {"load_universal": False}, "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1}, "data_types": {"grad_accum_dtype": None}, "fp16": {"enabled": False},
    }  # fmt: skip
    zero = {"zero_hpz_partition_size": 1, "zero_quantized_weights": False, "reduce_scatter": True}
    return train(start(stack(), config(stage, zero=zero, **off)), 3)


@case()
def states_that_wait_elsewhere(_directory: Path) -> Any:
    from deepspeed.runtime.zero.offload_config import (  # type: ignore[import-not-found]
        OffloadDeviceEnum,
        OffloadStateTypeEnum,
    )

    engine = start(stack(), config(3))
    losses = train(engine, 2)
    kinds = (
        OffloadStateTypeEnum.optim_states,
        OffloadStateTypeEnum.contiguous_grad_buffer,
        OffloadStateTypeEnum.hp_params,
    )
    engine.optimizer.offload_states(include=kinds, device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=False)
    engine.empty_partition_cache()
    engine.reload_states(non_blocking=False)
    return losses + train(engine, 2)


@cases_over({"1": 1, "3": 3})
def an_actor_and_a_critic(_directory: Path, stage: int) -> Any:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100}
    actor, critic = (start(stack(seed=seed), config(stage, fp16=fp16)) for seed in (1, 2))
    seen = []
    for x, y in batches(2, dtype=torch.float16):
        with torch.no_grad():
            value = critic(x, y)
        actor_loss = actor(x, y) * (1 + value.item())
        actor.backward(actor_loss)
        actor.step()
        critic_loss = critic(x, y)
        critic.backward(critic_loss)
        critic.step()
        seen.append(
            [actor.optimizer.overflow, critic.optimizer.overflow, actor.optimizer.cur_scale, critic.global_steps]
        )
    return seen


# --- figures of one's own, and tools


@case()
def figures_of_ones_own(directory: Path) -> Any:
    section = {"enabled": True, "output_path": str(directory), "job_name": "job"}
    engine = start(stack(), config(1, csv_monitor=section))
    plain = start(stack(), config(1))
    if engine.monitor.enabled:
        engine.monitor.write_events([("Eval/Loss", 0.5, 4), ("Eval/Loss", torch.tensor(0.25).item(), 8)])
    engine.monitor.write_events([("Eval/Accuracy", 1, 8)])
    files = {path.name: list(csv.reader(path.read_text().splitlines()))[1:] for path in (directory / "job").iterdir()}
    points = {name: [[int(step), float(value)] for step, value in rows] for name, rows in files.items()}
    return engine.monitor.enabled, plain.monitor.enabled, {name: points[name] for name in points if "Eval" in name}


@case()
def a_monitor_of_ones_own(directory: Path) -> Any:
    from deepspeed.monitor.monitor import MonitorMaster  # type: ignore[import-not-found]
    from deepspeed.runtime.config import DeepSpeedConfig  # type: ignore[import-not-found]

    section = {"enabled": True, "output_path": str(directory), "job_name": "job"}
    monitor = MonitorMaster(DeepSpeedConfig(config(0, csv_monitor=section)).monitor_config)
    monitor.write_events([("Running Loss", 0.5, 4)])
    rows = [list(csv.reader(path.read_text().splitlines()))[1:] for path in (directory / "job").iterdir()]
    silent = MonitorMaster(DeepSpeedConfig(config(0)).monitor_config)
    silent.write_events([("Running Loss", 0.5, 4)])
    return monitor.enabled, silent.enabled, [[int(step), float(value)] for ((step, value),) in rows]


ALONE = {
    "adamw": lambda params: DeepSpeedCPUAdam(params, lr=0.05, weight_decay=0.1),
    "adam": lambda params: DeepSpeedCPUAdam(params, lr=0.05, weight_decay=0.1, adamw_mode=False),
    "adam-without-correction": lambda params: DeepSpeedCPUAdam(params, lr=0.05, bias_correction=False),
}


@cases_over(ALONE, relative=1e-4)  # theirs are kernels that round in another order; ours are torch's own
def optimizers_alone(_directory: Path, make: Any) -> Any:
    model = stack()
    optimizer = make(model.parameters())
    losses = []
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = optimizer.state_dict()
    return losses, {name: value.double().sum().item() for name, value in model.state_dict().items()}, [
        sorted(set(group) - {"params"})[:2] for group in state["param_groups"]
    ]  # fmt: skip


@cases_over({"1": 1, "2": 2, "3": 3})
def the_script_beside_a_checkpoint(directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    train(engine, 2)
    engine.save_checkpoint(directory / "saved")
    script, out = directory / "saved" / "zero_to_fp32.py", directory / "out"
    subprocess.run([sys.executable, script, directory / "saved", out], check=True, capture_output=True, timeout=100)
    whole = torch.load(out / "pytorch_model.bin")
    own = sums(engine)
    return {name: value.double().sum().item() for name, value in whole.items()}, [
        abs(own[name] - value.double().sum().item()) < 1e-5 for name, value in whole.items()
    ]


@case()
def copied_models(_directory: Path) -> Any:
    """A teacher is a copy that is made before there is an engine."""
    student = stack()
    teacher = copy.deepcopy(student)
    engine = start(student, config(3))
    frozen, *_ = deepspeed.initialize(model=teacher, config=config(3, optimizer=None))
    seen = []
    for x, y in batches(3):
        with torch.no_grad():
            known = frozen(x, y)
        loss = engine(x, y) - 0.5 * known
        engine.backward(loss)
        engine.step()
        seen.append([known.item(), loss.item()])
    return seen, sums(frozen)
