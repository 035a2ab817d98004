"""Ranks that share one model: who starts torch.distributed, who ends it, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import infinity
from infinity.errors import ConfigError, WorldError
from infinity.tiers.world import Peers
from tests.support.ranks import end_of, free_port, run_ranks, start_launcher

PRELUDE = """
import copy, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
import infinity

rank = int(os.environ["RANK"])
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10},
}
DDP_ADAM = {"lr": 1e-2, "weight_decay": 0.0, "fused": True}

def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))

def batches(count, rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 32, generator=generator) for _ in range(count)]

def train(engine, batches):
    losses = []
    for batch in batches:
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses

def weights(engine):
    return {name: value.tolist() for name, value in engine.full_state_dict().items() if "running" not in name}

def bits(tensor):
    return tensor.detach().contiguous().view(torch.int32 if tensor.dtype is torch.float32 else torch.int64).tolist()
"""


def test_ranks_share_one_model_and_what_was_started_ends_quietly(tmp_path: Path) -> None:
    """Built differently on every rank, with ``Init`` on the way, twice in one process: rank 0's model everywhere."""
    code = """
    runs = []
    for seed in (10, 20):
        with infinity.Init(config_dict_or_path=CONFIG):
            model = build(seed + rank)
        started = dist.is_initialized() and (dist.get_world_size(), dist.get_rank())
        engine, *_ = infinity.initialize(model=model, config=CONFIG)
        train(engine, batches(3, rank))
        runs.append(dict(started=started, batch=engine.train_batch_size(), weights=weights(engine)))
        engine.destroy()
        runs[-1]["ended"] = not dist.is_initialized()
    print(json.dumps(runs))
    """
    ranks = run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2)
    answers = [rank.answer for rank in ranks]
    for rank, runs in enumerate(answers):
        assert [run["started"] for run in runs] == [[2, rank]] * 2
        assert [run["batch"] for run in runs] == [4, 4]
        assert all(run["ended"] for run in runs)
    assert answers[0][0]["weights"] == answers[1][0]["weights"] != answers[0][1]["weights"] == answers[1][1]["weights"]
    assert [rank.errors for rank in ranks] == ["", ""]


def test_a_script_that_forgets_destroy_ends_quietly(tmp_path: Path) -> None:
    code = """
    model = build()
    engine, *_ = infinity.initialize(model=model, config=CONFIG)
    train(engine, batches(2, rank))
    """
    ranks = run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * 2


def test_ranks_that_would_keep_the_changes_of_different_ranks_are_told_so(tmp_path: Path) -> None:
    """Both waited for the other's, until their time was up."""
    code = """
    model = build()
    engine, *_ = infinity.initialize(model=model, config=CONFIG)
    try:
        with infinity.zero.GatheredParameters(model[0].weight, modifier_rank=rank), torch.no_grad():
            model[0].weight.fill_(1.0)
    except infinity.errors.WorldError as error:
        print(json.dumps(str(error)), flush=True)
    os._exit(0)
    """
    for rank in run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2):
        assert "the ranks diverge" in rank.answer
        assert "take what rank 0 has" in rank.answer
        assert "take what rank 1 has" in rank.answer


def test_a_parameter_without_elements_is_reduced_with_the_others(tmp_path: Path) -> None:
    code = """
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.nothing = nn.Linear(32, 1), nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return self.linear(x) + self.nothing.sum()

    losses = []
    for limits in ({}, {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}):
        torch.manual_seed(0)
        zero = CONFIG["zero_optimization"] | limits
        engine, *_ = infinity.initialize(model=Empty(), config=CONFIG | {"zero_optimization": zero})
        losses.append(train(engine, batches(3, rank)))
        assert engine.full_state_dict()["nothing"].shape == (0,)
        engine.destroy()
    print(json.dumps(losses))
    """
    for rank in run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2):
        whole, each = rank.answer
        assert whole == each


