"""Generation from a model whose weights are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infinity.zero import GatheredParameters


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside, all weights of an engine are in memory, so that many tokens are generated without gathering. Collective.

    A model larger than memory generates without: its weights come with every use.
    """
    with GatheredParameters(model.parameters()):
        hooks = getattr(model.optimizer, "parameter_offload", None)
        if hooks is None:
            yield model
            return
        hooks.remove()
        try:
            yield model
        finally:
            hooks._register_deepspeed_module(hooks.module)
