"""A cache of keys and values for generation, in memory that stays: ``deepspeed.utils.static_cache``.

Where tokens are written is a tensor of the caller's, which a captured graph reads anew each time that it is replayed.
"""

from __future__ import annotations

from typing import Any

import torch

from infinity.errors import ConfigError


class DeepSpeedStaticLayer:
    """The keys and values of one layer, for ``max_cache_len`` tokens of each row."""

    is_compileable = True
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, max_cache_len: int) -> None:
        self.max_cache_len = max_cache_len
        self.is_initialized = False
        self._position: torch.Tensor | None = None

    def set_write_position(self, pos: torch.Tensor) -> None:
        """Where the next tokens go: a number for all rows, or one for each. Kept by reference."""
        if not isinstance(pos, torch.Tensor) or pos.dim() > 1 or pos.dtype not in (torch.int32, torch.int64):
            raise ConfigError("write position", pos, "must be a tensor of whole numbers, of no or of one dimension")
        self._position = pos

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Get memory for rows, heads and head sizes such as these have."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.max_batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        shape = (self.max_batch_size, self.num_heads, self.max_cache_len)
        self.keys = torch.zeros(*shape, self.k_head_dim, dtype=self.dtype, device=self.device)
        self.values = torch.zeros(*shape, self.v_head_dim, dtype=self.dtype, device=self.device)
        for each in (self.keys, self.values):
            torch._dynamo.mark_static_address(each)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens, and give back all keys and values; with a position for each row those of the rows given."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_rows, num_tokens = key_states.shape[0], key_states.shape[-2]
        if self._position is not None and self._position.dim() == 1:
            rows = torch.arange(num_rows, device=self.device)
            positions = self._checked(self._position, num_rows, num_tokens)
            self.keys[rows, :, positions] = key_states[:, :, 0]
            self.values[rows, :, positions] = value_states[:, :, 0]
            return self.keys[:num_rows], self.values[:num_rows]
        positions = torch.arange(num_tokens, device=self.device) + (0 if self._position is None else self._position)
        self.keys.index_copy_(2, positions, key_states)
        self.values.index_copy_(2, positions, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How long a mask is, and where it begins."""
        return self.max_cache_len, 0

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens that are here once those at the write position are written."""
        return self._position + 1 if self.is_initialized and self._position is not None else 0

    def get_max_cache_shape(self) -> int:
        """``max_cache_len``."""
        return self.max_cache_len

    def reset(self) -> None:
        """Zero all."""
        if self.is_initialized:
            self.keys.zero_()
            self.values.zero_()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i be what row ``beam_idx[i]`` was."""
        if self.is_initialized:
            self.keys = self.keys.index_select(0, beam_idx.to(self.keys.device))
            self.values = self.values.index_select(0, beam_idx.to(self.values.device))
            if self._position is not None and self._position.dim() == 1:
                self._position = self._position.index_select(0, beam_idx.to(self._position.device))

    def compact(self, rows: torch.Tensor) -> None:
        """Keep ``rows``, in that order, as the first ones, and zero the others."""
        for each in (self.keys, self.values):
            each[: len(rows)] = each.index_select(0, rows)
            each[len(rows) :].zero_()

    def trim_left(self, count: int) -> None:
        """Forget the first ``count`` tokens; the others move to the front."""
        kept = max(self.max_cache_len - count, 0)
        for each in (self.keys, self.values) if self.is_initialized else ():
            each[:, :, :kept] = each[:, :, self.max_cache_len - kept :].clone()
            each[:, :, kept:].zero_()

    def _checked(self, positions: torch.Tensor, num_rows: int, num_tokens: int) -> torch.Tensor:
        if positions.numel() < num_rows:
            raise ConfigError(
                "write position", positions.tolist(), f"must cover the active batch size: {num_rows} rows"
            )
        if num_tokens != 1:
            raise ConfigError("key_states", num_tokens, "with a position for each row, one token a row is written")
        positions = positions[:num_rows].to(self.device)
        is_captured = positions.is_cuda and torch.cuda.is_current_stream_capturing()
        if not is_captured and bool(((positions < 0) | (positions >= self.max_cache_len)).any()):
            raise ConfigError("write position", positions.tolist(), f"must be from 0 to {self.max_cache_len - 1}")
        return positions


class DeepSpeedStaticCache:
    """The layers of a model, which share one write position.

    Args:
        config: a Hugging Face model's.
        batch_size: rows.
        max_cache_len: tokens of each.
        device, dtype: with both, memory is got now, else by the first ``update``.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int = 1,
        max_cache_len: int = 4096,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        text = getattr(config, "text_config", config)
        self.layers = [DeepSpeedStaticLayer(max_cache_len) for _ in range(getattr(text, "num_hidden_layers", 1))]
        self._max_cache_len = max_cache_len
        self._position: torch.Tensor | None = None
        if dtype is not None and device is not None and batch_size > 0:
            num_queries = getattr(text, "num_attention_heads", 1)
            num_heads = getattr(text, "num_key_value_heads", num_queries)
            head_dim = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 1) // num_queries
            self.early_initialization(batch_size, num_heads, head_dim, dtype, device)

    def early_initialization(
        self, batch_size: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str | int
    ) -> None:
        """Get the memory of all layers."""
        like = torch.empty((batch_size, num_heads, 0, head_dim), dtype=dtype, device=device)
        for layer in self.layers:
            layer.lazy_initialization(like, like)

    def set_write_position(self, pos: torch.Tensor) -> None:
        """Do for all layers what a layer does."""
        for layer in self.layers:
            layer.set_write_position(pos)
        self._position = pos

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what the layer does. Raises IndexError if there is no such layer."""
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def compact(self, active_indices: torch.Tensor) -> None:
        """Keep those rows alone, as the first ones, with their write positions; -1 becomes the position of others."""
        num_rows = self.layers[0].max_batch_size
        rows = active_indices.tolist()
        if active_indices.dim() != 1 or len(set(rows)) < len(rows) or not set(rows) <= set(range(num_rows)):
            raise ConfigError("active_indices", rows, f"must be rows from 0 to {num_rows - 1}, each once at most")
        positions = self._position
        if positions is not None and positions.dim() == 1 and positions.numel() != num_rows:
            raise ConfigError("write position", positions.tolist(), f"must be one for each of {num_rows} rows")
        for layer in self.layers:
            layer.compact(active_indices.to(layer.keys.device))
        if positions is not None and positions.dim() == 1:
            positions[: len(rows)] = positions.index_select(0, active_indices.to(positions.device))
            positions[len(rows) :].fill_(-1)

    def trim_left(self, count: int) -> None:
        """Do for all layers what a layer does."""
        if not isinstance(count, int) or count < 0:
            raise ConfigError("count", count, "must be a number of tokens, 0 or more")
        for layer in self.layers:
            layer.trim_left(count)

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """The layer's; of a position for each row the longest."""
        length = self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0
        return length.max() if isinstance(length, torch.Tensor) and length.dim() == 1 else length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How long a mask is, and where it begins."""
        return self._max_cache_len, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """``max_cache_len``."""
        return self._max_cache_len

    def reset(self) -> None:
        """Zero all."""
        for layer in self.layers:
            layer.reset()

    def __len__(self) -> int:
        return len(self.layers)
