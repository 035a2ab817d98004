"""The configuration as the engine reads it: frozen, keyword-only, every value already checked.

One class per section of the JSON. A key that has no field here is never read by the engine: it is subsumed or refused,
see ``dialect.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from infinity.config.observing import CommsLogger, CsvMonitor, FlopsProfiler, LogLevel, TensorBoard, Timers, Wandb
from infinity.config.optimizer import Optimizer
from infinity.config.schedule import Scheduler
from infinity.config.section import (
    BlockBytes,
    Count,
    Fraction,
    NonEmpty,
    NonNegative,
    PathText,
    Positive,
    QueueDepth,
    Section,
    as_tuple,
    false_is_none,
    lower,
    never_is_zero,
    whole,
)
from io_daemon.config import EngineChoice, resolved

Device = Literal["none", "cpu", "nvme"]

SUB_GROUP_NUMEL_MIN: Final = 16_384
"""The elements that a norm is taken of at once: what is updated together is never less."""
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def _words(value: object) -> object:
    """DeepSpeed takes one name without its list."""
    return (value,) if isinstance(value, str) else as_tuple(value)


def _short(dtype: object) -> object:
    """DeepSpeed takes torch's names of dtypes, too."""
    return _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype


Words = Annotated[tuple[NonEmpty, ...], BeforeValidator(_words)]
DtypeName = Annotated[
    Literal["fp32", "bf16", "fp16"],
    BeforeValidator(_short),
    WithJsonSchema({"enum": ["fp32", "bf16", "fp16", *_DTYPES]}),
]
NarrowDtypeName = Annotated[
    Literal["bf16", "fp16"],
    BeforeValidator(_short),
    WithJsonSchema({"enum": ["bf16", "fp16", "bfloat16", "float16", "half"]}),
]


class Bf16(Section):
    """16-bit weights with fp32 master weights and moments."""

    enabled: bool = False
    check_grad_overflow: bool = False
    """A step whose gradients are not all finite is skipped."""
    bf16_master_weights_and_grads: bool = False
    """There are no fp32 master weights: the weights themselves are stepped. Loses bits."""
    bf16_optimizer_states: bool = False
    """The optimizer's states are bf16, too. Loses bits."""


class Fp16(Section):
    """16-bit weights with fp32 master weights and moments, and a loss scaled so that small gradients survive."""

    enabled: bool = False
    auto_cast: bool = False
    """Floating-point inputs of forward are cast to fp16."""
    loss_scale: NonNegative = 0.0
    """0 = dynamic."""
    initial_scale_power: Annotated[int, Field(ge=0, le=127), BeforeValidator(whole)] = 16
    """The dynamic scale begins at 2 to this power."""
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[float, Field(gt=0)] = 1.0


class TorchAutocast(Section):
    """The engine's forward runs under torch.autocast; weights, gradients and states stay fp32."""

    enabled: bool = False
    dtype: NarrowDtypeName = "bf16"
    """The dtype of what is cast; with fp16 the loss is scaled as by torch.amp.GradScaler."""


class DataTypes(Section):
    param_dtype: DtypeName | None = None
    """dtype of the weights; it only confirms what the sections bf16 and fp16 say."""
    grad_accum_dtype: DtypeName | None = None
    """dtype of the gradients kept until the update; None = the narrowest that loses nothing."""
    buffer_dtype: DtypeName | None = None
    """dtype of floating-point buffers; None = as ``weights/buffers.py`` says."""
    keep_in_fp32_modules: Literal["auto"] | Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = "auto"
    """Patterns of names of buffers that are fp32 in 16-bit training; "auto": the model's own, if it has any."""


class OffloadParam(Section):
    """Where the shards of the weights live between uses."""

    device: Device = "none"
    nvme_path: PathText | None = None
    pin_memory: bool = False
    """The arena is page-locked wherever the memlock limit allows it; true: refuse to run where it is not."""


class OffloadOptimizer(Section):
    """Where the master weights and the moments live between updates."""

    device: Device = "none"
    nvme_path: PathText | None = None
    pin_memory: bool = False
    ratio: Fraction = 1.0
    """The part of the elements whose states leave the device; the others' are stepped there."""


class LeafModule(Section):
    """Modules that are gathered and reduced as one, since the data decides what they call."""

    classes: Words = ()
    """A class's name, plain or with its module's."""
    names: Words = ()
    name_suffixes: Words = ()


