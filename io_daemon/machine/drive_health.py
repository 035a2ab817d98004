"""What a drive says about itself: temperature, wear, bytes written (SMART). From smartctl, else from hwmon.

smartctl's JSON is described in smartmontools' smartctl(8); the NVMe log in NVM Express Base Specification 2.0, figure
208: one data unit is 1,000 blocks of 512 bytes, and Percentage Used may exceed 100.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from io_daemon.shared.record import Record

SMARTCTL_TIMEOUT_S: Final = 10.0
DATA_UNIT_BYTES: Final = 512_000


class DriveHealth(Record):
    """None: the drive, or this user's rights, do not tell."""

    source: str
    """``smartctl`` or ``hwmon``."""
    temperature_c: float | None = None
    percent_used: int | None = None
    """The part of the life that the vendor promises; it may exceed 100."""
    spare_percent: int | None = None
    written_bytes: int | None = None
    """By the host, over the drive's life."""
    read_bytes: int | None = None
    power_on_hours: int | None = None
    media_errors: int | None = None
    critical_warning: int | None = None
    """Bits of the NVMe log; 0 is well."""


def read_health(disk: Path, name: str) -> tuple[DriveHealth | None, str | None]:
    """``disk``: its directory in /sys; ``name``: as in /dev. What is known, and a note with the remedy if that is
    little. Never raises."""
    health, problem = _ask_smartctl(name)
    if health is not None:
        return health, None
    temperature_c = _hwmon_temperature_c(disk)
    if temperature_c is not None:
        return DriveHealth(source="hwmon", temperature_c=temperature_c), f"wear unknown: {problem}"
    return None, f"drive health unknown: {problem}"


def _ask_smartctl(name: str) -> tuple[DriveHealth | None, str]:
    program = shutil.which("smartctl") or shutil.which("smartctl", path="/usr/sbin:/sbin")
    if program is None:
        return None, "smartctl is not there: install smartmontools and run as root"
    try:
        answer = subprocess.run(
            [program, "--json", "--all", f"/dev/{name}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SMARTCTL_TIMEOUT_S,
            check=False,  # its exit code is a bit field in which warnings of the drive count too
        )
        log = json.loads(answer.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return None, f"smartctl gave no answer ({type(error).__name__})"
    health = _from_log(log) if isinstance(log, dict) else None
    if health is not None:
        return health, ""
    remedy = "" if os.geteuid() == 0 else "; run as root"
    return None, f"smartctl: {_message(log)}{remedy}"


def _from_log(log: dict[str, Any]) -> DriveHealth | None:
    """None if it holds no figure at all."""
    nvme = _section(log, "nvme_smart_health_information_log")
    health = DriveHealth(
        source="smartctl",
        temperature_c=_integer(_section(log, "temperature"), "current"),
        percent_used=_integer(nvme, "percentage_used"),
        spare_percent=_integer(nvme, "available_spare"),
        written_bytes=_data_units(nvme, "data_units_written"),
        read_bytes=_data_units(nvme, "data_units_read"),
        power_on_hours=_integer(_section(log, "power_on_time"), "hours"),
        media_errors=_integer(nvme, "media_errors"),
        critical_warning=_integer(nvme, "critical_warning"),
    )
    return None if health == DriveHealth(source="smartctl") else health


def _section(log: dict[str, Any], key: str) -> dict[str, Any]:
    value = log.get(key)
    return value if isinstance(value, dict) else {}


def _integer(section: dict[str, Any], key: str) -> int | None:
    value = section.get(key)
    return value if isinstance(value, int) else None


def _data_units(section: dict[str, Any], key: str) -> int | None:
    value = _integer(section, key)
    return None if value is None else value * DATA_UNIT_BYTES


def _message(log: object) -> str:
    """The words of smartctl for why there is nothing."""
    status = _section(log, "smartctl") if isinstance(log, dict) else {}
    messages = status.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    return str(first["string"]) if isinstance(first, dict) and "string" in first else "no health log"


def _hwmon_temperature_c(disk: Path) -> float | None:
    """The drive's own sensor: millidegrees in hwmon*/temp1_input, below the device or in its hwmon folder."""
    for place in ("device/hwmon*", "device/hwmon/hwmon*", "device/device/hwmon/hwmon*"):
        for sensor in sorted(disk.glob(f"{place}/temp1_input")):
            try:
                return int(sensor.read_text()) / 1000
            except (OSError, ValueError):
                continue
    return None
