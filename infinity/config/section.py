"""What every section of the configuration is, and the kinds of values that fields have."""

from __future__ import annotations

import math
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

BLOCK_ALIGNMENT_BYTES: Final = 4096
BLOCK_BYTES_MAX: Final = 1 << 30
QUEUE_DEPTH_MAX: Final = 4096


class Section(BaseModel):
    """Frozen and strict: "8" is no number and 1 no boolean."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def whole(value: object) -> object:
    """DeepSpeed's JSON writes element counts as 5e7: a float that is a whole number is that number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def never_is_zero(value: object) -> object:
    """Accelerate writes ``steps_per_print: inf`` for never."""
    return 0 if isinstance(value, float) and math.isinf(value) else whole(value)


def false_is_none(value: object) -> object:
    """``number_checkpoints: false`` is how many files say that there is none."""
    return None if value is False else value


def as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def without_nul(path: str) -> str:
    if "\0" in path:
        raise PydanticCustomError("path", "must be a path, which holds no NUL character")
    return path


Count = Annotated[int, Field(ge=0), BeforeValidator(whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(whole)]
BlockBytes = Annotated[
    int,
    Field(ge=BLOCK_ALIGNMENT_BYTES, le=BLOCK_BYTES_MAX, multiple_of=BLOCK_ALIGNMENT_BYTES),
    BeforeValidator(whole),
]
QueueDepth = Annotated[int, Field(ge=1, le=QUEUE_DEPTH_MAX), BeforeValidator(whole)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(as_tuple)]
Pair = Annotated[tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]], BeforeValidator(as_tuple)]
NonNegative = Annotated[float, Field(ge=0)]
NonEmpty = Annotated[str, Field(min_length=1)]
PathText = Annotated[NonEmpty, AfterValidator(without_nul)]
