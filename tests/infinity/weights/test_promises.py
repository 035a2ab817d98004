"""Values that are given part by part: written where there is memory, else kept until there is."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.files import pieces
from infinity.weights.owners import Values
from infinity.weights.promises import check_promise, fill, promise, take_promises

SHAPE = (6, 5)
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": lambda: torch.zeros(SHAPE),
    "transposed": lambda: torch.zeros(SHAPE[::-1]).t(),
    "with holes": lambda: torch.zeros(6, 9)[:, 2:7],
    "with holes, transposed": lambda: torch.zeros(9, 6)[2:7].t(),
    "repeated": lambda: torch.zeros(6, 2, 5)[:, 1],
    "in half precision": lambda: torch.zeros(SHAPE, dtype=torch.bfloat16),
    "empty": lambda: torch.zeros(0, 5),
    "a number": lambda: torch.zeros(()),
    "a parameter": lambda: nn.Parameter(torch.zeros(SHAPE)),
}


def counting(asked: list[tuple[int, int]]) -> Values:
    """1, 2, 3, ... in order of memory."""

    def values(first: int, numel: int) -> torch.Tensor:
        asked.append((first, numel))
        return torch.arange(first + 1, first + numel + 1, dtype=torch.float64)

    return values


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_filled_in_its_own_memory_in_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 7)
    tensor = TENSORS[kind]()
    memory = tensor.untyped_storage().data_ptr()
    asked: list[tuple[int, int]] = []
    fill(tensor, counting(asked))
    assert tensor.untyped_storage().data_ptr() == memory
    assert tensor.is_leaf
    assert [first for first, _ in asked] == list(range(0, tensor.numel(), 7))
    assert sum(numel for _, numel in asked) == tensor.numel()
    in_memory = sorted((tensor[at].storage_offset(), tensor[at].item()) for at in _places(tensor))
    assert [value for _, value in in_memory] == [float(number) for number in range(1, tensor.numel() + 1)]
    around = torch.empty(0).set_(tensor.detach().float().untyped_storage()).sum()
    assert around == tensor.numel() * (tensor.numel() + 1) / 2, "nothing beside it was written"


def _places(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(place) for place in torch.ones(tensor.shape).nonzero().tolist()]


def on_meta() -> nn.Parameter:
    return nn.Parameter(torch.empty(SHAPE, device="meta"), requires_grad=False)


def test_what_was_promised_comes_with_memory() -> None:
    first, second, other = on_meta(), on_meta(), nn.Parameter(torch.ones(2))
    first.tag = "kept"  # type: ignore[attr-defined]
    given = counting([])
    promise(first, counting([]), "a file")
    promise(first, given, "a file")
    promise(second, counting([]), "a file")
    taken = take_promises([("a", first), ("b", second), ("other", other)])
    assert set(taken) == {id(first), id(second)}
    assert taken[id(first)] is given, "the last promise counts"
    for param in (first, second):
        assert (param.device.type, param.shape, param.requires_grad) == ("cpu", SHAPE, False)
        assert param.isnan().all()
        assert param.untyped_storage().nbytes() == param.element_size(), "no memory of its own size"
    assert first.tag == "kept"  # type: ignore[attr-defined]
    assert take_promises([("a", first)]) == {}, "a promise is taken once"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("none", ""),
        ("no promise", r"model\.net\.weight.*it has no values.*load_pretrained"),
        ("written", r"model\.net\.weight.*it was changed after .*GatheredParameters"),
        ("another shape", r"model\.net\.weight.*it was changed after .*GatheredParameters"),
    ],
)
def test_a_promise_holds_for_what_the_parameter_was(change: str, words: str) -> None:
    param = on_meta()
    if change != "no promise":
        promise(param, counting([]), "a file")
    if change == "written":
        param.add_(1)
    if change == "another shape":
        param.data = torch.empty(3, device="meta")
    if not words:
        check_promise("net.weight", param)
        return
    with pytest.raises(ConfigError, match=words):
        check_promise("net.weight", param)


def test_where_one_cannot_have_memory_all_are_as_before() -> None:
    first, held, last = on_meta(), on_meta(), on_meta()
    for param in (first, held, last):
        promise(param, counting([]), "a file")
    view = held.view(-1)  # shares what would be swapped
    reference = weakref.ref(held)
    with pytest.raises(ConfigError, match=r"model\.held.*cannot be given memory \(.+\): use it"):
        take_promises([("first", first), ("held", held), ("last", last)])
    assert all(param.is_meta for param in (first, held, last))
    for param in (first, held, last):
        check_promise("it", param)
    del view, reference
    assert len(take_promises([("first", first), ("held", held), ("last", last)])) == 3
