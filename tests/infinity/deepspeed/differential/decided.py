"""Where an answer differs from the real DeepSpeed's because ours was decided on: in which case and place, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

ABSOLUTE: Final = 1e-8
"""What kernels of other instruction sets leave of gradients that cancel to 1e-5."""


@dataclass(frozen=True)
class Decision:
    """Of the named cases these lines of ``facts.compare`` may be there; any other is a difference like all others."""

    why: str
    cases: tuple[str, ...]
    lines: tuple[str, ...]
    """As ``differences`` writes them, with * for what is left open: in a place within one step, behind it anything."""
    factor: float | None = None
    """What the real one's number is multiplied by; None: nothing is said of it."""
    relative: float = 1e-5
    """How close it then is, or within ``ABSOLUTE``."""


def _over(name: str, labels: str) -> tuple[str, ...]:
    return tuple(f"{name}[{label}]" for label in labels.split())


_UNUSED: Final = "a parameter without a gradient is left alone, as by torch; ZeRO decays it"
_CUT: Final = "a rank's part is cut elsewhere: shards are of groups, not of single parameters"
_SHAPE: Final = "a placeholder has the parameter's shape"
_BY_THREE: Final = "3 3-offload 3-offload-all 3-sub-groups"
_MADE: Final = "parameters.made_under_init"
_NO_HALVES: Final = "bare enabled group mem-efficient-off remote-cpu remote-cpu-pinned bf16-config fp16-config"
_NUMBER: Final = " * != *"
_STAGE_0: Final = (
    "stage 0 in 16 bits has the losses of stages 1 to 3, plain torch's over fp32 masters; the real one's initialize "
    "takes a step with zeros there, which decays weights and counts: plain torch that takes it, too, has its losses"
)
_STAGE_0_IN_FP16: Final = (
    "stage 0 in fp16 has the losses of stages 1 to 3; the real one's engine.backward scales the loss for ZeRO's "
    "optimizers alone, but its step divides by the scale: Adam's eps and clipping meet gradients 2^16 times too small, "
    "beside a first step with zeros. Plain torch that does both has its losses within 1e-8"
)
_MASTERS: Final = (
    "masters of an fp32 model are its own weights, the real one's are the rounded ones: plain torch that rounds them "
    "first has its losses within 1e-8"
)
_SUMMED_IN_BF16: Final = (
    "all-offloaded-nothing-live checkpointed rl-with-sections-off trainer-1-short-bf16 trainer-1-timers-bf16 "
    "trainer-2-bf16 trainer-2-offload-bf16 trainer-2-sub-groups-bf16 trainer-3-bf16 trainer-3-decay-bf16 "
    "trainer-3-offload-bf16 trainer-3-on-no-device-bf16 trainer-3-path-beside-cpu-bf16 trainer-3-torch-adam-bf16"
)
_SUMMED_IN_FP16: Final = (
    "chat chat-2 trainer-2-fp16 trainer-2-offload-fp16 trainer-2-sub-groups-fp16 trainer-3-fp16 trainer-3-nvme-fp16 "
    "trainer-3-offload-fp16 trainer-3-on-no-device-fp16 trainer-3-path-beside-cpu-fp16 trainer-3-torch-adam-fp16"
)
_NO_FLAG, _NOT_ASSERTED = " False != True", " ['AssertionError'] != 'nothing'"

