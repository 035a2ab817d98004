"""A model's state dict beside the pieces of a checkpoint, in the file that DeepSpeed writes of one whose weights are
whole: scripts read it by ``torch.load(path)["module"]``. Infinity itself goes by the pieces."""

from __future__ import annotations

import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch

from infinity.checkpoint.disk import disk_errors
from infinity.checkpoint.manifest import FileEntry
from infinity.checkpoint.writing import Files
from infinity.errors import CheckpointError
from infinity.files.direct import BlockWriter

MODEL_STATES: Final = "mp_rank_00_model_states.pt"


class _Appended:
    """What ``torch.save`` writes to."""

    def __init__(self, file: BlockWriter) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        self._file.append(data)
        return len(data)

    def flush(self) -> None:
        """It has all been taken; ``finish`` of the file has it on the drive."""


def write_model_states(aside: Path, state: dict[str, Any]) -> Files:
    """The file, on the disk. Raises CheckpointError."""
    path = aside / MODEL_STATES
    with disk_errors(path, "written"), closing(BlockWriter(path)) as file:
        appended: Any = _Appended(file)
        torch.save(state, appended)
        file.finish()
    return {MODEL_STATES: FileEntry(num_bytes=file.num_bytes)}


def verify_model_states(directory: Path) -> None:
    """Read it, and compare the checksums that ``torch.save`` puts beside each tensor. Raises CheckpointError."""
    path, remedy = directory / MODEL_STATES, "copy this file anew, or save again; infinity does without it"
    try:
        with disk_errors(path, "read"), zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise CheckpointError(path, f"is damaged: {error}", remedy) from error
    if damaged is not None:
        raise CheckpointError(path, f"is damaged: the checksum of {damaged} is another", remedy)