UNLIKE: dict[str, list[dict[str, object]]] = {
    "gradient_clipping": [{}, {"gradient_clipping": 0.1}],
    "gradient_allreduce_op": [{}, {"gradient_allreduce_op": "sum"}],
    "communication_data_type": [{}, {"communication_data_type": "bf16"}],
    "bf16.enabled": [{}, {"bf16": {"enabled": True}}],
    "fp16.initial_scale_power": [{"fp16": {"enabled": True, "initial_scale_power": power}} for power in (4, 8)],
    "data_types.grad_accum_dtype": [
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": dtype}} for dtype in ("fp32", "bf16")
    ],
    "zero_optimization.stage": [{"zero_optimization": {"stage": stage}} for stage in (0, 1)],
    "zero_optimization.stage3_param_persistence_threshold": [
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": numel}} for numel in (0, 10**6)
    ],
    "optimizer.params.lr": [{"optimizer": {"type": "AdamW", "params": {"lr": lr}}} for lr in (0.1, 0.2)],
    "io_daemon.update": [{"io_daemon": {"update": update}} for update in ("on_use", "in_step")],
}


def test_a_configuration_that_differs_from_rank_to_rank_is_refused_by_its_key_at_once(tmp_path: Path) -> None:
    """Ranks that clipped, scaled or averaged each its own way trained on to weights that were neither's."""
    code = f"""
    found = []
    for unlike in {list(UNLIKE.values())!r}:
        try:
            infinity.initialize(model=build(), config=CONFIG | unlike[rank])
        except infinity.errors.ConfigError as error:
            found.append([error.key, str(error)])
    own = [{{"steps_per_print": 5}}, {{"io_daemon": {{"host_budget_bytes": 1 << 30}}, "log_level": "warning"}}][rank]
    engine, *_ = infinity.initialize(model=build(), config=CONFIG | own)
    train(engine, batches(1, rank))
    engine.destroy()
    try:
        infinity.initialize(model=build(), config=CONFIG | [{{}}, {{"gradient_clip": 1.0}}][rank])
    except Exception as error:
        found.append([type(error).__name__, str(error)])
    print(json.dumps(found))
    """
    ranks = run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2)
    for rank in ranks:
        *unlike, (kind, words) = rank.answer
        assert [key for key, _ in unlike] == list(UNLIKE)
        assert all("rank 0 has" in text and "give all ranks one configuration" in text for _, text in unlike)
        assert "gradient_clip" in words
        assert kind in ("ConfigError", "WorldError")


@pytest.mark.parametrize("stage", [0, 3])
def test_what_shares_its_memory_under_init_is_rank_0s_too(stage: int, tmp_path: Path) -> None:
    """Of a parameter that somebody keeps a view of no shards are made before the engine's."""
    code = f"""
    CONFIG["zero_optimization"]["stage"] = {stage}
    torch.manual_seed(rank)
    with infinity.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 1))
        own = torch.randn(64, 32)
        before = own.tolist()
        model[0].weight = nn.Parameter(own)
    engine, *_ = infinity.initialize(model=model, config=CONFIG)
    print(json.dumps([before, engine.full_state_dict()["0.weight"].tolist()]))
    """
    (first, found), (second, found_too) = (r.answer for r in run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2))
    assert first != second
    assert found == found_too == first


@pytest.mark.parametrize("on_nvme", [False, True])
def test_engines_that_ranks_let_go_of_at_different_times_disturb_no_other(on_nvme: bool, tmp_path: Path) -> None:
    """A garbage collector is each rank's own: what one has collected ends when all have, and the others meet it."""
    code = f"""
    if {on_nvme}:
        CONFIG["zero_optimization"]["offload_optimizer"] = {{"device": "nvme", "nvme_path": {str(tmp_path)!r}}}
    held, losses, ends = [], [], []
    for run in range(4):
        with infinity.Init(config_dict_or_path=CONFIG):
            model = build(run)
        engine, *_ = infinity.initialize(model=model, config=CONFIG)
        losses.append(train(engine, batches(2, 0))[-1])
        ends.append(engine._loop)
        if rank == 1 and run == 0:
            held.append(engine)
        if run == 2:
            held.clear()
        del engine, model
    print(json.dumps([losses, [each.phases.phase.name == "CLOSED" for each in ends]]))
    """
    ranks = run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2)
    assert [rank.errors for rank in ranks] == ["", ""]
    (losses, ends), again = ranks[0].answer, ranks[1].answer
    assert again == [losses, ends]
    assert len(set(losses)) == 4
    assert ends == [True, True, True, False], "the last one ends at exit, the first when rank 1 has let go of it, too"


