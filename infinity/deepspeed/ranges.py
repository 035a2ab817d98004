"""Ranges of profilers around functions: ``deepspeed.utils.nvtx``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from infinity.deepspeed.accelerators import get_accelerator

Call = TypeVar("Call", bound=Callable[..., Any])

enable_nvtx = True
"""Scripts set it to False, to have no ranges."""
DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"
"""The name under which NVIDIA's profiler shows them."""
is_compiling = torch.compiler.is_compiling


def instrument_w_nvtx(func: Call) -> Call:
    """``func`` inside a range of torch's profiler and of the accelerator, but not while it is compiled."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not enable_nvtx or is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        has_domains = getattr(accelerator, "supports_nvtx_domain", False)
        domain = {"domain": DEEPSPEED_NVTX_DOMAIN} if has_domains else {}
        accelerator.range_push(func.__qualname__, **domain)
        try:
            with torch.profiler.record_function(func.__qualname__):
                return func(*args, **kwargs)
        finally:
            accelerator.range_pop(**domain)

    return wrapped  # type: ignore[return-value]
