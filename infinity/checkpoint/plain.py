"""Python values in a checkpoint: pickled by torch, and read back without running anybody's code.

What ``torch.load(weights_only=True)`` takes is what a checkpoint may hold: tensors, numbers, strings, containers of
these, NumPy's arrays and scalars, and namespaces. Anything else is refused when it is saved, not when it is needed.
"""

from __future__ import annotations

import argparse
import io
import re
import threading
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.serialization import get_safe_globals, safe_globals

from infinity.errors import ConfigError

_multiarray: Any = (getattr(np, "_core", None) or np.core).multiarray
_SAFE: set[Any] = {
    _multiarray._reconstruct,
    _multiarray.scalar,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
    argparse.Namespace,
    types.SimpleNamespace,
}
_marking = threading.Lock()
"""What torch takes as safe is the process's: only who holds this adds to it, and takes away what nobody else had."""


def kept(values: Mapping[str, Any], remedies: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint of ``values`` gives back: of what they are now. Raises as ``to_bytes``.

    Args:
        remedies: what else may be done about one that cannot be read back, by its key.
    """
    found: dict[str, Any] = _both(values, remedies)[1]
    return found


def to_bytes(values: Mapping[str, Any]) -> bytes:
    """Raises ConfigError, with the key, where a value cannot be read back."""
    return _both(values, {})[0]


def from_bytes(data: bytes) -> Any:
    """Raises pickle.UnpicklingError for what is not such a value."""
    with _marking, safe_globals(list(_SAFE.difference(get_safe_globals()))):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _both(values: Mapping[str, Any], remedies: Mapping[str, str]) -> tuple[bytes, Any]:
    """The bytes, and what they give back."""
    try:
        data = _dumped(dict(values))
        return data, from_bytes(data)
    except Exception as error:
        for key, value in values.items():
            _check(key, value, remedies.get(key, ""))
        raise ConfigError("client_state", ", ".join(values), f"cannot be saved: {error}") from error


def reason_of(error: Exception) -> str:
    """Why a value cannot be pickled or read back, in a line: torch's text is of what its own callers may do."""
    text = str(error)
    found = re.search(
        r"Unsupported (?:global|class|operand)\b[^\n]*?(?= was not| Please|, which| try|$)", text, re.MULTILINE
    )
    return found[0] if found else text.split("\n")[0] or type(error).__name__


def _dumped(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _check(key: str, value: object, remedy: str, above: tuple[object, ...] = ()) -> None:
    """``above``: what it lies in, one of which it may be."""
    try:
        from_bytes(_dumped(value))
        return
    except Exception as error:  # noqa: BLE001 (pickling calls what users wrote; it is told below)
        cause = error
    inner: dict[str, object] = {}
    if isinstance(value, Mapping) and all(isinstance(each, str) for each in value):
        inner = {f"{key}.{name}": each for name, each in value.items()}
    elif isinstance(value, list | tuple):
        inner = {f"{key}[{place}]": each for place, each in enumerate(value)}
    for name, each in inner.items():
        if not any(each is other for other in (*above, value)):
            _check(name, each, remedy, (*above, value))
    raise ConfigError(
        key,
        type(value).__name__,
        f"cannot be read back without running code ({reason_of(cause)}): {remedy}keep numbers, strings, tensors, "
        "arrays, lists and dicts, such as vars(it)",
    ) from cause
