"""A model cut up over a strict store: what is decided, what is registered, what is written, without an engine."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from infinity.config import parse_config
from infinity.errors import BudgetError
from infinity.plan.leaves import set_leaf_modules
from infinity.plan.memory_plan import MemoryPlan
from infinity.plan.precision import Precision
from infinity.tiers.base import HostStore
from infinity.tiers.collectives import Collectives
from infinity.tiers.layers import PoisonStore, SplitStore
from infinity.tiers.memory import MemoryStore
from infinity.weights import access, owners, placeholder, sharded_model
from infinity.weights.param import ShardedParam, flattened
from infinity.weights.sharded_model import (
    LEASE_SHARE,
    LEASES_AHEAD_MAX,
    SUB_GROUPS_AHEAD_MAX,
    Layout,
    ShardedModel,
)
from io_daemon.shared.protocol import LEASES_MAX, PAGE_BYTES, ObjectKind
from tests.support.small_shards import ADAM
from tests.support.strict_store import StrictStore
from tests.support.threaded_ranks import ThreadedCollectives, on_ranks

WEIGHT, MASTER = ObjectKind.WEIGHT.mask, ObjectKind.MASTER.mask
CPU = torch.device("cpu")


class Place(NamedTuple):
    local_world_size: int = 1


class Host(StrictStore):
    def tenant_stats(self) -> None:
        return None

    def relieve_by(self, relieve: Callable[[], None]) -> None:
        """Nobody waits for frames here."""

    def reserve(self) -> None:
        """There is no disk."""


class HostTier:
    job = "a job"

    def __init__(self) -> None:
        self.store = Host()
        self.opened: list[tuple[MemoryPlan, str, int]] = []

    def open(
        self, plan: MemoryPlan, *, job: str, pinned_mask: int, device: torch.device, spare_bytes: int = 0
    ) -> HostStore:
        self.opened.append((plan, job, pinned_mask))
        return self.store

    def close(self) -> None:
        raise AssertionError("the engine's end")


class Net(nn.Module):
    """Three layers of 4096 elements, one of them frozen, biases below the threshold, and one of torch's units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.second.weight.requires_grad_(False)
        self.attention = nn.MultiheadAttention(16, 2)
        with torch.no_grad():
            self.third.weight = nn.Parameter(self.third.weight.t())


def config_of(
    *, bf16: bool = False, param: str = "nvme", optimizer: str = "nvme", top: dict[str, Any] | None = None, **zero: Any
) -> Any:
    def offload(tier: str) -> dict[str, str]:
        return {"device": tier, **({"nvme_path": tempfile.gettempdir()} if tier == "nvme" else {})}

    return parse_config(
        {
            "train_batch_size": 1,
            "bf16": {"enabled": bf16},
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 1000,
                "stage3_prefetch_bucket_size": 5000,
                "offload_param": offload(param),
                "offload_optimizer": offload(optimizer),
                **zero,
            },
            **(top or {}),
        }
    )


class Fixture:
    def __init__(
        self,
        model: nn.Module,
        config: Any,
        collectives: Collectives | None = None,
        *,
        budget_bytes: int = 1 << 24,
        poison: bool = False,
        local_world_size: int = 1,
    ) -> None:
        self.model, self.tier = model, HostTier()
        collectives = Collectives(None) if collectives is None else collectives
        self.layout = Layout.of(model, config, collectives.world_size)
        place: Any = Place(local_world_size)
        self.sharded = ShardedModel(
            self.layout,
            config=config,
            precision=Precision.of(config, ADAM, unsigned=[ObjectKind.STATE_1]),
            collectives=collectives,
            device=CPU,
            place=place,
            tier=self.tier,
            budget_bytes=budget_bytes,
            poison=poison,
        )

    @property
    def store(self) -> StrictStore:
        return self.tier.store

    def write(self) -> None:
        self.sharded.write_initial(lambda param, first, numel: param.own_values(first, numel))
        for param in self.sharded.params:
            owners.disown(param.param)


def group_of(fixture: Fixture, name: str) -> Any:
    (index,) = [index for index, each in enumerate(fixture.layout.names) if each == name]
    (group,) = [group for group in fixture.sharded.groups if any(param.index == index for param in group.params)]
    return group


