"""Every key of the DeepSpeed dialect, in exactly one class: works, subsumed or refused.

The only place that knows which keys exist. ``parse.py`` checks a user's JSON against it, ``infinity config keys``
prints it, and a test holds it against the fields of ``sections.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from io_daemon.config import EngineChoice


class Standing(Enum):
    WORKS = "works"
    SUBSUMED = "subsumed"
    """Accepted: the engine always does so, or has no such limit."""
    REFUSED = "refused"
    """A ConfigError, but for the values that switch it off."""


Shape = Literal["boolean", "whole number", "number", "string", "object", "any"]


@dataclass(frozen=True, kw_only=True)
class Key:
    path: str
    """Dotted, from the top of the JSON."""
    standing: Standing
    note: str
    """What it does, or why it is subsumed or refused."""
    remedy: str = ""
    """What to write instead of a refused value."""
    accepts: tuple[object, ...] | None = None
    """The only values that pass; None = no restriction."""
    shape: Shape = "any"
    """Checked here for subsumed keys only: fields that work are checked by their section's class."""
    switch: str = ""
    """For a refused section: the key inside it that turns it on. Absent or false, the section passes, whatever else
    it holds."""
    auto: Literal["refused", "default", "value"] = "refused"
    """What "auto" means: an error, the key's default, or a value like any other."""


def _works(
    path: str,
    note: str,
    *,
    accepts: tuple[object, ...] | None = None,
    remedy: str = "",
    auto: Literal["refused", "default", "value"] = "refused",
) -> Key:
    return Key(path=path, standing=Standing.WORKS, note=note, accepts=accepts, remedy=remedy, auto=auto)


def _subsumed(path: str, shape: Shape, why: str) -> Key:
    return Key(path=path, standing=Standing.SUBSUMED, note=why, shape=shape, auto="default")


def _refused(path: str, why: str, remedy: str, *, accepts: tuple[object, ...] = (), switch: str = "") -> Key:
    return Key(path=path, standing=Standing.REFUSED, note=why, remedy=remedy, accepts=accepts, switch=switch)


_BATCH = "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size"
_ONLY_ZERO3 = "the engine runs stage 3; stages 0, 1 and 2 are not built yet"
_NO_COLLECTIVE_BUCKETS = "parameters and gradients communicate per param group, so there is no bucket to size"
_FP16_ONLY = "acts on fp16 only, which is off"
_FRAMES = "the arena is made of equal frames within io_daemon.host_budget_bytes"
_REPORT = "engine.io_report() gives bytes, hit rates, stalls and bandwidth of the last step"

