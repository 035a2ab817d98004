"""Directories for swap files that a configuration names and nobody has made."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from infinity.deepspeed.raw_config import section_of, zero_of

_log = logging.getLogger(__name__)


def make_swap_dirs(raw: Mapping[str, Any]) -> None:
    """Make what ``nvme_path`` names beside device nvme, as DeepSpeed does, and say so: a drive that is not mounted is
    missing in the same way. What cannot be made is told where the configuration is checked."""
    zero = zero_of(raw)
    for name in ("offload_param", "offload_optimizer"):
        section = section_of(zero, name) if isinstance(zero, Mapping) else {}
        path = section.get("nvme_path")
        if section.get("device") != "nvme" or not isinstance(path, (str, os.PathLike)) or os.path.exists(path):
            continue
        # "none" is what Accelerate's launcher says where it drops the path
        if str(path) != "none" and not str(path).startswith("~") and "$" not in str(path):
            with contextlib.suppress(OSError, ValueError):
                os.makedirs(path, exist_ok=True)
                _log.warning("zero_optimization.%s.nvme_path = %r was not there: made", name, str(path))
