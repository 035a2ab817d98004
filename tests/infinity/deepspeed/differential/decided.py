"""Where an answer differs from the real DeepSpeed's because ours was decided on, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DECIDED: Final[Mapping[str, str]] = {
    "backwards.gradients_of_inputs_asked_for_apart": "they are of the loss as it is; outputs divide nothing",
    "backwards.of_a_loss_beside_its_logits": "they are divided once, not by each output on their way",
    "backwards.of_a_loss_with_a_regulariser": "all of it is divided, not what passes outputs alone",
    "buffers.added_to_inputs_in_bf16[init]": "Init casts no buffers: this one is named with data_types.buffer_dtype",
    "buffers.asked_for_in_fp32_training": "data_types.buffer_dtype holds in fp32 training, too",
    "buffers.made_under_init": "Init casts no buffers, also those that torch's constructors make",
    "checkpoints.latest_and_tags[0]": "zero_to_fp32.py lies beside every checkpoint, at stage 0, too",
    "checkpoints.of_the_module_alone[3]": "weights alone are loaded at stage 3, too",
    "checkpoints.without_states_of_the_optimizer": "a schedule that is loaded sets its rate at once",
    "collectives.operations_by_name": "engine.comms_summary() has the table; meshes are for sequence parallelism",
    "configuration.ways_into_initialize[args-and-config]": "the same configuration may be given twice",
    "configuration.zero_conversions": "numbers and booleans in quotes are refused, as by initialize",
    "leaves.by_the_configuration": "a parameter without a gradient is left alone, as by torch; ZeRO decays it",
    "leaves.the_granularity_makes_leaves": "a parameter without a gradient is left alone, as by torch; ZeRO decays it",
    "leaves.trained": "a parameter without a gradient is left alone, as by torch; ZeRO decays it",
    "parameters.attributes_of_a_parameter": "what the engine's hooks call on a parameter is not there",
    "parameters.below_stage_3_nothing_hangs_on_them": "all_gather() of what stays whole does nothing",
    "parameters.gathered_twice_is_refused": "gathering may be nested",
    "parameters.init_below_stage_3_is_whole_or_refused": "a model made under Init trains at every stage",
    "parameters.made_under_init[": "a placeholder has the parameter's shape, and its dtype until initialize",
    "parameters.made_under_init_by_two": "ds_tensor is a tensor and has no ds_numel: it has no padding",
    "parameters.persistent_parameters": "a placeholder has the parameter's shape",
    "parameters.placeholder_of_an_engine": "a placeholder has the parameter's shape",
    "parameters.registering_what_is_no_parameter": "a wrong type is a TypeError",
    "parts.partitioned_tensors": "PartitionedTensor belongs to pipeline parallelism",
    "parts.tiled_linear_refuses": "a wrong number is a ConfigError",
    "precision.bf16[0]": "AdamW over fp32 masters, as by torch; the real one's own stages 1 to 3 agree",
    "schedules.as_classes[cosine": "a second schedule of an optimizer starts from its own rates, not from the first's",
    "starting.untested_optimizers": "every optimizer that can be sharded is taken without a word",
    "state.own_values_are_stage_3s": "a rank's part of the states is there at every stage that shards",
    "state.own_values": "a rank's part is cut elsewhere: shards are of groups, not of single parameters",
    "state.parts_of_all_ranks_make_the_whole": "parts have no padding, the real one's has what was in memory",
    "training.accumulation_and_clipping[0]": "the norm is told at stage 0, too",
    "training.unused_are_named_where_asked": "ignore_unused_parameters: false names them, as documented",
    "training.unused_parameters": "a parameter without a gradient is left alone, as by torch; ZeRO decays it",
}
"""By the beginnings of names."""


def reason(name: str) -> str | None:
    """Why the case may differ; None if it may not."""
    return next((why for start, why in DECIDED.items() if name.startswith(start)), None)
