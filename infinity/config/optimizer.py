"""The ``optimizer`` section: one class for each optimizer that a configuration can name, chosen by ``type``."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from infinity.config.section import Betas, NonNegative, Section


class AdamParams(Section):
    """Defaults are those of DeepSpeed's Adam (weight decay 0, not torch's 0.01)."""

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    amsgrad: bool = False
    bias_correction: bool = True
    adam_w_mode: bool = True


class AdamOptimizer(Section):
    type: Literal["Adam", "AdamW"]
    params: AdamParams = AdamParams()

    @property
    def decoupled_weight_decay(self) -> bool:
        """AdamW's decay. As in DeepSpeed, "Adam" means AdamW unless ``adam_w_mode`` is false."""
        return self.type == "AdamW" or self.params.adam_w_mode


class AdagradParams(Section):
    lr: NonNegative = 1e-2
    lr_decay: NonNegative = 0.0
    eps: NonNegative = 1e-10
    weight_decay: NonNegative = 0.0
    initial_accumulator_value: NonNegative = 0.0


class AdagradOptimizer(Section):
    type: Literal["Adagrad"]
    params: AdagradParams = AdagradParams()


class LionParams(Section):
    """Defaults are those of DeepSpeed's Lion (the paper has betas 0.9 and 0.99)."""

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    weight_decay: NonNegative = 0.0


class LionOptimizer(Section):
    type: Literal["Lion"]
    params: LionParams = LionParams()


class SgdParams(Section):
    lr: NonNegative = 1e-3
    momentum: NonNegative = 0.0
    dampening: float = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False


class SgdOptimizer(Section):
    type: Literal["SGD"]
    params: SgdParams = SgdParams()


SPELLINGS: Final = {name.lower(): name for name in ("Adam", "AdamW", "Adagrad", "Lion", "SGD")}
"""Names in lower case, and as they are."""
_WHOLE: Final = "which shards and sub-groups hold parts of"
REFUSED: Final[dict[str, str]] = {
    "muon": f"Muon orthogonalises whole matrices, {_WHOLE}",
    "lamb": f"LAMB scales by norms of whole layers, {_WHOLE}",
    "onebitadam": "1-bit Adam compresses what ranks exchange",
    "zerooneadam": "0/1 Adam compresses what ranks exchange",
    "onebitlamb": "1-bit LAMB compresses what ranks exchange",
    "muadam": "with mup, pass its optimizer as an object",
    "muadamw": "with mup, pass its optimizer as an object",
    "musgd": "with mup, pass its optimizer as an object",
}
"""DeepSpeed's other optimizers, in lower case, and why a configuration cannot name them."""


def reason_against(kind: str) -> str:
    """Why a configuration cannot name this optimizer."""
    return REFUSED.get(kind.lower(), "for any other that treats each element by itself, pass an object to initialize")


def _spelt(optimizer: object) -> object:
    """DeepSpeed takes optimizer names in any case."""
    if isinstance(optimizer, dict) and isinstance(name := optimizer.get("type"), str):
        return {**optimizer, "type": SPELLINGS.get(name.lower(), name)}
    return optimizer


Optimizer = Annotated[
    Annotated[AdamOptimizer | AdagradOptimizer | LionOptimizer | SgdOptimizer, Field(discriminator="type")],
    BeforeValidator(_spelt),
]
