"""``initialize`` and its kin, with DeepSpeed's arguments."""

from __future__ import annotations

import argparse
import importlib
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from infinity.deepspeed import optimizer_kinds
from infinity.deepspeed.asserted import asserted
from infinity.deepspeed.config_classes import CLIPPING, optimizer_name
from infinity.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from infinity.deepspeed.distributed import init_distributed, refuse_uncounted_ranks
from infinity.deepspeed.experts import is_moe_param
from infinity.deepspeed.model_dtypes import as_given, cast, sections_for
from infinity.deepspeed.model_parallel import refuse_split
from infinity.deepspeed.optimizers import TESTED_TYPES, DeepSpeedCPUAdam, is_zero_supported_optimizer
from infinity.deepspeed.raw_config import idle_offload, raw_config, section_of, stage_of, without_idle_offload
from infinity.deepspeed.swap_dirs import make_swap_dirs
from infinity.deepspeed.training_engine import DeepSpeedEngine
from infinity.entry import initialize as initialize_engine
from infinity.errors import ConfigError
from infinity.plan.registered import named_parameters
from infinity.update.optimizer import ShardedOptimizer
from infinity.update.schedules import SCHEDULES

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], LRScheduler]
Initialized = tuple[DeepSpeedEngine, ShardedOptimizer | None, "DataLoader[Any] | None", Any]

_log = logging.getLogger(__name__)
_engines: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()
"""Those that are alive: one whose model gets another engine ends."""
FLAG: Final = "use the engine (for the script itself)"
_DTYPES: Final = {
    torch.float16: "fp16", torch.half: "fp16", "fp16": "fp16", "half": "fp16", "float16": "fp16",
    torch.bfloat16: "bf16", "bf16": "bf16", "bfloat16": "bf16",
    torch.float32: None, "fp32": None, "float": None, "float32": None, None: None,
}  # fmt: skip
_NOT_SERVED: Final[Mapping[str, str]] = {
    name: why
    for names, why in (
        (
            "tensor_parallel tp mp_size training_mp_size",
            "there is no tensor parallelism: weights are sharded over all ranks, leave it out",
        ),
        (
            (
                "replace_with_kernel_inject kernel_inject injection_policy injection_policy_tuple injection_dict "
                "use_triton"
            ),
            "the model's own modules run as they are: leave it out",
        ),
        ("enable_cuda_graph", "weights come and go, which no graph can hold: leave it out"),
        ("moe ep_size", "there is no expert parallelism: leave it out"),
        ("quant", "quantisation is not built: leave it out"),
        (
            "checkpoint checkpoint_config ckpt_config base_dir",
            "load weights before: infinity.load_pretrained(model, path)",
        ),
        ("save_mp_checkpoint_path", "there is no tensor parallelism: save by engine.save_16bit_model()"),
    )
    for name in names.split()
}
_OF_REPLACED_LAYERS: Final = frozenset({
    "replace_method", "triangular_masking", "tm", "return_tuple", "max_out_tokens", "max_tokens", "min_out_tokens",
    "min_tokens", "transposed_mode", "triton_autotune", "keep_module_on_host", "set_empty_params",
})  # fmt: skip
"""Options of inference that say how layers of DeepSpeed's own run; there are none, so that they mean nothing."""
_MUPS: Final = {name.lower(): name for name in ("MuAdam", "MuAdamW", "MuSGD")}


