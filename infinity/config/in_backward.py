"""What an update inside backward cannot be together with. Pure."""

from __future__ import annotations

from infinity.config.complaints import Complaints
from infinity.config.sections import Config


def check_in_backward(config: Config, complaints: Complaints) -> None:
    """Complain of what needs all gradients of a step before its first weight changes."""
    if not config.io_daemon.update_in_backward:
        return
    hindrances = {
        "gradient_clipping: it needs the norm of all gradients first; write 0": config.gradient_clipping > 0,
        "fp16: a step is skipped if any gradient overflows; use bf16 or fp32": config.fp16.enabled,
        "bf16.check_grad_overflow: a step is skipped if any gradient overflows": config.bf16.check_grad_overflow,
        "torch_autocast in fp16: a step is skipped if any gradient overflows": config.scales_as_torch,
        "stages below 3: all weights are whole, and updated together": config.zero_optimization.stage < 3,
    }
    for hindrance, is_there in hindrances.items():
        if is_there:
            complaints.add("io_daemon.update_in_backward", True, f"not together with {hindrance}, or write false here")
            return
