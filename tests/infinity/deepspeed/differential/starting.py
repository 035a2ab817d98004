"""``initialize``: optimizers of all kinds, data, what it returns, and what the engine answers about itself."""

# mypy: ignore-errors
from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # type: ignore[import-not-found]
from deepspeed.runtime.utils import see_memory_usage  # type: ignore[import-not-found]
from torch import nn
from torch.utils.data import TensorDataset

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start, sums, train

ALL = {str(stage): stage for stage in range(4)}


@cases_over(ALL)
def four_things(_directory: Path, stage: int) -> Any:
    model = stack()
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage)
    )
    return [
        engine.optimizer is optimizer, loader is None, schedule is None, engine.module is model,
        isinstance(engine, deepspeed.DeepSpeedEngine), isinstance(engine, nn.Module),
        engine.training_dataloader is None,
        engine.lr_scheduler is None,
    ]  # fmt: skip


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


@cases_over({f"{name}-{stage}": (name, stage) for name in OPTIMIZERS for stage in range(4)}, relative=1e-5)
def clients_optimizer(_directory: Path, given: tuple[str, int]) -> Any:
    name, stage = given
    model = stack()
    options = config(stage, optimizer=None, zero_allow_untested_optimizer=True)
    engine = start(model, options, optimizer=OPTIMIZERS[name](model.parameters()), model_parameters=None)
    return train(engine, 3), sums(engine)


@cases_over(ALL)
def clients_function(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, optimizer=None), optimizer=lambda params: torch.optim.AdamW(params, lr=0.05))
    return train(engine, 3)


@cases_over({name: name for name in ("Adam", "AdamW")})
def optimizers_by_name(_directory: Path, name: str) -> Any:
    out = []
    for adam_w_mode in (True, False):
        params = {"lr": 0.05, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": adam_w_mode}
        engine = start(stack(), config(2, optimizer={"type": name, "params": params}))
        out.append(train(engine, 3))
        out.append(engine.optimizer_name())
    return out


@cases_over({"0": 0, "1": 1, "2": 2, "3": 3})
def sgd_by_name(_directory: Path, stage: int) -> Any:
    optimizer = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.5}}
    engine = start(stack(), config(stage, optimizer=optimizer, zero_allow_untested_optimizer=True))
    return train(engine, 3), engine.get_mom(), engine.get_lr()


@cases_over({"1": 1, "2": 2, "3": 3})
def untested_optimizers_need_a_word(_directory: Path, stage: int) -> Any:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return raised(lambda: start(model, config(stage, optimizer=None), optimizer=optimizer, model_parameters=None))


@cases_over({f"{stage}-{force}": (stage, force) for stage in (1, 2, 3) for force in (True, False)})
def the_cpus_optimizer_is_forced(_directory: Path, given: tuple[int, bool]) -> Any:
    stage, force = given
    answers = []
    for kind in (torch.optim.AdamW, DeepSpeedCPUAdam):
        for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
            model = stack()
            options = config(stage, optimizer=None, zero=zero, zero_force_ds_cpu_optimizer=force)
            optimizer = kind(model.parameters(), lr=0.1)
            answers.append(raised(partial(start, model, options, optimizer=optimizer, model_parameters=None)))
    return answers


@case()
def fused_adam_is_a_class(_directory: Path) -> Any:
    return issubclass(FusedAdam, torch.optim.Optimizer), see_memory_usage("nothing")


@cases_over(ALL)
def no_optimizer_at_all(_directory: Path, stage: int) -> Any:
    engine, optimizer, _, schedule = deepspeed.initialize(model=stack(), config=config(stage, optimizer=None))
    x, y = batches(1)[0]
    with torch.no_grad():
        return engine(x, y).item(), schedule is None, raised(lambda: optimizer.param_groups) if stage == 0 else "any"


@cases_over(ALL)
def empty_optimizer_section(_directory: Path, stage: int) -> Any:
    engine = deepspeed.initialize(model=stack(), config=config(stage, optimizer={}))[0]
    x, y = batches(1)[0]
    with torch.no_grad():
        return engine(x, y).item()


@cases_over(ALL)
def groups_with_options(_directory: Path, stage: int) -> Any:
    model = stack()
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.2},
    ]
    engine = start(model, config(stage), model_parameters=groups)
    losses = train(engine, 3)
    return losses, engine.get_lr(), [group["weight_decay"] for group in engine.optimizer.param_groups]


@cases_over(ALL)
def rates_written_by_hand(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.2
    return train(engine, 2), engine.get_lr(), engine.get_type(), engine.get_mom()


@cases_over(ALL)
def data_of_ones_own(_directory: Path, stage: int) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(40).float().reshape(20, 2), torch.zeros(20).long())
    model = nn.Linear(2, 2)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config(stage)
    )
    seen = [len(x) for x, _ in loader]
    for x, y in loader:
        engine.backward(nn.functional.cross_entropy(engine(x), y))
        engine.step()
    return seen, len(loader), engine.global_steps, engine.training_dataloader is loader


