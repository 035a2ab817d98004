"""``TiledLinear``: one linear layer as a grid of small ones, of which one tile is live at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.zero.gathered import GatheredParameters


class TilesError(ConfigError, RuntimeError):
    """A number of tiles that a layer cannot be cut into: DeepSpeed's users catch a RuntimeError."""


class TiledLinear(nn.Module):
    """A linear layer whose weight ``[out_features, in_features]`` is cut into ``out_splits`` x ``in_splits`` tiles.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        bias: whether a bias is added; it lies with the last tile of each row.
        in_splits: tiles along the input, between 1 and ``in_features``.
        out_splits: tiles along the output, between 1 and ``out_features``.
        input_is_already_split: ``forward`` takes a sequence of ``in_splits`` tensors.
        combine_out_splits: False: ``forward`` gives a list of ``out_splits`` tensors.
        linear_cls: what the tiles are made of: ``linear_cls(in_features, out_features, bias=…, **kwargs)``.
        init_linear: a layer to take weight and bias of.

    Tiles of uneven sizes differ by one at most, the first ones are larger. Sums over tiles round otherwise than one
    product does.

    Raises:
        TilesError: a number of tiles that the sizes cannot be cut into.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = _cut("in_splits", in_features, in_splits)
        self.out_parts = _cut("out_splits", out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(in_stop - in_start, out_stop - out_start, bias=bias and number == in_splits - 1, **kwargs)
                for number, (in_start, in_stop) in enumerate(pairwise(self.in_parts))
            )
            for out_start, out_stop in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """``[..., in_features]`` to ``[..., out_features]``, or lists of their parts."""
        inputs = self._inputs(input_)
        outputs = []
        for row in self.linears:
            total: torch.Tensor | None = None
            for tile, part in zip(row.children(), inputs, strict=True):
                product = self._product(tile, part)
                total = product if total is None else total + product
            outputs.append(total)
        return self._combined(outputs)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take weight and bias of a layer of the same shape; of sharded ones, rank 0's values. Collective then."""
        if tuple(other.weight.shape) != (self.out_features, self.in_features):
            needed = (self.out_features, self.in_features)
            raise ConfigError("other.weight", tuple(other.weight.shape), f"a weight of shape {needed} is needed")
        if (other.bias is not None) != self.use_bias:
            raise ConfigError("other.bias", other.bias is not None, "only one of the two layers has a bias")
        for row, (out_start, out_stop) in zip(self.linears, pairwise(self.out_parts), strict=True):
            for tile, (in_start, in_stop) in zip(row.children(), pairwise(self.in_parts), strict=True):
                params = [other.weight, *tile.parameters(), *([] if other.bias is None else [other.bias])]
                with GatheredParameters(params, modifier_rank=0):
                    tile.get_parameter("weight").copy_(other.weight[out_start:out_stop, in_start:in_stop])
                    if tile.bias is not None:
                        tile.get_parameter("bias").copy_(other.bias[out_start:out_stop])

    def _inputs(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if isinstance(input_, torch.Tensor) and not self.input_is_already_split:
            sizes = [stop - start for start, stop in pairwise(self.in_parts)]
            return list(torch.split(input_, sizes, dim=-1))
        if isinstance(input_, torch.Tensor) or not self.input_is_already_split or len(input_) != self.in_splits:
            wanted = f"{self.in_splits} tensors" if self.input_is_already_split else "one tensor"
            raise ConfigError("input", type(input_).__name__, f"forward takes {wanted} (input_is_already_split)")
        return list(input_)

    def _product(self, tile: nn.Module, part: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = tile(part)
        return product

    def _combined(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs


class TiledLinearReturnBias(TiledLinear):
    """The same for layers whose forward gives ``(output, bias)`` and leaves the sum to the caller, as Megatron's do.

    ``forward`` gives the pair of combined outputs and combined biases; the latter None without bias.
    """

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """``[..., in_features]`` to ``([..., out_features], [out_features] or None)``, or lists of their parts."""
        self._biases: list[torch.Tensor] = []
        outputs = super().forward(input_)
        biases, self._biases = self._biases, []
        return outputs, self._combined(biases) if biases else None

    def _product(self, tile: nn.Module, part: torch.Tensor) -> torch.Tensor:
        output, bias = tile(part)
        if bias is not None:
            self._biases.append(bias)
        return torch.as_tensor(output)


def _cut(key: str, size: int, num_parts: int) -> list[int]:
    """Where the parts begin, and the end."""
    if not 1 <= num_parts <= size:
        raise TilesError(key, num_parts, f"a number of tiles between 1 and {size} is needed")
    least, larger = divmod(size, num_parts)
    return [number * least + min(number, larger) for number in range(num_parts + 1)]
