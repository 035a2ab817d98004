"""The states of all generators of random numbers that a training draws from, of one rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Torch's on the CPU and on ``device``, NumPy's and Python's."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, following = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python": (version, torch.tensor(words), following),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Go on drawing where ``random_states`` was called; a device of another type draws as before."""
    torch.set_rng_state(states["torch"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, words, following = states["python"]
    random.setstate((version, tuple(words.tolist()), following))
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
