"""Leaves without ranks: when their groups are held in backward, let go, and said to be complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from infinity.weights.leaf import LeafCalls

Forward = Callable[..., Any]


class Leaf(nn.Module):
    def __init__(self, forward: Forward = lambda x: x * 2) -> None:
        super().__init__()
        self.rule = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.rule(*args, **kwargs)


class Fixture:
    def __init__(self, *leaves: Leaf) -> None:
        self.log: list[str] = []
        groups_of: dict[nn.Module, Any] = {
            leaf: [
                SimpleNamespace(name=f"w{number}", placement=SimpleNamespace(trainable=True)),
                SimpleNamespace(name=f"f{number}", placement=SimpleNamespace(trainable=False)),
            ]
            for number, leaf in enumerate(leaves)
        }
        hold: Any = lambda group: self.log.append(f"hold {group.name}")  # noqa: E731
        complete: Any = lambda group: self.log.append(f"complete {group.name}")  # noqa: E731
        self.calls = LeafCalls(groups_of, hold=hold, release=self.release, complete=complete)

    def release(self, groups: Sequence[Any]) -> None:
        self.log.append(f"release {' '.join(group.name for group in groups)}")

    def backward(self, output: torch.Tensor) -> list[str]:
        torch.autograd.backward(output.sum())
        done = list(self.log)
        self.calls.end_backward()
        return done


X = torch.ones(3)


def test_a_leaf_is_held_from_its_outputs_gradient_to_its_inputs() -> None:
    leaf = Leaf()
    fixture = Fixture(leaf)
    x = X.clone().requires_grad_()
    assert fixture.backward(leaf(x)) == ["hold w0", "hold f0", "release w0 f0", "complete w0"]
    assert fixture.log[4:] == [], "nothing is left for the end"


def test_a_leaf_whose_inputs_need_no_gradient_is_held_until_backward_ends() -> None:
    weight = nn.Parameter(X.clone())
    leaf = Leaf(lambda x: x * weight)
    fixture = Fixture(leaf)
    assert fixture.backward(leaf(X)) == ["hold w0", "hold f0"]
    assert fixture.log[2:] == ["release w0 f0"]
    fixture.log.clear()
    assert fixture.backward(leaf(X)) == ["hold w0", "hold f0"], "the next backward begins anew"


def test_a_leaf_that_was_called_twice_is_complete_after_the_second() -> None:
    leaf = Leaf()
    fixture = Fixture(leaf)
    x = X.clone().requires_grad_()
    first = leaf(x)
    log = fixture.backward(leaf(first * 3))
    assert log == [*["hold w0", "hold f0", "release w0 f0"] * 2, "complete w0"]


@pytest.mark.parametrize("passed", ["leaf", "tensor"])
def test_what_is_passed_through_gets_a_place_of_its_own(passed: str) -> None:
    """Two leaves in a row that do nothing: the second's backward comes first."""
    first, second = Leaf(lambda x: x), Leaf(lambda x: x)
    fixture = Fixture(first, second)
    x = X.clone().requires_grad_() if passed == "leaf" else X.clone().requires_grad_() * 1
    between = first(x)
    output = second(between)
    assert between is not x
    assert output is not between
    assert torch.equal(output, x)
    log = fixture.backward(output)
    assert [what for what in log if what.startswith("hold w")] == ["hold w1", "hold w0"]
    assert [what for what in log if what.startswith("complete")] == ["complete w1", "complete w0"]
    assert log.index("release w1 f1") < log.index("release w0 f0")
    assert len(log) == 8


def test_what_is_computed_is_not_copied() -> None:
    kept: list[torch.Tensor] = []

    def rule(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return kept[0]

    leaf = Leaf(rule)
    Fixture(leaf)
    x = X.clone().requires_grad_()
    assert leaf(x) is kept[0]


def test_inputs_and_outputs_are_found_in_structures_and_keywords() -> None:
    leaf = Leaf(lambda a, *, b: {"out": [a["x"] * 2, (b + 1,)], "word": "kept"})
    fixture = Fixture(leaf)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    output = leaf({"x": x}, b=y)
    assert output["word"] == "kept"
    log = fixture.backward(output["out"][0] + output["out"][1][0])
    assert log == ["hold w0", "hold f0", "release w0 f0", "complete w0"]
    fixture.log.clear()
    output = leaf({"x": x}, b=y)
    log = fixture.backward(output["out"][0])
    assert log[:2] == ["hold w0", "hold f0"], "any of its outputs"
    assert "release w0 f0" in fixture.log


def test_without_gradients_a_leaf_is_left_alone() -> None:
    leaf = Leaf(lambda x: x)
    fixture = Fixture(leaf)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert leaf(x) is x
    output = leaf(X)
    assert output is X
    assert not output.requires_grad
    assert fixture.log == []


def test_what_is_recomputed_in_backward_is_held_by_its_first_call() -> None:
    leaf = Leaf(lambda x: x * 2)
    fixture = Fixture(leaf)
    x = X.clone().requires_grad_()
    log = fixture.backward(checkpoint(leaf, x, use_reentrant=False))
    assert log.count("complete w0") == 1
    assert log.count("hold w0") == log.count("release w0 f0") >= 1


def test_a_failed_backward_leaves_nothing_behind() -> None:
    leaf = Leaf(lambda x: x * 2)
    fixture = Fixture(leaf)

    def explode(_gradient: torch.Tensor) -> None:
        raise KeyError("backward")

    x = X.clone().requires_grad_()
    inner = x * 1
    register_multi_grad_hook([inner], explode, mode="any")
    output = leaf(inner)
    with pytest.raises(KeyError):
        torch.autograd.backward(output.sum())
    fixture.calls.end_backward()
    assert fixture.log[-1] in ("release w0 f0", "complete w0")
    fixture.log.clear()
    assert fixture.backward(leaf(x)) == ["hold w0", "hold f0", "release w0 f0", "complete w0"]


def test_removed_hooks_are_gone() -> None:
    leaf = Leaf()
    fixture = Fixture(leaf)
    fixture.calls.remove()
    fixture.calls.remove()
    assert not leaf._forward_hooks
    x = X.clone().requires_grad_()
    assert fixture.backward(leaf(x)) == []
