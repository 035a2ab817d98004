"""The norm of a step's gradients, as ``torch.nn.utils.clip_grad_norm_`` takes it, bit for bit.

That is the norm of each parameter's gradient, in fp32 and in torch's order, and then the norm of these. On a CPU the
order is from the first element to the last: where ranks have a part of each parameter, the sums go from rank to rank,
group by group, so that all ranks work at the same time, each on another group. An accelerator's order is its kernel's,
which is called with each gradient once it is whole. Where neither can be, squares are summed in fp64.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._foreach_utils import _device_has_foreach_support

from infinity.plan.sharding import NORM_BLOCK, Segment
from infinity.tiers.base import spans
from infinity.tiers.collectives import Collectives
from io_daemon import _native

_log = logging.getLogger(__name__)

Sums = NDArray[np.float32]

BLOCKS_TOGETHER: Final = 4
"""Norms of so many blocks are taken by one call: in fp64 they lie in a core's own cache."""
CAST_NUMEL: Final = 1 << 16
"""Elements in fp16 that are cast at a time: both forms lie in a core's own cache."""
_STATE: Final = 16
_NOT_FINITE: Final = _STATE - 1
_FAILED: Final = -1
"""What is passed on as taken of a parameter where a rank could not: the next ones wait for its word."""
_TRIED: Final = (*range(1, 18),) * 20 + (100, 4_099, 70_001)
"""Sizes: what makes no whole row of eight is summed otherwise, and one column shows that only now and then."""


class Norm(NamedTuple):
    value: torch.Tensor
    """0-D fp32, on the CPU."""
    is_finite: bool
    """Every gradient is, also where the norm itself is too large for fp32."""


class Norms(Protocol):
    """What is known of the norms of the running step's gradients, segment by segment."""

    def clear(self) -> None:
        """The gradients are forgotten."""

    def drop(self, segment: Segment) -> None:
        """The segment's gradient has changed."""

    def take(self, segment: Segment, pieces: Sequence[torch.Tensor]) -> None:
        """Note the segment's gradient, which lies in its chunk's ``pieces``. A parameter's segments come in order."""

    def lacks(self, segment: Segment) -> bool:
        """Whether the segment is to be taken for ``total``."""

    def total(self, groups: Sequence[Sequence[int]], take_lacking: Callable[[int], None]) -> Norm:
        """The norm of the parameters of all groups, the same on every rank. Collective.

        Args:
            groups: parameters, each group's in their order, alike on every rank.
            take_lacking: takes what is lacking of the group of this number.
        """


def norms_of(numels: Sequence[int], collectives: Collectives, *, device: torch.device | None) -> Norms:
    """Those with torch's own bits, on a CPU whose torch is understood, and on an accelerator where this rank has all
    of each parameter; else those in fp64. Collective.

    Args:
        numels: of each parameter, unsharded.
        collectives: of the ranks that have a part of each parameter.
        device: where the optimizer steps; None: some here, some there.
    """
    kind = "" if device is None else device.type
    is_known = torch_sums_in_lanes() if kind == "cpu" else kind not in ("", "meta") and collectives.world_size == 1
    unknown = torch.tensor([not is_known], dtype=torch.uint8, device="cpu")
    collectives.max(unknown, "agree on how norms are taken")
    if unknown:
        return BlockNorms(collectives)
    return ParamNorms(numels, collectives) if kind == "cpu" else WholeNorms(numels)


