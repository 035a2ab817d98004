"""Pages of files of weights that were read through a mapping leave the process's memory when they were copied.

Transformers maps all files of a model and copies tensor after tensor out of them: page by page the whole model becomes
part of the process, until memory is short. What is paged out is read again from the file where somebody still needs it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

MADV_PAGEOUT: Final = 21
"""Linux 5.4; keeps what was written to a private mapping, unlike MADV_DONTNEED."""
ENDINGS: Final = (b".safetensors", b".bin", b".pt", b".pth")
"""Transformers and torch map files of these names."""


def page_out_mapped_weights() -> None:
    """Advise the kernel to take back all pages of mapped files of weights; does nothing where it does not know how."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    for line in Path("/proc/self/maps").read_bytes().split(b"\n"):  # any bytes may stand in a path
        if line.endswith(ENDINGS):
            first, stop = (int(address, 16) for address in line.split(b" ", 1)[0].split(b"-"))
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), MADV_PAGEOUT)
