"""What published training code does with it: names, objects for model parallelism, timers, loggers, schedules.

Each program does what several public repositories do, in words of its own.
"""

# mypy: ignore-errors
from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any, ClassVar

import deepspeed  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad  # type: ignore[import-not-found]
from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion  # type: ignore[import-not-found]
from deepspeed.runtime import utils as runtime_utils  # type: ignore[import-not-found]
from deepspeed.utils.logging import LoggerFactory, get_dist_msg, print_dist  # type: ignore[import-not-found]
from deepspeed.utils.tensor_fragment import fragment_address  # type: ignore[import-not-found]
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer  # type: ignore[import-not-found]
from torch import nn

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start, sums, train


class Alone:
    """What Megatron's ``mpu`` says where every rank has the whole model."""

    get_model_parallel_rank = get_pipeline_model_parallel_rank = staticmethod(lambda: 0)
    get_model_parallel_world_size = get_pipeline_model_parallel_world_size = staticmethod(lambda: 1)
    get_tensor_model_parallel_world_size = staticmethod(lambda: 1)
    get_tensor_model_parallel_rank = get_tensor_model_parallel_src_rank = staticmethod(lambda: 0)
    get_data_parallel_rank = staticmethod(lambda: dist.get_rank())
    get_data_parallel_world_size = staticmethod(lambda: dist.get_world_size())
    get_data_parallel_group = staticmethod(lambda: dist.group.WORLD)
    groups: ClassVar[list[Any]] = []

    @classmethod
    def get_model_parallel_group(cls) -> Any:
        """One rank's own."""
        if not cls.groups:
            cls.groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        return cls.groups[dist.get_rank()]

    get_tensor_model_parallel_group = get_model_parallel_group


@cases_over({str(stage): stage for stage in range(4)})
def every_rank_has_the_whole_model(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage), mpu=Alone, dist_init_required=False)
    return train(engine, 3), sums(engine), engine.mpu is Alone


@case(ranks=2)
def two_ranks_have_the_whole_model(_directory: Path) -> Any:
    Alone.get_model_parallel_group()
    with deepspeed.zero.Init(config_dict_or_path=config(3), mpu=Alone, data_parallel_group=dist.group.WORLD):
        model = stack()
    engine = start(model, config(3), mpu=Alone)
    return train(engine, 3), engine.mpu is Alone


@case()
def norms_of_the_whole_model(_directory: Path) -> Any:
    Alone.get_model_parallel_group()
    model = stack()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    norm = runtime_utils.clip_grad_norm_(model.parameters(), max_norm=2.0, mpu=Alone)
    return float(norm), float(runtime_utils.get_weight_norm(model.parameters(), mpu=Alone))


@case()
def without_one(_directory: Path) -> Any:
    return start(stack(), config(2)).mpu is None


@case()
def dist_below_the_root(_directory: Path) -> Any:
    deepspeed.dist.barrier()
    total = torch.ones(2)
    deepspeed.dist.all_reduce(total, op=deepspeed.dist.ReduceOp.SUM)
    return deepspeed.dist.get_rank(), deepspeed.dist.get_world_size(), deepspeed.dist.is_initialized(), total.tolist()


@case()
def wall_clocks(_directory: Path) -> Any:
    timers = SynchronizedWallClockTimer()
    timers("a").start()
    twice = raised(lambda: timers("a").start())
    timers("a").stop()
    unstarted = raised(lambda: timers("b").stop())
    first = timers("a").elapsed(reset=False)
    timers.log(["a", "nothing"], normalizer=2.0, memory_breakdown=True)
    seen = [first >= 0.0, timers("a").elapsed(), sorted(timers.get_timers()), timers("a") is timers("a")]
    timers("b").start()
    going = timers("b").elapsed(reset=True) >= 0.0, timers("b").started_
    timers("b").stop(record=True)
    means = timers.get_mean(["b", "nothing"])
    own = SynchronizedWallClockTimer().Timer("own")
    return twice, unstarted, seen, going, sorted(means), means["b"] >= 0.0, own.name_, own.started_, timers("c").mean()


@case()
def no_clock(_directory: Path) -> Any:
    timers = NoopTimer()
    timers("a").start()
    timers("a").stop(record=True)
    timers.log(["a"])
    return timers("a").elapsed(reset=False), timers("a").mean(), timers.get_timers(), timers.get_mean(["a"])


@case()
def loggers_of_ones_own(_directory: Path) -> Any:
    made = LoggerFactory.create_logger("published", logging.INFO)
    again = logging.getLogger("published")
    seen = [made is again, made.level, made.propagate, [handler.level for handler in made.handlers]]
    print_dist("told", ranks=[0])
    return (
        seen,
        get_dist_msg("told", [0]),
        get_dist_msg("told", [1]),
        get_dist_msg("told"),
        raised(LoggerFactory.create_logger),
    )


@case()
def where_a_part_lies(_directory: Path) -> Any:
    address = fragment_address(numel=3, start=5)
    same = pickle.loads(pickle.dumps(address)) == address
    torch.serialization.add_safe_globals([fragment_address])
    return address.numel, address.start, same, address == fragment_address(3, 5)


