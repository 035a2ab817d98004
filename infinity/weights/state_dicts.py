"""What ``state_dict()`` of a sharded module gives: its keys, shapes and dtypes, and the weights that are here: those
that stay in memory, and those that are gathered around the call.

A file written from it would hold NaN for every other weight. So its entries refuse to be read, pickled or written, each
by name; whoever asks for the keys only (as Transformers does) gets them.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from infinity.errors import WeightsError
from infinity.weights.access import ShardedAlias


class StateDictHook:
    """Replaces one module's own weights in its state dict."""

    def __init__(self, name: str, *, copies: bool = False) -> None:
        """``name`` is the module's, for refusals. ``copies``: it may be copied, and finds nothing to replace there."""
        self._name, self._copies = name, copies

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, param in module._parameters.items():
            found = state_dict.get(prefix + name)
            # else it is whole weights', one of which that outlives them is refused at the next update, by name; the
            # parameter itself (keep_vars), which refuses on its own; or what a hook of the user's has made
            if param is not None and isinstance(found, ShardedAlias) and found.param is param:
                state_dict[prefix + name] = ShardedAlias.of(param).make_unreadable()

    def __reduce__(self) -> NoReturn:
        refuse_module_copy(self._name, "pickled", copies=self._copies)

    def __deepcopy__(self, _memo: Any) -> StateDictHook:
        if not self._copies:
            refuse_module_copy(self._name, "copied")
        return self


def refuse_module_copy(name: str, how: str, *, copies: bool = False) -> NoReturn:
    if copies:
        raise WeightsError(name, f"cannot be {how}: its hooks are the engine's", "save its state_dict()")
    raise WeightsError(
        name,
        f"cannot be {how}: its weights are sharded, and it holds none",
        "load what engine.full_state_dict() gives before destroy() into a module built anew",
    )