def test_the_layout_names_and_places_every_parameter() -> None:
    model = Net()
    layout = Layout.of(model, config_of(), 1)
    assert layout.names == [name for name, _ in model.named_parameters()]
    assert [id(param) for param in layout.params] == [id(param) for param in model.parameters()]
    assert all(layout.index_of[id(param)] == index for index, param in enumerate(layout.params))
    assert layout.modules == list(model.modules())
    placed = sorted(each.param for placement in layout.placements for each in placement.params)
    assert placed == list(range(len(layout.params)))
    for members, placement in zip(layout.members, layout.placements, strict=True):
        assert [layout.index_of[id(param)] for param in members.params] == [each.param for each in placement.params]
        assert placement.trainable == members.trainable
    lines = layout.description()
    assert len(lines) == len(layout.params)
    assert any(
        line.startswith("second.weight (64, 64) torch.float32 in group ") and line.endswith("frozen") for line in lines
    )
    assert sum(line.endswith("trained") for line in lines) == len(lines) - 1


@pytest.mark.parametrize(
    ("bucket", "live", "apart"), [(9000, 1 << 30, False), (5000, 1 << 30, True), (9000, 5000, True), (9000, 0, True)]
)
def test_groups_are_as_large_as_bucket_and_live_limit_allow(bucket: int, live: int, apart: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    config = config_of(stage3_prefetch_bucket_size=bucket, stage3_max_live_parameters=live)
    layout = Layout.of(model, config, 1)
    assert len(layout.placements) == (2 if apart else 1)


@pytest.mark.parametrize(
    ("to_bf16", "came_in_bf16", "masters"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_without_an_optimizer_only_what_is_rounded_has_masters(
    to_bf16: bool, came_in_bf16: bool, masters: bool
) -> None:
    """It may be trained later, from what it was before it was rounded."""
    model = Net().to(torch.bfloat16 if came_in_bf16 else torch.float32)
    layout = Layout.of(model, config_of(bf16=to_bf16), 1, trains=False)
    assert [placement.trainable for placement in layout.placements] == [
        masters and group.params[0].requires_grad for group in layout.members
    ]
    assert not layout.trains


MIB = 1 << 20
STREAMED = {False: 1 << 19 | 1 << 13, True: 3 << 17}
"""By whether masters are kept, a budget for less than all of ``Net``."""


def layers(num_layers: int = 6) -> nn.Sequential:
    """Each of 1 Mi elements."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("zero", "mib"),
    [
        ({"stage3_max_live_parameters": 1 << 30}, 24),
        ({"stage3_max_live_parameters": 2 << 20}, 12),
        ({"stage3_max_live_parameters": 0}, 4),
        ({"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 1 << 20}, 24),
    ],
    ids=["all", "some", "one", "persistent"],
)
def test_the_pool_has_room_for_what_is_live_and_for_gathering_it(
    zero: dict[str, Any], mib: int, world_size: int
) -> None:
    config = config_of(param="none", optimizer="none", stage3_prefetch_bucket_size=1 << 20, **zero)

    def work(collectives: ThreadedCollectives) -> tuple[int, int]:
        sharded = Fixture(layers(), config, collectives).sharded
        return sharded.pool.free_bytes, max(placement.numel for placement in sharded.layout.placements)

    for free, largest in on_ranks(world_size, work):
        needed = mib * MIB + (2 * largest * 4 if world_size > 1 else 0)
        assert needed < free <= needed + 2 * MIB, "with what blocks lose by their alignment, in huge pages"


@pytest.mark.parametrize(("optimizer", "kinds"), [("none", 4), ("nvme", 1)])
def test_the_device_has_room_for_all_that_lies_there_and_a_quarter_more(optimizer: str, kinds: int) -> None:
    fixture = Fixture(layers(4), config_of(param="none", optimizer=optimizer))
    free = fixture.sharded.device_store._pool.free_bytes
    needed = 4 * kinds * sum(chunk.numel for chunk in fixture.sharded.chunks) * 5 // 4
    assert needed < free <= needed + 2 * MIB


@pytest.mark.parametrize("bf16", [False, True])
def test_frozen_chunks_have_weights_alone(bf16: bool) -> None:
    fixture = Fixture(Net(), config_of(bf16=bf16, stage3_max_live_parameters=0), budget_bytes=STREAMED[bf16])
    trained = {ObjectKind.WEIGHT, ObjectKind.GRAD, ObjectKind.STATE_0, ObjectKind.STATE_1}
    trained |= {ObjectKind.MASTER} if bf16 else set()
    for layout, chunk in zip(fixture.store.layouts, fixture.sharded.chunks, strict=True):
        trainable = fixture.layout.placements[chunk.group].trainable
        assert set(layout.dtypes) == (trained if trainable else {ObjectKind.WEIGHT})
        assert layout.numel == chunk.numel
    assert len(fixture.store.layouts) == len(fixture.sharded.chunks)


@pytest.mark.parametrize("bf16", [False, True])
def test_initial_values_are_written_and_leave_the_parameters(bf16: bool) -> None:
    model = Net()
    values = [flattened(param.detach().clone(), sorted(range(param.dim()), key=param.stride, reverse=True))
              for param in model.parameters()]  # fmt: skip
    fixture = Fixture(model, config_of(bf16=bf16), budget_bytes=STREAMED[bf16])
    model.first.weight.grad = torch.ones(64, 64)
    sharded = fixture.sharded
    fixture.sharded.write_initial(lambda param, first, numel: param.own_values(first, numel))
    for chunk, placement in enumerate(sharded.chunks):
        trainable = fixture.layout.placements[placement.group].trainable
        for segment in placement.segments:
            expected = values[segment.param][segment.param_offset : segment.param_offset + segment.numel]
            place = slice(segment.chunk_offset, segment.chunk_offset + segment.numel)
            weight = fixture.store.object(chunk, ObjectKind.WEIGHT)[place]
            assert torch.equal(weight, expected.to(torch.bfloat16 if bf16 else torch.float32))
            if bf16 and trainable:
                assert torch.equal(fixture.store.object(chunk, ObjectKind.MASTER)[place], expected)
        mask = WEIGHT | (MASTER if bf16 and trainable else 0)
        assert (chunk, 0, mask) in fixture.store.acquired()
        assert (chunk, mask, 0) in fixture.store.released()
    assert fixture.store.num_held == 0
    assert access.own_gradient(model.get_parameter("first.weight")) is None
    for param in model.parameters():
        assert type(param) is access.ShardedParameter
        assert placeholder.is_held_by(param)


def test_a_fault_of_the_values_gives_the_lease_back() -> None:
    fixture = Fixture(Net(), config_of())

    def fault(_param: ShardedParam, _first: int, _numel: int) -> torch.Tensor:
        raise OSError("injected")

    with pytest.raises(OSError, match="injected"):
        fixture.sharded.write_initial(fault)
    assert fixture.store.num_held == 0
    assert fixture.store.released()[0][1:] == (0, 0), "and nothing of it is kept"


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_write_their_own_shards(world_size: int) -> None:
    def work(collectives: ThreadedCollectives) -> dict[int, list[tuple[int, int]]]:
        fixture = Fixture(Net(), config_of(), collectives)
        ranges: dict[int, list[tuple[int, int]]] = {}

        def values_of(param: ShardedParam, first: int, numel: int) -> torch.Tensor:
            ranges.setdefault(param.index, []).append((first, first + numel))
            return param.own_values(first, numel)

        fixture.sharded.write_initial(values_of)
        assert collectives.said[0] == "open the store of shards"
        return ranges

    ranks = on_ranks(world_size, work)
    for index, param in enumerate(Net().parameters()):
        parts = sorted(part for ranges in ranks for part in ranges.get(index, []))
        assert parts[0][0] == 0
        assert parts[-1][1] == param.numel()
        assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))


def test_a_segments_weights_are_found_where_they_are() -> None:
    sharded = Fixture(Net(), config_of()).sharded
    for segment in (segment for chunk in sharded.chunks for segment in chunk.segments):
        sharded.weights_of(segment).fill_(segment.chunk_offset)
        whole = sharded.params[segment.param].allocate()
        assert sharded.weights_of(segment).shape == (segment.numel,)
        assert float(whole[segment.param_offset]) == segment.chunk_offset


def test_groups_know_whose_call_uses_them() -> None:
    model = Net()
    set_leaf_modules(model, [model.first])
    fixture = Fixture(model, config_of())
    sharded = fixture.sharded
    persistent = group_of(fixture, "third.bias")
    assert persistent.persistent
    assert not group_of(fixture, "third.weight").persistent
    assert all(persistent not in groups for groups in sharded.anchors.values())
    assert sharded.anchors[model.third] == [group_of(fixture, "third.weight")]
    assert sharded.units == {model.attention}
    assert list(sharded.leaves) == [model.first]
    assert sharded.leaves[model.first] == sharded.anchors[model.first]
    names = {group.name for group in sharded.groups}
    assert len(names) == len(sharded.groups)
    for group in sharded.groups:
        assert [sharded.chunks[chunk] for chunk, _ in group.chunks] == [placement for _, placement in group.chunks]
        assert {placement.group for _, placement in group.chunks} == {group.index}


# Tiers.


def stores(store: Any) -> Any:
    """What lies below the layers of due updates, snapshots and traces."""
    return store._inner._inner._inner


@pytest.mark.parametrize(
    ("param", "optimizer", "live", "split", "pinned"),
    [
        ("nvme", "nvme", 0, False, 0),
        ("cpu", "nvme", 0, False, WEIGHT),
        ("none", "nvme", 0, True, 0),
        ("nvme", "cpu", 1 << 30, False, ~WEIGHT),
        ("nvme", "nvme", 1 << 30, True, 0),
        ("cpu", "nvme", 1 << 30, True, WEIGHT),
        ("none", "nvme", 1 << 30, True, 0),
    ],
)
def test_each_kind_lies_on_its_tier(param: str, optimizer: str, live: int, split: bool, pinned: int) -> None:
    fixture = Fixture(Net(), config_of(param=param, optimizer=optimizer, stage3_max_live_parameters=live))
    ((plan, job, pinned_mask),) = fixture.tier.opened
    assert job == "a job"
    assert plan is fixture.sharded.plan
    kinds = {kind for layout in fixture.store.layouts for kind in layout.dtypes}
    trained = ObjectKind.GRAD.mask | ObjectKind.STATE_0.mask | ObjectKind.STATE_1.mask
    assert pinned_mask == (trained if pinned == ~WEIGHT else pinned)
    assert isinstance(stores(fixture.sharded.store), SplitStore) is split
    assert (ObjectKind.WEIGHT in kinds) is (param != "none")
    assert (ObjectKind.GRAD in kinds) is (live == 0 or optimizer != "nvme"), "else it waits where weights were"
    host: Any = fixture.sharded.host_store
    assert host is fixture.store


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_where_everything_is_in_memory_weights_are_made_of_their_masters(tier: str) -> None:
    config = config_of(bf16=True, param=tier, optimizer=tier)
    fixture = Fixture(Net(), config)
    sharded = fixture.sharded
    assert sharded.precision.rounds_gathers
    fixture.write()
    for chunk, placement in enumerate(sharded.chunks):
        trainable = fixture.layout.placements[placement.group].trainable
        assert (ObjectKind.WEIGHT in sharded._chunk_layout(placement).dtypes) is not trainable
        if tier == "none":
            has = [sharded.device_store.has(chunk, kind) for kind in (ObjectKind.WEIGHT, ObjectKind.MASTER)]
            assert has == [not trainable, trainable]
    group = group_of(fixture, "first.weight")
    group.wait_for_unshard()
    assert torch.equal(group.params[0].full, Net().first.weight.to(torch.bfloat16))


def test_a_budget_for_what_there_is_then_is_enough() -> None:
    """16 bytes a trained parameter with weights beside their masters, which is what the smallest budget was."""
    model, bf16 = layers(4), config_of(bf16=True, param="cpu", optimizer="cpu")
    with pytest.raises(BudgetError) as error:
        Fixture(model, bf16, budget_bytes=1)
    smallest = error.value.smallest_bytes
    numel = sum(chunk.numel for chunk in Fixture(model, bf16, budget_bytes=smallest).sharded.chunks)
    assert 14 * numel < smallest < 16 * numel
    with pytest.raises(BudgetError):
        Fixture(model, bf16, budget_bytes=smallest - PAGE_BYTES)


@pytest.mark.parametrize(
    ("keys", "budget_bytes"),
    [
        ({"bf16": False}, 1 << 24),
        ({"bf16": True, "param": "none"}, 1 << 24),
        ({"bf16": True, "param": "cpu", "optimizer": "none"}, 1 << 24),
        ({"bf16": True}, STREAMED[True]),
        ({"bf16": True, "stage": 2, "param": "none"}, 1 << 24),
    ],
    ids=["no masters", "masters elsewhere", "weights elsewhere", "streamed", "weights stay"],
)
def test_elsewhere_they_are_copied(keys: dict[str, Any], budget_bytes: int) -> None:
    assert not Fixture(Net(), config_of(**keys), budget_bytes=budget_bytes).sharded.precision.rounds_gathers


@pytest.mark.parametrize(
    "top",
    [{"io_daemon": {"master_weights": "split"}}, {"train_batch_size": 2, "gradient_accumulation_steps": 2}],
    ids=str,
)
def test_half_masters_and_several_gathers_a_step_have_weights_beside_them(top: dict[str, Any]) -> None:
    assert not Fixture(Net(), config_of(bf16=True, top=top)).sharded.precision.rounds_gathers


def test_without_offload_nothing_leaves_the_device() -> None:
    fixture = Fixture(Net(), config_of(param="none", optimizer="none"))
    assert fixture.tier.opened == []
    assert (fixture.sharded.plan, fixture.sharded.host_store) == (None, None)
    assert isinstance(stores(fixture.sharded.store), MemoryStore)
    assert fixture.sharded.sub_groups_ahead == 1
    fixture.write()


def test_poison_is_asked_for_and_only_then_given() -> None:
    for poison in (False, True):
        store: Any = Fixture(Net(), config_of(), poison=poison).sharded.store
        assert isinstance(store._inner, PoisonStore) is poison


def test_a_store_that_refuses_is_closed() -> None:
    def refuse(_layouts: Any) -> range:
        raise OSError("full")

    class Refusing(HostTier):
        def __init__(self) -> None:
            super().__init__()
            self.store.register = refuse  # type: ignore[method-assign, assignment]

    tiers: list[HostTier] = []

    class Refused(Fixture):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "tier":
                value = Refusing()
                tiers.append(value)
            super().__setattr__(name, value)

    with pytest.raises(OSError, match="full"):
        Refused(Net(), config_of())
    assert tiers[0].store.closed


@pytest.fixture
def planned() -> Fixture:
    return Fixture(Net(), config_of())


@pytest.mark.parametrize(
    ("frames", "pinned", "demand", "ahead"),
    [
        (100, 0, 5, SUB_GROUPS_AHEAD_MAX),
        (100, 0, 8, 3),
        (100, 40, 5, 3),
        (100, 0, 20, 1),
        (20, 0, 10, 1),
        (100, 0, 0, 1),
    ],
)
def test_the_update_leases_ahead_within_a_quarter_of_what_streams(
    planned: Fixture, frames: int, pinned: int, demand: int, ahead: int
) -> None:
    planned.sharded.plan = MemoryPlan(
        chunk_numel=1 << 14,
        frame_bytes=1 << 14,
        num_frames=frames,
        pinned_frames=pinned,
        demand_frames=demand,
        swap_bytes=0,
        chunks_max=100,
    )
    assert planned.sharded.sub_groups_ahead == ahead


@pytest.mark.parametrize("tier", ["nvme", "none"])
def test_weights_are_leased_ahead_within_a_quarter_of_what_streams(tier: str) -> None:
    fixture = Fixture(Net(), config_of(param=tier, optimizer=tier), budget_bytes=1 << 22)
    sharded = fixture.sharded
    allowances = {id(group._allowance) for group in sharded.groups}
    assert len(allowances) == 1, "all groups share one"
    given = sharded.groups[0]._allowance.num_left
    if sharded.plan is None:
        assert given == len(sharded.chunks)
    else:
        assert given == (sharded.plan.num_frames - sharded.plan.pinned_frames) // LEASE_SHARE
        assert given > 0


def test_no_more_is_leased_ahead_than_a_daemon_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lease takes a frame at least; frames may be many where they are small."""
    assert LEASES_AHEAD_MAX <= LEASES_MAX // 2
    monkeypatch.setattr(sharded_model, "LEASES_AHEAD_MAX", 3)
    sharded = Fixture(Net(), config_of(), budget_bytes=1 << 22).sharded
    assert sharded.groups[0]._allowance.num_left == 3


def test_the_budget_is_the_nodes() -> None:
    budget_bytes = 3 << 19
    plans = [
        Fixture(Net(), config_of(), budget_bytes=budget_bytes, local_world_size=count).sharded.plan for count in (1, 2)
    ]
    arenas = [plan.arena_bytes for plan in plans if plan is not None]
    assert arenas[1] < arenas[0] <= budget_bytes
    assert 2 * arenas[1] <= budget_bytes
