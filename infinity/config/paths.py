"""Swap directories and the socket: what a configuration says of this machine's files."""

from __future__ import annotations

import os

from infinity.config.complaints import Complaints
from infinity.config.sections import Config
from io_daemon.config import SOCKET_PATH_BYTES_MAX
from io_daemon.disk.swap_dir import unusable


def check_offload(config: Config, complaints: Complaints) -> None:
    """What can be said without looking at the machine."""
    zero = config.zero_optimization
    stage_is_known = not complaints.has("zero_optimization.stage")
    if stage_is_known and zero.stage < 3 and zero.offload_param.device != "none":
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
        if remedy := unusable(path):
            is_dropped = path == "none" and key.endswith(".nvme_path")
            complaints.add(key, path, _dropped_by_accelerate(key) if is_dropped else remedy)


def _dropped_by_accelerate(key: str) -> str:
    """``key``: an ``nvme_path``, since Accelerate says no other."""
    variable = f"ACCELERATE_DEEPSPEED_{key.split('.')[-2].upper()}_NVME_PATH"
    return (
        "is Accelerate's word for no path, and its launcher drops the one that it is given: set the environment "
        f"variable {variable}, or write the path in a file for --deepspeed_config_file"
    )