class ParamNorms:
    """Norms of whole parameters, with torch's bits."""

    def __init__(self, numels: Sequence[int], collectives: Collectives) -> None:
        self._numels, self._collectives = numels, collectives
        self._states = np.zeros((len(numels), _STATE), dtype=np.float32)
        self._taken = [0] * len(numels)
        """Elements of each parameter, from its first one, that its state has, here and on the ranks before."""

    def clear(self) -> None:
        self._taken = [0] * len(self._numels)

    def drop(self, segment: Segment) -> None:
        self._taken[segment.param] = 0

    def take(self, segment: Segment, pieces: Sequence[torch.Tensor]) -> None:
        param, state = segment.param, self._states[segment.param]
        if segment.param_offset == 0:
            state.fill(0.0)
        elif segment.param_offset != self._taken[param]:
            return  # what lies before it is still to come, and this once more
        for done, part in spans(pieces, segment.chunk_offset, segment.numel):
            _add_squares(part.cpu(), state, segment.param_offset + done, self._numels[param])
        self._taken[param] = segment.param_offset + segment.numel

    def lacks(self, segment: Segment) -> bool:
        return self._taken[segment.param] < segment.param_offset + segment.numel

    def total(self, groups: Sequence[Sequence[int]], take_lacking: Callable[[int], None]) -> Norm:
        rank, last = self._collectives.rank, self._collectives.world_size - 1
        self._collectives.agree("take the norm of the gradients")
        failures: list[Exception] = []
        for number, params in enumerate(groups):
            if rank > 0:
                passed = torch.empty(len(params), _STATE + 1, dtype=torch.float64, device="cpu")
                self._collectives.receive_from_previous(passed)
                self._accept(params, passed)
            try:
                if not failures:
                    take_lacking(number)
            except Exception as error:  # noqa: BLE001 (raised below: the next rank waits for this one)
                failures.append(error)
            for param in params if failures else ():
                self._taken[param] = _FAILED
            if rank < last:
                self._collectives.send_to_next(self._known(params))
        params = sorted(param for group in groups for param in group)
        if last > 0:
            known = self._known(params)
            self._collectives.broadcast(known, "tell the norms of the gradients", source=last)
            self._accept(params, known)
        if failures or any(self._taken[param] == _FAILED for param in params):

            def tell() -> None:
                if failures:
                    raise failures[0]

            self.clear()
            self._collectives.together(tell, "tell why the norm of the gradients was not taken")
        states = self._states[params]
        norms = torch.from_numpy(_norms_of(states, [self._numels[param] for param in params]))
        return Norm(torch.linalg.vector_norm(norms), not bool(np.isnan(states[:, _NOT_FINITE]).any()))

    def _known(self, params: Sequence[int]) -> torch.Tensor:
        """[parameters, states and how much is in them] in fp64, which has both."""
        taken = [[float(self._taken[param])] for param in params]
        states = torch.from_numpy(self._states[list(params)]).double()
        return torch.cat([states, torch.tensor(taken, dtype=torch.float64, device="cpu").view(-1, 1)], dim=1)

    def _accept(self, params: Sequence[int], passed: torch.Tensor) -> None:
        self._states[list(params)] = passed[:, :_STATE].float().numpy()
        for param, taken in zip(params, passed[:, _STATE].tolist(), strict=True):
            self._taken[param] = int(taken)


