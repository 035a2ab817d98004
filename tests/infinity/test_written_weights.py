"""What was written to sharded weights that are in memory is refused at once for all of them, and undone."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import WeightsError
from tests.support.ranks import run_ranks


def test_one_refusal_undoes_everything_that_was_written() -> None:
    """Groups that stay in memory, of ten elements each; the second refusal would be of the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 24 * 25, "reduce_bucket_size": 24 * 25},
    }
    engine, _, _, _ = infinity.initialize(model=model, config=config)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    with pytest.raises(WeightsError, match=r"^0\.weight .*, as were 0\.bias, 1\.weight"):
        engine.full_state_dict()
    weights = engine.full_state_dict()
    assert all(torch.equal(weights[name], value) for name, value in before.items())
    engine.destroy()


def test_what_is_written_where_that_is_kept_is_not_told_to_be_written_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 30},
    }
    engine: Any = infinity.initialize(model=nn.Linear(24, 24), config=config)[0]
    for name, param in engine.module.named_parameters():  # one comes and goes, one stays
        with infinity.zero.GatheredParameters(param, modifier_rank=0):
            with torch.no_grad():
                param.fill_(2.0)
            for call in (
                engine.full_state_dict,
                lambda: engine.save_checkpoint(tmp_path),
                engine.full_master_state_dict,
            ):
                with pytest.raises(WeightsError, match=f"^{name} .*whose end keeps that: call this behind that block"):
                    call()
        assert bool((engine.full_state_dict()[name] == 2.0).all())
    engine.save_checkpoint(tmp_path)
    engine.destroy()


def test_a_forward_that_saw_what_is_refused_later_is_not_differentiated() -> None:
    """The first layer is gathered for its use, and its successor stays: backward would go through other weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 200, "reduce_bucket_size": 100},
    }
    engine, _, _, _ = infinity.initialize(model=model, config=config)
    last = engine.module.get_parameter("2.weight")
    with torch.no_grad():
        last.fill_(3.0)
    loss = engine(torch.ones(1, 48)).sum()
    with pytest.raises(WeightsError, match=r"^2\.weight .* was changed in place"):
        infinity.utils.safe_get_full_fp32_param(last)
    with pytest.raises(WeightsError, match="modified by an inplace operation"):
        engine.backward(loss)
    engine.backward(engine(torch.ones(1, 48)).sum())
    engine.step()
    engine.destroy()


def _write(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.fill_(3.0)


def _write_through_a_storage(weight: nn.Parameter) -> None:
    storage: Any = weight.data.untyped_storage()
    storage.fill_(3)


def _write_past_an_array(weight: nn.Parameter) -> None:
    """The array can be read only, which torch does not heed but for a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(weight.data.numpy()).fill_(3.0)


def _write_through_an_address(weight: nn.Parameter) -> None:
    ctypes.memset(weight.data_ptr(), 7, weight.nbytes)


@pytest.mark.parametrize("write", [_write, _write_through_a_storage, _write_past_an_array, _write_through_an_address])
def test_a_write_between_forward_and_backward_gets_into_no_gradient(write: Callable[[nn.Parameter], None]) -> None:
    """The update refused it, and undid it; called again it went on with gradients through what was written."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 200, "reduce_bucket_size": 100},
    }
    found = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
        engine, _, _, _ = infinity.initialize(model=model, config=config)
        if disturbed:
            loss = engine(torch.ones(1, 48)).sum()
            write(engine.module.get_parameter("2.weight"))
            with pytest.raises(WeightsError, match=r"^2\.weight .* was changed in place"):
                engine.backward(loss)
        engine.backward(engine(torch.ones(1, 48)).sum())
        engine.step()
        found.append(engine.full_state_dict())
        engine.destroy()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("num_written", "told"),
    [
        (1, r"^0\.weight .* was changed in place, which"),
        (2, r"in place, as was 0\.bias, which"),
        (21, r"in place, as were 0\.bias, 1\.weight, .*, 10\.weight, which"),
        (23, r"in place, as were 0\.bias, 1\.weight, .*, 10\.weight, 2 more, which"),
    ],
)
def test_what_was_written_is_named_up_to_a_number(num_written: int, told: str) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(16)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    engine, _, _, _ = infinity.initialize(model=model, config=config)
    engine(torch.ones(1, 2))
    with torch.no_grad():
        for param in list(model.parameters())[:num_written]:
            param.mul_(2)
    with pytest.raises(WeightsError, match=told):
        engine.full_state_dict()
    engine.destroy()


READ_BY_ONE = """
import json, os
import torch
from torch import nn
import infinity

rank = int(os.environ["RANK"])

def start(stage, bf16):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    return infinity.initialize(model=nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 2)), config=config)[0]

def train(engine):
    engine.backward(engine(torch.ones(1, 24, dtype=engine.module[0].weight.dtype)).float().square().mean())
    engine.step()

def written(engine):
    train(engine)
    with torch.no_grad():
        engine.module[0].weight[:, ::2] *= 0.5

found = []
for stage in (0, 1, 2):
    for bf16 in (False, True):
        alone, together = start(stage, bf16), start(stage, bf16)
        read = lambda engine: infinity.utils.safe_get_local_fp32_param(engine.module[0].weight)
        written(alone)
        written(together)
        if rank == 0:  # which saves what it has, say
            states, mine = alone.optimizer.state_dict(), read(alone)
        infinity.utils.safe_get_full_fp32_param(together.module[0].weight)
        if rank == 0:
            found.append(torch.equal(mine, read(together)))
            if bf16:
                found.append(torch.equal(states["fp32_weights"][0].reshape(-1), mine))
        train(alone)
        train(together)
        masters = alone.full_master_state_dict(), together.full_master_state_dict()
        found.append(all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0]))
        for engine in (alone, together):
            engine.destroy()
