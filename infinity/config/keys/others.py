"""Sections of parts that are not built, and of other products."""

from __future__ import annotations

from infinity.config.keys.key import Key, refused, subsumed, works

_CHECKPOINTS = "checkpoints have one format, of infinity's own"
_LATE = "remove it; engine.save_checkpoint(…, asynchronous=True) writes while training goes on"
_MONITOR = "there is no such monitor: tensorboard, csv_monitor and wandb are"

ACTIVATIONS: tuple[Key, ...] = (
    subsumed(
        "activation_checkpointing.partition_activations",
        "boolean",
        "only ranks of one tensor-parallel group hold the same activations, and there are none",
    ),
    *(
        works(f"activation_checkpointing.{name}", note)
        for name, note in (
            ("cpu_checkpointing", "inputs of infinity.checkpointing.checkpoint wait for backward in host memory"),
            ("contiguous_memory_optimization", "they wait in one piece of memory, as large as number_checkpoints says"),
            ("number_checkpoints", "checkpointed calls of one forward"),
            ("synchronize_checkpoint_boundary", "the device is waited for at the ends of each call"),
            ("profile", "the time of each call is logged, in forward and in backward"),
        )
    ),
)

CHECKPOINTS: tuple[Key, ...] = (
    subsumed(
        "checkpoint.tag_validation",
        "string",
        "ranks that name different tags save under rank 0's through infinity.deepspeed, and are refused with Fail and "
        "by infinity's own engine",
        accepts=tuple(form(word) for word in ("ignore", "warn", "fail") for form in (str.title, str.upper, str)),
        remedy='write "Ignore", "Warn" or "Fail"',
    ),
    *(
        refused(f"checkpoint.{name}", why, "write false", accepts=(False,))
        for name, why in (
            ("load_universal", "any checkpoint loads at any world size and stage; DeepSpeed's are imported"),
            ("use_node_local_storage", "all ranks share the directory of a checkpoint"),
            ("parallel_write.pipeline_stage", "there is no pipeline parallelism"),
        )
    ),
    refused("checkpoint.checkpoint_serialization", _CHECKPOINTS, "remove it"),
    *(refused(key, _CHECKPOINTS, _LATE) for key in ("checkpoint.writer", "datastates_ckpt")),
)

SWITCHED: tuple[Key, ...] = (
    refused(
        "tensor_parallel", "there is no tensor parallelism", "remove the section", switch="autotp_size", off=(1, 0)
    ),
    refused(
        "compile", "DeepCompile is not built", "call engine.compile(), which is torch.compile", switch="deepcompile"
    ),
    *(
        refused(name, why, "remove the section", switch="enabled")
        for name, why in (
            ("amp", "apex is not used"),
            ("autotuning", "there is no autotuner"),
            ("compression_scheduler", "compression is not built"),
            ("curriculum_learning", "data is the caller's"),
            ("data_efficiency", "data is the caller's"),
            ("eigenvalue", "quantisation is not built"),
            ("elasticity", "the world size is fixed"),
            ("expert_parallel", "there is no expert parallelism"),
            ("hybrid_engine", "there is no inference engine"),
            ("nebula", _CHECKPOINTS),
            ("progressive_layer_drop", "the model is the caller's"),
            ("quantize_training", "quantisation is not built"),
            ("comet", _MONITOR),
            ("trackio", _MONITOR),
        )
    ),
)

WHOLE: tuple[Key, ...] = (
    *(
        refused(name, why, "remove it")
        for name, why in (
            ("compression_training", "compression is not built"),
            ("pipeline", "there is no pipeline parallelism"),
            ("sparse_attention", "the model is the caller's"),
            ("weight_quantization", "quantisation is not built"),
            ("weight_quantization_config", "quantisation is not built"),
        )
    ),
    refused("use_data_before_expert_parallelism", "there is no expert parallelism", "write false", accepts=(False,)),
    refused("graph_harvesting", "CUDA graphs are not built", "write false", accepts=(False,)),
)

OBSERVING: tuple[Key, ...] = (
    *(
        works(f"{name}.{key}", note)
        for name, drawn in (("tensorboard", "figures for TensorBoard"), ("csv_monitor", "figures as CSV files"))
        for key, note in (
            ("enabled", f"{drawn}, of every step"),
            ("output_path", "directory that holds the job's"),
            ("job_name", "the job's directory"),
        )
    ),
    works("wandb.enabled", "figures for Weights & Biases, of every step"),
    works("wandb.group", "group of the run"),
    works("wandb.team", "team that the run belongs to"),
    works("wandb.project", "project of the run"),
    works("flops_profiler.enabled", "counts the operations of one forward, by module, with torch's counter"),
    works("flops_profiler.profile_step", "the step, counted from 1, whose first forward is counted"),
    works("flops_profiler.module_depth", "levels of modules in the table; -1 = all"),
    works("flops_profiler.top_modules", "modules named at every level"),
    works("flops_profiler.detailed", "name all modules"),
    works("flops_profiler.recompute_fwd_factor", "the part of forward that backward computes again"),
    works("flops_profiler.output_file", "where the table is written; without it the log"),
    works("comms_logger.enabled", "counts collectives; engine.comms_summary() is the table"),
    works("comms_logger.verbose", "log each collective"),
    works("comms_logger.prof_all", "count all operations"),
    works("comms_logger.prof_ops", "the operations counted where prof_all is false"),
    works("comms_logger.debug", "log what each collective was for"),
    works("timers.throughput.enabled", "samples a second in the progress line"),
    works("timers.throughput.synchronized", "the device is waited for before the time is taken"),
)

TABLES = (ACTIVATIONS, CHECKPOINTS, SWITCHED, WHOLE, OBSERVING)
