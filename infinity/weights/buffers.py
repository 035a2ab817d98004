"""Buffers stay whole on every rank and follow rank 0's, exactly as DDP has them with ``broadcast_buffers``.

DDP sends them when it is made, and before every forward unless the last one ran without gradients or in ``no_sync()``:
so an evaluation takes rank 0's once, and the first training forward after it keeps what each rank has, which is still
the same unless the evaluation changed it. They are written in place, version counters kept, since autograd may have
saved them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.errors import WeightsError
from infinity.plan.registered import modules, named_buffers, named_modules, named_parameters, parameters
from infinity.tiers.collectives import Collectives

_MIXES: Final = re.compile("dtype|scalar type")
"""What torch says, in one form or another, where operands of an operation differ in their dtypes."""


class FollowedBuffers:
    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        """Collective: every rank has rank 0's afterwards."""
        self._module, self._collectives = module, collectives
        self._due, self._num_divergences = True, collectives.num_divergences
        self._broadcast()

    @property
    def is_due(self) -> bool:
        """Whether the next forward begins with rank 0's. Ranks that have diverged may have had other forwards, and
        begin anew."""
        return self._due or self._num_divergences != self._collectives.num_divergences

    def before_forward(self, *, in_no_sync: bool = False) -> None:
        if self.is_due:
            self._broadcast()
        self._num_divergences = self._collectives.num_divergences
        self._due = torch.is_grad_enabled() and not in_no_sync

    def _broadcast(self) -> None:
        if self._collectives.world_size == 1:
            return
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for buffer in self._module.buffers():  # asked anew: buffers are often replaced
            if buffer.device.type != "meta" and buffer.numel():
                by_kind.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        for buffers in by_kind.values():
            values = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            self._collectives.broadcast(values, f"broadcast {values.numel()} elements of buffers of {values.dtype}")
            for buffer, value in zip(buffers, torch.split(values, [b.numel() for b in buffers]), strict=True):
                write_buffer(buffer, value.view(buffer.shape))


def is_expanded(buffer: torch.Tensor) -> bool:
    """Whether elements lie in one place, and it cannot be written."""
    return any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def write_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Give it other contents, in place and without a new version."""
    if is_expanded(buffer):
        buffer.data = value.clone()
    else:
        buffer.data.copy_(value)


def move_buffers(
    model: nn.Module,
    device: torch.device,
    weight_dtype: torch.dtype,
    *,
    dtype: torch.dtype | None = None,
    follow: bool = True,
    kept: Sequence[str] | Literal["auto"] = "auto",
) -> None:
    """Buffers go to ``device``. A model in fp32 that the configuration makes 16-bit takes its fp32 buffers along: those
    of its state dict, which are values as weights are. The others are constants that constructors compute, and what
    reads an export computes them anew: rotary frequencies, above all, lose their positions in bf16.

    Args:
        weight_dtype: the dtype of the weights from now on.
        dtype: what floating-point buffers, fp64 ones too, are cast to instead; None: as above.
        follow: whether buffers follow the weights at all: not those of a model that came in 16 bits.
        kept: patterns of full names of buffers that are fp32 beside 16-bit weights, found anywhere in a name, * for any
            characters; "auto": what the model's modules list themselves, as transformers' do.
    """
    patterns = list(_own_patterns(model, weight_dtype)) if kept == "auto" else [_regular(name) for name in kept]
    for names, buffer, is_value in _buffers_of(model):
        target = buffer.dtype
        is_kept = any(re.search(pattern, name) for pattern in patterns for name in names)
        if weight_dtype is not torch.float32 and is_kept:
            target = torch.float32 if buffer.is_floating_point() and buffer.itemsize < 4 else target
        elif dtype is not None:
            target = dtype if buffer.is_floating_point() else target
        elif follow and is_value and buffer.dtype is torch.float32:
            target = weight_dtype
        buffer.data = buffer.data.to(device=device, dtype=target)


def narrowed_against_the_model(model: nn.Module, weight_dtype: torch.dtype) -> list[str]:
    """Names of the parameters that the model's own lists want in fp32 beside others in ``weight_dtype``."""
    if weight_dtype is torch.float32:
        return []
    patterns = list(_own_patterns(model, weight_dtype))
    return [name for name, _ in named_parameters(model) if any(re.search(pattern, name) for pattern in patterns)]


def _buffers_of(model: nn.Module) -> Iterator[tuple[Sequence[str], torch.Tensor, bool]]:
    """Each with all its names, and whether a state dict holds it, under any of them."""
    values = {
        id(buffer)
        for module in modules(model)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    named: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        named.setdefault(id(buffer), ([], buffer))[0].append(name)
    for names, buffer in named.values():
        yield names, buffer, id(buffer) in values


@contextmanager
def mixed_dtypes_named(model: nn.Module, inputs: object) -> Iterator[None]:
    """Around a forward: where torch refuses to mix dtypes and no input is in fp32, buffers in fp32 beside 16-bit
    weights are what brought it in, and are named."""
    try:
        yield
    except RuntimeError as error:
        refusal = _mixed_dtypes_in(model, inputs, error)
        if refusal is None:
            raise
        raise refusal from error


def note_mixed_dtypes(model: nn.Module, inputs: object, error: BaseException | None) -> None:
    """The same for a call that is not ours to end: torch's error gets a note."""
    if isinstance(error, RuntimeError) and (refusal := _mixed_dtypes_in(model, inputs, error)) is not None:
        error.add_note(str(refusal))


def _mixed_dtypes_in(model: nn.Module, inputs: object, error: RuntimeError) -> WeightsError | None:
    if isinstance(error, WeightsError) or not _MIXES.search(str(error)):
        return None
    narrow = {param.dtype for param in parameters(model)} & {torch.bfloat16, torch.float16}
    fp32 = [name for name, buffer in named_buffers(model) if buffer.dtype is torch.float32]
    given = (each.dtype for each in tree_leaves(inputs) if isinstance(each, torch.Tensor))
    if not narrow or not fp32 or torch.float32 in given:
        return None
    short = "bf16" if torch.bfloat16 in narrow else "fp16"
    return WeightsError(
        ", ".join(fp32[:4]),
        f"in fp32 met weights in {short}: {error}",
        f'write "data_types": {{"buffer_dtype": "{short}"}}, or cast what the buffers give in forward()',
    )


def _own_patterns(model: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    """``_keep_in_fp32_modules_strict`` is for all 16-bit dtypes, ``_keep_in_fp32_modules`` for fp16 alone."""
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype is torch.float16 else [])]
    for prefix, module in named_modules(model):
        for name in (name for each in lists for name in getattr(module, each, None) or ()):
            yield f"^{re.escape(prefix)}[.].*{_regular(name)}" if prefix else _regular(name)


def _regular(pattern: str) -> str:
    return ".*".join(re.escape(part) for part in pattern.split("*"))
