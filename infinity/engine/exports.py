"""What an engine gives away of its weights: state dicts in memory, files for others to load."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from infinity.engine.answers import Answers
from infinity.engine.weight_files import save_model_of_transformers, save_weights, tensors_of
from infinity.engine.whole_state import full_master_state_dict, full_state_dict
from infinity.files.place import check_file_name
from infinity.files.shards import WHOLE_BYTES, parse_size


class Exports(Answers):
    """What leaves the engine. Every rank calls it alike."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """What ``module.state_dict()`` of the unsharded model would be, on the CPU. Collective.

        Shared parameters stand under each of their names; buffers and extra state are included. Weights are gathered
        group by group.

        Args:
            rank0_only: only rank 0 gets the result, the others an empty dict.
        """
        return full_state_dict(self._runtime, rank0_only=rank0_only)

    def full_master_state_dict(self) -> dict[str, torch.Tensor]:
        """Name -> full fp32 master weight on the CPU, trainable parameters only. Collective."""
        return full_master_state_dict(self._runtime)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        *,
        safe_serialization: bool = True,
        max_shard_size: str | int = "5GB",
    ) -> bool:
        """Write the weights, in the dtype that forward runs in, as ``from_pretrained`` and ``load_pretrained`` read
        them. Collective; rank 0 writes, a piece at a time, and the files appear when all of them are whole.

        Args:
            save_dir: made where it is not there. Files of an earlier call are replaced.
            save_filename: one file of this name instead, in the format of its ending: ``.safetensors``, else torch's.
            exclude_frozen_parameters: leave out what is not trained.
            safe_serialization: safetensors, else files of ``torch.save``.
            max_shard_size: bytes, or a text like "5GB", of one file.

        Returns:
            True: the weights were saved.

        Raises:
            WeightsFileError: the directory cannot be written, or has not enough space; what stood there stays.
        """
        self._runtime.check_readable("save_16bit_model")
        if save_filename is not None:
            check_file_name("save_filename", save_filename)
        tensors = tensors_of(self._runtime, exclude_frozen=exclude_frozen_parameters)
        if save_filename is None:
            max_bytes, safe = parse_size("max_shard_size", max_shard_size), safe_serialization
        else:
            max_bytes, safe = WHOLE_BYTES, save_filename.endswith(".safetensors")
        save_weights(self._runtime, tensors, save_dir, file=save_filename, safe=safe, max_shard_bytes=max_bytes)
        return True

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        beside: Iterable[Any] = (),
        safe_serialization: bool = True,
        max_shard_size: str | int = "5GB",
    ) -> None:
        """Write a directory that the model's class reads with ``from_pretrained``: weights as ``save_16bit_model``
        writes them, configuration, generation configuration. Collective.

        Args:
            save_directory: made where it is not there.
            beside: a tokenizer, a processor: whatever else has a ``save_pretrained`` of its own.
            safe_serialization: safetensors, else files of ``torch.save``.
            max_shard_size: bytes, or a text like "5GB", of one file.

        Raises:
            WeightsError: the module is no model of Transformers.
            WeightsFileError: as ``save_16bit_model``.
        """
        self._runtime.check_readable("save_pretrained")
        save_model_of_transformers(
            self._runtime, save_directory, beside=beside, safe=safe_serialization, max_shard_size=max_shard_size
        )

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether trainers shall take all weights into rank 0's memory to save them; the configuration's word. Here
        ``save_16bit_model`` and ``save_pretrained`` need no such memory, whatever it says."""
        return self._loop.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """All weights in rank 0's memory, None on the others. Collective; ``full_state_dict`` by the name that trainers
        call."""
        entries = full_state_dict(self._runtime, rank0_only=True, exclude_frozen=exclude_frozen_parameters)
        return entries if self.global_rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict
    """The same by the name that OpenRLHF calls."""
