"""An optimizer's own step on other tensors than its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from infinity.update.stand_in import StandIn

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
CHOSEN: list[tuple[type[optim.Optimizer], dict[str, Any], torch.device, Any]] = [
    # class, options, device, "fused" of what is chosen
    (optim.AdamW, {"fused": None, "foreach": None}, CPU, True),
    (optim.Adam, {"fused": None, "foreach": None}, CUDA, True),
    (optim.SGD, {"fused": None, "foreach": None}, CUDA, True),
    (optim.Adagrad, {"fused": None, "foreach": None}, CPU, True),
    (optim.Adagrad, {"fused": None, "foreach": None}, CUDA, None),
    (optim.AdamW, {"fused": None, "foreach": None}, META, None),
    (optim.RMSprop, {"fused": None, "foreach": None}, CPU, None),
    (optim.AdamW, {"fused": False, "foreach": None}, CPU, False),
    (optim.AdamW, {"fused": None, "foreach": True}, CPU, None),
    (optim.AdamW, {"fused": None, "foreach": False}, CPU, None),
    (optim.AdamW, {"fused": None, "foreach": None, "differentiable": True}, CPU, None),
]


@pytest.mark.parametrize(("kind", "options", "device", "fused"), CHOSEN)
def test_torchs_fused_step_is_taken_where_it_is_preferred_and_nobody_chose(
    kind: type[optim.Optimizer], options: dict[str, Any], device: torch.device, fused: Any
) -> None:
    optimizer = kind([nn.Parameter(torch.ones(1))])  # type: ignore[call-arg]
    assert StandIn(optimizer).chosen(options, device) is options, "as torch would"
    stand_in = StandIn(optimizer, prefers_fused=True)
    found = stand_in.chosen(options, device)
    assert found["fused"] is fused
    assert {**found, "fused": 0} == {**options, "fused": 0}


def test_an_optimizer_without_such_a_choice_is_left_alone() -> None:
    options = {"lr": 0.1}
    assert StandIn(optim.Rprop([nn.Parameter(torch.ones(1))]), prefers_fused=True).chosen(options, CPU) is options


def test_pieces_are_stepped_as_if_they_were_its_own_and_it_keeps_nothing() -> None:
    own = nn.Parameter(torch.ones(3))
    optimizer = optim.Adam([own], lr=0.1)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    optimizer.step = lambda *_: called.append("schedule")  # type: ignore[method-assign]
    piece, expected = torch.ones(3), nn.Parameter(torch.ones(3))
    plain = optim.Adam([expected], lr=0.3, betas=(0.5, 0.6))
    options = {**optimizer.param_groups[0], "lr": 0.3, "betas": (0.5, 0.6)}
    state: dict[str, Any] = {}
    for step in range(3):
        gradient = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
        expected.grad = gradient.clone()
        plain.step()
        (state,) = StandIn(optimizer).step([piece], [gradient], [state], options)
        assert torch.equal(piece, expected.detach())
        assert piece.grad is None
    assert torch.equal(state["exp_avg"], plain.state[expected]["exp_avg"])
    assert called == []
    assert not optimizer.state
    assert torch.equal(own.detach(), torch.ones(3))


class Counting(optim.SGD):
    """Counts its steps beside its state, where each call would count."""

    num_steps: int

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params, lr=0.1)
        self.where, self.num_steps = where, 0
        self.param_groups[0]["num_calls"] = 0

    def step(self, closure: Any = None) -> Any:
        if self.where == "object":
            self.num_steps += 1
        elif self.where == "group":
            self.param_groups[0]["num_calls"] += 1
        return super().step(closure)


@pytest.mark.parametrize("where", ["object", "group", "nowhere"])
def test_a_number_for_all_parameters_together_is_refused_by_name(where: str) -> None:
    optimizer = Counting([nn.Parameter(torch.ones(1))], where)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}

    def step() -> None:
        StandIn(optimizer).step([torch.ones(1)], [torch.ones(1)], [{}], options)

    if where == "nowhere":
        step()
    else:
        with pytest.raises(ValueError, match=r"keeps num_(steps|calls) for all parameters together"):
            step()
    assert optimizer.num_steps == 0
