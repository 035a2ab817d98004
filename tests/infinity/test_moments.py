"""Moments in fewer bits: the bits of a loop that rounds them, everywhere, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity import Engine
from infinity.errors import ConfigError
from infinity.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from tests.infinity.test_split_masters import WIDTH, Net, batch, engine_of, everything, same, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

Moments = dict[str, Any]
FORMS: dict[str, Moments] = {
    "bf16": {"moments": "bf16"},
    "8bit": {"moments": "8bit"},
    "split": {"moments": "bf16", "master_weights": "split"},
}


def nearest(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def by_chance(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Up with the chance of the 16 bits that are cut off, by the number drawn for the element's place."""

    def mixed(x: Any) -> Any:
        x = (x ^ x >> 16) * np.uint32(0x85EBCA6B)
        x = (x ^ x >> 13) * np.uint32(0xC2B2AE35)
        return x ^ x >> 16

    bits = values.detach().flatten().numpy().view(np.uint32)
    places = np.arange(bits.size, dtype=np.uint32)
    drawn = mixed(places * np.uint32(0x9E3779B1) ^ np.uint32(seed)) & np.uint32(0xFFFF)
    rounded = bits + drawn & np.uint32(0xFFFF0000)
    return torch.from_numpy(rounded.view(np.float32)).view(values.shape)