@asserted
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | DeepSpeedOptimizerCallable | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Initialized:
    """``infinity.initialize`` with DeepSpeed's arguments.

    An optimizer or a schedule that is passed goes before the configuration's. Without either of them the engine
    evaluates and generates, and trains nothing.

    Args:
        args: what a script's parser gave; ``deepspeed_config`` is the path of a configuration, and ``local_rank``, if
            there is one, is set to this rank's: torchrun gives no such argument.
        model: the model, built plainly or under ``zero.Init``. One that an engine from here already has goes over to
            the new engine, with the weights that it has now; the old one ends.
        optimizer: a torch optimizer, or a function from parameters to one.
        model_parameters: what the configuration's optimizer, or that function, gets; by default all that train.
        training_data: a dataset, to get a loader of micro-batches back.
        lr_scheduler: a scheduler on ``optimizer``, or a function from the engine's optimizer to one.
        distributed_port: where ranks meet if MASTER_PORT is not set.
        mpu: an object of Megatron's kind by which every rank has the whole model; any other is refused.
        dist_init_required: False: torch.distributed is not started here.
        collate_fn: makes a micro-batch of its samples.
        config: a dict or a path, DeepSpeed's JSON.
        mesh_param: refused: there is no sequence parallelism.
        config_params: an old name of ``config``.

    Returns:
        engine, optimizer or None, data loader or None, scheduler or None.

    Raises:
        ConfigError: with key, value and remedy of what cannot work.
    """
    if model is None:
        raise ConfigError("model", None, "pass the module to train")
    if mesh_param is not None:
        raise ConfigError("mesh_param", mesh_param, "there is no sequence parallelism: leave it out")
    for name, param in named_parameters(model):
        if is_moe_param(param):
            remedy = "there is no expert parallelism: every rank has every expert, leave allreduce=False out"
            raise ConfigError(f"{name}.allreduce", False, remedy)
    raw = raw_config(config, args, config_params)
    for key, value in idle_offload(raw).items():
        _log.warning("zero_optimization.%s = %r: weights stay whole below stage 3: write stage 3", key, value)
    taken = without_idle_offload(raw)
    make_swap_dirs(taken)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    refuse_split(mpu)
    refuse_uncounted_ranks()
    for former in [each for each in _engines if each.holds(model)]:
        _log.info("the model goes over from an engine that it had")
        former.destroy()
    cast(model, raw)
    added = sections_for(model, raw)
    with_schedule = {"gradient_clipping": CLIPPING, **taken, **added}
    if optimizer is not None and section_of(raw, "optimizer"):
        _log.info("the optimizer that was passed goes before the configuration's section")
        with_schedule.pop("optimizer")
    elif optimizer is None and (mups := _mups_optimizer(section_of(raw, "optimizer"))) is not None:
        optimizer = mups
        with_schedule.pop("optimizer")
    if lr_scheduler is not None and section_of(raw, "scheduler"):
        _log.info("the scheduler that was passed goes before the configuration's section")
        with_schedule.pop("scheduler")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        optimizer = _made(optimizer, model, model_parameters)
    _refuse_untested(raw, optimizer)
    _refuse_other_than_cpu_adam(raw, optimizer)
    if optimizer is None:
        _refuse_clipped_muon(raw)
    if lr_scheduler is None and (torchs := _torchs_scheduler(section_of(raw, "scheduler"))) is not None:
        lr_scheduler = torchs
        with_schedule.pop("scheduler")
    if not section_of(raw, "optimizer"):
        with_schedule.pop("optimizer", None)
    engine, made, loader, schedule = initialize_engine(
        model=model,
        config=with_schedule,
        model_parameters=None if optimizer is not None else model_parameters,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        engine_class=DeepSpeedEngine,
        may_lack_optimizer=True,
    )
    if not isinstance(engine, DeepSpeedEngine):
        raise AssertionError("another engine than asked for")
    engine.speak(raw, added)
    engine.mpu = mpu
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank
    if made is not None:
        optimizer_kinds.speak(made, engine, as_given(engine.settings, raw, added))
    _engines.add(engine)
    return engine, made, loader, schedule


def _refuse_untested(raw: Mapping[str, Any], optimizer: Optimizer | None) -> None:
    """What ``zero_allow_untested_optimizer: false`` asks for. Without the key nobody asks, and any that can be sharded
    is taken."""
    key, name = "zero_allow_untested_optimizer", section_of(raw, "optimizer").get("type")
    if raw.get(key) is not False or not stage_of(raw):
        return
    if optimizer is not None:
        tested, name = is_zero_supported_optimizer(optimizer), type(optimizer).__name__
    else:
        tested = name is None or str(name).lower() in TESTED_TYPES
    if not tested:
        raise ConfigError(key, False, f"DeepSpeed does not list {name} as tested: write true, or leave the key out")


def _refuse_other_than_cpu_adam(raw: Mapping[str, Any], optimizer: Optimizer | None) -> None:
    """What ``zero_force_ds_cpu_optimizer: true`` asks for where states are offloaded. Without the key nobody asks."""
    key, offload = "zero_force_ds_cpu_optimizer", section_of(section_of(raw, "zero_optimization"), "offload_optimizer")
    asks = raw.get(key) is True and offload.get("device", "none") != "none" and stage_of(raw)
    if asks and optimizer is not None and not isinstance(optimizer, DeepSpeedCPUAdam):
        name = type(optimizer).__name__
        raise ConfigError(key, True, f"{name} is no DeepSpeedCPUAdam: write false, or leave the key out")