def test_engines_share_the_world_and_the_users_own_is_left_to_the_user(tmp_path: Path) -> None:
    code = """
    first, *_ = infinity.initialize(model=build(), config=CONFIG)
    second, *_ = infinity.initialize(model=build(), config=CONFIG)
    losses = [train(first, batches(2, rank)), train(second, batches(2, rank))]
    first.destroy()
    losses.append(train(second, batches(1, rank)))
    second.destroy()
    ended = not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
    third, *_ = infinity.initialize(model=build(), config=CONFIG)
    losses.append(train(third, batches(2, rank)))
    third.destroy()
    print(json.dumps([ended, dist.is_initialized(), losses]))
    dist.barrier()
    dist.destroy_process_group()
    """
    ranks = run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2, words=[str(tmp_path)])
    for rank in ranks:
        ended, kept, (first, second, _, third) = rank.answer
        assert ended
        assert kept
        assert first == second == third
        assert rank.errors == ""


@pytest.mark.parametrize("start", ["dist.init_process_group('gloo')", "infinity.deepspeed.init_distributed()"])
def test_a_script_that_leaves_its_process_group_open_ends_well(start: str, tmp_path: Path) -> None:
    """Gloo's threads would let go of tensors while the interpreter ends, which aborts the process now and then."""
    code = f"""
    {start}
    engine = infinity.initialize(model=build(), config=CONFIG)[0]
    train(engine, batches(1, rank))
    engine.destroy()
    dist.all_reduce(torch.ones(1))
    end, dist.destroy_process_group = dist.destroy_process_group, lambda: (end(), print("ended", file=sys.stderr))
    print(json.dumps(dist.is_initialized()))
    """
    for rank in run_ranks(PRELUDE + "import infinity.deepspeed\n" + _body(code), tmp_path, num_ranks=2):
        assert rank.answer is True
        assert rank.errors == "ended\n"


def test_groups_of_a_part_of_the_world_train_models_of_their_own(tmp_path: Path) -> None:
    code = """
    dist.init_process_group("gloo")
    groups = {members: dist.new_group(members) for members in ((0, 2), (1,))}
    mine = next(members for members in groups if rank in members)
    group = groups[mine]
    try:
        infinity.initialize(model=build(), config=CONFIG, process_group=next(g for m, g in groups.items() if m != mine))
        refused = ""
    except infinity.errors.ConfigError as error:
        refused = str(error)
    with infinity.Init(config_dict_or_path=CONFIG, process_group=group):
        model = build(rank)
    engine, *_ = infinity.initialize(model=model, config=CONFIG, process_group=group)
    train(engine, batches(2, rank))
    print(json.dumps([engine.train_batch_size(), weights(engine), refused]))
    engine.destroy()
    again, *_ = infinity.initialize(model=build(), config=CONFIG, process_group=group)
    train(again, batches(2, rank))
    again.destroy()
    dist.destroy_process_group()
    """
    ranks = run_ranks(PRELUDE + "import infinity.errors\n" + _body(code), tmp_path, num_ranks=3)
    batch, weights, refused = zip(*(rank.answer for rank in ranks), strict=True)
    assert batch == (4, 2, 4)
    assert weights[0] == weights[2] != weights[1]
    assert all(f"rank {rank} is not in it" in words for rank, words in enumerate(refused))


def test_buffers_follow_rank_0_as_ddps_do(tmp_path: Path) -> None:
    """Losses and buffers bit for bit, over training, evaluations with and without gradients, and training again."""
    code = """
    plan = ["train", "train", "eval", "eval", "train", "train", "grads", "train", "train"]
    engine, *_ = infinity.initialize(model=build(rank), config=CONFIG)
    own = nn.parallel.DistributedDataParallel(build(rank))
    adam = torch.optim.AdamW(own.parameters(), **DDP_ADAM)
    found = []
    for kind, batch in zip(plan, batches(len(plan), rank)):
        for model in (engine, own):
            model.train(kind != "eval")
            with torch.set_grad_enabled(kind != "eval"):
                loss = model(batch).square().mean()
            if kind == "train" and model is engine:
                engine.backward(loss)
                engine.step()
            elif kind == "train":
                loss.backward()
                adam.step()
                adam.zero_grad()
            module = model.module
            found.append([bits(loss), *(bits(buffer) for buffer in module.buffers())])
    print(json.dumps([found[0::2], found[1::2]]))
    engine.destroy()
    """
    ranks = run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2)
    answers = [rank.answer for rank in ranks]
    for ours, ddps in answers:
        assert ours == ddps
    assert answers[0][0] != answers[1][0], "ranks see batches of their own"