DECIDED: Final[tuple[Decision, ...]] = (
    Decision(
        "gradients of inputs are of the loss as it is; outputs divide nothing",
        ("backwards.gradients_of_inputs_asked_for_apart[1-2]",),
        (f"[*][*]:{_NUMBER}",),
        factor=4,
    ),
    Decision(
        "gradients of inputs are of the loss as it is; outputs divide nothing",
        ("backwards.gradients_of_inputs_asked_for_apart[3-2]",),
        (f"[*][*]:{_NUMBER}",),
        factor=2,
    ),
    Decision(
        "gradients are divided once, not by each output on their way",
        ("backwards.of_a_loss_beside_its_logits[1-2]",),
        (f"[*][*][*]:{_NUMBER}", f"[*][*]:{_NUMBER}"),
        factor=2,
    ),
    Decision(
        "all of a loss is divided, not what passes outputs alone",
        ("backwards.of_a_loss_with_a_regulariser[1-2]",),
        (f"[*][*][*]:{_NUMBER}", f"[*][*]:{_NUMBER}"),
    ),
    Decision(
        "Init casts no buffers: this one is named with data_types.buffer_dtype",
        ("buffers.added_to_inputs_in_bf16[init]",),
        (": [*] != 'refused'",),
    ),
    Decision(
        "data_types.buffer_dtype holds in fp32 training, too",
        _over("buffers.asked_for_in_fp32_training", "bf16"),
        (*(f"[*].{name}: * != 'torch.bfloat16'" for name in ("constant", "half_kept", "kept_bias", "value", "wide")),),
    ),
    Decision(
        "data_types.buffer_dtype holds in fp32 training, too",
        _over("buffers.asked_for_in_fp32_training", "fp32"),
        (*(f"[*].{name}: * != 'torch.float32'" for name in ("narrow", "wide")),),
    ),
    Decision(
        "data_types.buffer_dtype holds in fp32 training, too",
        _over("buffers.asked_for_in_fp32_training", "bf16 fp32"),
        (f"[1][*]:{_NUMBER}",),
        factor=1,
        relative=5e-3,
    ),
    Decision(
        "Init casts no buffers, also those that torch's constructors make",
        _over("buffers.made_under_init", "config-and-dtype config-bf16 config-fp16 dtype-bf16"),
        ("[0].value: * != 'torch.float32'", "[1].value: * != 'torch.float32'"),
    ),
    Decision(
        "zero_to_fp32.py lies beside every checkpoint, at stage 0, too",
        ("checkpoints.latest_and_tags[0]",),
        (f"[2]:{_NO_FLAG}",),
    ),
    Decision("weights alone are loaded at stage 3, too", ("checkpoints.of_the_module_alone[3]",), (f"[3]:{_NO_FLAG}",)),
    Decision(
        "a schedule that is loaded sets its rate at once",
        _over("checkpoints.without_states_of_the_optimizer", "0 1 2 3"),
        (f"[1][0]:{_NUMBER}", f"[2][1]:{_NUMBER}"),
    ),
    Decision(
        "meshes are for sequence parallelism",
        ("collectives.operations_by_name",),
        (".initialize_mesh_device: True != False",),
    ),
    Decision(
        "the same configuration may be given twice",
        ("configuration.ways_into_initialize[args-and-config]",),
        (": ['AssertionError'] != 'started'",),
    ),
    Decision(
        "numbers and booleans in quotes are refused, as by initialize",
        _over("configuration.zero_conversions", "boolean-word stage-text text"),
        ("raised: pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig",),
    ),
    Decision(_UNUSED, ("leaves.by_the_configuration",), tuple(f"[1][{place}]:{_NUMBER}" for place in (1, 3))),
    Decision(
        _UNUSED,
        ("leaves.the_granularity_makes_leaves", *_over("leaves.trained", "expert experts names none")),
        tuple(f"[{place}]:{_NUMBER}" for place in (1, 3)),
    ),
    Decision(_UNUSED, ("leaves.trained_by_two",), tuple(f"[*][{place}]:{_NUMBER}" for place in (1, 3))),
    Decision(
        _UNUSED,
        _over("training.unused_parameters", "0 1 2 3"),
        tuple(f"[*][1].unused.{name}:{_NUMBER}" for name in ("weight", "bias")),
    ),
    Decision(
        "what the engine's own hooks call on a parameter is not there",
        ("parameters.attributes_of_a_parameter",),
        tuple(
            f"[0].{name}: True != False"
            for name in (
                "aligned_size",
                "all_gather_coalesced",
                "convert_to_zero_parameters",
                "ds_param_type",
                "ds_process_group",
                "ds_zero_partition_rank",
                "ds_zero_partition_world_size",
                "padding_size",
                "partition_gradients",
                "reduce_gradients_at_owner",
            )
        ),
    ),
    Decision(
        "all_gather() of what stays whole does nothing",
        ("parameters.below_stage_3_nothing_hangs_on_them",),
        (f"[0][3]:{_NO_FLAG}",),
    ),
    Decision(
        "gathering may be nested", ("parameters.gathered_twice_is_refused",), (": ['RuntimeError'] != 'nothing'",)
    ),
    Decision(
        "a model made under Init trains at every stage",
        ("parameters.init_below_stage_3_is_whole_or_refused",),
        (": ['RuntimeError'] != 'nothing'",),
    ),
    Decision(
        _SHAPE,
        _over(_MADE, f"bf16 config config-old-name fp32 half {_NO_HALVES}"),
        ("[6]: 1 entries, found 2: [0] != [4, 6]", "[7]: 0 != 24"),
    ),
    Decision("a placeholder has its dtype until initialize", _over(_MADE, _NO_HALVES), ("[0]: * != 'torch.float32'",)),
    Decision(
        "ds_tensor is a tensor and has no ds_numel: it has no padding",
        ("parameters.made_under_init_by_two",),
        ("raised: AttributeError: 'Tensor' object has no attribute 'ds_numel'",),
    ),
    Decision(_SHAPE, ("parameters.persistent_parameters",), (f".*.weight[2]:{_NO_FLAG}",)),
    Decision(
        _SHAPE,
        ("parameters.placeholder_of_an_engine",),
        ("[0]: 1 entries, found 2: [0] != [3, 12]", "[1]: 0 != 36"),
    ),
    Decision(
        "a wrong type is a TypeError",
        ("parameters.registering_what_is_no_parameter",),
        (": raises ['TypeError'], not as ['RuntimeError']",),
    ),
    Decision(
        _STAGE_0,
        ("precision.bf16[0]",),
        (f"[0][*]:{_NUMBER}",),
        factor=1,
        relative=3e-2,
    ),
    Decision(
        _STAGE_0_IN_FP16,
        ("buffers.of_a_model_in_fp32[fp16-0]",),
        (f"[1][*]:{_NUMBER}",),
        factor=1,
        relative=3e-2,
    ),
    Decision(
        _STAGE_0,
        ("precision.bf16_overflows[0]", "precision.bf16_overflows[0True]"),
        (f"[2][0]:{_NUMBER}",),
        factor=1,
        relative=3e-2,
    ),
    Decision(
        "bf16.check_grad_overflow is heard at every stage, by the real one at stages 1 and 2 alone",
        ("precision.bf16_overflows[0False]", "precision.bf16_overflows[3False]"),
        ("[1][1]: 1 != 0", "[2][1]: 1 != 0", "[2][0]: * != 'nan'"),
    ),
    Decision(
        "a section that is enabled says what weights are: fp32 that Init was told is cast as any other",
        ("precision.dtype_made_under_init[float32-told-bf16]",),
        ("[0][0]: 'torch.float32' != 'torch.bfloat16'",),
    ),
    Decision(
        "a dtype that Init was told and the configuration contradicts is refused by name",
        ("precision.dtype_made_under_init[float16-told-bf16]",),
        ("raised: io_daemon.errors.ConfigError: *",),
    ),
    Decision(
        "under autocast gradients are reduced in fp32, as by plain torch; ZeRO reduces some in the narrow dtype",
        _over("precision.torch_autocast_by_two", "1 2 3"),
        (f"[0][*]:{_NUMBER}", f"[1][*]:{_NUMBER}"),
        factor=1,
        relative=1e-3,
    ),
    Decision(
        "stage 0 steps no 16-bit weights without masters: it is refused; the real one's fp16 ends in NaN there",
        _over("precision.narrow_model_at_stage_0", "0-bfloat16 0-float16"),
        ("raised: io_daemon.errors.ConfigError: *",),
    ),
    Decision(
        _STAGE_0,
        _over("found.in_16_bits", "chat-bfloat16-0 language-model-bf16 trainer-0-bf16"),
        (f"[0][*]:{_NUMBER}",),
        factor=1,
        relative=2e-2,
    ),
    Decision(
        _STAGE_0_IN_FP16,
        _over("found.in_16_bits", "bert trainer-0-fp16"),
        (f"[0][*]:{_NUMBER}",),
        factor=1,
        relative=2e-2,
    ),
    Decision(
        "gradients of micro-batches add up in fp32, the real one's in 16 bits where grad_accum_dtype is not written: "
        "plain torch that adds so has its losses within 1e-8",
        _over("found.in_16_bits", f"{_SUMMED_IN_BF16} {_SUMMED_IN_FP16}"),
        (f"[0][*]:{_NUMBER}",),
        factor=1,
        relative=1e-4,
    ),
    Decision(
        "gradients are reduced in fp32, which they are in; the real one's stage 2 has one dtype for all, that of the "
        "frozen weights before them",
        _over("precision.frozen_weights_in_a_dtype_of_their_own", "2-bfloat16 2-float16"),
        (f"[0][*]:{_NUMBER}",),
        factor=1,
        relative=1e-4,
    ),
    Decision(
        "the step is torch's, theirs a kernel that rounds in another order: here and there a 16-bit weight is another",
        ("found.in_16_bits[lightning-2-fp16]",),
        (f"[0][*]:{_NUMBER}",),
        factor=1,
        relative=2e-5,
    ),
    Decision(
        _MASTERS,
        (*_over("precision.bf16", "1 2 3"), *_over("precision.fp16_static", "1 2 3")),
        (f"[0][*]:{_NUMBER}",),
        factor=1,
        relative=1e-3,
    ),
    Decision(
        _MASTERS,
        _over("buffers.of_a_model_in_fp32", "bf16-1 bf16-3 fp16-1 fp16-3"),
        (f"[1][*]:{_NUMBER}",),
        factor=1,
        relative=1e-3,
    ),
    Decision(
        _MASTERS,
        _over("buffers.as_data_types_says", "bf16 fp16 fp32 kept-alone kept-auto kept-none kept-value none"),
        (f"[*][1][*]:{_NUMBER}",),
        factor=1,
        relative=1e-3,
    ),
    Decision(
        _MASTERS,
        _over("precision.bf16_with_gradients_in", "1 2 3"),
        (f"[*][*]:{_NUMBER}",),
        factor=1,
        relative=1e-3,
    ),
    Decision(
        _MASTERS,
        _over("precision.fp16_optimizers_by_name", "adam adamw sgd"),
        (f"[*]:{_NUMBER}",),
        factor=1,
        relative=1e-4,
    ),
    Decision(
        _MASTERS,
        _over("precision.fp16_auto_cast", "1 2 3"),
        (f"[0][*]:{_NUMBER}",),
        factor=1,
        relative=1e-5,
    ),
    Decision(
        "a second schedule of an optimizer starts from its own rates, not from the first's",
        _over("schedules.as_classes", "cosine cosine-floor"),
        (f"[2][0]:{_NUMBER}", f"[2][1]:{_NUMBER}"),
    ),
    Decision(
        "every optimizer that can be sharded is taken without a word",
        _over("starting.untested_optimizers_need_a_word", "1 2 3"),
        (f":{_NOT_ASSERTED}",),
    ),
    Decision(
        "every optimizer that can be sharded is taken without a word",
        ("starting.untested_optimizers_are_refused_as",),
        (": 'AssertionError' != 'nothing'",),
    ),
    Decision(
        "a rank's part of the states is there at every stage that shards",
        _over("state.own_values_are_stage_3s", "1 2"),
        (f"[0]:{_NOT_ASSERTED}", f"[1]:{_NOT_ASSERTED}"),
    ),
    Decision(
        _CUT,
        _over("state.own_values", _BY_THREE),
        ("[*][*].head.weight: 18 entries, found *", "[*][*].head.bias: 2 entries, found *"),
    ),
    Decision(_CUT, _over("state.own_values_written", _BY_THREE), (f"[*][0][*]:{_NUMBER}", f"[*][1][*][*]:{_NUMBER}")),
    Decision(
        "what is written to masters shows at once, not after the next step",
        _over("state.own_values_written", _BY_THREE),
        tuple(f"[*][2].{name}:{_NUMBER}" for name in ("head.*", "layers.0.*", "layers.1.*")),
    ),
    Decision(
        "parts have no padding, the real one's has what was in memory: sometimes zeros, and then they agree",
        _over("state.parts_of_all_ranks_make_the_whole", _BY_THREE),
        (f"[*][10]:{_NO_FLAG}",),
    ),
    Decision(
        "batch sizes change between steps, and nothing is loaded within one: both are refused",
        (
            *_over("moments.a_batch_size_changes_within_a_step", "0 1 2 3"),
            *_over("moments.loaded_within_accumulation", "0 1 2 3"),
        ),
        (": 'nothing' != ['AssertionError', 'RuntimeError']",),
    ),
    Decision(
        "a step without gradients changes nothing, as in torch; the real one's ends in an error of Python's own",
        _over("moments.a_step_without_a_backward", "0 1 2 3"),
        ("[0]: [*] != 'nothing'",),
    ),
    Decision(
        "backwards before a step add up, as in torch and at the real one's stage 0; its ZeRO drops what came before",
        (
            *_over("moments.two_backwards_before_a_step", "1-1 1-2 2-1 2-2 3-1 3-2"),
            *_over("moments.a_graph_that_is_kept", "1 2"),
        ),
        (f"[0][*]:{_NUMBER}", f"[1].*:{_NUMBER}"),
    ),
    Decision(
        "two forwards before their backwards train as at stages 0 to 2",
        ("moments.both_forwards_come_first[3]",),
        (f"[0][*]:{_NUMBER}",),
    ),
    Decision(
        "each gradient is reduced with its own, as by torch and at the real one's stage 0, also where ranks use other "
        "weights; its ZeRO reduces those together that came at the same place",
        _over("moments.each_rank_uses_another_head", "1 2"),
        (f"[*][0][*]:{_NUMBER}", f"[*][1].*:{_NUMBER}"),
    ),
    Decision(
        "zero_grad() drops gradients, whose ever it is",
        (
            *_over(
                "moments.zeroed_between_backward_and_step",
                " ".join(f"{stage}-{of}" for stage in (1, 2, 3) for of in ("engine", "optimizer", "module", "params")),
            ),
            "moments.zeroed_between_micro_batches[2-optimizer]",
        ),
        (f"[0][*]:{_NUMBER}",),
    ),
    Decision(
        "zero_grad() between micro-batches is refused: the real one drops what was accumulated at stages 0 and 1, and "
        "keeps it at 2 and 3",
        _over(
            "moments.zeroed_between_micro_batches",
            " ".join(f"{stage}-{of}" for stage in range(4) for of in ("engine", "module", "params")),
        ),
        ("[0][3]: 'nothing' != ['RuntimeError']", f"[0][5]:{_NUMBER}", f"[0][6]:{_NUMBER}"),
    ),
    Decision(
        "clipping under Muon is refused: ZeRO clips what Muon has made of the gradients, also by the default of 1.0",
        _over("defaults.muon_under_the_clipping_that_nobody_wrote", "1 2 3"),
        ("raised: io_daemon.errors.ConfigError: gradient_clipping = *",),
    ),
    Decision("the norm is told at stage 0, too", ("training.accumulation_and_clipping[0]",), ("[*][2]: 0.0 != *",)),
    Decision(
        "at stage 3 a weight that is written without a modifier_rank is refused by name; on one rank it is kept, on "
        "several it is lost",
        ("idioms.moving_averages[3]",),
        ("raised: infinity.errors.WeightsError: * was changed in place, which sharded weights do not keep: *",),
    ),
    Decision(
        "ignore_unused_parameters: false names them, as documented",
        ("training.unused_are_named_where_asked",),
        (": 'nothing' != ['AssertionError', 'RuntimeError']",),
    ),
)