print(json.dumps(found))
"""


def test_one_rank_alone_reads_its_part_of_what_was_written(tmp_path: Path) -> None:
    """``if rank == 0: torch.save(optimizer.state_dict(), file)`` asks no other rank: the next step does."""
    for rank in run_ranks(READ_BY_ONE, tmp_path, num_ranks=2, variables={"INFINITY_TIMEOUT_S": "60"}):
        assert rank.answer
        assert all(rank.answer)


WRITTEN_BY_ONE = """
import json, os, sys
import torch
from torch import nn
import infinity
from infinity.errors import WeightsError, WorldError

rank = int(os.environ["RANK"])
found = []
for stage in (0, 1, 2, 3):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30},
    }
    engine = infinity.initialize(model=nn.Linear(24, 24), config=config)[0]
    weight, bias = engine.module.weight, engine.module.bias
    engine.backward(engine(torch.ones(1, 24)).sum())

    def told(call):
        try:
            call()
        except (WeightsError, WorldError) as error:
            return str(error)

    def save():
        engine.save_checkpoint(sys.argv[1])

    for param in (weight, bias):  # of stage 3 one comes and goes, one stays
        with infinity.zero.GatheredParameters(param, modifier_rank=0):
            if rank == 0:
                with torch.no_grad():
                    param.fill_(2.0)
            calls = (engine.full_state_dict, save, engine.step, engine.full_master_state_dict)
            found.append([told(call) for call in calls])
    save()
    found.append([bool((value == 2.0).all()) for value in engine.full_state_dict().values()])
    if rank == 0 and stage < 3:
        with torch.no_grad():
            weight.fill_(3.0)
    found.append(told(save) if stage < 3 else "GatheredParameters(param, modifier_rank=its number)")
    engine.destroy()
print(json.dumps(found))
"""


def test_what_one_rank_wrote_where_that_is_kept_is_told_to_wait_for_its_end_by_all(tmp_path: Path) -> None:
    """Below stage 3 the rank that had written asked for agreement, and the others for what had been called: both were
    told that ranks diverge, and to mark a mixture of experts."""
    for rank in run_ranks(WRITTEN_BY_ONE, tmp_path, num_ranks=2, words=[str(tmp_path)]):
        for number in range(0, 16, 4):
            weight, bias, kept, alone = rank.answer[number : number + 4]
            for name, words in (("weight", weight), ("bias", bias)):
                assert all(f"{name} is written to inside GatheredParameters" in said for said in words), words
            assert kept == [True, True]
            assert "GatheredParameters(param, modifier_rank=its number)" in alone


NAMED_LIKE_A_SAVE = """
import json, os
from collections import OrderedDict
import torch
from torch import nn
import infinity
from infinity.errors import WorldError

config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
}
engine = infinity.initialize(model=nn.Sequential(OrderedDict(checkpoint=nn.Linear(4, 4))), config=config)[0]
if os.environ["RANK"] == "0":
    with torch.no_grad():
        engine.module.checkpoint.weight.fill_(2.0)
told = ""
try:
    engine.full_state_dict()
except WorldError as error:
    told = str(error)
print(json.dumps(told))
"""


def test_a_parameters_name_is_not_taken_for_a_save(tmp_path: Path) -> None:
    """Who writes to ``checkpoint.weight`` saves nothing."""
    for rank in run_ranks(NAMED_LIKE_A_SAVE, tmp_path, num_ranks=2):
        assert "modifier_rank=its number" in rank.answer
        assert "saved by all ranks" not in rank.answer


LOADED_TO_BE_READ = """
    import json, os
    import torch
    from torch import nn
    import infinity
    from infinity.errors import WeightsError

    rank, found = int(os.environ["RANK"]), {}
    for precision in ({}, {"bf16": {"enabled": True}}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 30), nn.Linear(30, 3))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40},
            **precision,
        }
        engine = infinity.initialize(model=model, config=config)[0]
        params = list(model.parameters())
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 70).to(params[0].dtype)).float().sum())
            engine.step()
        masters = engine.full_master_state_dict()
        with infinity.zero.GatheredParameters(params):
            model.load_state_dict(masters)  # rounded, they are the weights
            read = {name: value.clone() for name, value in model.state_dict().items()}
        before = engine.full_state_dict()
        assert all(torch.equal(before[name], value) for name, value in read.items())
        told = []
        # the last elements are those of the last rank; the third change is one rank's alone
        for change in (lambda p: p[0].add_(1), lambda p: p[-1].add_(1), lambda p: p[rank % 2 * -1].add_(1)):
            try:
                with infinity.zero.GatheredParameters(params), torch.no_grad():
                    change(params[0])
            except WeightsError as error:
                told.append(str(error).split(" (")[0] if "was changed in place" in str(error) else str(error))
        assert all(torch.equal(before[name], value) for name, value in engine.full_state_dict().items())
        assert all(torch.equal(masters[name], value) for name, value in engine.full_master_state_dict().items())
        found[str(precision)] = told
        engine.destroy()
    print(json.dumps(found))
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_values_that_are_written_as_they_were_are_no_change(num_ranks: int, tmp_path: Path) -> None:
    for ended in run_ranks(LOADED_TO_BE_READ, tmp_path, num_ranks=num_ranks):
        assert list(ended.answer.values()) == [["0.weight"] * 3] * 2
