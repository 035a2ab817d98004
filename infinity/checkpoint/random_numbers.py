"""The states of all generators of random numbers that a training draws from, of one rank."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from numpy import random as numpy_random  # numpy itself imports it at its first use, and drops Ctrl-C there

_log = logging.getLogger(__name__)


def random_states(device: torch.device) -> dict[str, Any]:
    """Torch's on the CPU and on ``device``, NumPy's and Python's."""
    version, words, following = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": _numpys_state(),
        "python": (version, torch.tensor(words, device="cpu"), following),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _numpys_state() -> Any:
    """NumPy's own generator has a tuple; another one, which the user has set, has what NumPy calls its state."""
    state: Any = numpy_random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return state
    keys, position = state["state"]["key"], state["state"]["pos"]
    values = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return "MT19937", values, position, state["has_gauss"], state["gauss"]


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Go on drawing where ``random_states`` was called; a device of another type draws as before."""
    torch.set_rng_state(states["torch"])
    saved = states["numpy"]
    if not isinstance(saved, dict):
        name, keys, *rest = saved
        saved = (name, keys.numpy().astype(np.uint32), *rest)
    try:
        numpy_random.set_state(saved)
    except ValueError as error:
        _log.warning("NumPy draws as before, its generator is another than the one that was saved: %s", error)
    version, words, following = states["python"]
    random.setstate((version, tuple(words.tolist()), following))
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
