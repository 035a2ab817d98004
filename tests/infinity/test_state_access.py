"""Every function of state access, against plain torch: tiers, precisions, one and two ranks, in and out of a step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity import utils
from infinity.engine import Engine
from infinity.errors import ConfigError, EngineStateError, WeightsError
from infinity.weights.ds_names import DsNames
from infinity.zero import (
    GatheredParameters,
    TiledLinear,
    TiledLinearReturnBias,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)
from infinity.zero.estimates import state_bytes, zero2_needs, zero3_needs
from tests.support.ranks import run_ranks
from tests.support.state_story import batches_of, build, config, differences, loss_of


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_state_reads_and_writes_as_plain_torch_does(tier: str, bf16: bool, tmp_path: Path) -> None:
    assert differences(tier, str(tmp_path), bf16=bf16) == []


@pytest.mark.parametrize(
    ("tier", "bf16", "num_ranks"), [("none", True, 2), ("nvme", False, 2), ("cpu", False, 4), ("nvme", True, 4)]
)
def test_on_several_ranks(tier: str, bf16: bool, num_ranks: int, tmp_path: Path) -> None:
    code = f"""
    import json, torch
    from tests.support.state_story import differences
    import infinity
    from infinity.tiers.collectives import Collectives
    kept = Collectives.join()
    print(json.dumps(differences({tier!r}, {str(tmp_path)!r}, bf16={bf16}, world_size={num_ranks})))
    kept.close()
    """
    assert [rank.answer for rank in run_ranks(code, tmp_path, num_ranks=num_ranks)] == [[]] * num_ranks


WITHOUT_THE_OTHERS = """
import json, os, sys
import torch
import infinity
from infinity import utils
from infinity.errors import WorldError
from tests.support.state_story import batches_of, build, config

rank = int(os.environ["RANK"])
engine, *_ = infinity.initialize(model=build(), config=config("cpu", ".", bf16=False))
weight = engine.module.get_parameter("0.weight")
before = utils.safe_get_full_fp32_param(weight)
said = []
for write in (
    lambda value: utils.safe_set_full_fp32_param(weight, value),
    lambda value: utils.safe_set_full_optimizer_state(weight, value, "exp_avg"),
):
    try:
        write(before + rank)
    except WorldError as error:
        said.append(str(error))
same = torch.equal(utils.safe_get_full_fp32_param(weight), before)
try:
    if rank == 0:
        utils.safe_set_full_optimizer_state(weight, before, "exp_avg")
    engine.eval()
    engine(batches_of(1, world_size=1, bf16=False)[0])
except WorldError as error:
    said.append(str(error))
print(json.dumps([same, *said]))
sys.stdout.flush()
os._exit(0)
"""

REFUSED_BY_ONE = """
import json, os, sys
import torch
import infinity
from infinity import utils
from tests.support.state_story import build, config

rank = int(os.environ["RANK"])
engine, *_ = infinity.initialize(model=build(), config=config("cpu", ".", bf16=False))
weight = engine.module.get_parameter("0.weight")
before = utils.safe_get_full_fp32_param(weight)
with infinity.zero.GatheredParameters(weight):
    kept = weight.view(-1) if rank == 0 else None
said = []
for _ in range(2):
    try:
        utils.safe_set_full_fp32_param(weight, before + 1)
        said.append("nothing")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    kept = None
    said.append(float((utils.safe_get_full_fp32_param(weight) - before).mean().round()))
