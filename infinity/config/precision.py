"""What the keys about dtypes mean together. Pure."""

from __future__ import annotations

from infinity.config.complaints import Complaints
from infinity.config.sections import Config


def check_precision(config: Config, complaints: Complaints) -> None:
    """Complain of dtypes that contradict each other."""
    _check_split(config, complaints)
    _check_moments(config, complaints)
    bf16, accumulated = config.bf16, config.data_types.grad_accum_dtype
    if config.fp16.enabled and bf16.enabled:
        complaints.add("fp16.enabled", True, "bf16 is enabled, too, and weights have one dtype: enable one of the two")
    if config.torch_autocast.enabled and (config.fp16.enabled or bf16.enabled):
        other = "fp16" if config.fp16.enabled else "bf16"
        complaints.add(
            "torch_autocast.enabled",
            True,
            f"autocast casts fp32 weights, and {other} is enabled, too: enable one of the two",
        )
    if bf16.bf16_master_weights_and_grads and not bf16.enabled:
        complaints.add("bf16.bf16_master_weights_and_grads", True, "write bf16.enabled: true, too")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        complaints.add(
            "bf16.bf16_optimizer_states",
            True,
            "states have the dtype of what is stepped: write bf16_master_weights_and_grads: true, too",
        )
    weights = "fp16" if config.fp16.enabled else "bf16" if bf16.enabled else "fp32"
    if config.data_types.param_dtype not in (None, weights):
        remedy = f"weights are {weights} by the sections bf16 and fp16: enable the one that is meant, or leave this out"
        complaints.add("data_types.param_dtype", config.data_types.param_dtype, remedy)
    if accumulated not in (None, "fp32", weights):
        choices = "fp32" if weights == "fp32" else f"fp32 or {weights}"
        complaints.add("data_types.grad_accum_dtype", accumulated, f"gradients are {weights} here: write {choices}")


def _check_split(config: Config, complaints: Complaints) -> None:
    """Complain of masters that are no weights and a rest."""
    if config.io_daemon.master_weights != "split":
        return
    hindrances = {
        "fp16: a master is no fp16 weight and 16 bits; use bf16": config.fp16.enabled,
        "weights in fp32: they have no masters; enable bf16": not config.bf16.enabled,
        "bf16_master_weights_and_grads: there are no fp32 masters": config.bf16.bf16_master_weights_and_grads,
        "stages below 3: weights are whole in memory, and the store has their masters alone": (
            config.zero_optimization.stage < 3
        ),
    }
    for hindrance, is_there in hindrances.items():
        if is_there:
            complaints.add("io_daemon.master_weights", "split", f'not together with {hindrance}, or write "fp32" here')
            return


def _check_moments(config: Config, complaints: Complaints) -> None:
    """Complain of states that cannot be rounded."""
    section = config.io_daemon
    if section.moments != "fp32" and config.bf16.bf16_optimizer_states:
        remedy = 'states are bf16 already, by bf16_optimizer_states: write "fp32" here, which then means as they are'
        complaints.add("io_daemon.moments", section.moments, remedy)
    elif section.moments == "8bit" and section.master_weights == "split":
        remedy = 'split master weights need a sign of a state, which 8 bits have no room for: write "bf16", or "fp32" '
        complaints.add("io_daemon.moments", "8bit", f'{remedy}for "io_daemon.master_weights"')
