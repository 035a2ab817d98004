"""A param group over a strict store: what is leased when, what ends up where, on one rank and on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from infinity.commands.absent_peers import AbsentPeers
from infinity.plan.sharding import NORM_BLOCK
from infinity.tiers.collectives import Collectives
from infinity.weights import access
from infinity.weights.param_group import DEMAND_LEASES_AHEAD, LeaseAllowance, ParamGroup
from io_daemon.shared.protocol import ObjectKind
from tests.support.small_shards import BF16, FP32, SmallShards
from tests.support.strict_store import StrictLease
from tests.support.threaded_ranks import ThreadedCollectives, on_ranks
from tests.support.work import lines_run

WEIGHT = ObjectKind.WEIGHT.mask
SHAPES = [(200, 100), (64,), (7, 3000), (5,)]
"""Three chunks on one rank; parameters begin and end inside of them."""

MASTERS_ONLY = replace(BF16, keeps_weights=False)
IN_PLACE = replace(MASTERS_ONLY, weights_stay=True)


def written(collectives: Collectives | None = None, **options: Any) -> SmallShards:
    shards = SmallShards([SHAPES], collectives, **options)
    shards.write_weights()
    return shards


def show(group: ParamGroup) -> list[torch.Tensor]:
    """The weights as their users see them."""
    for param in group.params:
        param.show()
    found = [param.param.detach().clone() for param in group.params]
    for param in group.params:
        assert param.hide()
    return found


def assert_whole(shards: SmallShards) -> None:
    (group,) = shards.groups
    for shown, full, shape in zip(show(group), shards.full, SHAPES, strict=True):
        assert torch.equal(shown, full.view(shape))


def test_an_allowance_is_given_out_and_taken_back() -> None:
    allowance = LeaseAllowance(3)
    assert [allowance.take(chunk) for chunk in range(4)] == [1, 1, 1, 0]
    allowance.give_back(2)
    assert [allowance.take(chunk) for chunk in range(3)] == [1, 1, 0]


def test_a_lease_that_takes_more_frames_uses_up_more() -> None:
    allowance = LeaseAllowance(6, lambda chunk: 4 if chunk == 0 else 1)
    assert [allowance.take(chunk) for chunk in (0, 0, 1, 2, 3)] == [4, 0, 1, 1, 0]


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("piece_numel", [5000, NORM_BLOCK])
def test_weights_come_whole(precision: Any, piece_numel: int) -> None:
    shards = written(precision=precision, piece_numel=piece_numel)
    (group,) = shards.groups
    group.wait_for_unshard()
    assert group.state.name == "UNSHARDED"
    assert_whole(shards)
    group.reshard()
    assert all(param.full is None for param in group.params)
    assert group.state.name == "SHARDED"


def test_without_an_allowance_two_leases_are_held_at_most() -> None:
    shards = written(leases_ahead=0)
    (group,) = shards.groups
    group.unshard()
    assert shards.store.log == []
    group.wait_for_unshard()
    assert shards.store.acquired() == [(chunk, WEIGHT, 0) for chunk in range(3)]
    assert shards.store.released() == [(chunk, 0, 0) for chunk in range(3)]
    assert shards.store.num_held_max == DEMAND_LEASES_AHEAD == 2


def test_what_was_leased_ahead_is_not_leased_again() -> None:
    shards = written(leases_ahead=2)
    (group,) = shards.groups
    group.unshard()
    assert shards.store.acquired() == [(0, WEIGHT, 0), (1, WEIGHT, 0)]
    group.wait_for_unshard()
    assert shards.store.acquired() == [(chunk, WEIGHT, 0) for chunk in range(3)]
    assert shards.store.num_held == 0
    assert_whole(shards)
    assert shards.allowance.num_left == 2, "given back"


def test_an_allowance_for_all_is_used_for_all() -> None:
    shards = written(leases_ahead=9)
    (group,) = shards.groups
    group.unshard()
    assert len(shards.store.acquired()) == 3
    assert shards.allowance.num_left == 6
    group.wait_for_unshard()
    assert shards.allowance.num_left == 9


def test_leases_ahead_that_are_not_used_are_released() -> None:
    shards = written(leases_ahead=2)
    (group,) = shards.groups
    group.unshard()
    group.reshard()
    assert shards.store.released() == [(0, 0, 0), (1, 0, 0)]
    assert shards.allowance.num_left == 2
    group.unshard()
    group.wait_for_unshard()
    assert_whole(shards)
    assert shards.allowance.num_left == 2, "given back once"


def test_a_fault_gives_leases_and_allowance_back() -> None:
    shards = written(leases_ahead=2)
    (group,) = shards.groups

    def fault(lease: StrictLease) -> None:
        if lease.chunk == 1:
            raise OSError("injected")

    shards.store.before_wait = fault
    with pytest.raises(OSError, match="injected"):
        group.wait_for_unshard()
    assert shards.store.num_held == 0
    assert shards.allowance.num_left == 2


def test_a_persistent_groups_weights_stay_where_they_are() -> None:
    shards = written(persistent=[0])
    (group,) = shards.groups
    group.wait_for_unshard()
    places = [param.full.data_ptr() for param in group.params if param.full is not None]
    group.reshard()
    shards.store.object(0, ObjectKind.WEIGHT).mul_(0)
    group.wait_for_unshard()
    assert [param.full.data_ptr() for param in group.params if param.full is not None] == places
    assert len(places) == 4
    assert not show(group)[0].view(-1)[: NORM_BLOCK // 2].any(), "what the store has now"


def test_where_the_store_has_masters_only_weights_are_made_of_them_but_after_an_update_in_place() -> None:
    shards = written(persistent=[0], precision=IN_PLACE)
    (group,) = shards.groups
    group.wait_for_unshard()
    assert_whole(shards)
    assert shards.store.acquired() == [(chunk, ObjectKind.MASTER.mask, 0) for chunk in range(len(shards.chunks))]
    for param in group.params:
        param.allocate().fill_(7)  # as an update puts them there
    group.reshard()
    group.wait_for_unshard(updated=True)
    assert all(bool((shown == 7).all()) for shown in show(group))
    assert len(shards.store.acquired()) == len(shards.chunks), "nothing was read"
    group.reshard()
    group.wait_for_unshard()
    assert_whole(shards)


@pytest.mark.parametrize("precision", [FP32, BF16, MASTERS_ONLY], ids=["fp32", "bf16", "masters only"])
def test_after_an_update_weights_are_read_again_of_what_the_store_has(precision: Any) -> None:
    shards = written(persistent=[0], precision=precision)
    (group,) = shards.groups
    group.wait_for_unshard()
    group.reshard()
    for chunk in range(len(shards.chunks)):
        shards.store.object(chunk, precision.home(trainable=True)).fill_(7)
    group.wait_for_unshard(updated=True)
    assert all(bool((shown == 7).all()) for shown in show(group))


@pytest.mark.parametrize("world_size", [2, 3])
def test_after_an_update_ranks_send_each_other_what_they_have_written(world_size: int) -> None:
    def work(collectives: ThreadedCollectives) -> list[torch.Tensor]:
        shards = written(collectives, persistent=[0], precision=IN_PLACE)
        (group,) = shards.groups
        group.wait_for_unshard()
        for param, placement in zip(group.params, group.placement.params, strict=True):
            start = collectives.rank * placement.shard_numel
            flat = param.allocate()
            flat[start : start + placement.valid_numel(collectives.rank)] = collectives.rank + 1
        group.reshard()
        group.wait_for_unshard(updated=True)
        return show(group)

    ranks = on_ranks(world_size, work)
    for shown in zip(*ranks, strict=True):
        assert all(torch.equal(found, shown[0]) for found in shown)
    largest = ranks[0][2].view(-1)
    assert sorted(set(largest.tolist())) == list(range(1, world_size + 1))
    assert torch.equal(largest, largest.sort().values)


class Lent:
    """What a store notes of weights that it is lent."""

    def __init__(self) -> None:
        self.views: dict[tuple[int, int], Any] = {}
        self.num_kept = 0

    def keep_in(self, chunk: int, kind: int, views: Any) -> None:
        self.views[chunk, kind] = views
        self.num_kept += 1

    def take_back(self, chunk: int, kind: int) -> None:
        del self.views[chunk, kind]


def test_weights_that_are_here_are_the_stores_own_until_they_are_withdrawn() -> None:
    lent: Any = Lent()
    shards = written(persistent=[0], lent_to=lent)
    (group,) = shards.groups
    group.withdraw()  # of what nobody has been lent
    group.wait_for_unshard()
    assert group.is_lent
    for chunk, placement in enumerate(shards.chunks):
        expected = torch.zeros(placement.numel)
        for segment in placement.segments:
            part = shards.full[segment.param][segment.param_offset : segment.param_offset + segment.numel]
            expected[segment.chunk_offset : segment.chunk_offset + segment.numel] = part
        assert torch.equal(torch.cat(lent.views[chunk, ObjectKind.WEIGHT]()), expected)
    group.params[0].allocate().fill_(7)
    group.reshard()
    num_acquired = len(shards.store.acquired())
    group.wait_for_unshard()
    assert bool((show(group)[0] == 7).all()), "what is here is what the store has"
    assert (len(shards.store.acquired()), lent.num_kept) == (num_acquired, len(shards.chunks))
    group.withdraw()
    assert (group.is_lent, lent.views) == (False, {})


def test_lending_costs_each_chunk_what_lies_in_it() -> None:
    """In lines run: for each chunk a table of the group's parameters was made."""

    def work(num_params: int) -> int:
        lent: Any = Lent()
        shards = SmallShards([[(64,)] * num_params], persistent=[0], lent_to=lent)
        shards.write_weights()
        return lines_run(shards.groups[0].wait_for_unshard, "infinity/weights")

    few, many = work(512), work(8192)
    assert many <= 20 * few, f"{few} lines for 2 chunks of 256 parameters, {many} for 32"