def plain_loop(model: nn.Module, num_steps: int, *, bf16: bool) -> dict[str, torch.Tensor]:
    """Losses, masters and moments of a loop in torch that has bf16 moments between its steps."""
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    if bf16:
        model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    losses = []
    for step in range(num_steps):
        loss = model(batch(step))
        loss.backward()
        losses.append(loss.detach())
        for param, master in zip(model.parameters(), masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.to(master.dtype), None
        optimizer.step()
        with torch.no_grad():
            for index, (param, master) in enumerate(zip(model.parameters(), masters, strict=True)):
                state = optimizer.state[master]
                param.copy_(master)
                state["exp_avg"].copy_(nearest(state["exp_avg"]))
                seed = crc32(repr((index, 4, (float(step + 1),))).encode())
                state["exp_avg_sq"].copy_(by_chance(state["exp_avg_sq"], seed))
    found = {"losses": torch.stack(losses)}
    for (name, _), master in zip(model.named_parameters(), masters, strict=True):
        states = optimizer.state[master]
        found |= {f"master {name}": master.detach()}
        found |= {f"{label} {name}": states[label] for label in ("exp_avg", "exp_avg_sq")}
    return found


def trained(engine: Engine, steps: range = range(6)) -> dict[str, torch.Tensor]:
    losses = torch.stack(train(engine, steps))
    return {"losses": losses, **everything(engine)}


def started(tmp_path: Path, tier: str = "none", form: str = "bf16", **changes: Any) -> Any:
    section = {**FORMS[form], **changes.pop("io_daemon", {})}
    masters = section.get("master_weights", "fp32")
    return engine_of(tmp_path, masters, tier, io_daemon=section, **changes)


@pytest.mark.parametrize(("tier", "bf16"), [("nvme", True), ("none", False)])
def test_the_bits_are_those_of_a_loop_that_rounds(tier: str, bf16: bool, tmp_path: Path) -> None:
    def client(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for group in groups for param in group["params"]], lr=1e-3, fused=True)

    section = {"host_budget_bytes": 2 << 20}
    with started(tmp_path, tier, optimizer=client, bf16={"enabled": bf16}, io_daemon=section) as engine:
        initial = engine.full_master_state_dict()
        found = trained(engine)
    model = Net()
    model.load_state_dict(initial)
    expected = plain_loop(model, 6, bf16=bf16)
    assert same({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_tiers_budgets_and_times_of_the_update_change_no_bit(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, "none", form) as engine:
        expected = trained(engine)
    monkeypatch.setenv("INFINITY_DEBUG", "poison")
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("nvme", form, {"update_in_backward": True}, {}),
        ("cpu", form, {}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        ("none", form, {"update": "in_step"}, {"stage": 1}),
    ]
    if form == "bf16":
        cases.append(("nvme", "split", {}, {}))
    for tier, stored, section, changes in cases:
        with started(tmp_path, tier, stored, io_daemon=section, zero=changes) as engine:
            assert same(trained(engine), expected), (tier, stored, section, changes)


def test_fewer_bytes_are_kept_read_and_written(tmp_path: Path) -> None:
    kept, moved = {}, {}
    for form, section in {**FORMS, "fp32": {}}.items():
        with engine_of(tmp_path, section.get("master_weights", "fp32"), io_daemon=section) as engine:
            train(engine, range(2))
            before = engine.io_report().nvme_total
            train(engine, range(2, 5))
            report = engine.io_report()
            assert before is not None
            assert report.nvme_total is not None
            kept[form], moved[form] = report.swap_bytes, report.nvme_total.since(before)
    # a chunk of the least size in 8 bits takes five pages, where a large one takes 1/64 more than four
    for form, num_bytes in (("bf16", 12), ("split", 10), ("8bit", 10.5)):
        assert kept[form] / kept["fp32"] == pytest.approx(num_bytes / 16, rel=0.02), form
    for form, share in (("bf16", 0.6), ("split", 0.6), ("8bit", 0.4)):
        assert moved[form].bytes_written["exp_avg"] < share * moved["fp32"].bytes_written["exp_avg"], form


def test_the_report_says_what_is_stored(tmp_path: Path) -> None:
    for form, word in (("bf16", "bf16"), ("8bit", "8bit unsigned")):
        with started(tmp_path, form=form) as engine:
            assert engine.io_report().stored_as["exp_avg_sq"] == word
    with started(tmp_path, form="split") as engine:
        assert engine.io_report().as_dict()["stored_as"] == {
            "weight": "bf16",
            "grad": "bf16",
            "master": "16 bits beside the weight",
            "exp_avg": "bf16",
            "exp_avg_sq": "bf16",
        }


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_goes_on_with_the_same_bits(form: str, tmp_path: Path) -> None:
    with started(tmp_path, form=form) as engine:
        train(engine, range(3))
        engine.save_checkpoint(str(tmp_path / "checkpoint"))
        saved = everything(engine)
        expected = trained(engine, range(3, 5))
    with started(tmp_path, "none", form) as engine:
        engine.load_checkpoint(str(tmp_path / "checkpoint"))
        assert same(everything(engine), saved)
        assert same(trained(engine, range(3, 5)), expected)


@pytest.mark.parametrize(("source", "target"), [("bf16", None), (None, "bf16"), (None, "8bit"), ("8bit", "bf16")])
def test_a_checkpoint_of_another_form_is_rounded_to_this_one(
    source: str | None, target: str | None, tmp_path: Path
) -> None:
    def section(form: str | None) -> Moments:
        return FORMS[form] if form else {}

    with engine_of(tmp_path, "fp32", "none", io_daemon=section(source)) as engine:
        train(engine, range(3))
        engine.save_checkpoint(str(tmp_path / "checkpoint"))
        saved = everything(engine)
    with engine_of(tmp_path, "fp32", "none", io_daemon=section(target)) as engine:
        engine.load_checkpoint(str(tmp_path / "checkpoint"))
        found = everything(engine)
        train(engine, range(3, 4))
    for name, value in saved.items():
        if "exp_avg" not in name or target is None:
            assert torch.equal(found[name], value), name
        elif target == "bf16":
            assert torch.equal(found[name], nearest(value)), name
        else:
            assert not torch.equal(found[name], value)
            assert torch.allclose(found[name], value, rtol=2**-4, atol=float(value.abs().max()) * 2**-14), name


@pytest.mark.parametrize("form", FORMS)
def test_what_the_user_writes_is_rounded_and_read(form: str, tmp_path: Path) -> None:
    with started(tmp_path, form=form) as engine:
        train(engine, range(2))
        param = engine.module.get_parameter("layers.0.weight")
        value = torch.rand(param.shape, generator=torch.Generator().manual_seed(1)) + 0.5
        safe_set_full_optimizer_state(param, value, "exp_avg_sq")
        found = safe_get_full_optimizer_state(param, "exp_avg_sq")
        assert found is not None
        if form == "8bit":
            assert torch.allclose(found, value, rtol=2**-5)
        else:
            assert torch.equal(found, nearest(value))
        assert bool(torch.isfinite(torch.stack(train(engine, range(2, 4)))).all())


def test_a_negative_second_moment_has_no_sign_in_8_bits(tmp_path: Path) -> None:
    with started(tmp_path, form="8bit") as engine:
        train(engine, range(1))
        param, before = engine.module.get_parameter("layers.0.weight"), everything(engine)
        with pytest.raises(ValueError, match='write no negative values, or "bf16"'):
            safe_set_full_optimizer_state(param, torch.full(param.shape, -1.0), "exp_avg_sq")
        assert same(everything(engine), before)


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_two_ranks_have_the_bits_of_one(form: str, tmp_path: Path) -> None:
    code = f"""
    import json, os
    import torch
    import infinity
    from tests.infinity.test_moments import digest
    print(json.dumps(digest({form!r})))
    """
    answers = [ended.answer for ended in run_ranks(code, tmp_path, num_ranks=2)]
    assert answers == [digest(form)] * 2


def digest(form: str) -> list[int]:
    """Of losses, masters and moments of a few steps on parameters of odd sizes; all ranks take the same batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 77), nn.Tanh(), nn.Linear(77, 13))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "io_daemon": FORMS[form],
    }
    engine, *_ = infinity.initialize(model=model, model_parameters=model.parameters(), config=config)
    found = []
    for step in range(5):
        loss = engine(batch(step).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    state: list[Any] = list(engine.full_master_state_dict().values())
    for param in model.parameters():
        state += [safe_get_full_optimizer_state(param, label) for label in ("exp_avg", "exp_avg_sq")]
    engine.destroy()
    return [crc32(struct.pack(f"{t.numel()}f", *t.float().flatten().tolist())) for t in (*found, *state)]


@pytest.mark.parametrize(
    ("section", "changes", "word"),
    [
        ({"moments": "8bit", "master_weights": "split"}, {}, "sign"),
        ({"moments": "bf16"}, {"optimizer": "SGD"}, "keeps no state"),
        (
            {"moments": "bf16"},
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            "bf16 already",
        ),
    ],
)
def test_what_cannot_be_rounded_is_refused(
    section: Moments, changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    masters = section.get("master_weights", "fp32")
    with (
        pytest.raises(ConfigError, match=word) as caught,
        engine_of(tmp_path, masters, "none", io_daemon=section, **changes),
    ):
        pass
    assert (caught.value.key, caught.value.value) == ("io_daemon.moments", section["moments"])


class Trusting(torch.optim.Optimizer):
    """Steps each parameter as a whole, by its norm, and keeps a second moment."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"], state["square"] = torch.zeros(()), torch.zeros_like(param)
                state["step"] += 1
                state["square"].mul_(0.999).addcmul_(param.grad, param.grad, value=1e-3)
                update = param.grad / (state["square"].sqrt() + 1e-6)
                param.sub_(update * (group["lr"] * param.norm() / update.norm()))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | str] = {
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-3, initial_accumulator_value=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-3, amsgrad=True),
    "Lion": "Lion",
    "Muon": "Muon",
    "by its norm": Trusting,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_train_nearly_as_with_fp32(name: str, tmp_path: Path) -> None:
    losses = []
    for section in ({}, *(FORMS[form] for form in ("bf16", "8bit"))):
        with engine_of(tmp_path, "fp32", "none", optimizer=OPTIMIZERS[name], io_daemon=section) as engine:
            losses.append(torch.stack(train(engine, range(8))))
    assert torch.allclose(losses[1], losses[0], rtol=2e-2)
    assert torch.allclose(losses[2], losses[0], rtol=1e-1)
    assert not torch.equal(losses[1], losses[0])
