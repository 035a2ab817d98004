"""The version of DeepSpeed whose names and calls are spoken: what others look for in the metadata."""

from __future__ import annotations

from typing import Final

DIALECT: Final = "0.19.8"
__version__ = version = DIALECT
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in DIALECT.split("."))
git_hash = git_branch = __git_hash__ = __git_branch__ = "infinity"
"""There is no commit of DeepSpeed's behind the names."""
torch_info = {"version": "0.0", "cuda_version": "0.0", "nccl_version": "0.0", "hip_version": "0.0"}
"""Nothing was compiled for a version of torch: what DeepSpeed says where it was not."""