@case()
def optimizers_by_their_files(_directory: Path) -> Any:
    same = DeepSpeedCPUAdagrad is deepspeed.ops.adagrad.DeepSpeedCPUAdagrad
    return same, DeepSpeedCPULion is deepspeed.ops.lion.DeepSpeedCPULion


class Annealing:
    """A schedule as Megatron's are: no torch scheduler, whose ``step`` takes how many samples there were."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num_steps = optimizer, 0
        self.step(0)

    def step(self, increment: int = 1) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.num_steps)

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]


@cases_over({str(stage): stage for stage in range(4)})
def schedules_that_are_none_of_torchs(directory: Path, stage: int) -> Any:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = Annealing(optimizer)
    options = config(stage, optimizer=None, zero_allow_untested_optimizer=True)
    engine = start(model, options, optimizer=optimizer, lr_scheduler=schedule, model_parameters=None)
    for x, y in batches(2):
        engine.backward(engine(x, y))
        engine.step(lr_kwargs={"increment": 2})
    seen = [schedule.num_steps, engine.get_lr(), engine.was_step_applied()]
    engine.save_checkpoint(str(directory), tag="here")
    losses = train(engine, 2)
    engine.load_checkpoint(str(directory), tag="here")
    return seen, losses, schedule.num_steps, train(engine, 2) == losses


@case()
def a_schedule_that_comes_later(_directory: Path) -> Any:
    engine = start(stack(), config(2))
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer.optimizer, lambda step: 1 / (1 + step))
    return train(engine, 3), engine.get_lr(), sums(engine)


class Parts(nn.Module):
    """Whose methods are called beside ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.second_stage(x, y)

    def second_stage(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.body(x))), y)


@cases_over({str(stage): stage for stage in range(4)})
def methods_of_the_module(_directory: Path, stage: int) -> Any:
    torch.manual_seed(3)
    engine = start(Parts(), config(stage))
    losses = []
    for x, y in batches(3):
        loss = engine.module.second_stage(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses, sums(engine)


@cases_over({f"{stage}-{dtype}": (stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")})
def the_optimizers_own_norm(_directory: Path, given: tuple[int, str]) -> Any:
    stage, dtype = given
    options = config(stage, gradient_clipping=0.0, **({"bf16": {"enabled": True}} if dtype == "bf16" else {}))
    engine = start(stack(), options)
    before = float(engine.optimizer._global_grad_norm)
    norms = []
    for x, y in batches(2, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32):
        engine.backward(engine(x, y))
        engine.step()
        norms.append(round(float(engine.optimizer._global_grad_norm), 2))
    return before, norms, float(engine.get_global_grad_norm()) == float(engine.optimizer._global_grad_norm)


@cases_over({str(stage): stage for stage in (1, 2, 3)}, relative=1e-3)
def scales_that_scripts_set(_directory: Path, stage: int) -> Any:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
    engine = start(stack(), config(stage, fp16=fp16))
    engine.optimizer.cur_scale = 8.0
    seen = [engine.optimizer.cur_scale, engine.optimizer.loss_scale, engine.optimizer.loss_scaler.cur_scale]
    engine.optimizer.loss_scaler.cur_scale = min(engine.optimizer.cur_scale, 4.0)
    seen += [engine.optimizer.cur_scale, engine.optimizer.loss_scaler.loss_scale]
    losses = []
    for x, y in batches(3, dtype=torch.float16):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        seen.append(engine.optimizer.cur_scale)
    engine.optimizer.loss_scale = 2.0
    return seen, losses, engine.optimizer.cur_scale


@case()
def loaders_that_scripts_put_there(_directory: Path) -> Any:
    rows = [(x[0], y[0]) for x, y in batches(8)]
    engine = start(stack(), config(2))
    before = engine.training_dataloader
    engine.training_dataloader = engine.deepspeed_io(rows, num_local_io_workers=0)
    losses = []
    for x, y in engine.training_dataloader:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return before is None, len(engine.training_dataloader), len(losses)


@case()
def a_section_of_activations_that_nobody_configures(_directory: Path) -> Any:
    section = {"partition_activations": True, "contiguous_memory_optimization": True}
    engine = start(stack(), config(2, activation_checkpointing=section))
    return train(engine, 2)


OPTIONS = {
    "method": {"mp_size": 1, "replace_method": "auto", "replace_with_kernel_inject": False},
    "tokens": {"tensor_parallel": {"tp_size": 1}, "max_out_tokens": 64, "min_out_tokens": 2, "return_tuple": False},
    "nothing": {"enable_cuda_graph": False, "checkpoint": None, "base_dir": "", "injection_policy": None},
    "in-a-dict": {"config": {"tensor_parallel": {"enabled": True, "tp_size": 1}, "replace_method": "auto"}},
}


@cases_over(OPTIONS)
def options_of_inference(_directory: Path, given: dict[str, Any]) -> Any:
    x, y = batches(1)[0]
    engine = deepspeed.init_inference(stack(), dtype=torch.float32, **given)
    return float(engine(x, y)), float(engine.module(x, y))
