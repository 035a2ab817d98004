"""Inference mode, in which a user may call what the engine does on its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def outside_inference() -> AbstractContextManager[object]:
    """What is made inside may be written to later, and whatever there is may be written to inside.

    Where nobody is in that mode nothing is entered: what an interrupt leaves half entered torch undoes with the last
    reference to its traceback, and puts gradients back then to what they were, be they on or off by now.
    """
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()
