"""The staging area over a strict store and threaded ranks: what stays in memory, what is written, what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import parse_config
from infinity.errors import WeightsError
from infinity.tiers.collectives import Collectives
from infinity.weights import access, owners, staging
from infinity.weights.staging import StagedParam, StagingArea, staged_param
from io_daemon.shared.protocol import ObjectKind
from tests.support.strict_store import StrictLease, StrictStore
from tests.support.threaded_ranks import ThreadedCollectives, on_ranks
from tests.support.work import lines_run

STAGING = ObjectKind.STAGING.mask
BUCKET = 1000
"""Elements that stay in memory."""


def config_of(offload: Mapping[str, Any] = MappingProxyType({}), **io_daemon: Any) -> Any:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": BUCKET, **offload}
    return parse_config({"train_batch_size": 1, "zero_optimization": zero, "io_daemon": io_daemon})


class Area:
    """A staging area whose store forgives nothing; pieces of 64 elements."""

    def __init__(self, collectives: Collectives | None = None) -> None:
        self.area = StagingArea(config_of(), Collectives(None) if collectives is None else collectives)
        self.store = StrictStore(1 << 20)
        self.area.store = self.store
        self.area.piece_bytes = 256

    def add(self, *shape: int, value: float | None = None, order: Sequence[int] | None = None) -> nn.Parameter:
        values = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
        if order is not None:
            values = values.permute(*order)
        param = nn.Parameter(values if value is None else torch.full(shape, value))
        self.area.adopt(param, "Linear.weight")
        return param

    def is_staged(self, *params: nn.Parameter) -> list[bool]:
        return [self.area.staged(param).is_staged for param in params]


def values(param: nn.Parameter) -> torch.Tensor:
    """As a user would read them."""
    return (param * 1).detach()


def test_what_was_touched_last_stays_within_the_bucket() -> None:
    area = Area()
    first, second = area.add(400), area.add(600)
    assert area.is_staged(first, second) == [False, False], "just as many as fit"
    third = area.add(1)
    assert area.is_staged(first, second, third) == [True, False, False]
    assert type(first) is access.ShardedParameter
    assert owners.owner_of(first) is area.area
    assert torch.equal(values(first), torch.arange(1.0, 401))
    assert area.is_staged(first, second, third) == [False, True, False], "it was touched last"
    assert type(first).__name__ == "Parameter", "the user's own again"
    assert owners.owner_of(first) is None
    large = area.add(5000)
    assert area.is_staged(first, second, third, large) == [True, True, True, False], "the one that came stays"
    area.area.stage_everything()
    assert area.is_staged(large) == [True]
    for param, numel in ((second, 600), (large, 5000), (third, 1)):
        assert torch.equal(values(param), torch.arange(1.0, numel + 1))


def test_pieces_are_registered_once_and_written_anew_each_time() -> None:
    area = Area()
    param = area.add(10, 15)
    area.area.stage_everything()
    assert [layout.numel for layout in area.store.layouts] == [64, 64, 64], "150 and padding to 192"
    assert area.store.acquired() == [(chunk, 0, STAGING) for chunk in range(3)]
    assert area.store.released() == [(chunk, STAGING, 0) for chunk in range(3)]
    with torch.no_grad():
        param.mul_(2)
    assert torch.equal(values(param).view(-1), 2 * torch.arange(1.0, 151))
    area.area.stage_everything()
    assert len(area.store.layouts) == 3
    assert area.store.acquired()[3:6] == [(chunk, STAGING, 0) for chunk in range(3)]
    assert torch.equal(values(param).view(-1), 2 * torch.arange(1.0, 151)), "what was written is kept"
    assert area.store.num_held == 0


def test_a_parameter_larger_than_the_arena_is_staged_in_pieces_of_a_frame(tmp_path: Path) -> None:
    offload = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    area = StagingArea(config_of(offload, host_budget_bytes=8 << 20), Collectives(None))
    assert 0 < area.arena_bytes < 4 * 300_000
    param = nn.Parameter(torch.arange(300_000.0))
    area.adopt(param, "Linear.weight")
    area.stage_everything()
    assert area.staged(param).is_staged
    assert torch.equal(values(param), torch.arange(300_000.0))
    area.close()


@pytest.mark.parametrize(("shape", "order"), [((4, 6), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((5, 70), None)])
def test_parameters_keep_how_they_lie(shape: tuple[int, ...], order: tuple[int, ...] | None) -> None:
    area = Area()
    param = area.add(*shape, order=order)
    expected, stride = param.detach().clone(), param.stride()
    area.area.stage_everything()
    assert area.area.layout_of(param).stride() == stride
    found = values(param)
    assert torch.equal(found, expected)
    assert param.stride() == stride
    assert area.area.layout_of(param).stride() == stride


@pytest.mark.parametrize(("first", "numel"), [(0, 150), (0, 64), (63, 2), (64, 64), (10, 100), (149, 1)])
def test_any_range_of_the_shard_is_read(first: int, numel: int) -> None:
    area = Area()
    param = area.add(150)
    area.area.stage_everything()
    found = area.area.staged(param).read(first, numel)
    assert found.tolist() == list(range(first + 1, first + numel + 1))
    assert area.store.num_held == 0


def test_a_read_or_a_write_that_fails_holds_nothing_and_can_be_repeated() -> None:
    area = Area()
    first, second = area.add(150), area.add(130)

    def fail_at(chunk: int) -> None:
        def fail(lease: StrictLease) -> None:
            if lease.chunk == chunk:
                raise OSError("the drive")

        area.store.before_wait = fail

    fail_at(1)
    with pytest.raises(OSError, match="the drive"):
        area.area.stage_everything()
    assert area.store.num_held == 0
    assert area.is_staged(first, second) == [False, False]
    fail_at(-1)
    area.area.stage_everything()
    assert area.is_staged(first, second) == [True, True]
    fail_at(4)
    with pytest.raises(OSError, match="the drive"):
        torch.dot(first[:130], second)
    assert area.store.num_held == 0
    assert area.is_staged(first, second) == [False, True]
    area.area.stage_everything()
    assert area.is_staged(first, second) == [True, True], "what had come is not forgotten"
    fail_at(-1)
    expected = torch.arange(1.0, 131).square().sum()
    torch.testing.assert_close(torch.dot(first[:130], second).detach(), expected)


def test_a_parameter_with_a_view_stays_in_memory_and_goes_on_following_it() -> None:
    area = Area()
    param = area.add(10)
    view = param.detach()[2:]
    area.area.stage_everything()
    assert area.is_staged(param) == [False]
    view.zero_()
    assert values(param).tolist() == [1, 2] + [0] * 8


def test_an_alias_that_was_read_keeps_nothing_in_memory() -> None:
    area = Area()
    param = area.add(10)
    area.area.stage_everything()
    area.area.is_building = False
    assert (area.area.alias(param) * 2).tolist() == list(range(2, 21, 2))
    assert area.is_staged(param) == [True]


def test_what_was_changed_while_it_was_the_users_is_registered_anew() -> None:
    area = Area()
    param = area.add(100)
    area.area.stage_everything()
    values(param)
    param.data = param.data.to(torch.bfloat16)
    area.area.stage_everything()
    assert area.store.unregistered == [range(2)]
    assert [layout.dtypes[ObjectKind.STAGING] for layout in area.store.layouts[2:]] == [torch.bfloat16]
    assert values(param).tolist() == list(range(1, 101))


def test_a_parameter_without_elements_is_staged_as_all_are() -> None:
    area = Area()
    param = area.add(0)
    area.area.stage_everything()
    assert area.is_staged(param) == [True]
    assert values(param).shape == (0,)


def test_new_weights_reach_parameters_wherever_they_are() -> None:
    area = Area()
    staged, in_memory = area.add(10, 15), area.add(70)
    area.area.stage_everything()
    values(in_memory)
    assert area.is_staged(staged, in_memory) == [True, False]
    area.area.overwrite(
        [(each, lambda first, numel: torch.arange(first, first + numel) * 2.0) for each in (staged, in_memory)]
    )
    assert area.is_staged(staged, in_memory) == [True, False]
    for each in (staged, in_memory):
        assert torch.equal(values(each).view(-1), torch.arange(each.numel()) * 2.0)


def test_a_parameter_that_was_dropped_is_not_staged() -> None:
    area = Area()
    kept = area.add(10)
    dropped = area.add(900)
    del dropped
    large = area.add(500)
    assert area.is_staged(kept) == [False], "nothing had to make room"
    assert area.area.num_params == 3
    area.area.stage_everything()
    assert area.is_staged(kept, large) == [True, True]
    assert len(area.store.layouts) == 1 + 8


def test_while_the_model_is_built_an_alias_is_the_constructors_own() -> None:
    area = Area()
    param = area.add(10)
    area.area.stage_everything()
    alias = area.area.alias(param)
    assert type(alias) is torch.Tensor
    alias.fill_(3)
    assert values(param).tolist() == [3] * 10
    del alias
    area.area.stage_everything()
    area.area.is_building = False
    assert type(area.area.alias(param)) is access.ShardedAlias
    assert values(param).tolist() == [3] * 10
    assert area.is_staged(param) == [True], "after Init nothing stays in memory"


def test_a_replaced_parameter_begins_anew() -> None:
    area = Area()
    param = area.add(100)
    area.area.stage_everything()
    param.data = torch.full((3,), 7.0)
    assert (type(param), owners.owner_of(param)) == (nn.Parameter, None), "the user's own"
    assert area.store.unregistered == [range(2)]
    assert param.shape == (3,)
    area.area.stage_everything()
    assert values(param).tolist() == [7] * 3
    staged = staged_param(param)
    assert staged is not None
    assert "parameter 2 under Init, parameter 1 under Init, Linear.weight" in staged.name


def test_what_an_engine_has_taken_over_is_forgotten() -> None:
    area = Area()
    param, in_memory = area.add(100), area.add(10)
    area.area.stage_everything()
    values(in_memory)
    for each in (param, in_memory):
        area.area.staged(each).discard()
        assert staged_param(each) is None
    assert area.store.unregistered == [range(2), range(2, 3)]
    with pytest.raises(AssertionError, match="not staged"):
        area.area.staged(param)
    num_acquired = len(area.store.acquired())
    area.area.stage_everything()
    assert len(area.store.acquired()) == num_acquired


def test_a_staged_parameter_has_no_gradient_and_a_copy_of_its_own() -> None:
    area = Area()
    param = area.add(4)
    area.area.stage_everything()
    assert param.grad is None
    param.grad = None
    with pytest.raises(WeightsError, match=r"parameter 1 under Init, Linear\.weight of shape \(4,\).*no gradient"):
        param.grad = torch.ones(4)
    copied = area.area.copy(param)
    assert type(copied) is nn.Parameter
    assert copied.tolist() == [1, 2, 3, 4]
    assert copied.requires_grad
    param.requires_grad_(False)
    assert not area.area.copy(param).requires_grad
    with torch.no_grad():
        copied.zero_()
    assert values(param).tolist() == [1, 2, 3, 4]


def test_a_gradient_that_came_while_the_weights_were_here_stays_until_it_is_dropped() -> None:
    area = Area()
    param = area.add(4)
    (param * 3).sum().backward()  # type: ignore[no-untyped-call]
    area.area.stage_everything()
    assert param.grad is not None
    assert param.grad.tolist() == [3.0] * 4
    param.grad = None
    assert param.grad is None


def test_an_area_that_nobody_refers_to_ends_what_it_has() -> None:
    closed: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self._name = name

        def close(self) -> None:
            closed.append(self._name)

    parts: Any = [Noted(name) for name in ("store", "collectives", "connection")]
    staging._end(parts[0], parts[1], parts[2])
    assert closed == ["store", "collectives", "connection"]
    staging._end(parts[0], parts[1], None)
    assert closed[3:] == ["store", "collectives"]


def test_closing_ends_the_store_and_the_connection() -> None:
    area = Area()
    closed: list[str] = []

    class Connection:
        def close(self) -> None:
            closed.append("connection")

    collectives: Any = area.area.collectives
    collectives.close = lambda: closed.append("collectives")
    area.area.close()
    assert area.store.closed
    assert closed.pop() == "collectives"
    collectives.close = lambda: None
    connection: Any = Connection()
    area.area.connection = connection
    area.area.close_store()
    assert closed == [], "the engine goes on with it"
    area.area.close()
    assert closed == ["connection"]


def test_freed_memory_is_returned_where_that_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr(staging, "return_freed", lambda: returned.append(1))
    paged: list[int] = []
    monkeypatch.setattr(staging, "page_out_mapped_weights", lambda: paged.append(1))
    monkeypatch.setattr(staging, "RETURNED_NUMEL_MIN", 100)
    area = Area()
    small = area.add(99)
    area.area.stage_everything()
    assert (area.is_staged(small), returned, paged) == ([True], [], [])
    large = area.add(100)
    area.area.stage_everything()
    assert (area.is_staged(large), returned, paged) == ([True], [1], [1])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("numel", [1, 64, 130, 1000])
def test_ranks_keep_a_shard_each_of_rank_0s_values(world_size: int, numel: int) -> None:
    def work(collectives: ThreadedCollectives) -> tuple[Area, nn.Parameter, StagedParam]:
        area = Area(collectives)
        param = area.add(numel, value=float(collectives.rank))
        if collectives.rank == 0:
            with torch.no_grad():
                param.copy_(torch.arange(1.0, numel + 1))
        area.area.stage_everything()
        staged = area.area.staged(param)
        shard = torch.cat([area.store.object(chunk, ObjectKind.STAGING) for chunk in range(len(area.store.layouts))])
        assert len(shard) == staged.shard_numel
        assert staged.start == collectives.rank * staged.shard_numel
        held = torch.arange(1.0, numel + 1)[staged.start : staged.start + staged.shard_numel]
        assert torch.equal(shard[: len(held)], held)
        assert torch.equal(area.area.shard_of(param), held)
        assert not area.area.is_persistent(param)
        assert not shard[len(held) :].isfinite().all() or not shard[len(held) :].any() or len(held) == len(shard)
        assert values(param).tolist() == list(range(1, numel + 1))
        return area, param, staged

    for area, _, staged in on_ranks(world_size, work):
        assert staged.shard_numel % 64 == 0
        assert staged.shard_numel * world_size >= numel
        assert staged.shard_numel * world_size < numel + 64 * world_size
        said = area.area.collectives.said  # type: ignore[attr-defined]
        name = f"parameter 1 under Init, Linear.weight of shape ({numel},)"
        assert said == [f"stage out {name}", f"bring back {name}"]


def test_many_small_parameters_are_staged_out_and_given_back_together() -> None:
    """Each was a collective, a request for space and one to give it back."""

    def work(collectives: ThreadedCollectives) -> list[float]:
        area = Area(collectives)
        params = [area.add(3, value=float(number + collectives.rank)) for number in range(100)]
        area.area.stage_everything()
        said = area.area.collectives.said  # type: ignore[attr-defined]
        name = "under Init, Linear.weight of shape (3,)"
        assert said == [f"stage out parameter 1 {name} to parameter 100 {name}, 100 of them"]
        given_back: list[range] = []
        area.store.unregister = given_back.append  # type: ignore[method-assign, assignment]
        found = [float(area.area.staged(param).read(area.area.staged(param).start, 0).numel()) for param in params]
        assert found == [0.0] * 100
        shown = [float(values(param)[0]) for param in params[::33]]
        area.area.stage_everything()
        staging.discard(params)
        assert [(chunks.start, chunks.stop) for chunks in given_back] == [(0, 100)]
        assert not any(staged_param(param) for param in params)
        return shown

    assert on_ranks(2, work) == [[0.0, 33.0, 66.0, 99.0]] * 2


def test_what_one_rank_changes_while_weights_are_gathered_is_every_ranks() -> None:
    def work(collectives: ThreadedCollectives) -> list[list[float]]:
        area = Area(collectives)
        found = []
        for modifier in (0, 1, None):
            param = area.add(3, value=0.0)
            area.area.stage_everything()
            with area.area.gathered([param], modifier), torch.no_grad():
                shown: Any = param
                assert shown.ds_status.name == "AVAILABLE"
                param.fill_(collectives.rank + 10.0)
            area.area.stage_everything()
            found.append(values(param).tolist())
        return found

    for found in on_ranks(2, work):
        assert found == [[10.0] * 3, [11.0] * 3, [10.0] * 3]


def test_a_change_that_nobody_keeps_is_refused_where_checks_are_asked_for() -> None:
    """On every rank, whichever made it; what is only read is not, and what a ``modifier_rank`` changes is kept."""

    def work(collectives: ThreadedCollectives) -> list[float]:
        area = Area(collectives)
        area.area.config = config_of({"enable_sanity_checks": True})
        param, other = area.add(3, value=0.0), area.add(2, value=0.0)
        area.area.stage_everything()
        with area.area.gathered([other, param], None):
            assert values(param).tolist() == [0.0] * 3

        def change() -> None:
            with area.area.gathered([other, param], None), torch.no_grad():
                if collectives.rank == 1:
                    param.fill_(5.0)

        with pytest.raises(WeightsError, match=r"parameter 1 under Init.*in-place modification"):
            change()
        area.area.stage_everything()
        assert area.is_staged(param, other) == [True, True]
        with area.area.gathered([param], 1), torch.no_grad():
            param.fill_(collectives.rank + 10.0)
        return values(param).tolist()

    assert list(on_ranks(2, work)) == [[11.0] * 3] * 2


def test_what_a_library_holds_of_a_broadcast_on_one_rank_keeps_no_parameter_in_memory_there() -> None:
    """Else that rank does not stage it out, and the next call finds the ranks apart."""

    def work(collectives: ThreadedCollectives) -> list[bool]:
        area = Area(collectives)
        param = area.add(3, value=0.0)
        area.area.stage_everything()
        held, broadcast = [], collectives.broadcast

        def held_broadcast(tensor: torch.Tensor, what: str, *, source: int = 0) -> None:
            broadcast(tensor, what, source=source)
            held.append(tensor if collectives.rank == 1 else None)

        collectives.broadcast = held_broadcast  # type: ignore[method-assign]
        with area.area.gathered([param], 1), torch.no_grad():
            param.fill_(collectives.rank + 10.0)
        area.area.stage_everything()
        assert values(param).tolist() == [11.0] * 3
        area.area.stage_everything()
        return area.is_staged(param)

    assert list(on_ranks(2, work)) == [[True], [True]]


def test_ranks_that_bring_back_different_parameters_are_told_apart_before_they_do() -> None:
    def work(collectives: ThreadedCollectives) -> None:
        area = Area(collectives)
        params = [area.add(100), area.add(100)]
        area.area.stage_everything()
        values(params[collectives.rank])

    with pytest.raises(AssertionError, match="the ranks diverge"):
        on_ranks(2, work)


@pytest.mark.parametrize("is_full", [False, True], ids=["all in memory", "some to be staged out"])
def test_a_parameter_that_comes_costs_as_much_among_many(is_full: bool) -> None:
    """In lines run: each one that came looked at all that were there."""

    def work(num_there: int) -> float:
        area = Area()
        numel = BUCKET // (num_there + (not is_full))
        there = [area.add(numel) for _ in range(num_there)]
        assert area.is_staged(*there) == [False] * num_there
        num_more = num_there if is_full else 1
        work = lines_run(lambda: there.extend(area.add(numel) for _ in range(num_more)), "infinity/weights")
        assert area.is_staged(there[0], there[-1]) == [is_full, False]
        return work / num_more

    few, many = work(12), work(200)
    assert many <= 1.5 * few, f"{few} lines beside 12 parameters, {many} beside 200"


def test_a_parameter_that_was_dropped_makes_room() -> None:
    """At once, wherever it stands in the order."""
    area = Area()
    first, dropped = area.add(400), area.add(500)
    del dropped
    second = area.add(600)
    assert area.is_staged(first, second) == [False, False]
    area.add(1)
    assert area.is_staged(first, second) == [True, False]