print(json.dumps(said))
"""


def test_a_write_that_one_rank_refuses_is_done_on_none(tmp_path: Path) -> None:
    first, second = (rank.answer for rank in run_ranks(REFUSED_BY_ONE, tmp_path, num_ranks=2))
    assert first[0].startswith("WeightsError: 0.weight (shape (50, 24)) has a view")
    assert second[0].startswith("WorldError: rank 0 failed: WeightsError: 0.weight (shape (50, 24)) has a view")
    assert first[1:] == second[1:] == [0.0, "nothing", 1.0]


def test_a_write_of_other_values_or_by_one_rank_alone_is_told(tmp_path: Path) -> None:
    first, second = (rank.answer for rank in run_ranks(WITHOUT_THE_OTHERS, tmp_path, num_ranks=2))
    assert first == second
    same, weights, states, alone = first
    assert same, "nothing has changed"
    for said, kind in ((weights, "weight"), (states, "exp_avg")):
        assert re.search(rf"rank 0: write the {kind} of 0\.weight with checksum \w+.*rank 1: write the {kind}", said)
    assert re.search(r"rank 0: write the exp_avg of 0\.weight.*rank 1: begin an evaluating forward", alone)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine, *_ = infinity.initialize(model=build(), config=config("cpu", str(tmp_path), bf16=False))
    yield engine
    engine.destroy()


def test_a_change_without_a_modifier_is_refused_by_name(engine: Engine) -> None:
    weight = engine.module.get_parameter("0.weight")
    with (
        pytest.raises(WeightsError, match=r"0\.weight .*modifier_rank"),
        torch.no_grad(),
        GatheredParameters(weight),
    ):
        weight.zero_()
    with GatheredParameters(weight):
        assert float(weight.detach().abs().sum()) > 0


def test_shapes_cannot_change_inside(engine: Engine) -> None:
    weight = engine.module.get_parameter("0.weight")
    with GatheredParameters(weight, modifier_rank=0), pytest.raises(ValueError, match="shape"):
        weight.data = torch.zeros(3)


def test_what_belongs_to_nobody_is_left_alone() -> None:
    plain = nn.Linear(3, 3)
    with GatheredParameters([*plain.parameters(), torch.zeros(2)], modifier_rank=0), torch.no_grad():
        plain.weight.zero_()
    with GatheredParameters(iter(()), modifier_rank=0):
        pass
    assert not plain.weight.any()
    assert utils.safe_get_full_fp32_param(plain.weight) is None
    with pytest.raises(ConfigError, match="no engine"):
        utils.safe_set_full_fp32_param(plain.weight, torch.zeros(3, 3))


def test_disabled_it_gathers_nothing(engine: Engine) -> None:
    weight = engine.module.get_parameter("0.weight")
    with GatheredParameters(weight, enabled=False):
        assert "sharded=True" in repr(weight)


def test_between_init_and_initialize(tmp_path: Path) -> None:
    settings = config("cpu", str(tmp_path), bf16=False)
    with infinity.Init(config_dict_or_path=settings):
        model = build()
    weight = model.get_parameter("0.weight")
    with GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        weight.fill_(0.5)
        model.get_parameter("3.bias").data.fill_(0.25)
    engine, *_ = infinity.initialize(model=model, config=settings)
    full = engine.full_state_dict()
    assert bool((full["0.weight"] == 0.5).all())
    assert bool((full["3.bias"] == 0.25).all())


def test_parameters_have_the_dialects_attributes(engine: Engine) -> None:
    weight, bias = engine.module.get_parameter("0.weight"), engine.module.get_parameter("0.bias")
    assert isinstance(weight, DsNames)
    assert isinstance(bias, DsNames)
    assert weight.ds_id != bias.ds_id
    assert (weight.ds_numel, tuple(weight.ds_shape)) == (24 * 50, (50, 24))
    assert (weight.ds_status, bias.ds_status) == (ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE)
    assert (weight.ds_persist, bias.ds_persist) == (False, True)
    assert weight.ds_summary()["shape"] == (50, 24)
    expected = build().get_parameter("0.weight").detach()
    assert torch.equal(weight.ds_tensor, expected.flatten())
    weight.all_gather()
    weight.all_gather([weight, bias, nn.Parameter(torch.zeros(1))])
    weight.partition([weight, bias])
    assert weight.ds_summary()["status"] == "AVAILABLE"
    with torch.no_grad():
        weight.mul_(2)
    weight.partition(has_been_updated=True)
    weight.partition()
    assert weight.ds_summary()["status"] == "NOT_AVAILABLE"
    assert torch.equal(weight.ds_tensor, 2 * expected.flatten())
    assert not hasattr(nn.Parameter(torch.zeros(1)), "ds_id")


def test_staged_parameters_have_them_too(tmp_path: Path) -> None:
    with infinity.Init(config_dict_or_path=config("cpu", str(tmp_path), bf16=False)):
        model = build()
    weight = model.get_parameter("0.weight")
    assert isinstance(weight, DsNames)
    assert torch.equal(weight.ds_tensor, build().get_parameter("0.weight").detach().flatten())
    assert (weight.ds_status, weight.ds_persist) == (ZeroParamStatus.NOT_AVAILABLE, False)
    weight.all_gather()
    assert (weight.ds_status, weight.ds_numel) == (ZeroParamStatus.AVAILABLE, 24 * 50)
    with torch.no_grad():
        weight.mul_(2)
    weight.partition(has_been_updated=True)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert torch.equal(weight.ds_tensor, 2 * build().get_parameter("0.weight").detach().flatten())
    assert not hasattr(nn.Linear(1, 1).weight, "ds_numel")


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after it"])
def test_a_loss_of_gathered_weights_gives_their_gradients(engine: Engine, inside: bool) -> None:
    plain = build()
    (batch,) = batches_of(0, world_size=1, bf16=False)
    (loss_of(plain, batch) + plain.get_parameter("4.weight").square().sum()).backward()  # type: ignore[no-untyped-call]
    weight = engine.module.get_parameter("4.weight")
    with GatheredParameters(weight):
        loss = loss_of(engine, batch) + weight.square().sum()
        if inside:
            engine.backward(loss)
    if not inside:
        engine.backward(loss)
    expected = plain.get_parameter("4.weight").grad
    found = utils.safe_get_full_grad(weight)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


def test_a_gradient_that_no_backward_gave_is_stepped(engine: Engine) -> None:
    bias = engine.module.get_parameter("4.bias")
    before = utils.safe_get_full_fp32_param(bias)
    (batch,) = batches_of(0, world_size=1, bf16=False)
    engine.backward(loss_of(engine.module.get_submodule("0"), batch))
    assert utils.safe_get_full_grad(bias) is None
    utils.safe_set_full_grad(bias, torch.ones_like(bias))
    engine.step()
    after = utils.safe_get_full_fp32_param(bias)
    assert before is not None
    assert after is not None
    assert torch.allclose(before - after, torch.full_like(before, 1e-2), rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p: utils.safe_set_full_fp32_param(p["0.weight"], torch.zeros(2)), ValueError, "0.weight"),
        (lambda p: utils.safe_set_local_grad(p["0.weight"], torch.zeros(2)), ValueError, "0.weight"),
        (lambda p: utils.safe_set_full_grad(p["3.bias"], torch.zeros(33)), ValueError, "frozen"),
        (lambda p: utils.safe_get_full_optimizer_state(p["0.bias"], "momentum"), KeyError, "exp_avg"),
    ],
    ids=["shape", "local shape", "frozen", "no such state"],
)
def test_what_cannot_be_done_is_refused_in_words(engine: Engine, call: object, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        call(dict(engine.module.named_parameters()))  # type: ignore[operator]


def test_inside_backward_it_is_refused(engine: Engine) -> None:
    (batch,) = batches_of(0, world_size=1, bf16=False)
    output = engine(batch)
    refused: list[BaseException] = []

    def look(_: torch.Tensor) -> None:
        with pytest.raises(EngineStateError, match="BACKWARD") as caught:
            utils.safe_get_full_grad(engine.module.get_parameter("4.bias"))
        refused.append(caught.value)

    output.register_hook(look)
    engine.backward(output.square().mean())
    assert refused


def test_after_destroy_it_is_refused(engine: Engine) -> None:
    weight = engine.module.get_parameter("0.weight")
    engine.destroy()
    with pytest.raises(EngineStateError, match="destroyed"):
        utils.safe_get_full_fp32_param(weight)
    with pytest.raises(WeightsError, match=r"0\.weight"), GatheredParameters(weight):
        pass


def test_a_kept_view_does_not_miss_a_write(engine: Engine) -> None:
    weight = engine.module.get_parameter("0.weight")
    with GatheredParameters(weight):
        kept = weight.detach()[0]
    with pytest.raises(WeightsError, match=r"0\.weight .*view"):
        utils.safe_set_full_fp32_param(weight, torch.zeros_like(weight))
    assert kept.any()


def test_leaf_modules_by_name_and_suffix() -> None:
    a, b = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    model = nn.ModuleDict({"a": a, "b": b})
    found, missing = utils.set_z3_leaf_modules_by_name(model, ["a", "c"], raise_if_not_found=False)
    assert found == [a]
    assert missing == ["c"]
    assert utils.z3_leaf_module(a)
    with pytest.raises(ConfigError, match="named so"):
        utils.set_z3_leaf_modules_by_suffix(model, [".7"])
    assert utils.set_z3_leaf_modules_by_suffix(model, [".0"])[0] == [a[0], b[0]]
    utils.set_z3_leaf_module(a, flag=False)
    assert utils.get_z3_leaf_modules(model) == [a[0], b[0]]
    assert utils.unset_z3_leaf_modules(model, [nn.Linear]) == [a[0], b[0]]
    assert utils.set_z3_leaf_modules(model, [nn.Sequential]) == [a, b]


def test_external_parameters_need_no_announcement() -> None:
    layer = nn.Linear(2, 2)
    register_external_parameter(layer, layer.weight)
    unregister_external_parameter(layer, layer.weight)
    with pytest.raises(TypeError, match="Tensor was given"):
        register_external_parameter(layer, torch.zeros(2))


@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (3, 2), (7, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_tiles_give_what_one_layer_gives(in_splits: int, out_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(7, 5, bias=bias).double()
    tiled = TiledLinear(
        7, 5, bias=bias, in_splits=in_splits, out_splits=out_splits, init_linear=whole, dtype=torch.float64
    )
    batch = torch.randn(4, 7, dtype=torch.float64)
    torch.testing.assert_close(tiled(batch), whole(batch))
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())
    parts = TiledLinear(7, 5, bias=bias, in_splits=in_splits, out_splits=out_splits, input_is_already_split=True,
                        combine_out_splits=False, init_linear=whole, dtype=torch.float64)  # fmt: skip
    sizes = [b - a for a, b in zip(parts.in_parts, parts.in_parts[1:], strict=False)]
    torch.testing.assert_close(torch.cat(parts(torch.split(batch, sizes, dim=-1)), dim=-1), whole(batch))


class _LeavesBias(nn.Linear):
    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        return nn.functional.linear(batch, self.weight), self.bias


def test_tiles_may_leave_the_bias_to_the_caller() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(6, 4)
    tiled = TiledLinearReturnBias(6, 4, in_splits=2, out_splits=2, linear_cls=_LeavesBias, init_linear=whole)
    batch = torch.randn(3, 6)
    output, bias = tiled(batch)
    torch.testing.assert_close(output + bias, whole(batch))
    assert TiledLinearReturnBias(6, 4, bias=False, linear_cls=_LeavesBias)(batch)[1] is None


def test_tiles_of_a_sharded_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(40, 40)
    expected = whole.weight.detach().clone()
    with infinity.Init(config_dict_or_path=config("cpu", str(tmp_path), bf16=False)):
        tiled = TiledLinear(40, 40, in_splits=2, out_splits=2)
        tiled.copy_params_from(whole)
    engine, *_ = infinity.initialize(model=tiled, config=config("cpu", str(tmp_path), bf16=False))
    assert torch.equal(engine.full_state_dict()["linears.1.0.weight"], expected[20:, :20])


@pytest.mark.parametrize(("key", "value"), [("in_splits", 0), ("out_splits", 9)])
def test_tiles_that_cannot_be_cut_are_refused(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=key):
        TiledLinear(4, 4, **{key: value})  # type: ignore[arg-type]


def test_estimates_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    for need in zero3_needs(1_000_000, 0, 4, 2):
        host = need.host_bytes or 0
        if "cpu" in need.options and "nvme" in need.options:
            continue  # part of it is inside the budget
        assert 8 * need.gpu_bytes + 2 * (host + need.nvme_bytes) == 16_000_000
    sizes = {(m, k): state_bytes(m, k) for m in ("fp32", "split") for k in ("fp32", "bf16")}
    assert sizes == {("fp32", "fp32"): 12, ("fp32", "bf16"): 8, ("split", "fp32"): 10, ("split", "bf16"): 6}
    assert zero3_needs(64, 0, 1, 1, states=state_bytes(moments="8bit"))[0].gpu_bytes == 64 * 10 + 2
    with pytest.raises(ValueError, match="4bit"):
        state_bytes(moments="4bit")
    none, cpu, nvme = zero2_needs(1_000_000, 4, 2)
    assert none.gpu_bytes - cpu.gpu_bytes == 14_000_000 // 8
    assert cpu.host_bytes == nvme.nvme_bytes == 7_000_000
    infinity.zero.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000), num_gpus_per_node=2)
    infinity.zero.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(1000, 1000), moments="bf16")
    printed = capsys.readouterr().out
    assert "1M total params, 1M largest layer params" in printed
    assert "offload_param=nvme" in printed