class WholeNorms:
    """Norms by the device's own kernel, with the bits that it gives gradients in memory of their own. Nothing here
    waits for the device before ``total``."""

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = numels
        self._parts: dict[int, list[torch.Tensor]] = {}
        """Copies of what is here of gradients that are not whole yet, in their order."""
        self._taken: dict[int, int] = {}
        """By parameter its elements that are known, from the first on."""
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By parameter its norm, and its smallest and largest element."""

    def clear(self) -> None:
        self._parts.clear()
        self._taken.clear()
        self._found.clear()

    def drop(self, segment: Segment) -> None:
        for known in (self._parts, self._taken, self._found):
            known.pop(segment.param, None)

    def take(self, segment: Segment, pieces: Sequence[torch.Tensor]) -> None:
        param = segment.param
        if segment.param_offset == 0:
            self.drop(segment)
        elif segment.param_offset != self._taken.get(param, 0):
            return  # what lies before it is still to come, and this once more
        parts = [part for _, part in spans(pieces, segment.chunk_offset, segment.numel)]
        self._taken[param] = segment.param_offset + segment.numel
        if self._taken[param] < self._numels[param]:
            self._parts.setdefault(param, []).extend(part.clone() for part in parts)
            return
        parts = [*self._parts.pop(param, ()), *parts]
        # the kernel sums in another order what begins at an odd address
        whole = (parts[0].clone() if len(parts) == 1 else torch.cat(parts)).float()
        self._found[param] = _norm_on_device(whole), torch.stack(torch.aminmax(whole))

    def lacks(self, segment: Segment) -> bool:
        return self._taken.get(segment.param, 0) < segment.param_offset + segment.numel

    def total(self, groups: Sequence[Sequence[int]], take_lacking: Callable[[int], None]) -> Norm:
        for number in range(len(groups)):
            take_lacking(number)
        params = sorted(param for group in groups for param in group)
        found = {param: self._found[param] for param in params if self._numels[param]}
        if not found:
            return Norm(torch.zeros((), device="cpu"), is_finite=True)
        zero = torch.zeros_like(next(iter(found.values()))[0])  # of a parameter without elements
        norms = [found[param][0] if param in found else zero for param in params]
        are_finite = torch.stack([extremes for _, extremes in found.values()]).isfinite().all()
        return Norm(torch.linalg.vector_norm(torch.stack(norms)).cpu(), bool(are_finite))


def _norm_on_device(values: torch.Tensor) -> torch.Tensor:
    """0-D, as ``torch.nn.utils.get_total_norm`` takes those of single gradients."""
    if _device_has_foreach_support(values.device):
        norms: tuple[torch.Tensor, ...] = torch._foreach_norm([values])
        return norms[0]
    norm: torch.Tensor = torch.linalg.vector_norm(values)
    return norm


class BlockNorms:
    """Norms of the group shards' blocks in fp64, whose squares are summed in order: what the sum depends on, where
    groups, shards and chunks are cut, is gone when it is rounded to fp32."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._is_told = False
        self._squares: dict[tuple[int, int], list[float]] = {}
        """By parameter and offset in it, of each block."""

    def clear(self) -> None:
        self._squares.clear()

    def drop(self, segment: Segment) -> None:
        self._squares.pop((segment.param, segment.param_offset), None)

    def take(self, segment: Segment, pieces: Sequence[torch.Tensor]) -> None:
        found = []
        for offset, numel, count in _norm_blocks(segment):
            parts = [part for _, part in spans(pieces, offset, count * numel)]
            values = torch.cat(parts) if len(parts) > 1 else parts[0]
            found.append(torch.linalg.vector_norm(values.view(count, numel), dim=1, dtype=torch.float64))
        norms = torch.cat(found)
        self._squares[segment.param, segment.param_offset] = (norms * norms).tolist()

    def lacks(self, segment: Segment) -> bool:
        return (segment.param, segment.param_offset) not in self._squares

    def total(self, groups: Sequence[Sequence[int]], take_lacking: Callable[[int], None]) -> Norm:
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "norms of gradients are summed in fp64 here, since torch's own order is not known where parameters "
                "are stepped: what is clipped by them differs in the last bits from torch.nn.utils.clip_grad_norm_"
            )

        def own() -> torch.Tensor:
            for number in range(len(groups)):
                take_lacking(number)
            counted, total = {param for group in groups for param in group}, 0.0
            for (param, _), squares in sorted(self._squares.items()):
                if param in counted:
                    for square in squares:
                        total += square
            return torch.tensor(total, dtype=torch.float64, device="cpu")

        square_sum = self._collectives.prepared(own, "take the norm of the gradients")
        self._collectives.sum(square_sum, "sum the norm of the gradients")
        return Norm(square_sum.sqrt().float(), bool(square_sum.isfinite()))


@cache
def torch_sums_in_lanes() -> bool:
    """Whether this CPU's torch takes norms in the order that ``_native.add_squares`` knows; asked of torch itself."""
    generator = torch.Generator().manual_seed(0)

    def agrees(numel: int) -> bool:
        values, state = torch.randn(numel, generator=generator, device="cpu"), np.zeros(_STATE, dtype=np.float32)
        _add_squares(values, state, 0, numel)
        return float(_norms_of(state, [numel])[0]) == float(torch.linalg.vector_norm(values))

    return all(map(agrees, _TRIED))


def _add_squares(values: torch.Tensor, state: Sums, first: int, numel: int) -> None:
    match values.dtype:
        case torch.float32:
            _native.add_squares(values.numpy(), state, first, numel)
        case torch.bfloat16:
            _native.add_squares(values.view(torch.int16).numpy(), state, first, numel)
        case _:
            for done in range(0, values.numel(), CAST_NUMEL):
                part = values[done : done + CAST_NUMEL].float()
                _native.add_squares(part.numpy(), state, first + done, numel)


def _norms_of(states: Sums, numels: Sequence[int]) -> Sums:
    """[parameters]: of states [parameters, 16]."""
    norms = np.empty(len(numels), dtype=np.float32)
    _native.norms_of_squares(np.ascontiguousarray(states).reshape(-1), np.array(numels, dtype=np.int64), norms)
    return norms


def _norm_blocks(segment: Segment) -> Iterator[tuple[int, int, int]]:
    """(chunk offset, numel, how many) of the segment's norm blocks that are taken together: only whole ones are."""
    first = numel = count = 0
    for offset, length in segment.norm_ranges():
        if count and numel == length == NORM_BLOCK and count < BLOCKS_TOGETHER:
            count += 1
            continue
        if count:
            yield first, numel, count
        first, numel, count = offset, length, 1
    if count:
        yield first, numel, count
