"""The ``optimizer`` section: one class for each optimizer that a configuration can name, chosen by ``type``."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from pydantic import BeforeValidator, Field

from infinity.config.section import Beta, Betas, Fraction, NonNegative, Pair, Section

TORCH_WEIGHT_DECAY: Final = 0.01
"""The default of ``torch.optim.AdamW``."""


class AdamParams(Section):
    """Defaults are those of DeepSpeed's Adam: weight decay 0, with ``torch_adam`` torch's own, 0.01 of AdamW."""

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    amsgrad: bool = False
    bias_correction: bool = True
    adam_w_mode: bool = True
    torch_adam: bool = False
    """Torch's arithmetic always runs; this takes torch's choice of its code and its default of the weight decay."""


class AdamOptimizer(Section):
    type: Literal["Adam", "AdamW"]
    params: AdamParams = AdamParams()

    @property
    def decoupled_weight_decay(self) -> bool:
        """AdamW's decay. As in DeepSpeed, "Adam" means AdamW unless ``adam_w_mode`` is false."""
        return self.type == "AdamW" or self.params.adam_w_mode

    @property
    def weight_decay(self) -> float:
        """What is written, or the default that goes with ``torch_adam``."""
        is_torchs = self.params.torch_adam and "weight_decay" not in self.params.model_fields_set
        return TORCH_WEIGHT_DECAY if is_torchs and self.decoupled_weight_decay else self.params.weight_decay


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


class MuonParams(Section):
    """Matrices are orthogonalised; embeddings, ``lm_head`` and whatever has less than two dimensions are AdamW's."""

    lr: NonNegative | None = None
    """Where ``muon_lr`` or ``adam_lr`` is absent; without either 0.02 for matrices, 3e-4 for the rest."""
    muon_lr: NonNegative | None = None
    adam_lr: NonNegative | None = None
    momentum: Beta = 0.95
    weight_decay: NonNegative = 0.0
    betas: Betas = (0.9, 0.95)
    eps: NonNegative = 1e-10
    ns_method: Literal["standard", "gram"] = "gram"
    """The iteration that orthogonalises."""


class MuonOptimizer(Section):
    type: Literal["Muon"]
    params: MuonParams = MuonParams()


class RmspropParams(Section):
    lr: NonNegative = 1e-2
    alpha: Fraction = 0.99
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    momentum: NonNegative = 0.0
    centered: bool = False


class RmspropOptimizer(Section):
    type: Literal["RMSprop"]
    params: RmspropParams = RmspropParams()


class AdadeltaParams(Section):
    lr: NonNegative = 1.0
    rho: Fraction = 0.9
    eps: NonNegative = 1e-6
    weight_decay: NonNegative = 0.0


class AdadeltaOptimizer(Section):
    type: Literal["Adadelta"]
    params: AdadeltaParams = AdadeltaParams()


class AdamaxParams(Section):
    lr: NonNegative = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0


class AdamaxOptimizer(Section):
    type: Literal["Adamax"]
    params: AdamaxParams = AdamaxParams()


class NadamParams(AdamaxParams):
    momentum_decay: NonNegative = 4e-3
    decoupled_weight_decay: bool = False


class NadamOptimizer(Section):
    type: Literal["NAdam"]
    params: NadamParams = NadamParams()


class RadamParams(AdamaxParams):
    lr: NonNegative = 1e-3
    decoupled_weight_decay: bool = False


class RadamOptimizer(Section):
    type: Literal["RAdam"]
    params: RadamParams = RadamParams()


class AsgdParams(Section):
    lr: NonNegative = 1e-2
    lambd: NonNegative = 1e-4
    alpha: NonNegative = 0.75
    t0: NonNegative = 1e6
    weight_decay: NonNegative = 0.0


class AsgdOptimizer(Section):
    type: Literal["ASGD"]
    params: AsgdParams = AsgdParams()


class RpropParams(Section):
    lr: NonNegative = 1e-2
    etas: Pair = (0.5, 1.2)
    step_sizes: Pair = (1e-6, 50.0)


class RpropOptimizer(Section):
    type: Literal["Rprop"]
    params: RpropParams = RpropParams()


TorchOptimizer = (
    RmspropOptimizer
    | AdadeltaOptimizer
    | AdamaxOptimizer
    | NadamOptimizer
    | RadamOptimizer
    | AsgdOptimizer
    | RpropOptimizer
)
"""What torch has under the same name, with torch's own defaults."""
OwnOptimizer = AdamOptimizer | AdagradOptimizer | LionOptimizer | SgdOptimizer | MuonOptimizer
NAMES: Final = tuple(get_args(each.model_fields["type"].annotation) for each in get_args(OwnOptimizer | TorchOptimizer))
HYPER_PARAMETERS: Final = frozenset(
    {"maximize"}.union(
        *(each.model_fields["params"].annotation.model_fields for each in get_args(OwnOptimizer | TorchOptimizer))
    )
)
"""What some optimizer would heed in a param group; under other names scripts keep there what they like."""
SPELLINGS: Final = {name.lower(): name for names in NAMES for name in names}
"""Names in lower case, and as they are."""
REFUSED: Final[dict[str, str]] = {
    "lamb": "pass a LAMB of your own as an object: one that steps each parameter by itself is served",
    "lars": "pass a LARS of your own as an object: one that steps each parameter by itself is served",
    "lbfgs": "LBFGS calls the model again within its step",
    "adafactor": "Adafactor keeps rows and columns of whole matrices, which belong to no element",
    "sparseadam": "gradients are dense: write Adam",
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
    return REFUSED.get(
        kind.lower(), "for any other that treats each element or parameter by itself, pass an object to initialize"
    )


def _spelt(optimizer: object) -> object:
    """DeepSpeed takes optimizer names in any case."""
    if isinstance(optimizer, dict) and isinstance(name := optimizer.get("type"), str):
        return {**optimizer, "type": SPELLINGS.get(name.lower(), name)}
    return optimizer


Optimizer = Annotated[
    Annotated[OwnOptimizer | TorchOptimizer, Field(discriminator="type")],
    BeforeValidator(_spelt),
]
