"""A directory of weights, or one file of it, as Transformers lays them out: every tensor by name, wherever it lies."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Final

import torch

from infinity.errors import WeightsFileError
from infinity.files.entry import Entry, WeightsFile
from infinity.files.place import local_path
from infinity.files.safetensors_file import SafetensorsFile
from infinity.files.torch_file import TorchFile

SAFE_NAME, TORCH_NAME = "model.safetensors", "pytorch_model.bin"
INDEX_ENDING: Final = ".index.json"
LOOKED_FOR: Final = (SAFE_NAME, SAFE_NAME + INDEX_ENDING, TORCH_NAME, TORCH_NAME + INDEX_ENDING)


class WeightsDirectory:
    """``entries``: every tensor, by name. ``path``: the file or index that says so."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        """Raises WeightsFileError for what is not there, not whole, or not of a known format, ConfigError for what is
        no path."""
        self.path = _find(str(local_path("source", source)))
        self._file_of: dict[str, WeightsFile] = {}
        if self.path.endswith(INDEX_ENDING):
            self._read_index()
        else:
            file = _open(self.path)
            self._file_of = dict.fromkeys(file.entries, file)
        self.entries: Mapping[str, Entry] = {name: file.entries[name] for name, file in self._file_of.items()}

    def read(self, name: str, first: int, numel: int) -> torch.Tensor:
        """Elements [first, first + numel), row-major, 1-D, in the file's dtype."""
        return self._file_of[name].read(name, first, numel)

    def _read_index(self) -> None:
        try:
            with open(self.path, encoding="utf-8") as index:
                found = json.load(index)
        except OSError as error:
            raise WeightsFileError.of(error, self.path, "read") from error
        except (ValueError, RecursionError) as error:
            raise WeightsFileError(self.path, f"is no JSON ({error})", "copy or download it again") from error
        names = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise WeightsFileError(self.path, 'has no "weight_map"', "pass the index of a sharded model, or its file")
        here = os.path.dirname(self.path)
        wanted = sorted(set(names.values()))
        # basenames only: an index may not lead out of its directory
        absent = [name for name in wanted if os.path.basename(name) != name or not os.path.exists(f"{here}/{name}")]
        if absent:
            raise WeightsFileError(
                self.path, f"names files that are not there: {', '.join(absent)}", "copy or download them"
            )
        files = {name: _open(os.path.join(here, name)) for name in wanted}
        self._file_of = {str(tensor): files[name] for tensor, name in names.items()}
        lost = [name for name, file in self._file_of.items() if name not in file.entries]
        if lost:
            raise WeightsFileError(
                self._file_of[lost[0]].path,
                f"lacks what {self.path} says is in it: {', '.join(lost[:10])}",
                "copy or download both again: they are of two models, or of two versions of one",
            )


def _find(source: str) -> str:
    if os.path.isfile(source):
        return source
    if not os.path.isdir(source):
        raise WeightsFileError(
            source,
            "is neither a file nor a directory",
            "pass a local path; a model of a hub is downloaded first, e.g. by huggingface_hub.snapshot_download()",
        )
    for name in LOOKED_FOR:
        if os.path.isfile(path := os.path.join(source, name)):
            return path
    raise WeightsFileError(source, f"has none of {', '.join(LOOKED_FOR)}", "pass the file with the weights itself")


def _open(path: str) -> WeightsFile:
    return SafetensorsFile(path) if path.endswith(".safetensors") else TorchFile(path)
