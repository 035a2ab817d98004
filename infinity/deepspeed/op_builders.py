"""What scripts ask DeepSpeed's builders before they use an optimizer or asynchronous I/O: whether it is there."""

from __future__ import annotations

from typing import ClassVar, Final, NoReturn


class OpBuilder:
    """Answers for one of DeepSpeed's compiled extensions. Nothing is compiled here: torch's kernels and the node's I/O
    daemon do the work."""

    NAME: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """True: what the extension is for is served."""
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """Raises ImportError: there is no extension to call."""
        raise ImportError(
            f"infinity has no extension {self.name}: use the optimizers of deepspeed.ops, and the daemon for I/O"
        )


class CPUAdamBuilder(OpBuilder):
    """Adam on the CPU."""

    NAME = "cpu_adam"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the CPU."""

    NAME = "cpu_adagrad"


class CPULionBuilder(OpBuilder):
    """Lion on the CPU."""

    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    """Adam, all parameters in one call."""

    NAME = "fused_adam"


class FusedLionBuilder(OpBuilder):
    """Lion, all parameters in one call."""

    NAME = "fused_lion"


class AsyncIOBuilder(OpBuilder):
    """Asynchronous I/O for NVMe offload."""

    NAME = "async_io"


class UtilsBuilder(OpBuilder):
    """Flattening of tensors."""

    NAME = "utils"


class FusedLambBuilder(OpBuilder):
    """LAMB, which is not built."""

    NAME = "fused_lamb"

    def is_compatible(self, verbose: bool = False) -> bool:
        """False: nothing stands in for it."""
        return False


_SERVED: Final = (
    CPUAdamBuilder,
    CPUAdagradBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    FusedLionBuilder,
    AsyncIOBuilder,
    UtilsBuilder,
)
ALL_OPS: Final[dict[str, OpBuilder]] = {builder.NAME: builder() for builder in _SERVED}


class _Served(dict[str, bool]):
    """Whether an extension's work is served; False of all others."""

    def __missing__(self, name: str) -> bool:
        return False


compatible_ops: Final = _Served(dict.fromkeys(ALL_OPS, True))
installed_ops: Final = _Served(dict.fromkeys(ALL_OPS, True))