@case(ranks=2)
def data_over_two_ranks(_directory: Path) -> Any:
    data = TensorDataset(torch.arange(40).float().reshape(20, 2))
    model = nn.Linear(2, 2)
    _, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config(0)
    )
    return sum(len(x) for (x,) in loader), len(loader)


@case()
def collate(_directory: Path) -> Any:
    model = nn.Linear(2, 2)
    _, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=[1, 2, 3, 4, 5, 6, 7, 8],
        collate_fn=lambda samples: torch.tensor(samples).sum(), config=config(0),
    )  # fmt: skip
    return sum(int(each) for each in loader), len(loader)


@case()
def drop_last(_directory: Path) -> Any:
    out = []
    for flag in (False, True):
        model = nn.Linear(2, 2)
        _, _, loader, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), training_data=list(range(10)),
            config=config(0, dataloader_drop_last=flag),
        )  # fmt: skip
        out.append(len(list(loader)))
    return out


@case()
def loaders_of_the_engine(_directory: Path) -> Any:
    engine = start(stack(), config(0))
    loader = engine.deepspeed_io(list(range(9)), batch_size=3, route="eval")
    repeating = deepspeed.utils.RepeatingLoader([1, 2, 3])
    return [each.tolist() for each in loader], [next(repeating) for _ in range(7)]


QUESTIONS = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer_name",
    "scheduler_name",
    "zero_optimization",
    "zero_optimization_stage",
    "zero_allow_untested_optimizer",
    "zero_reduce_scatter",
    "zero_overlap_comm",
    "zero_use_cpu_optimizer",
    "zero_cpu_offload",
    "zero_partial_offload",
    "zero_sub_group_size",
    "zero_reduce_bucket_size",
    "zero_allgather_bucket_size",
    "zero_optimization_partition_gradients",
    "zero_optimization_partition_weights",
    "zero_contiguous_gradients",
    "zero_load_from_fp32_weights",
    "zero_elastic_checkpoint",
    "zero_max_live_parameters",
    "zero_max_reuse_distance",
    "zero_prefetch_bucket_size",
    "zero_module_granularity_threshold",
    "zero_param_persistence_threshold",
    "zero_model_persistence_threshold",
    "zero_gather_16bit_weights_on_model_save",
    "zero_legacy_stage1",
    "zero_ignore_unused_parameters",
    "fp16_enabled",
    "bfloat16_enabled",
    "fp16_master_weights_and_gradients",
    "bf16_master_weights_and_gradients",
    "torch_autocast_enabled",
    "loss_scale",
    "gradient_clipping",
    "dynamic_loss_scale",
    "initial_dynamic_scale",
    "postscale_gradients",
    "gradient_predivide_factor",
    "steps_per_print",
    "zero_allgather_partitions",
    "zero_round_robin_gradients",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "dump_state",
    "memory_breakdown",
    "wall_clock_breakdown",
    "flops_profiler_enabled",
    "autotuning_enabled",
    "managed_gradient_accumulation",
    "use_node_local_storage",
    "load_universal_checkpoint",
    "get_global_grad_norm",
    "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail",
    "fp16_auto_cast",
    "zero_nvme_offload_optimizer",
    "super_offload",
    "bf16_optimizer_states",
    "zero_compute_grad_norm",
    "is_sanity_checks_enabled",
    "curriculum_learning_enabled",
    "random_ltd_enabled",
    "data_efficiency_enabled",
    "zero_multi_rank_bucket_allreduce",
    "dataloader_drop_last",
    "optimizer_params",
    "scheduler_params",
    "dynamic_loss_scale_args",
    "optimizer_legacy_fusion",
    "zero_force_ds_cpu_optimizer",
    "zero_parameter_alignment",
    "zero_log_trace_cache_warnings",
    "is_first_weights_partition_group",
    "flops_profiler_profile_step",
    "tensor_parallel_config",
    "autotp_size",
    "get_mom",
    "get_lr",
    "get_type",
]
IGNORED = ("tensor_parallel_config",)
"""Answers are objects: that there is one is what is asked."""


@cases_over({f"{stage}-{name}": (stage, name) for stage in (0, 2, 3) for name in ("all",)})
def questions(_directory: Path, given: tuple[int, str]) -> Any:
    engine = start(stack(), config(given[0], gradient_clipping=0.5))
    answers = {name: getattr(engine, name)() for name in QUESTIONS}
    return {name: name in IGNORED or answer for name, answer in answers.items()}