_TOP = (
    _works("train_batch_size", _BATCH, auto="default"),
    _works("train_micro_batch_size_per_gpu", _BATCH, auto="default"),
    _works("gradient_accumulation_steps", _BATCH, auto="default"),
    _works("gradient_clipping", "largest global gradient norm, 0 = off"),
    _works("steps_per_print", "optimizer steps between progress lines, 0 or Infinity = never", auto="default"),
    _works("communication_data_type", "dtype of the gradients' reduce-scatter: fp32 or bf16"),
    _refused(
        "seq_parallel_communication_data_type", "there is no sequence parallelism", "remove it", accepts=("fp32",)
    ),
    _refused("prescale_gradients", "gradients are averaged by the reduce-scatter", "write false", accepts=(False,)),
    _refused("gradient_predivide_factor", "gradients are averaged by the reduce-scatter", "write 1.0", accepts=(1.0,)),
    _refused("gradient_allreduce_op", "gradients are averaged over ranks", 'write "mean"', accepts=("mean",)),
    _refused("sparse_gradients", "embedding gradients are dense", "write false", accepts=(False,)),
    _refused("disable_allgather", "stage 3 cannot do without all-gather", "write false", accepts=(False,)),
    _refused("managed_gradient_accumulation", "the engine counts micro-batches", "write true", accepts=(True,)),
    _refused("wall_clock_breakdown", _REPORT, "write false and read engine.io_report()", accepts=(False,)),
    _refused("memory_breakdown", _REPORT, "write false and read engine.io_report()", accepts=(False,)),
    _refused("dump_state", _REPORT, "write false and read engine.io_report()", accepts=(False,)),
    _refused("log_level", "levels are set through Python's logging", "use logging.getLogger('infinity')"),
    _refused("disable_python_gc", "the collector is the caller's", "call gc.disable() yourself", accepts=(False,)),
    _refused("dataloader_drop_last", "every sample is served", "write false", accepts=(False,)),
    _subsumed("zero_allow_untested_optimizer", "boolean", "an optimizer is served or refused by name at initialize"),
    _subsumed("zero_force_ds_cpu_optimizer", "boolean", "torch's fused implementation runs on every device"),
    _works("bf16.enabled", "16-bit weights with fp32 master weights and moments"),
    _subsumed("bf16.immediate_grad_update", "boolean", "gradients are added to the accumulator as each is produced"),
    _refused("bf16.check_grad_overflow", "bf16 gradients are not scanned", "write false", accepts=(False,)),
    _refused("bf16.bf16_master_weights_and_grads", "master weights are fp32", "write false", accepts=(False,)),
    _refused("bf16.bf16_optimizer_states", "moments are fp32", "write false", accepts=(False,)),
    _refused("bfloat16", "is an old name", "write bf16"),
    _refused("fp16.enabled", "fp16 is not built yet", "write bf16: {enabled: true}, or fp32", accepts=(False,)),
    *(_subsumed(f"fp16.{name}", "number", _FP16_ONLY) for name in ("loss_scale", "min_loss_scale")),
    *(
        _subsumed(f"fp16.{name}", "whole number", _FP16_ONLY)
        for name in ("initial_scale_power", "loss_scale_window", "hysteresis")
    ),
    *(
        _subsumed(f"fp16.{name}", "boolean", _FP16_ONLY)
        for name in ("auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads")
    ),
    _refused(
        "data_types.grad_accum_dtype", "gradients accumulate in fp32", 'write "fp32"', accepts=("fp32", "float32")
    ),
    _refused("data_types.param_dtype", "bf16.enabled decides", "remove it"),
    _refused("data_types.buffer_dtype", "floating buffers take the weights' dtype", "remove it"),
    _refused("data_types.keep_in_fp32_modules", "one dtype for all weights", "remove it"),
)

_OPTIMIZER = (
    _works("optimizer.type", "Adam or AdamW, in any case; Adam means AdamW unless adam_w_mode is false"),
    _works("optimizer.params.lr", "learning rate"),
    _works("optimizer.params.betas", "decay of the two moments"),
    _works("optimizer.params.eps", "added to the denominator"),
    _works("optimizer.params.weight_decay", "weight decay"),
    _works("optimizer.params.adam_w_mode", "false: Adam adds weight decay to the gradient (L2)"),
    _subsumed("optimizer.params.torch_adam", "boolean", "torch's own implementation always runs"),
    _refused("optimizer.params.bias_correction", "moments are always corrected", "write true", accepts=(True,)),
    _refused("optimizer.params.amsgrad", "AMSGrad keeps a third moment", "write false", accepts=(False,)),
    _refused("optimizer.params.fp32_optimizer_states", "moments are fp32", "write true", accepts=(True,)),
    _refused("optimizer.params.max_grad_norm", "clipping is global", "write gradient_clipping at the top"),
    _refused("optimizer.legacy_fusion", "there is one implementation", "write false", accepts=(False,)),
)

