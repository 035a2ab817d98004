"""The typed errors a caller of infinity meets; defined once, beside the daemon that raises most of them."""

from io_daemon.errors import (
    BudgetError,
    ConfigError,
    DaemonLostError,
    DeviceIOError,
    IntegrityError,
    ProtocolError,
    SwapSpaceError,
    WorldError,
)

__all__ = [
    "BudgetError",
    "ConfigError",
    "DaemonLostError",
    "DeviceIOError",
    "IntegrityError",
    "ProtocolError",
    "SwapSpaceError",
    "WorldError",
]
