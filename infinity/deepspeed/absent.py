"""What DeepSpeed has and infinity does not serve: each with the reason and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

from infinity.deepspeed.tree import TREE

_PIPELINE: Final = (
    "there is no pipeline parallelism, ZeRO-3 shards every layer over all ranks: pass the plain module to initialize()"
)
_TENSOR: Final = (
    "there is no tensor parallelism, ZeRO-3 shards every weight over all ranks: pass the plain module to initialize()"
)
_SEQUENCE: Final = "there is no sequence parallelism: shorten the sequences, or use activation checkpointing"
_EXPERTS: Final = (
    "there is no expert parallelism: use the model's own mixture of experts, and mark it with "
    "deepspeed.utils.set_z3_leaf_modules(model, [ItsClass])"
)
_QUANTISED: Final = "quantisation is not built: train in bf16, fp16 or fp32"
_KERNELS: Final = "the model's own modules run as they are: leave the replacement out"
_INFERENCE: Final = "generation runs from sharded weights: use deepspeed.init_inference(model, zero={'stage': 3, ...})"
_OPTIMIZERS: Final = (
    "its optimizer is not built: use a torch optimizer, or one of deepspeed.ops.adam, adagrad, lion, or Muon by name"
)
_IO: Final = "the node's I/O daemon reads and writes: measure with `io-daemon bench`, see `io-daemon --help`"
_GROUPS: Final = "weights are sharded over all ranks, not within groups of them: use deepspeed.zero.Init"
_OWN_CHECKPOINTS: Final = (
    "checkpoints load at any world size and stage as they are: `infinity import-deepspeed` reads those of DeepSpeed"
)

ABSENT: Final[Mapping[str, str]] = {
    "pipe": _PIPELINE,
    "DualPipeVEngine": _PIPELINE,
    "DualPipeVModule": _PIPELINE,
    "runtime.pipe": _PIPELINE,
    "tp_model_init": _TENSOR,
    "set_autotp_mode": _TENSOR,
    "module_inject": _KERNELS,
    "replace_transformer_layer": _KERNELS,
    "model_implementations": _KERNELS,
    "ops.transformer": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "DeepSpeedTransformerConfig": _KERNELS,
    "ops.sparse_attention": "sparse attention is the model's own business: use torch's flex_attention or masks",
    "ops.deepspeed4science": _KERNELS,
    **dict.fromkeys(
        (
            f"runtime.activation_checkpointing.checkpointing.{name}"
            for name in (
                "get_cuda_rng_tracker",
                "model_parallel_cuda_manual_seed",
                "model_parallel_reconfigure_tp_seed",
                "CudaRNGStatesTracker",
            )
        ),
        "there is no model parallelism, whose ranks would need random numbers of their own: torch.manual_seed() seeds, "
        "and checkpoint() draws the same ones again",
    ),
    "runtime.tensor_parallel": _TENSOR,
    "runtime.sequence_parallel": _SEQUENCE,
    "runtime.domino": _TENSOR,
    "sequence": _SEQUENCE,
    "moe": _EXPERTS,
    "compression": "compression is not built: prune or distil with the model's own code",
    "ops.quantizer": _QUANTISED,
    "ops.fp_quantizer": _QUANTISED,
    "linear": "optimized linear layers are not built: use PEFT's LoRA over a sharded base",
    "autotuning": "there is no autotuner: `io-daemon bench` finds the settings of the disk, the rest needs none",
    "elasticity": "the world size is fixed while a job runs: start again from the last checkpoint, at any world size",
    "inference": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "runtime.hybrid_engine": _INFERENCE,
    "DeepSpeedHybridEngine": _INFERENCE,
    "runtime.rollout": _INFERENCE,
    "ops.lamb": _OPTIMIZERS,
    "runtime.fp16.onebit": _OPTIMIZERS,
    "runtime.superoffload": _OPTIMIZERS,
    "runtime.zenflow": _OPTIMIZERS,
    "ops.op_builder": "nothing is compiled when a job starts: leave the builder out",
    "ops.aio": _IO,
    "ops.gds": _IO,
    "nvme": _IO,
    "io": _IO,
    "runtime.swap_tensor": _IO,
    "runtime.data_pipeline": "data is the caller's: use a sampler of torch's",
    **dict.fromkeys(("comm.configure", "comm.comm.configure"), "write the section comms_logger into the configuration"),
    "comm.initialize_mesh_device": _SEQUENCE,
    "comm.comm.initialize_mesh_device": _SEQUENCE,
    "runtime.progressive_layer_drop": "the model is the caller's: drop its layers there",
    "runtime.eigenvalue": _QUANTISED,
    "runtime.quantize": _QUANTISED,
    "runtime.weight_quantizer": _QUANTISED,
    "runtime.compiler": "use engine.compile() or torch.compile()",
    "compile": "DeepCompile is not built: use engine.compile()",
    "profiling": "write the section flops_profiler into the configuration, or count any model's forward by "
    "torch.utils.flop_counter.FlopCounterMode",
    "monitor": "write tensorboard, csv_monitor or wandb into the configuration, and figures to engine.monitor",
    "datastates": _OWN_CHECKPOINTS,
    "runtime.checkpoint_engine": _OWN_CHECKPOINTS,
    "runtime.state_dict_factory": _OWN_CHECKPOINTS,
    "runtime.model_checkpointing": _OWN_CHECKPOINTS,
    "checkpoint": _OWN_CHECKPOINTS,
    "utils.timer": "write wall_clock_breakdown into the configuration, or time with torch.profiler",
    "utils.numa": "bind ranks to cores by the launcher: numactl or torchrun's --numa-binding",
    "utils.tensor_fragment": "shards are infinity's: deepspeed.utils.safe_get_* and safe_set_* read and write them",
    "runtime.config_utils": "a configuration is a dict or a file: deepspeed.DeepSpeedConfig reads it",
    "accelerator.abstract_accelerator": "accelerators are torch's: use deepspeed.get_accelerator()",
    "accelerator.set_accelerator": "accelerators are torch's, found by torch.accelerator: leave the call out",
    "ops.adam.ZenFlowSelectiveAdamW": _OPTIMIZERS,
    "ops.adam.ZenFlowSelectiveAdamW_stage3": _OPTIMIZERS,
    "ops.adam.ZenFlowCPUAdam": _OPTIMIZERS,
    "utils.groups": "all ranks share the model: torch.distributed's own group is the data-parallel one",
    "runtime.zero.stage3": "the engine's optimizer is infinity's: use engine.optimizer and deepspeed.zero",
    "runtime.zero.stage_1_and_2": "the engine's optimizer is infinity's: use engine.optimizer and deepspeed.zero",
    "runtime.zero.parameter_offload": "hooks are infinity's: weights come with every use, see deepspeed.zero",
    "runtime.zero.partitioned_param_coordinator": "the order of weights is the daemon's: see engine.io_report()",
    "runtime.zero.MiCS_Init": _GROUPS,
    "runtime.zero.mics": _GROUPS,
    "runtime.zero.muon": 'write "optimizer": {"type": "Muon"} into the configuration',
    "runtime.sparse_tensor": "gradients of embeddings are dense: write sparse=False",
}
"""Reasons by dotted name; what stands below a name is absent for the same reason."""


_REMEDY: Final = "leave the call out, or ask hasattr() before it; docs/from-deepspeed.md tells what differs"


def refusal(root: str, place: str, name: str) -> str:
    """What a user reads who asks ``root.place`` for ``name``: whose module that is, the reason, the remedy."""
    full = f"{place}.{name}" if place else name
    why = reason(full)
    if why is None:
        close = difflib.get_close_matches(name, TREE.get(place, ()), n=1, cutoff=0.8)
        why = f"did you mean {close[0]}?" if close else _REMEDY
    return f"infinity serves {root!r} here, which has no {full}: {why}"


def reason(full: str) -> str | None:
    """Why the dotted name is absent; None if nothing is said of it or of what it stands below."""
    while full and full not in ABSENT:
        full = full.rpartition(".")[0]
    return ABSENT.get(full)