def test_models_that_differ_are_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    code = """
    model = build()
    if rank == 1:
        model.append(nn.Linear(1, 5))
    infinity.initialize(model=model, config=CONFIG)
    """
    for rank in run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2):
        assert rank.code == 1
        assert "rank 1 has 3.weight (5, 1)" in rank.errors
        assert "rank 0 has " in rank.errors
        assert "build the same model on all ranks" in rank.errors


def test_two_launchers_are_two_nodes_with_a_daemon_each(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    code = """
    offload = {"device": "nvme", "nvme_path": sys.argv[1]}
    CONFIG["zero_optimization"] |= {"offload_param": offload, "offload_optimizer": offload}
    CONFIG["io_daemon"] = {"host_budget_bytes": 1 << 26}
    engine, *_ = infinity.initialize(model=build(rank), config=CONFIG)
    train(engine, batches(3, rank))
    print(json.dumps([engine.train_batch_size(), weights(engine)]))
    engine.destroy()
    """
    script.write_text(PRELUDE + _body(code))
    port, launchers = str(free_port()), []
    for node in range(2):
        (swap_dir := tmp_path / f"node{node}").mkdir()
        words: list[str | Path] = [
            "--swap-dir",
            swap_dir,
            "--nnodes",
            "2",
            "--node-rank",
            str(node),
            "--nproc-per-node",
            "1",
        ]
        words += ["--master-addr", "127.0.0.1", "--master-port", port, script, swap_dir]
        launchers.append(start_launcher(*words))
    nodes = [end_of(launcher) for launcher in launchers]
    answers = [node.answer for node in nodes]
    assert answers[0] == answers[1]
    assert answers[0][0] == 4
    for number, ended in enumerate(nodes):
        attached = [line for line in ended.errors.splitlines() if "attached" in line]
        assert len(attached) == 1
        assert f"rank {number} " in attached[0], "each rank is its own node's daemon's"
        assert list((tmp_path / f"node{number}").iterdir()) == []


# --- what is refused


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As rank 0 of 2, with nobody to meet."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    return monkeypatch


def test_process_groups_that_were_destroyed_before_the_engine_are_said(tmp_path: Path) -> None:
    code = """
    dist.init_process_group("gloo")
    engine = infinity.initialize(model=build(), config=CONFIG)[0]
    train(engine, batches(1, rank))
    dist.destroy_process_group()
    told = []
    for asynchronous in (False, True):
        try:
            engine.save_checkpoint(sys.argv[1], asynchronous=asynchronous)
        except infinity.errors.WorldError as error:
            told.append(str(error))
    engine.destroy()
    print(json.dumps(told))
    """
    code = PRELUDE + "import infinity.errors\n" + _body(code)
    for ended in run_ranks(code, tmp_path, num_ranks=2, words=[str(tmp_path / "saved")]):
        assert len(ended.answer) == 2
        for told in ended.answer:
            assert "was about to prepare a checkpoint" in told
            assert "call destroy_process_group() after engine.destroy()" in told
    assert not (tmp_path / "saved").exists()


def _initialize() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    infinity.initialize(model=torch.nn.Linear(4, 4), config=config)[0].destroy()


@pytest.mark.parametrize(("in_environment", "in_group"), [(2, 1), (1, 2), (3, 2)])
def test_a_world_that_disagrees_with_the_environment(
    in_environment: int, in_group: int, launched: pytest.MonkeyPatch
) -> None:
    launched.setenv("WORLD_SIZE", str(in_environment))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=in_group)
    try:
        with pytest.raises(ConfigError, match=rf"WORLD_SIZE = {in_environment}: .* initialised with {in_group}: let"):
            _initialize()
    finally:
        dist.destroy_process_group()


