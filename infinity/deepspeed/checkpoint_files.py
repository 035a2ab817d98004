"""Files of DeepSpeed's own checkpoints, as ``utils.zero_to_fp32`` and ``checkpoint.utils`` name and find them.

Infinity's checkpoints have others: ``get_fp32_state_dict_from_zero_checkpoint`` reads both.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from infinity.checkpoint.manifest import MANIFEST

_MODEL: Final = "_model_states.pt"
_OPTIMIZER: Final = "_optim_states.pt"


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """Where a checkpoint has a rank's model."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}{_MODEL}")


def get_checkpoint_files(checkpoint_dir: str | os.PathLike[str], glob_pattern: str) -> list[str]:
    """Paths of the files of a directory whose names match, 2 before 10. Raises FileNotFoundError if there are none."""
    directory = Path(checkpoint_dir)
    found = sorted((str(path) for path in directory.glob(glob_pattern)), key=_in_order)
    if not found:
        ours = "; it is infinity's, which get_fp32_state_dict_from_zero_checkpoint reads" * _is_ours(directory)
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'{ours}")
    return found


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The files of optimizer states, as ``get_checkpoint_files`` gives them."""
    return get_checkpoint_files(checkpoint_dir, f"*{_OPTIMIZER}")


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The files of models, as ``get_checkpoint_files`` gives them."""
    return get_checkpoint_files(checkpoint_dir, f"*{_MODEL}")


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """The first rank's file of the model. Raises FileNotFoundError if it is not there."""
    first = "zero_pp_rank_0_mp_rank_00" if zero_stage == 3 else "mp_rank_00"
    return get_checkpoint_files(checkpoint_dir, f"{first}{_MODEL}")[0]


def _is_ours(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def _in_order(path: str) -> list[int | str]:
    """The key by which numbers in names stand in their order."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]