@pytest.mark.parametrize("world_size", [2])
def test_ranks_that_gather_different_things_are_told_apart_before_they_do(world_size: int) -> None:
    def work(collectives: ThreadedCollectives) -> None:
        shards = written(collectives, precision=BF16)
        kind = ObjectKind.MASTER if collectives.rank else ObjectKind.WEIGHT
        shards.groups[0].gather(kind, torch.float32)

    with pytest.raises(AssertionError, match="the ranks diverge"):
        on_ranks(world_size, work)


def test_another_kind_is_gathered_beside_the_weights() -> None:
    shards = written(precision=BF16)
    (group,) = shards.groups
    group.unshard()
    masters = group.gather(ObjectKind.MASTER, torch.float32)
    assert group.state.name == "SHARDED", "what was leased ahead were weights"
    assert list(masters) == [0, 1, 2, 3]
    for index, full in enumerate(shards.full):
        assert masters[index].dtype is torch.float32
        assert torch.equal(masters[index], full.float())
    group.wait_for_unshard()
    num_acquired = len(shards.store.acquired())
    assert torch.equal(group.gather(ObjectKind.WEIGHT, torch.bfloat16)[1], shards.full[1])
    assert group.state.name == "UNSHARDED"
    assert shards.store.acquired()[num_acquired:] == [(chunk, WEIGHT, 0) for chunk in range(3)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("chunk_numel", [NORM_BLOCK, 4 * NORM_BLOCK])
def test_ranks_gather_each_others_shards(world_size: int, chunk_numel: int) -> None:
    def work(collectives: ThreadedCollectives) -> SmallShards:
        shards = written(collectives, chunk_numel=chunk_numel, piece_numel=5000)
        (group,) = shards.groups
        group.wait_for_unshard()
        found = group.gather(ObjectKind.WEIGHT, torch.float32)
        assert all(torch.equal(found[index], full) for index, full in enumerate(shards.full))
        return shards

    for shards in on_ranks(world_size, work):
        assert_whole(shards)
        assert shards.collectives.said == ["gather the weight of group 0"] * 2  # type: ignore[attr-defined]


# Gradients.


def give(shards: SmallShards, gradients: Sequence[torch.Tensor | None]) -> None:
    for param, gradient in zip(shards.params, gradients, strict=True):
        if gradient is not None:
            param.param.grad = gradient.view(param.shape).clone()
            shards.groups[0].take_gradient(param)


def ramps(scale: float = 1.0) -> list[torch.Tensor]:
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    return [scale * torch.arange(1.0, numel + 1) + 10 * index for index, numel in enumerate(numels)]


def test_one_rank_takes_the_gradients_that_there_are() -> None:
    shards = written()
    (group,) = shards.groups
    assert group.take_gradients(rounded=False)[0] == []
    given = ramps()
    give(shards, [given[0], None, given[2], None])
    params, gradient_of = group.take_gradients(rounded=False)
    assert (params, group.has_gradients) == ([0, 2], False)
    assert all(access.own_gradient(param.param) is None for param in shards.params)
    for placement in shards.chunks:
        for segment in placement.segments:
            found = gradient_of(segment)
            if segment.param in (1, 3):
                assert found is None
            else:
                begin = segment.param_offset
                assert found is not None
                assert torch.equal(found, given[segment.param][begin : begin + segment.numel])


def test_what_autograd_accumulates_is_the_groups_at_once() -> None:
    shards = written()
    (group,) = shards.groups
    give(shards, [ramps()[0], None, None, None])
    first, second = shards.params[:2]
    assert access.own_gradient(first.param) is None
    assert [group.has_gradient_of(first), group.has_gradient_of(second)] == [True, False]
    give(shards, [ramps(2.0)[0], None, None, None])
    _, gradient_of = group.take_gradients(rounded=False)
    part = gradient_of(shards.chunks[0].segments[0])
    assert part is not None
    assert torch.equal(part, (ramps()[0] + ramps(2.0)[0])[: part.numel()]), "before they are reduced they add up"


def test_a_gradient_is_divided_in_memory_of_its_own() -> None:
    (group,) = (shards := written()).groups
    given = torch.full(SHAPES[1], 6.0)
    shards.params[1].param.grad = given
    assert not group.take_gradient(shards.params[1], 4)
    assert given.tolist() == [6.0] * 64, "it may be somebody else's, too"
    (taken,), gradient_of = group.take_gradients(rounded=False)
    part = next(part for chunk in shards.chunks for s in chunk.segments if (part := gradient_of(s)) is not None)
    assert (taken, part.tolist()) == (1, [1.5] * 64)


def test_a_gradient_with_a_history_is_taken_without_it() -> None:
    (group,) = (shards := written()).groups
    weight = torch.ones(64, requires_grad=True)
    with access.raw():
        shards.params[1].param.grad = weight * 2
    group.take_gradient(shards.params[1])
    _, gradient_of = group.take_gradients(rounded=False)
    assert not any(part.requires_grad for s in shards.chunks[0].segments if (part := gradient_of(s)) is not None)


@pytest.mark.parametrize("rounded", [False, True])
def test_what_is_put_off_is_kept_and_added_to_in_its_own_dtype(rounded: bool) -> None:
    shards = SmallShards([SHAPES], precision=replace(BF16, reduce=torch.bfloat16))
    (group,) = shards.groups
    first, second = shards.params[:2]
    give(shards, [None, torch.full((64,), 256.0), None, None])
    group.keep_gradients(torch.float32)
    assert [group.has_gradients, group.has_kept_gradients] == [False, True]
    assert [group.has_gradient_of(first), group.has_gradient_of(second)] == [False, True]
    give(shards, [torch.ones(20_000), torch.ones(64), None, None])
    group.keep_gradients(torch.float32)
    give(shards, [None, torch.full((64,), 2.0), None, None])
    params, gradient_of = group.take_gradients(rounded=rounded)
    assert sorted(params) == [0, 1]
    assert not group.has_kept_gradients
    found = {s.param: part for c in shards.chunks for s in c.segments if (part := gradient_of(s)) is not None}
    assert found[1].tolist() == [260.0 if rounded else 259.0] * 64
    assert set(found[0].tolist()) == {1.0}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_get_their_part_of_the_mean(world_size: int) -> None:
    def work(collectives: ThreadedCollectives) -> list[tuple[int, torch.Tensor]]:
        shards = written(collectives)
        given: list[torch.Tensor | None] = [*ramps(1.0 + collectives.rank)]
        if collectives.rank == 0:
            given[1] = None
        give(shards, given)
        (group,) = shards.groups
        reduction, gradient_of = group.reduce_gradients()
        assert not group.has_gradients
        assert all(access.own_gradient(param.param) is None for param in shards.params)
        reduction.wait()
        found = []
        for placement in shards.chunks:
            for segment in placement.segments:
                part = gradient_of(segment)
                assert part is not None
                assert part.numel() == segment.numel
                found.append((segment.param, part))
        assert all(float(full.view(-1)[-1]) == 0 for full in collectives.reduced), "padding holds nothing"
        return found

    ranks = on_ranks(world_size, work)
    for param in range(4):
        whole = torch.cat([part for found in ranks for index, part in found if index == param])
        present = [ramps(1.0 + rank)[param] for rank in range(world_size) if not (param == 1 and rank == 0)]
        expected = torch.stack([gradient / world_size for gradient in present]).sum(0)
        assert torch.equal(whole, expected)


def test_a_thousand_ranks_cost_a_gather_and_a_reduction_what_two_do() -> None:
    """In lines run: each parameter was copied once for each rank, there and back."""

    def work(world_size: int) -> int:
        shards = written(AbsentPeers(world_size))
        (group,) = shards.groups
        give(shards, ramps())
        return lines_run(group.wait_for_unshard, "infinity/weights") + lines_run(
            group.reduce_gradients, "infinity/weights"
        )

    assert work(1024) <= work(2)


def test_a_group_is_complete_when_all_have_come_however_often_some_did() -> None:
    shards = written()
    (group,) = shards.groups

    def come(param: int) -> bool:
        shards.params[param].param.grad = torch.ones(SHAPES[param])
        return group.take_gradient(shards.params[param])

    assert [come(param) for param in (0, 0, 1, 2, 3)] == [False, False, False, False, True]
    group.drop_gradients()
    assert [group.has_gradients, come(0), group.has_gradients] == [False, False, True]


def test_a_group_is_in_use_while_it_is_held() -> None:
    (group,) = written().groups
    assert (group.num_holds, group.num_calls) == (0, 0), "nobody does at first"
    uses = []
    for group.num_holds in (0, 1, 2):
        uses.append(group.in_use)
    assert uses == [False, True, True]
    assert (group.index, group.numel) == (0, sum(torch.Size(shape).numel() for shape in SHAPES))
