"""DeepSpeed in a virtual environment of its own, so that it changes nothing in ours."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import torch

DEEPSPEED_VERSION = "0.19.8"


def prepare_venv(directory: Path, extras: Sequence[str] = ()) -> str:
    """Path of the Python of ``directory``, which is created with DeepSpeed and our torch's version if it has none.

    ``extras``: packages that are installed beside them.

    DeepSpeed's asynchronous I/O is compiled at its first start and needs libaio's header and a C++ compiler.
    """
    python = directory / "bin" / "python"
    if not python.exists():
        print(f"installing DeepSpeed {DEEPSPEED_VERSION} into {directory}", file=sys.stderr)
        venv.create(directory, with_pip=True)
        packages = [f"torch=={torch.__version__.partition('+')[0]}", f"deepspeed=={DEEPSPEED_VERSION}"]
        packages += ["numpy", "ninja", "setuptools", "wheel"]
        subprocess.run([str(python), "-P", "-m", "pip", "install", "--quiet", *packages], check=True, stdout=sys.stderr)
    if extras:
        subprocess.run([str(python), "-P", "-m", "pip", "install", "--quiet", *extras], check=True, stdout=sys.stderr)
    return str(python)