@cases_over(ALL)
def attributes(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    names = [
        "global_steps",
        "global_samples",
        "micro_steps",
        "skipped_steps",
        "world_size",
        "global_rank",
        "local_rank",
        "dp_world_size",
        "mp_world_size",
        "training",
        "gradient_average",
        "warn_unscaled_loss",
        "loaded_checkpoint_mp_world_size",
        "loaded_checkpoint_dp_world_size",
        "has_moe_layers",
        "enable_backward_allreduce",
    ]
    found = {name: getattr(engine, name) for name in names}
    return found, engine.config == engine._config._param_dict, str(engine.device), hasattr(engine, "no_such_thing")


@cases_over(ALL)
def the_module_behind(_directory: Path, stage: int) -> Any:
    model = stack()
    model.own = 17
    model.greet = lambda: "hello"
    engine = start(model, config(stage))
    return [
        engine.own, engine.greet(), [name for name, _ in engine.module.named_parameters()],
        [name for name, _ in engine.named_parameters()], len(list(engine.parameters())), len(list(engine.modules())),
        [n for n, _ in engine.named_children()], sorted(engine.state_dict()), sorted(engine.module_state_dict()),
        raised(lambda: engine.nothing),
    ]  # fmt: skip


@cases_over(ALL)
def train_and_eval(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    seen = [engine.training, engine.module.training]
    engine.eval()
    seen += [engine.module.training]
    engine.train()
    return [*seen, engine.training, engine.module.training]


@cases_over(ALL)
def the_optimizers_face(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    train(engine, 1)
    optimizer = engine.optimizer
    return [
        [sorted(set(group) - {"params"})[:3] for group in optimizer.param_groups], len(optimizer.param_groups),
        [group["lr"] for group in optimizer.param_groups], hasattr(optimizer, "state_dict"),
        hasattr(optimizer, "zero_grad"), hasattr(optimizer, "step"), hasattr(optimizer, "load_state_dict"),
        raised(lambda: optimizer.state), [bool(each) for each in (optimizer.param_groups,)],
    ]  # fmt: skip


@case()
def classes_of_optimizers(_directory: Path) -> Any:
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer  # type: ignore[import-not-found]
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # type: ignore[import-not-found]
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer  # type: ignore[import-not-found]
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer  # type: ignore[import-not-found]
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # type: ignore[import-not-found]
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # type: ignore[import-not-found]

    kinds = (
        DeepSpeedOptimizer, ZeROOptimizer, BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer,
        DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer,
    )  # fmt: skip
    out = []
    for stage in (1, 2, 3):
        kept_in_fp32 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        for section in ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, kept_in_fp32):
            engine = start(stack(), config(stage, **section))
            out.append([isinstance(engine.optimizer, kind) for kind in kinds])
    return out


@cases_over({"1": 1, "2": 2, "3": 3})
def attributes_of_zeros_optimizer(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_clipping=0.7))
    train(engine, 1)
    names = [
        "overflow",
        "dynamic_loss_scale",
        "loss_scale",
        "clip_grad",
        "partition_gradients",
        "reduce_scatter",
        "contiguous_gradients",
        "cpu_offload",
        "gradient_accumulation_steps",
        "is_gradient_accumulation_boundary",
    ]
    found = {name: getattr(engine.optimizer, name, "absent") for name in names}
    return {name: value() if callable(value) else value for name, value in found.items()}


@case()
def errors_by_name(_directory: Path) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfigError  # type: ignore[import-not-found]
    from deepspeed.runtime.zero.utils import ZeRORuntimeException  # type: ignore[import-not-found]

    return issubclass(DeepSpeedConfigError, Exception), issubclass(ZeRORuntimeException, Exception)


@case()
def untested_optimizers_are_refused_as(_directory: Path) -> Any:
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    model = stack()
    try:
        start(model, config(2, optimizer=None), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    except ZeRORuntimeException:
        return "ZeRORuntimeException"
    except AssertionError:
        return "AssertionError"
    return "nothing"


@cases_over({"0": 0, "1": 1, "2": 2, "3": 3})
def untested_optimizers_where_none_is_allowed(_directory: Path, stage: int) -> Any:
    def outcome(make: Any, section: Any = None) -> str:
        model = stack()
        given = config(stage, optimizer=section, zero_allow_untested_optimizer=False)
        try:
            start(model, given, **({} if make is None else {"optimizer": make(model.parameters())}))
        except AssertionError:
            return "AssertionError"
        return "nothing"

    def section(name: str) -> Any:
        return {"type": name, "params": {"lr": 0.1} | ({"torch_adam": True} if name == "Adam" else {})}

    made = (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, torch.optim.RMSprop)
    return [
        *(outcome(partial(kind, lr=0.1)) for kind in made),
        *(outcome(None, section(name)) for name in ("Adam", "Adagrad", "SGD")),
    ]


@cases_over(ALL)
def destroyed_twice(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    train(engine, 1)
    engine.destroy()
    engine.destroy()
    return "ended"


@case()
def inference(_directory: Path) -> Any:
    model = stack()
    engine = deepspeed.initialize(model=model, config=config(3, optimizer=None))[0]
    engine.eval()
    x, y = batches(1)[0]
    with torch.no_grad():
        return engine(x, y).item(), engine.module(x, y).item(), model(x, y).item()


@case()
def version(_directory: Path) -> Any:
    return [
        deepspeed.__version__,
        deepspeed.__version_major__,
        deepspeed.__version_minor__,
        deepspeed.__version_patch__,
    ]
