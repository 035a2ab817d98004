"""Ranks that do not the same: one calls something else, or its code raises. All must be told, by name and in time."""

from __future__ import annotations

from typing import Any, Final

Action = tuple[Any, ...]


def usual(batch: int) -> list[Action]:
    """What a rank does in a step that has one micro-batch."""
    return [("call", batch, False), ("backward", False), ("step",), ("weights",)]


OTHERS: Final = {
    "leaves out a forward": ("step", "weights"),
    "leaves out a backward": ("call", "step", "weights"),
    "leaves out a step": ("call", "backward", "weights"),
    "looks at weights first": ("weights", "call", "backward", "step"),
    "evaluates first": ("evaluate", "call", "backward", "step", "weights"),
    "drops its gradients": ("call", "backward", "zero_grad", "step", "weights"),
    "steps twice": ("call", "backward", "step", "step", "weights"),
    "has another learning rate": ("call", "backward", "option", "step", "weights"),
    "clips": ("call", "backward", "clip", "step", "weights"),
    "asks for a gradient": ("call", "backward", "gradient", "step", "weights"),
    "saves": ("save", "call", "backward", "step", "weights"),
    "raises in forward": ("forward goes wrong", "call", "step", "weights"),
    "raises in backward": ("backward goes wrong", "call", "backward", "step", "weights"),
}
"""What one rank does while the others do as usual."""

UNEVEN: Final = ("leaves out a step", "steps twice", "has another learning rate", "drops its gradients")
"""After which ranks count otherwise, or would train otherwise, whatever they are told."""


OF_SHARDS: Final = ("looks at weights first", "asks for a gradient")
"""What takes all ranks only where none has everything."""


def other(how: str, batch: int) -> list[Action]:
    """The calls of the rank that differs."""
    calls: dict[str, Action] = {
        "call": ("call", batch, False),
        "backward": ("backward", False),
        "evaluate": ("evaluate", batch, "no_grad"),
        "option": ("option", "lr", 0.03),
        "clip": ("clip", 0.01),
        "gradient": ("gradient", "head.weight"),
        "save": ("save", "alone", False),
        "forward goes wrong": ("arm", "forward"),
        "backward goes wrong": ("arm", "backward"),
    }
    return [calls.get(name, (name,)) for name in OTHERS[how]]
