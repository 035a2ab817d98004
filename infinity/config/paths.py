"""Swap directories and the socket: what a configuration says of this machine's files."""

from __future__ import annotations

import os
import shlex
import stat
import tempfile

from infinity.config.complaints import Complaints
from infinity.config.sections import Config
from io_daemon.config import SOCKET_PATH_BYTES_MAX
from io_daemon.errors import remedy_against


def check_offload(config: Config, complaints: Complaints) -> None:
    """What can be said without looking at the machine."""
    zero = config.zero_optimization
    if zero.stage < 3 and zero.offload_param.device != "none":
        complaints.add(
            "zero_optimization.offload_param.device",
            zero.offload_param.device,
            f"weights stay whole at stage {zero.stage}: write stage 3, or offload_optimizer instead",
        )
    for name, offload in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if offload.device == "nvme" and not config.swap_dirs:
            complaints.add(
                f"zero_optimization.{name}.nvme_path",
                None,
                "device nvme needs a directory: write nvme_path here or io_daemon.swap_dirs",
            )
    socket = config.io_daemon.socket
    if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
        complaints.add(
            "io_daemon.socket", socket, f"a Unix socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes; shorten it"
        )


def check_swap_dirs(config: Config, complaints: Complaints) -> None:
    """Every swap directory must be one, here, and writable."""
    for key, path in config.swap_dir_keys():
        if remedy := _unusable(path):
            complaints.add(key, path, remedy)


def _unusable(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return _missing(path)
    except OSError as error:
        return f"cannot be looked at ({error.strerror}): name another directory"
    if not stat.S_ISDIR(mode):
        return "is not a directory; name the directory that swap files go to"
    try:
        with tempfile.TemporaryFile(dir=path):
            return ""
    except OSError as error:
        remedy = remedy_against(error.errno, "chown or chmod it, or name another")
        return f"is not writable by uid {os.getuid()} ({error.strerror}): {remedy}"


def _missing(path: str) -> str:
    if path.startswith("~") or "$" in path:
        return "does not exist: ~ and $ stand for nothing here, write the path out"
    if os.path.islink(path):
        return f"is a link to {os.readlink(path)}, which does not exist: make that, or name another"
    where = "" if os.path.isabs(path) else "in the working directory, or write an absolute path, "
    return f"does not exist: mkdir -p {shlex.quote(path)}, {where}on the NVMe filesystem"