def undecided(name: str, lines: Sequence[str]) -> list[str]:
    """Of the lines in which the case differs, those that no decision speaks of."""
    decisions = [decision for decision in DECIDED if name in decision.cases]
    return [line for line in lines if not any(_speaks(decision, line) for decision in decisions)]


def stale(answers: Mapping[str, Sequence[str]]) -> list[str]:
    """Of the cases that were run, each line of a decision that none of them differs in: it hides nothing any more."""
    return [
        f"{decision.why}: {pattern}"
        for decision in DECIDED
        for pattern in decision.lines
        if all(name in answers for name in decision.cases)
        and not any(_is(pattern, line) for name in decision.cases for line in answers[name])
    ]


def _speaks(decision: Decision, line: str) -> bool:
    if not any(_is(pattern, line) for pattern in decision.lines):
        return False
    if decision.factor is None:
        return True
    theirs, ours = (float(value) for value in line.rpartition(": ")[2].split(" != "))
    return math.isclose(theirs * decision.factor, ours, rel_tol=decision.relative, abs_tol=ABSOLUTE)


def _is(pattern: str, line: str) -> bool:
    place, _, rest = pattern.partition(":")
    expected = r"[^\]:]*".join(map(re.escape, place.split("*"))) + ":" + ".*".join(map(re.escape, rest.split("*")))
    return re.fullmatch(expected, line, re.DOTALL) is not None