_SCHEDULER = (
    _works("scheduler.type", "WarmupLR, WarmupDecayLR or WarmupCosineLR"),
    _works("scheduler.params.total_num_steps", "optimizer steps until the end of the decay"),
    _works("scheduler.params.warmup_min_lr", "learning rate at the start"),
    _works("scheduler.params.warmup_max_lr", "learning rate after the warm-up"),
    _works("scheduler.params.warmup_min_ratio", "WarmupCosineLR: start, as a ratio of the optimizer's rate"),
    _works("scheduler.params.cos_min_ratio", "WarmupCosineLR: end, as a ratio of the optimizer's rate"),
    _works("scheduler.params.warmup_num_steps", "optimizer steps of warm-up"),
    _works("scheduler.params.warmup_type", "log or linear"),
    _refused("scheduler.params.last_batch_iteration", "a schedule begins with its engine", "write -1", accepts=(-1,)),
)

_PINNED = "refuse to run where the arena cannot be page-locked"
_ZERO = (
    _works(
        "zero_optimization.stage",
        _ONLY_ZERO3,
        accepts=(3,),
        remedy="write 3 (without the key the stage is 0, as in DeepSpeed)",
    ),
    *(
        _works(f"zero_optimization.{name}", note, auto="default")
        for name, note in (
            ("sub_group_size", "largest number of elements updated at once, at least 16384"),
            ("stage3_prefetch_bucket_size", "elements gathered ahead of use"),
            ("stage3_param_persistence_threshold", "smaller parameters are never resharded"),
            ("stage3_max_live_parameters", "elements unsharded at once; gates prefetch and retention"),
            ("stage3_max_reuse_distance", "keep what is used again within so many elements"),
        )
    ),
    *(
        _works(f"zero_optimization.{section}.{name}", note)
        for section in ("offload_param", "offload_optimizer")
        for name, note in (
            ("device", "none, cpu or nvme"),
            ("nvme_path", "directory of swap files"),
            ("pin_memory", _PINNED),
        )
    ),
    *(
        _subsumed(f"zero_optimization.{name}", "boolean", why)
        for name, why in (
            ("contiguous_gradients", "gradients lie contiguously in their chunks"),
            ("reduce_scatter", "gradients are always reduce-scattered"),
            ("allgather_partitions", "shards are always all-gathered"),
            ("overlap_comm", "communication always overlaps with compute where the device has streams"),
            ("round_robin_gradients", "shards of gradients are equal by construction"),
            ("ignore_unused_parameters", "unused parameters are found by an all-reduced bitmap"),
            ("use_multi_rank_bucket_allreduce", _NO_COLLECTIVE_BUCKETS),
            ("parameter_alignment", "shards are always cut at multiples of 64 elements"),
            ("compute_grad_norm", "the norm is computed where gradient_clipping asks for it"),
            ("memory_efficient_linear", "autograd never holds a gathered copy of a weight"),
            ("enable_sanity_checks", "state transitions are always checked"),
            ("stage3_gather_16bit_weights_on_model_save", "full_state_dict() gathers whenever it is called"),
            ("offload_optimizer.pipeline_read", "reads always run ahead of the update"),
            ("offload_optimizer.pipeline_write", "writes always run behind the update"),
            ("offload_optimizer.fast_init", "moments are born zero and not written before the first update"),
        )
    ),
    *(
        _subsumed(f"zero_optimization.{name}", "whole number", why)
        for name, why in (
            ("reduce_bucket_size", _NO_COLLECTIVE_BUCKETS),
            ("allgather_bucket_size", _NO_COLLECTIVE_BUCKETS),
            ("offload_param.buffer_count", _FRAMES),
            ("offload_param.buffer_size", _FRAMES),
            ("offload_param.max_in_cpu", "what stays in memory is planned within host_budget_bytes"),
            ("offload_optimizer.buffer_count", _FRAMES),
        )
    ),
)

