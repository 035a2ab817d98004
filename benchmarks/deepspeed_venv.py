"""DeepSpeed in a virtual environment of its own, so that it changes nothing in ours."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import torch

DEEPSPEED_VERSION = "0.19.8"
BUILDERS = ("AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "ShareMemCommBuilder", "PinMemoryBuilder")


def prepare_venv(directory: Path, extras: Sequence[str] = (), *, compiled: bool = True) -> str:
    """Path of the Python of ``directory``, which is created with DeepSpeed and our torch's version if it has none.

    Args:
        extras: packages that are installed beside them.
        compiled: with what DeepSpeed compiles at its first use.

    What DeepSpeed compiles at its first use needs libaio's header and a C++ compiler. It is compiled here, into the
    directory: another environment's would be compiled anew by turns, and a run that was ended over it leaves a lock
    for which the next waits for ever.
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
    if compiled:
        _compile(python, directory / "extensions")
    return str(python)


def environment_of(python: str | Path) -> dict[str, str]:
    """What is set for that Python, by whoever starts it and where its extensions are compiled.

    Its own ninja comes first: to another version of ninja everything looks changed, and is compiled anew.
    """
    return {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}


def _compile(python: Path, extensions: Path) -> None:
    """Whoever starts this Python finds the extensions, by a file that it reads at its start."""
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    start = f"import os; os.environ.setdefault('TORCH_EXTENSIONS_DIR', {str(extensions.absolute())!r})\n"
    (packages / "extensions.pth").write_text(start)
    for lock in extensions.glob("*/lock"):
        lock.unlink()
    load = (
        "from deepspeed.accelerator import get_accelerator\n"
        f"for name in {BUILDERS!r}:\n"
        "    get_accelerator().create_op_builder(name).load(verbose=False)\n"
    )
    environment = {**os.environ, **environment_of(python)}
    command = [str(python), "-P", "-c", load]
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)
