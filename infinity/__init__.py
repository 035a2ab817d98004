"""Train models far larger than memory: ZeRO stage 3 whose state lives on NVMe, bit-exact, inside a hard budget."""

from infinity.engine import Engine
from infinity.init_context import Init
from infinity.initialize import initialize

__all__ = ["Engine", "Init", "initialize"]
__version__ = "0.1.0"