_ZERO_REFUSED = tuple(
    _refused(f"zero_optimization.{name}", why, remedy, accepts=accepts)
    for name, why, remedy, accepts in (
        ("offload_optimizer.ratio", "the whole update runs where its chunks are", "write 1.0", (1.0,)),
        ("offload_optimizer.super_offload", "SuperOffload is not built", "write false", (False,)),
        ("offload_optimizer.cpuadam_cores_perc", "belongs to SuperOffload", "call torch.set_num_threads()", ()),
        ("cpu_offload", "is an old name", "write offload_optimizer: {device: cpu}", (False,)),
        ("cpu_offload_param", "is an old name", "write offload_param: {device: cpu}", (False,)),
        ("cpu_offload_params", "is an old name", "write offload_param: {device: cpu}", (False,)),
        ("cpu_offload_use_pin_memory", "is an old name", "write pin_memory in offload_*", (False,)),
        (
            "stage3_gather_fp16_weights_on_model_save",
            "is an old name",
            "write stage3_gather_16bit_weights_on_model_save",
            (False,),
        ),
        (
            "stage3_model_persistence_threshold",
            "persistent parameters are bounded one by one",
            "lower stage3_param_persistence_threshold",
            (),
        ),
        ("stage3_module_granularity_threshold", "param groups follow the modules", "write 0", (0,)),
        ("stage3_use_all_reduce_for_fetch_params", "parameters are all-gathered", "write false", (False,)),
        ("stage3_allgather_sequential", "parameters are gathered per param group", "write false", (False,)),
        ("leaf_module", "param groups follow the modules", "remove it", ()),
        ("override_module_apply", "Module.apply is left as it is", "initialise in constructors", (False,)),
        ("pipeline_loading_checkpoint", "there is no pipeline parallelism", "write false", (False,)),
        ("log_trace_cache_warnings", _REPORT, "write false", (False,)),
        ("save_muon_momentum_buffer_in_memory", "Muon is not built", "write false", (False,)),
        ("load_from_fp32_weights", "checkpoints are not built yet", "remove it", (True,)),
        ("elastic_checkpoint", "checkpoints are not built yet", "write false", (False,)),
        ("legacy_stage1", _ONLY_ZERO3, "write false", (False,)),
        ("zero_hpz_partition_size", "ZeRO++ is not built", "write 1", (1,)),
        ("zero_quantized_weights", "communication is exact", "write false", (False,)),
        ("zero_quantized_nontrainable_weights", "communication is exact", "write false", (False,)),
        ("zero_quantized_gradients", "communication is exact", "write false", (False,)),
        ("zeropp_loco_param", "communication is exact", "remove it", ()),
        ("mics_shard_size", "MiCS is not built: parameters are sharded over all ranks", "write -1", (-1,)),
        ("mics_hierarchical_params_gather", "MiCS is not built", "write false", (False,)),
        ("zenflow", "ZenFlow changes the result", "remove it", ()),
    )
)

_AIO = (
    _works("aio.block_size", "the same as io_daemon.block_size"),
    _works("aio.queue_depth", "the same as io_daemon.queue_depth"),
    _subsumed("aio.intra_op_parallelism", "whole number", "one I/O thread holds the whole queue depth"),
    _subsumed("aio.thread_count", "whole number", "one I/O thread holds the whole queue depth"),
    _subsumed("aio.single_submit", "boolean", "requests are submitted in batches"),
    _subsumed("aio.overlap_events", "boolean", "completions are reaped while others are submitted"),
    _refused("aio.use_gds", "GPUDirect Storage is not built yet", "write false", accepts=(False,)),
)

