"""``utils.zero_to_fp32``: the fp32 weights of a checkpoint, infinity's own or one that DeepSpeed wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import nn

from infinity.checkpoint.directory import latest_tag
from infinity.checkpoint.exported import ExportedWeights
from infinity.checkpoint.from_deepspeed import Import
from infinity.checkpoint.manifest import MANIFEST
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.deepspeed.asserted import asserted
from infinity.files.place import local_path
from infinity.files.shards import WHOLE_BYTES, parse_size
from io_daemon.command.scratch import scratch_directory

OUTPUT_DTYPE_NAMES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@asserted
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Name -> fp32 tensor on the CPU, buffers included: the whole model, in memory.

    Args:
        checkpoint_dir: what was given to ``save_checkpoint``.
        tag: which of its checkpoints; by default the one that ``latest`` names.
        exclude_frozen_parameters: leave out what was not trained.
        lazy_mode: taken for the dialect's sake: tensors are read at once.

    Raises:
        CheckpointError: it is not there, not whole or damaged.
    """
    with _opened(checkpoint_dir, tag) as checkpoint:
        return ExportedWeights(checkpoint, torch.float32, exclude_frozen=exclude_frozen_parameters).in_memory()


@asserted
def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load those weights into ``model``, which is moved to the CPU and no engine's, and give it back."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


@asserted
def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights as files that ``from_pretrained`` reads, a piece at a time; as ``infinity export`` does.

    Args:
        checkpoint_dir: what was given to ``save_checkpoint``.
        output_dir: made where it is not there.
        dtype: of floating-point tensors, torch's or its name: fp32, fp16, bf16 or the long ones.
        max_shard_size: bytes, or a text like "5GB", of one file; None: one file.
        safe_serialization: safetensors, else files of ``torch.save``.
        tag: which of the checkpoints; by default the one that ``latest`` names.
        exclude_frozen_parameters: leave out what was not trained.

    Raises:
        ValueError: another dtype.
        CheckpointError: it is not there, not whole or damaged.
    """
    dtype = _output_dtype(dtype)
    max_bytes = WHOLE_BYTES if max_shard_size is None else parse_size("max_shard_size", max_shard_size)
    with _opened(checkpoint_dir, tag, _there(local_path("output_dir", output_dir))) as checkpoint:
        weights = ExportedWeights(checkpoint, dtype, exclude_frozen=exclude_frozen_parameters)
        weights.write(output_dir, safe=safe_serialization, max_shard_bytes=max_bytes)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """``convert_zero_checkpoint_to_state_dict`` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
    )


def to_torch_tensor(
    state_dict: Mapping[str, torch.Tensor], return_empty_tensor: bool = False, dtype: torch.dtype | str | None = None
) -> dict[str, torch.Tensor]:
    """Contiguous tensors under the same names, one under several staying one; floating-point ones in ``dtype``.

    Args:
        state_dict: name -> tensor.
        return_empty_tensor: of shape and dtype alone, whatever is in them.
        dtype: as in ``convert_zero_checkpoint_to_state_dict``; None: each its own. Raises ValueError for others.
    """
    asked = None if dtype is None else _output_dtype(dtype)
    made: dict[int, torch.Tensor] = {}
    for tensor in state_dict.values():
        if id(tensor) not in made:
            own = asked if asked is not None and tensor.dtype.is_floating_point else tensor.dtype
            empty = return_empty_tensor
            made[id(tensor)] = (
                torch.empty(tensor.shape, dtype=own, device="cpu") if empty else tensor.contiguous().to(own)
            )
    return {name: made[id(tensor)] for name, tensor in state_dict.items()}


def _output_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = OUTPUT_DTYPE_NAMES.get(dtype.removeprefix("torch.").lower()) if isinstance(dtype, str) else dtype
    if found is None or found not in OUTPUT_DTYPE_NAMES.values():
        names = ", ".join(sorted(OUTPUT_DTYPE_NAMES))
        raise ValueError(f"Unsupported output dtype {dtype!r}: write one of {names}")
    return found


@contextmanager
def _opened(
    directory: str | os.PathLike[str], tag: str | None, beside: Path | None = None
) -> Iterator[StoredCheckpoint]:
    """The checkpoint, by infinity or, through a copy of its weights that is imported for the time being, by DeepSpeed.
    ``beside``: where that copy is made; None: where temporary files go."""
    path = Path(directory)
    chosen = tag or (None if (path / MANIFEST).is_file() else latest_tag(path))
    found = path / chosen if chosen else path
    if (found / MANIFEST).is_file() or not found.is_dir():
        with StoredCheckpoint.open(path, tag) as checkpoint:
            yield checkpoint
        return
    with scratch_directory("infinity-import-", beside) as aside:
        Import(path, tag).write(aside, states=False)
        with StoredCheckpoint.open(aside) as checkpoint:
            yield checkpoint


def _there(path: Path) -> Path:
    """The directory itself, or what of its path is there: on a disk that is to have as many bytes anyway."""
    return next((each for each in (path, *path.parents) if each.is_dir()), path)
