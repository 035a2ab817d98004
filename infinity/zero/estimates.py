"""What model states need before there is a model to try: printed for every way of offloading.

Mixed-precision Adam has 16 bytes a parameter: weight 2, gradient 2, master weight 4, two moments of 4; fewer where
``io_daemon.master_weights`` or ``io_daemon.moments`` say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from infinity.plan.narrow import Narrow

GIB = 1 << 30
WEIGHT_BYTES, GRAD_BYTES = 2, 2
MASTER_BYTES = {"fp32": 4, "split": 2}
MOMENT_BYTES = {"fp32": 4, "bf16": Narrow.BF16.bytes_per_value, "8bit": Narrow.SIGNED_8.bytes_per_value}
"""What one parameter has of each, by what ``io_daemon`` says."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes by place, for one way of offloading."""

    options: str
    gpu_bytes: int
    """What each GPU holds."""
    host_bytes: int | None
    """What each node holds; None: what ``io_daemon.host_budget_bytes`` says, however large the model is."""
    nvme_bytes: int
    """What each node's swap files hold."""


def state_bytes(master_weights: str = "fp32", moments: str = "fp32") -> float:
    """Master weight and two moments of one parameter, as ``io_daemon`` has them stored.

    Raises ValueError for what it does not know.
    """
    for key, value, known in (("master_weights", master_weights, MASTER_BYTES), ("moments", moments, MOMENT_BYTES)):
        if value not in known:
            raise ValueError(f"{key} is {value!r}: write one of {', '.join(known)}")
    return MASTER_BYTES[master_weights] + 2 * MOMENT_BYTES[moments]


STATE_BYTES = state_bytes()
"""What ``state_bytes`` gives where neither key is written."""


def zero3_needs(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int, num_nodes: int, *, states: float = STATE_BYTES
) -> list[Need]:
    """Stage 3: everything is sharded; a GPU holds a layer's weights and gradients while it is used. ``states``: bytes
    of a parameter's, see ``state_bytes``."""
    num_gpus = num_gpus_per_node * num_nodes
    live_bytes = (WEIGHT_BYTES + GRAD_BYTES) * largest_layer_params
    needs = []
    for param in ("none", "cpu", "nvme"):
        for optimizer in ("none", "cpu", "nvme"):
            bytes_on = {"none": 0.0, "cpu": 0.0, "nvme": 0.0}
            bytes_on[param] += WEIGHT_BYTES
            bytes_on[optimizer] += GRAD_BYTES + states
            needs.append(
                Need(
                    options=f"offload_param={param}, offload_optimizer={optimizer}",
                    gpu_bytes=int(bytes_on["none"] * total_params // num_gpus) + live_bytes,
                    host_bytes=None if bytes_on["nvme"] else int(bytes_on["cpu"] * total_params // num_nodes),
                    nvme_bytes=int(bytes_on["nvme"] * total_params // num_nodes),
                )
            )
    return needs


def zero2_needs(
    total_params: int, num_gpus_per_node: int, num_nodes: int, *, states: float = STATE_BYTES
) -> list[Need]:
    """Stage 2: weights are whole on every GPU, gradients and states are sharded. ``states`` as for stage 3."""
    sharded = (GRAD_BYTES + states) * total_params
    of_a_gpu, of_a_node = int(sharded // (num_gpus_per_node * num_nodes)), int(sharded // num_nodes)
    return [
        Need(
            options=f"offload_optimizer={optimizer}",
            gpu_bytes=WEIGHT_BYTES * total_params + (of_a_gpu if optimizer == "none" else 0),
            host_bytes=None if optimizer == "nvme" else (optimizer == "cpu") * of_a_node,
            nvme_bytes=(optimizer == "nvme") * of_a_node,
        )
        for optimizer in ("none", "cpu", "nvme")
    ]


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    master_weights: str = "fp32",
    moments: str = "fp32",
) -> None:
    """Print what ``model`` needs under stage 3; see ``estimate_zero3_model_states_mem_needs_all_cold``."""
    largest = max((_numel(module.parameters(recurse=False)) for module in model.modules()), default=0)
    estimate_zero3_model_states_mem_needs_all_cold(
        _numel(model.parameters()),
        largest,
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
        master_weights=master_weights,
        moments=moments,
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    master_weights: str = "fp32",
    moments: str = "fp32",
) -> None:
    """Print what a model of ``total_params`` needs under stage 3.

    Args:
        total_params: elements of all parameters.
        largest_layer_params: elements of the module that has most of its own.
        num_gpus_per_node: ranks on a node.
        num_nodes: nodes of the job.
        additional_buffer_factor: host memory is multiplied by it, for what else a process needs.
        master_weights: as ``io_daemon`` has them: "fp32" or "split".
        moments: as ``io_daemon`` has them: "fp32", "bf16" or "8bit".
    """
    states = state_bytes(master_weights, moments)
    _print(
        zero3_needs(total_params, largest_layer_params, num_gpus_per_node, num_nodes, states=states),
        f"{total_params / 1e6:.0f}M total params, {largest_layer_params / 1e6:.0f}M largest layer params",
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    moments: str = "fp32",
) -> None:
    """Print what ``model`` needs under stage 2; see ``estimate_zero2_model_states_mem_needs_all_cold``."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _numel(model.parameters()), num_gpus_per_node, num_nodes, additional_buffer_factor, moments=moments
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    moments: str = "fp32",
) -> None:
    """Print what a model of ``total_params`` needs under stage 2; arguments as for stage 3."""
    _print(
        zero2_needs(total_params, num_gpus_per_node, num_nodes, states=state_bytes(moments=moments)),
        f"{total_params / 1e6:.0f}M total params",
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _print(needs: list[Need], model: str, num_gpus_per_node: int, num_nodes: int, factor: float) -> None:
    print("Estimated memory needed for params, optim states and gradients for a:")
    nodes = f"{num_nodes} node{'s' if num_nodes > 1 else ''}"
    gpus = f"{num_gpus_per_node} GPU{'s' if num_gpus_per_node > 1 else ''}"
    print(f"HW: Setup with {nodes}, {gpus} per node.")
    print(f"SW: Model with {model}.")
    print("  per CPU  |  per GPU  |  on NVMe  | Options")
    for need in needs:
        host = "   budget" if need.host_bytes is None else f"{need.host_bytes * factor / GIB:7.2f}GB"
        gpu, nvme = (f"{count / GIB:7.2f}GB" for count in (need.gpu_bytes, need.nvme_bytes))
        print(f" {host} | {gpu} | {nvme} | {need.options}")