def _refuse_clipped_muon(raw: Mapping[str, Any]) -> None:
    """ZeRO clips what Muon has made of the gradients, whose norm is the root of all matrices' ranks: a rate that was
    found with it would be many times too high for one whose gradients are clipped."""
    key = "gradient_clipping"
    if stage_of(raw) and raw.get(key, CLIPPING) and optimizer_name(raw) == "muon":
        raise ConfigError(
            key,
            raw.get(key),
            f"by it, {CLIPPING} where it is not written, DeepSpeed's ZeRO clips what Muon has made of the gradients: "
            "write 0.0, and divide muon_lr by the engine.get_global_grad_norm() of a run there; infinity.initialize() "
            "clips the gradients",
        )


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Print what ``comms_logger`` has counted on rank 0, of every engine that there is.

    Raises:
        ConfigError: ``show_straggler`` or ``return_dict`` is asked for.
    """
    for name, value in (("show_straggler", show_straggler), ("return_dict", return_dict)):
        if value:
            raise ConfigError(name, value, "engine.comms_summary() has this rank's table, as text")
    for engine in _engines:
        if engine.global_rank == 0:
            print(engine.comms_summary(), flush=True)


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> DeepSpeedEngine:
    """An engine that generates and evaluates from sharded weights, which may lie on NVMe.

    Args:
        model: built plainly or under ``zero.Init``.
        config: DeepSpeed's options of inference, of which ``zero`` (the section ``zero_optimization``, stage 3) and
            ``dtype`` mean something here, and how replaced layers would run means nothing; a whole training
            configuration is taken, too. Where neither says in which dtype, it is fp16, as DeepSpeed's.
        kwargs: the same options.

    Returns:
        The engine; ``engine.module`` is the model, and ``engine.generate`` its own.

    Raises:
        ConfigError: an option of what is not built.
    """
    options = {**(raw_config(config) if config is not None else {}), **kwargs}
    for name, why in _NOT_SERVED.items():
        value = options.pop(name, None)
        if value is True or (value not in (None, False, 1, "", {}, {"enabled": False}) and not _is_of_one(value)):
            raise ConfigError(name, value, why)
    refuse_split(options.pop("mpu", None))
    raw = {name: value for name, value in options.items() if name not in {"zero", "dtype", *_OF_REPLACED_LAYERS}}
    dtype = options.get("dtype", None if options.keys() & {"bf16", "bfloat16", "fp16"} else torch.float16)
    if dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, "weights are fp32, bf16 or fp16")
    if (section := _DTYPES[dtype]) is not None:
        raw[section] = {"enabled": True}
    raw["zero_optimization"] = options.get("zero") or raw.get("zero_optimization") or {"stage": 3}
    raw.setdefault("train_micro_batch_size_per_gpu", 1)
    for name in ("optimizer", "scheduler"):
        raw.pop(name, None)
    engine, _, _, _ = initialize(model=model, config=raw)
    return engine.eval()


def _is_of_one(value: Any) -> bool:
    """Whether a section of tensor parallelism says that each rank has whole layers."""
    return isinstance(value, Mapping) and value.keys() <= {"tp_size", "enabled"} and value.get("tp_size", 1) == 1


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag for the script's own use) and ``--deepspeed_config FILE``, and their old names."""
    group = parser.add_argument_group("DeepSpeed", "the engine's configuration")
    for name, old in (("deepspeed", False), ("deepscale", True)):
        flag, file = ("old name of --deepspeed", "old name of --deepspeed_config") if old else (FLAG, "the JSON file")
        group.add_argument(f"--{name}", action="store_true", help=flag)
        group.add_argument(f"--{name}_config", type=str, help=file)
    return parser


def _torchs_scheduler(section: Mapping[str, Any]) -> DeepSpeedSchedulerCallable | None:
    """What makes the scheduler of a section that names one of torch's."""
    name = section.get("type")
    kind = getattr(torch.optim.lr_scheduler, name, None) if isinstance(name, str) and name not in SCHEDULES else None
    if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
        return None
    return partial(kind, **(section.get("params") or {}))


def _mups_optimizer(section: Mapping[str, Any]) -> DeepSpeedOptimizerCallable | None:
    """What makes the optimizer of a section that names one of the package mup's, one of torch's over rates by width."""
    name = _MUPS.get(str(section.get("type")).lower())
    if name is None:
        return None
    try:
        mup = importlib.import_module("mup")
    except ImportError as error:
        raise ConfigError("optimizer.type", section["type"], "the package mup is not here: pip install mup") from error
    return partial(getattr(mup, name), **(section.get("params") or {}))


def _made(make: DeepSpeedOptimizerCallable, model: nn.Module, model_parameters: Iterable[Any] | None) -> Optimizer:
    params = list(model_parameters) if model_parameters is not None else list(model.parameters())
    if params and not isinstance(params[0], dict):
        params = [param for param in params if param.requires_grad]
    made = make(params)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            "optimizer", type(made).__name__, "is what the function returned: it must return an optimizer"
        )
    return made
