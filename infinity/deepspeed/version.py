"""The version of DeepSpeed whose names and calls are spoken: what others look for in the metadata."""

from __future__ import annotations

from typing import Final

DIALECT: Final = "0.19.8"
__version__ = version = DIALECT
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in DIALECT.split("."))