_IO_DAEMON = (
    _works("io_daemon.socket", '"auto" ($INFINITY_IO_SOCKET, then the per-user socket) or a path', auto="value"),
    _works("io_daemon.host_budget_bytes", "bound on the arenas of all ranks of the job on the node"),
    _works("io_daemon.swap_dirs", "directories of swap files, besides nvme_path"),
    _works(
        "io_daemon.engine",
        " or ".join(f'"{choice}"' for choice in get_args(EngineChoice)) + "; a running daemon keeps its own",
        auto="value",
    ),
    _works(
        "io_daemon.block_size",
        'bytes per I/O and checksum, a multiple of 4096, or "auto": what `io-daemon bench` found best on this machine; '
        "a running daemon keeps its own",
        auto="value",
    ),
    _works(
        "io_daemon.queue_depth",
        'I/Os in flight per engine, or "auto": as block_size; a running daemon keeps its own',
        auto="value",
    ),
    _refused(
        "io_daemon.commit_every_n_steps",
        "durable commits are not built yet: a job that dies starts anew",
        "write 0",
        accepts=(0,),
    ),
    _refused(
        "io_daemon.update_in_backward",
        "the update inside backward is not built yet; it runs after backward",
        "write false",
        accepts=(False,),
    ),
    _works("io_daemon.verify_checksums", "check every block that is read back; a running daemon keeps its own"),
    _works("io_daemon.start", '"auto": start a private daemon where none is reachable; "never"', auto="value"),
)

_CHECKPOINTING = "activation checkpointing is torch's"
_OTHERS = (
    *(
        _refused(f"activation_checkpointing.{name}", _CHECKPOINTING, "use torch.utils.checkpoint", accepts=(False,))
        for name in (
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    ),
    _refused("activation_checkpointing.number_checkpoints", _CHECKPOINTING, "use torch.utils.checkpoint"),
    _refused("checkpoint", "checkpoints are not built yet", "remove the section"),
    _refused("compile", "DeepCompile is not built", "write deepcompile: false", switch="deepcompile"),
    *(
        _refused(name, why, "remove the section", switch="enabled")
        for name, why in (
            ("amp", "apex is not used"),
            ("torch_autocast", "bf16.enabled decides the dtype"),
            ("autotuning", "there is no autotuner"),
            ("comms_logger", "there is no communication log"),
            ("compression_scheduler", "compression is not built"),
            ("curriculum_learning", "data is the caller's"),
            ("data_efficiency", "data is the caller's"),
            ("eigenvalue", "quantisation is not built"),
            ("elasticity", "the world size is fixed"),
            ("expert_parallel", "there is no expert parallelism"),
            ("flops_profiler", "use torch.profiler"),
            ("hybrid_engine", "there is no inference engine"),
            ("nebula", "checkpoints are not built yet"),
            ("progressive_layer_drop", "the model is the caller's"),
            ("quantize_training", "quantisation is not built"),
            ("tensorboard", "there is no monitor; log engine.io_report()"),
            ("wandb", "there is no monitor; log engine.io_report()"),
            ("csv_monitor", "there is no monitor; log engine.io_report()"),
            ("comet", "there is no monitor; log engine.io_report()"),
        )
    ),
    *(
        _refused(name, why, "remove it")
        for name, why in (
            ("compression_training", "compression is not built"),
            ("datastates_ckpt", "checkpoints are not built yet"),
            ("pipeline", "there is no pipeline parallelism"),
            ("sparse_attention", "the model is the caller's"),
            ("tensor_parallel", "there is no tensor parallelism"),
            ("timers", "engine.io_report() holds the times"),
            ("weight_quantization_config", "quantisation is not built"),
        )
    ),
    _refused("use_data_before_expert_parallelism", "there is no expert parallelism", "write false", accepts=(False,)),
    _refused("graph_harvesting", "CUDA graphs are not built", "write false", accepts=(False,)),
)

KEYS: tuple[Key, ...] = (
    *_TOP,
    *_OPTIMIZER,
    *_SCHEDULER,
    *_ZERO,
    *_ZERO_REFUSED,
    *_AIO,
    *_IO_DAEMON,
    *_OTHERS,
)
BY_PATH: dict[str, Key] = {key.path: key for key in KEYS}
if len(BY_PATH) != len(KEYS):
    raise ImportError("a key stands twice in the dialect")
SECTIONS: frozenset[str] = frozenset(
    ".".join(parts[:depth]) for key in KEYS for parts in [key.path.split(".")] for depth in range(1, len(parts))
)
"""Paths that hold other keys."""
