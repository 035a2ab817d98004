"""Objects of any class in a client state, as frameworks keep their logs there: pickled, and made anew by running what
their pickle names, as DeepSpeed does. Everything else is kept as infinity's own engine keeps it, which runs nothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

import torch

from infinity.checkpoint import plain
from infinity.deepspeed.logs import logger
from infinity.errors import ConfigError

PICKLED: Final = "pickled by DeepSpeedEngine.save_checkpoint"
"""The key beside which the bytes of such an object stand."""


def packed(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """``state`` as a checkpoint can hold it. What cannot even be pickled stays, and is refused by name."""
    if not isinstance(state, Mapping) or _is_plain(state):
        return state
    return {key: value if _is_plain({key: value}) else _pickled(value) for key, value in state.items()}


def unpacked(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What ``packed`` was given."""
    if state is None:
        return None
    return {key: _made_anew(key, value) for key, value in state.items()}


def _is_plain(state: Mapping[str, Any]) -> bool:
    try:
        plain.to_bytes(state)
    except ConfigError:
        return False
    return True


def _pickled(value: object) -> object:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:  # noqa: BLE001 (pickling calls what users wrote; the refusal says what is wrong)
        return value
    return {PICKLED: torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)}


def _made_anew(key: str, value: Any) -> Any:
    if not (isinstance(value, dict) and value.keys() == {PICKLED}):
        return value
    logger.info("client_state.%s was pickled: the code that it names is run, as DeepSpeed does", key)
    return torch.load(io.BytesIO(value[PICKLED].numpy().tobytes()), map_location="cpu", weights_only=False)
