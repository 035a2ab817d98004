"""DeepSpeed's arithmetic between the three batch settings and the world size."""

from __future__ import annotations

from typing import Final, NamedTuple

from infinity.errors import ConfigError

BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SAMPLES_MAX: Final = 2**63 - 1
"""Above it a number of samples is a slip of the pen, and losses cannot be divided by it."""


class BatchSizes(NamedTuple):
    """Samples, but for ``accumulation``: micro-batches per optimizer step."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(*, train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Fill in what is None so that train = micro x accumulation x world_size.

    Raises ``ConfigError`` where the three contradict each other, do not divide, or say too little."""
    if train is None:
        if micro is None:
            raise ConfigError(
                "train_batch_size",
                None,
                "write train_batch_size or train_micro_batch_size_per_gpu: neither is given, and nothing else "
                "determines them",
            )
        accumulation = accumulation or 1
        return BatchSizes(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = _divided(train, accumulation * world_size, f"gradient_accumulation_steps {accumulation}", world_size)
    elif accumulation is None:
        accumulation = _divided(train, micro * world_size, f"train_micro_batch_size_per_gpu {micro}", world_size)
    if train != micro * accumulation * world_size:
        raise ConfigError(
            "train_batch_size",
            train,
            f"must be train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {accumulation} x world size "
            f"{world_size} = {micro * accumulation * world_size}; leave one of the three out",
        )
    return BatchSizes(train, micro, accumulation)


def _divided(train: int, divisor: int, what: str, world_size: int) -> int:
    quotient, rest = divmod(train, divisor)
    if rest or not quotient:
        below, above = quotient * divisor, (quotient + 1) * divisor
        nearest = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            "train_batch_size", train, f"must be a multiple of {what} x world size {world_size}: write {nearest}"
        )
    return quotient
