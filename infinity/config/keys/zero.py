"""``zero_optimization``."""

from __future__ import annotations

from infinity.config.keys.key import refused, subsumed, works

_NO_COLLECTIVE_BUCKETS = "weights travel in the param groups, or reduce_bucket_size's buckets, of their gradients"
_FRAMES = "the arena is made of equal frames within io_daemon.host_budget_bytes"
_PINNED = "refuse to run where the arena cannot be page-locked"

STAGE = (
    works(
        "zero_optimization.stage",
        "3: weights, gradients and states are sharded; 2: weights stay whole; 1: gradients, too, and they are reduced "
        "once a step; 0 (without the key, as in DeepSpeed): everything is whole, and every rank updates everything",
    ),
)
THRESHOLDS = tuple(
    works(f"zero_optimization.{name}", note, auto="default")
    for name, note in (
        ("sub_group_size", "largest number of elements updated at once; 16384 where it says less"),
        ("reduce_bucket_size", "elements of whole weights whose gradients are reduced together"),
        ("stage3_prefetch_bucket_size", "elements gathered ahead of use"),
        ("stage3_param_persistence_threshold", "smaller parameters are never resharded"),
        ("stage3_model_persistence_threshold", "elements of all that is never resharded; what comes first stays"),
        ("stage3_max_live_parameters", "elements unsharded at once; gates prefetch, and keeping weights and gradients"),
        ("stage3_max_reuse_distance", "keep what is used again within so many elements"),
    )
)
OFFLOAD = tuple(
    works(f"zero_optimization.{section}.{name}", note)
    for section in ("offload_param", "offload_optimizer")
    for name, note in (
        ("device", "none, cpu or nvme"),
        ("nvme_path", "directory of swap files"),
        ("pin_memory", _PINNED),
    )
)
RATIO = (
    works(
        "zero_optimization.offload_optimizer.ratio",
        "the part of the elements whose states leave the device, from 0 to 1; the others' stay and are stepped there",
    ),
)
COLLECTIVES = tuple(
    works(f"zero_optimization.{name}", note, auto="default")
    for name, note in (
        ("reduce_scatter", "false: gradients are all-reduced, and each rank takes its shard of the result"),
        ("allgather_partitions", "false: below stage 3 updated weights are broadcast, one rank's after the other's"),
        ("stage3_use_all_reduce_for_fetch_params", "true: at stage 3 weights are gathered by an all-reduce"),
    )
)
MODULES = (
    works(
        "zero_optimization.ignore_unused_parameters",
        "false: a step in which a trainable parameter has no gradient on any rank ends with its name",
        auto="default",
    ),
    works(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "whether trainers save by taking all weights into rank 0's memory; save_16bit_model() and save_pretrained() "
        "need no such memory and save in any case",
        auto="default",
    ),
    works(
        "zero_optimization.enable_sanity_checks",
        "true: a change inside GatheredParameters that no modifier_rank keeps is refused before initialize, too; an "
        "engine always refuses it",
        auto="default",
    ),
    *(
        works(f"zero_optimization.leaf_module.{name}", f"modules that are gathered as one, by {what}", auto="default")
        for name, what in (
            ("classes", "their classes' names"),
            ("names", "their names in the model"),
            ("name_suffixes", "the ends of their names"),
        )
    ),
)
SWITCHES = tuple(
    subsumed(f"zero_optimization.{name}", "boolean", why)
    for name, why in (
        ("contiguous_gradients", "gradients lie contiguously in their chunks"),
        ("overlap_comm", "gradients are always reduced while backward goes on"),
        ("round_robin_gradients", "shards of gradients are equal by construction"),
        ("use_multi_rank_bucket_allreduce", _NO_COLLECTIVE_BUCKETS),
        ("parameter_alignment", "shards are always cut at multiples of 64 elements"),
        ("compute_grad_norm", "the norm is computed where gradient_clipping asks for it"),
        ("memory_efficient_linear", "autograd never holds a gathered copy of a weight"),
        ("save_muon_momentum_buffer_in_memory", "offload_optimizer.device says where all states lie"),
        ("log_trace_cache_warnings", "a changed order never invalidates the trace; io_report() shows what it cost"),
        ("override_module_apply", "Module.apply() works on staged parameters as it is"),
        ("elastic_checkpoint", "any checkpoint loads at any world size"),
        ("pipeline_loading_checkpoint", "each rank reads its own part of a checkpoint, a piece at a time"),
        ("stage3_allgather_sequential", "weights are all-gathered in place, not through a bucket"),
        ("offload_optimizer.pipeline_read", "reads always run ahead of the update"),
        ("offload_optimizer.pipeline_write", "writes always run behind the update"),
        ("offload_optimizer.fast_init", "moments are born zero and not written before the first update"),
        ("offload_optimizer.convert_grad_on_cpu", "gradients are converted where they are accumulated"),
    )
)
SIZES = tuple(
    subsumed(f"zero_optimization.{name}", "whole number", why)
    for name, why in (
        ("allgather_bucket_size", _NO_COLLECTIVE_BUCKETS),
        ("stage3_module_granularity_threshold", "small modules always travel together, as one param group"),
        ("stage3_partition_stream_chunk_size", "Init always stages parameters out piece by piece"),
        ("offload_param.buffer_count", _FRAMES),
        ("offload_param.buffer_size", _FRAMES),
        ("offload_param.max_in_cpu", "what stays in memory is planned within host_budget_bytes"),
        ("offload_optimizer.buffer_count", _FRAMES),
    )
)
REFUSED = tuple(
    refused(f"zero_optimization.{name}", why, remedy, accepts=accepts)
    for name, why, remedy, accepts in (
        ("offload_optimizer.super_offload", "SuperOffload is not built", "write false", (False,)),
        ("offload_optimizer.cpuadam_cores_perc", "belongs to SuperOffload", "call torch.set_num_threads()", ()),
        ("load_from_fp32_weights", "master weights are what checkpoints hold", "remove it", (True,)),
        ("legacy_stage1", "there is one stage 1", "write false", (False,)),
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

TABLES = (STAGE, THRESHOLDS, OFFLOAD, RATIO, COLLECTIVES, MODULES, SWITCHES, SIZES, REFUSED)
