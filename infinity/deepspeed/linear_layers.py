"""Linear layers under the names of DeepSpeed's, whose backward keeps no gathered weight. No backward does here."""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import nn


class LinearModuleForZeroStage3(nn.Linear):
    """``torch.nn.Linear``: between forward and backward its weight is given up like any other's."""


class LinearFunctionForZeroStage3:
    """The function of a linear layer, called as an ``autograd.Function`` is."""

    apply = staticmethod(F.linear)


zero3_linear_wrap: Final = F.linear