class ActivationCheckpointing(Section):
    """How the inputs of calls by ``infinity.checkpointing.checkpoint`` wait for backward."""

    cpu_checkpointing: bool = False
    """They wait in host memory."""
    contiguous_memory_optimization: bool = False
    """They wait in one piece of memory for each shape."""
    number_checkpoints: Annotated[Positive | None, BeforeValidator(false_is_none)] = None
    """How many checkpointed calls a forward has."""
    synchronize_checkpoint_boundary: bool = False
    """The device is waited for at the beginning and end of each call."""
    profile: bool = False
    """The time of each call is logged."""


class ZeroOptimization(Section):
    """Thresholds count elements, not bytes."""

    stage: Annotated[int, Field(ge=0, le=3), BeforeValidator(whole)] = 0
    sub_group_size: Count = 1_000_000_000
    """A smaller one than ``SUB_GROUP_NUMEL_MIN`` is taken as that."""
    reduce_scatter: bool = True
    """False: gradients are all-reduced, and each rank takes its shard of the result."""
    allgather_partitions: bool = True
    """False: below stage 3 updated weights travel in broadcasts, one rank's after the other's."""
    stage3_use_all_reduce_for_fetch_params: bool = False
    """Weights of stage 3 become whole by an all-reduce of what is zero but for each rank's shard."""
    reduce_bucket_size: Count = 500_000_000
    """Elements of whole weights whose gradients are reduced together; a larger parameter is a bucket of its own."""
    stage3_prefetch_bucket_size: Count = 50_000_000
    stage3_param_persistence_threshold: Count = 100_000
    stage3_model_persistence_threshold: Count | None = None
    """Elements of all persistent parameters together; None = any number."""
    stage3_max_live_parameters: Count = 1_000_000_000
    stage3_max_reuse_distance: Count = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    """Whether trainers shall save by taking all weights into rank 0's memory."""
    ignore_unused_parameters: bool = True
    """False: a step in which a trainable parameter has no gradient ends with its name."""
    enable_sanity_checks: bool = False
    """True: what an engine always refuses is refused under ``Init`` already."""
    offload_param: OffloadParam = OffloadParam()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    leaf_module: LeafModule = LeafModule()


class Aio(Section):
    """DeepSpeed's names for two settings of ``io_daemon``; already merged into it."""

    block_size: BlockBytes | None = None
    queue_depth: QueueDepth | None = None


class IoDaemon(Section):
    socket: PathText = "auto"
    """"auto" or the path of the daemon's Unix socket."""
    host_budget_bytes: Positive = 2 << 30
    """Bound on the arenas of all ranks of the job on the node together."""
    swap_dirs: Annotated[tuple[PathText, ...], BeforeValidator(as_tuple)] = ()
    engine: EngineChoice = "auto"
    block_size: BlockBytes | Literal["auto"] = "auto"
    """Bytes per I/O; also the unit of checksums. "auto": what ``io-daemon bench`` found best here, else 512 KiB."""
    queue_depth: QueueDepth | Literal["auto"] = "auto"
    """"auto": what ``io-daemon bench`` found best here, else 32."""
    update_in_backward: bool = False
    """A chunk is updated inside backward, as soon as its gradients are final."""
    update: Literal["on_use", "in_step"] = "on_use"
    """When a chunk is updated: when its weights are next used, or before ``step`` returns."""
    master_weights: Literal["fp32", "split"] = "fp32"
    """How the store has fp32 master weights of bf16 ones: whole, or as what the weight lacks."""
    activation_checkpoints: bool = False
    """Inputs of ``infinity.checkpointing.checkpoint`` wait for backward in the swap files."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How the store has the optimizer's fp32 states: as they are, or rounded."""
    verify_checksums: bool = True
    start: Literal["auto", "never"] = "auto"
    """"auto": local rank 0 starts a private daemon where none is reachable."""


