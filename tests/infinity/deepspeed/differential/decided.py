"""Where an answer differs from the real DeepSpeed's because ours was decided on, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DECIDED: Final[Mapping[str, str]] = {
    "checkpoints.latest_and_tags[0]": "zero_to_fp32.py lies beside every checkpoint, at stage 0, too",
    "checkpoints.of_the_module_alone[3]": "weights alone are loaded at stage 3, too",
    "checkpoints.without_states_of_the_optimizer": "a schedule that is loaded sets its rate at once",
    "configuration.ways_into_initialize[args-and-config]": "the same configuration may be given twice",
    "configuration.zero_conversions": "numbers and booleans in quotes are refused, as by initialize",
    "leaves.by_the_configuration": "a parameter without a gradient is left alone, as by torch; ZeRO decays it",
    "leaves.the_granularity_makes_leaves": "a parameter without a gradient is left alone, as by torch; ZeRO decays it",
    "leaves.trained": "a parameter without a gradient is left alone, as by torch; ZeRO decays it",
    "parameters.attributes_of_a_parameter": "what the engine's hooks call on a parameter is not there",
    "parameters.below_stage_3_nothing_hangs_on_them": "all_gather() of what stays whole does nothing",
    "parameters.gathered_twice_is_refused": "gathering may be nested",
    "parameters.init_below_stage_3_is_whole_or_refused": "a model made under Init trains at every stage",
    "parameters.made_under_init": "a placeholder has the parameter's shape",
    "parameters.persistent_parameters": "a placeholder has the parameter's shape",
    "parameters.placeholder_of_an_engine": "a placeholder has the parameter's shape",
    "parameters.registering_what_is_no_parameter": "a wrong type is a TypeError",
    "parts.tiled_linear_refuses": "a wrong number is a ConfigError",
    "schedules.as_classes[cosine": "a second schedule of an optimizer starts from its own rates, not from the first's",
    "starting.untested_optimizers": "every optimizer that can be sharded is taken without a word",
    "state.own_values_are_stage_3s": "a rank's part of the states is there at every stage that shards",
    "training.unused_are_named_where_asked": "ignore_unused_parameters: false names them, as documented",
}
"""By the beginnings of names."""


OPEN: Final[Mapping[str, str]] = {
    "checkpoints.no_checkpoint_to_recover": "the error is no ValueError",
    "collectives.operations_by_name": "log_summary and initialize_mesh_device are missing",
    "configuration.other_sections": "activation_checkpointing_config lacks fields that mean nothing here",
    "parameters.values_are_rank_0s": "the random numbers of other ranks, not yet looked at",
    "parts.clipped_gradients_of_two": "clip_grad_norm_ takes the norm of its own rank",
    "parts.partitioned_tensors": "PartitionedTensor is missing",
    "precision.bf16[0]": "bf16 at stage 0, not yet looked at",
    "starting.questions": "tensor_parallel_config is missing",
    "state.own_values": "a rank's part is cut elsewhere: shards are of groups, not of single parameters",
    "training.accumulation_and_clipping": "the norm at stage 0, and sums in the seventh digit",
    "training.unused_parameters": "a parameter without a gradient is left alone, as by torch; ZeRO decays it",
}
"""What is still to be done, or to be understood."""


def reason(name: str) -> str | None:
    """Why the case may differ; None if it may not."""
    return next((why for table in (DECIDED, OPEN) for start, why in table.items() if name.startswith(start)), None)