def test_a_rank_that_disagrees_with_the_environment(launched: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        with pytest.raises(ConfigError, match=r"RANK = 0: torch\.distributed was initialised as rank 1"):
            _initialize()
    finally:
        dist.destroy_process_group()


def test_a_launcher_that_does_not_say_where_to_meet(launched: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR.*start with `infinity run`"):
        _initialize()


def test_a_world_size_without_a_rank(launched: pytest.MonkeyPatch) -> None:
    launched.delenv("RANK")
    with pytest.raises(ConfigError, match="RANK = None: must be set beside WORLD_SIZE"):
        _initialize()


def test_ranks_that_do_not_come(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("MASTER_ADDR", "127.0.0.1")
    launched.setenv("MASTER_PORT", str(free_port()))
    launched.setenv("INFINITY_TIMEOUT_S", "1")
    with pytest.raises(WorldError, match=r"rank 0 did not meet the other 1 ranks at 127\.0\.0\.1"):
        _initialize()


@pytest.mark.parametrize(("told", "seconds"), [(None, 7200.0), ("60", 60.0)])
def test_ranks_wait_as_long_as_those_of_the_users_process_group(
    told: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Accelerate's InitProcessGroupKwargs and the Trainer's ddp_timeout say it, but for INFINITY_TIMEOUT_S."""
    if told is None:
        monkeypatch.delenv("INFINITY_TIMEOUT_S", raising=False)
    else:
        monkeypatch.setenv("INFINITY_TIMEOUT_S", told)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(hours=2))  # type: ignore[attr-defined]
    try:
        peers = Peers.join()
        assert peers is not None
        assert peers.timeout_s == seconds
        peers.release()
    finally:
        dist.destroy_process_group()


def test_ranks_that_are_there_and_do_not_come_to_initialize(tmp_path: Path) -> None:
    """It was an error of torch's about keys of a store."""
    code = """
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        try:
            infinity.initialize(model=build(), config=CONFIG)
        except infinity.errors.WorldError as error:
            print(json.dumps(str(error)), flush=True)
        store.set("has ended", "")
    else:
        store.wait(["has ended"])
        print(json.dumps(""), flush=True)
    os._exit(0)
    """
    first, _ = run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2, variables={"INFINITY_TIMEOUT_S": "2"})
    assert first.answer.startswith("rank 0 did not meet the other 1 ranks in infinity.initialize() or Init")


def _body(code: str) -> str:
    """``code`` without its indentation, so that it can follow the prelude."""
    lines = code.splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines) + "\n"


def test_a_forked_process_is_refused_as_a_rank(tmp_path: Path) -> None:
    """It would wait for ever: what hears the other ranks does not come along."""
    code = """
    engine = infinity.initialize(model=build(), config=CONFIG)[0]

    class Uses(torch.utils.data.Dataset):
        def __init__(self, use):
            self.use = use

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return self.use()

    said = []
    for use in (lambda: engine.module[0].weight.sum().item(), lambda: engine(torch.ones(2, 32)).sum().item()):
        try:
            next(iter(torch.utils.data.DataLoader(Uses(use), num_workers=1)))
        except RuntimeError as error:
            said.append(str(error).strip().splitlines()[-1])
    train(engine, batches(1, rank))
    engine.destroy()
    print(json.dumps(said))
    """
    for ended in run_ranks(PRELUDE + _body(code), tmp_path, num_ranks=2):
        weights, forward = ended.answer
        assert "0.weight" in weights
        assert "is used in a forked process" in weights
        assert "begin a training forward: a forked process is none of the ranks" in forward


def test_a_wrapper_that_averages_itself_and_ranks_that_end_before_others_are_refused(tmp_path: Path) -> None:
    code = """
    from torch.distributed.algorithms import Join
    dist.init_process_group("gloo")
    wrapped, refused = nn.parallel.DistributedDataParallel(build()), []
    for model in (wrapped, nn.Sequential(wrapped)):
        try:
            infinity.initialize(model=model, config=CONFIG)
        except infinity.errors.ConfigError as error:
            refused.append(str(error))
    engine, *_ = infinity.initialize(model=wrapped.module, config=CONFIG)
    for enter in (lambda: Join([engine]), engine.join):
        try:
            enter()
        except infinity.errors.EngineStateError as error:
            refused.append(str(error))
    train(engine, batches(2, rank))
    print(json.dumps(refused))
    engine.destroy()
    dist.destroy_process_group()
    """
    ranks = run_ranks(PRELUDE + "import infinity.errors\n" + _body(code), tmp_path, num_ranks=2)
    for rank in ranks:
        outer, inner, *joins = rank.answer
        assert outer.startswith("model = 'DistributedDataParallel': ")
        assert inner.startswith("model.0 = 'DistributedDataParallel': ")
        assert "pass the module that it wraps" in outer
        assert len(joins) == 2
        assert all("give each as many batches" in words for words in joins)
