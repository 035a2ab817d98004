"""The dialect's other arguments of ``Init``: what each says in the configuration's keys, or why it is refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from infinity.config.complaints import Complaints
from infinity.config.load import Source, load
from infinity.errors import ConfigError

DEVICES: Final = ("none", "cpu", "nvme")
REFUSED: Final[Mapping[str, str]] = {
    "mpu": "there is no model parallelism: pass the ranks that share the model as process_group",
    "zero_param_parallel_group": "ZeRO++ is not built: leave it out",
    "zero_quantized_weights": "communication is exact: leave it out",
    "zero_quantized_nontrainable_weights": "communication is exact: leave it out",
    "sequence_data_parallel_group": "there is no sequence parallelism: pass the ranks that share the model as "
    "process_group",
    "param_swapper": "staged parameters go where offload_param.device says: leave it out",
}
"""Arguments that pass with None or False alone, and what to do instead."""


def refuse_foreign(given: Mapping[str, object]) -> None:
    """Raises ConfigError for an argument that belongs to what is not built, unless it says so itself."""
    for name, value in given.items():
        if name not in REFUSED:
            raise TypeError(f"Init() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            raise ConfigError(name, type(value).__name__ if not isinstance(value, bool) else value, REFUSED[name])


def placed(source: Source, remote_device: str | None, *, pin_memory: bool) -> Source:
    """The configuration with what ``remote_device`` and ``pin_memory`` say of its section ``offload_param``.

    Raises ConfigError for another device, for one that the configuration contradicts, and for page-locked memory where
    nothing leaves the device.
    """
    if remote_device is None and not pin_memory:
        return source
    if remote_device is not None and remote_device not in DEVICES:
        raise ConfigError("remote_device", remote_device, f"must be one of {', '.join(DEVICES)}")
    complaints = Complaints()
    raw: dict[str, Any] = copy.deepcopy(load(source, complaints))
    complaints.raise_all()
    zero = raw.setdefault("zero_optimization", {})
    section = zero.get("offload_param") or {} if isinstance(zero, dict) else {}
    if not isinstance(zero, dict) or not isinstance(section, dict):
        raise ConfigError("remote_device", remote_device, "needs zero_optimization as an object: write stage 3 there")
    written = section.get("device")
    if remote_device is not None and written not in (None, remote_device):
        raise ConfigError(
            "remote_device", remote_device, f"contradicts zero_optimization.offload_param.device = {written!r}"
        )
    device = remote_device or written or "none"
    if pin_memory and device == "none":
        raise ConfigError("pin_memory", True, 'nothing is offloaded: pass remote_device="cpu" or "nvme" beside it')
    zero["offload_param"] = {**section, "device": device, **({"pin_memory": True} if pin_memory else {})}
    return raw
