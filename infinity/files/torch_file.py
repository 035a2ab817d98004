"""What ``torch.save`` wrote: tensors by name, mapped and never loaded whole."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, Final

import torch

from infinity.errors import WeightsFileError
from infinity.files.entry import Entry, WeightsFile

MAPPED_BYTES_MAX: Final = 16 << 20
"""Pages that were read through one mapping count as this process's memory: it is made anew after so many bytes."""
WRAPPERS: Final = ("state_dict", "model_state_dict", "module")
"""Keys under which training scripts put a state dict beside other things."""


class TorchFile(WeightsFile):
    def __init__(self, path: str) -> None:
        """Raises WeightsFileError for what ``torch.load`` does not take with ``weights_only`` and ``mmap``."""
        super().__init__(path)
        self._tensors: dict[str, torch.Tensor] | None = None
        self._num_bytes = 0
        self._entries = {
            name: Entry(dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in self._mapped().items()
        }

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def read(self, name: str, first: int, numel: int) -> torch.Tensor:
        values = self._mapped()[name].reshape(-1)[first : first + numel].clone()
        self._num_bytes += values.nbytes
        if self._num_bytes >= MAPPED_BYTES_MAX:
            self._tensors, self._num_bytes = None, 0
        return values

    def _mapped(self) -> dict[str, torch.Tensor]:
        self.check_identity()
        if self._tensors is None:
            self._tensors = _tensors_of(_load(self.path), self.path)
        return self._tensors


def _load(path: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of bytes that are no pickle, the unpickler says anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which mapping a file that is cut short gives
            raise WeightsFileError.of(error, path, "read") from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsFileError(
            path,
            f"cannot be read as tensors of torch's ({reason})",
            "copy it again if it is truncated; a file from before torch 1.6, or with objects in it, must be loaded and "
            "saved anew, best by safetensors.torch.save_file()",
        ) from error


def _tensors_of(loaded: Any, path: str) -> dict[str, torch.Tensor]:
    for wrapper in WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    if not isinstance(loaded, Mapping):
        raise WeightsFileError(path, f"holds a {type(loaded).__name__}", "save a state dict: a dict of tensors")
    found = {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    for name, value in found.items():
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            kind = "on the meta device" if value.is_meta else "quantized" if value.is_quantized else "sparse"
            raise WeightsFileError(path, f"has {name}, which is {kind}", "save it as a dense tensor with its values")
    return found