class Config(Section):
    train_batch_size: Positive
    train_micro_batch_size_per_gpu: Positive
    gradient_accumulation_steps: Positive
    managed_gradient_accumulation: bool = True
    """False: every ``step()`` updates, whatever was accumulated before it."""
    gradient_clipping: NonNegative = 0.0
    """Largest global gradient norm; 0 = off."""
    steps_per_print: Annotated[int, Field(ge=0), BeforeValidator(never_is_zero)] = 10
    """0 = never."""
    communication_data_type: DtypeName | None = None
    """dtype of the gradients' reduction; None = the dtype they have."""
    prescale_gradients: bool = False
    """Divide gradients by the number of ranks before they are summed, whatever ``gradient_predivide_factor`` is."""
    gradient_predivide_factor: Annotated[float, Field(gt=0)] = 1.0
    """What gradients are divided by before they are summed, the rest after; 1 = by the number of ranks, as DDP."""
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lower)] = "mean"
    """What gradients become of those of all ranks; a sum is divided by nothing, whatever the two keys above say."""
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    torch_autocast: TorchAutocast = TorchAutocast()
    data_types: DataTypes = DataTypes()
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    zero_optimization: ZeroOptimization = ZeroOptimization()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    wall_clock_breakdown: bool = False
    """Times of forward, backward and update in the log, every ``steps_per_print`` steps."""
    memory_breakdown: bool = False
    """Memory of process, node and device in the log, every ``steps_per_print`` steps."""
    dump_state: bool = False
    """The resolved configuration in the log at ``initialize``."""
    log_level: LogLevel | None = None
    """The level of the loggers ``infinity`` and ``io_daemon`` from ``initialize`` on; None = left as it is."""
    dataloader_drop_last: bool = False
    """Whether the loader of ``training_data`` leaves out a last micro-batch that is not full."""
    tensorboard: TensorBoard = TensorBoard()
    csv_monitor: CsvMonitor = CsvMonitor()
    wandb: Wandb = Wandb()
    flops_profiler: FlopsProfiler = FlopsProfiler()
    comms_logger: CommsLogger = CommsLogger()
    timers: Timers = Timers()
    aio: Aio = Aio()
    io_daemon: IoDaemon = IoDaemon()
    subsumed: tuple[str, ...] = ()
    """Dotted paths of the keys that were given and that the engine needs no setting for."""
    old_names: tuple[str, ...] = ()
    """A sentence for each old spelling that was met, with what to write instead."""

    @property
    def offloads(self) -> bool:
        """Whether any shard leaves the device."""
        zero = self.zero_optimization
        return zero.offload_param.device != "none" or zero.offload_optimizer.device != "none"

    @property
    def needs_daemon(self) -> bool:
        """Whether shards, or inputs of checkpointed calls, leave the device."""
        return self.offloads or self.io_daemon.activation_checkpoints

    @property
    def scales_as_torch(self) -> bool:
        """Whether the loss is scaled as torch.amp.GradScaler does."""
        return self.torch_autocast.enabled and self.torch_autocast.dtype == "fp16"

    @property
    def accumulates(self) -> bool:
        """Whether an update may be of several micro-batches."""
        return self.gradient_accumulation_steps > 1 or not self.managed_gradient_accumulation

    @property
    def pin_memory(self) -> bool:
        zero = self.zero_optimization
        return zero.offload_param.pin_memory or zero.offload_optimizer.pin_memory

    @property
    def swap_dirs(self) -> tuple[Path, ...]:
        """Every directory that swap files may be put in, links resolved, in the order written, each once. Raises
        ConfigError where the working directory is gone."""
        return tuple(dict.fromkeys(resolved(Path(text), key) for key, text in self.swap_dir_keys()))

    def swap_dir_keys(self) -> list[tuple[str, str]]:
        """(dotted key, path as written) of each swap directory."""
        keys = [(key, path) for key, device, path in self._nvme_paths() if device == "nvme"]
        return keys + [(f"io_daemon.swap_dirs.{i}", path) for i, path in enumerate(self.io_daemon.swap_dirs)]

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell the writer once: old names, and what is not taken as it was written."""
        unused = (
            f"{key} = {path!r} is not used: device is {device}"
            for key, device, path in self._nvme_paths()
            if device != "nvme"
        )
        return (*self.old_names, *unused, *self._taken_as_another())

    def _taken_as_another(self) -> Iterator[str]:
        zero = self.zero_optimization
        if zero.sub_group_size < SUB_GROUP_NUMEL_MIN:
            taken = f"is taken as {SUB_GROUP_NUMEL_MIN}, the least that works"
            yield f"zero_optimization.sub_group_size = {zero.sub_group_size} {taken}"
        states = zero.offload_optimizer
        if states.ratio < 1 and states.device == "none":
            yield f"zero_optimization.offload_optimizer.ratio = {states.ratio} is not used: device is none"

    def _nvme_paths(self) -> list[tuple[str, str, str]]:
        """(dotted key, device beside it, path as written) of those that are written."""
        zero = self.zero_optimization
        sections: dict[str, OffloadParam | OffloadOptimizer] = {
            "offload_param": zero.offload_param,
            "offload_optimizer": zero.offload_optimizer,
        }
        return [
            (f"zero_optimization.{name}.nvme_path", section.device, section.nvme_path)
            for name, section in sections.items()
            if section.nvme_path is not None
        ]
