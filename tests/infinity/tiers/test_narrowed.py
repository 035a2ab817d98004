"""States in fewer bits: what the store below has, and what a lease shows and leaves."""

from __future__ import annotations

import pytest
import torch

from infinity.errors import ConfigError
from infinity.plan.narrow import BLOCK, Narrow
from infinity.tiers.base import ChunkLayout
from infinity.tiers.narrowed import NarrowedStore
from io_daemon.shared.protocol import ObjectKind
from tests.support.strict_store import StrictStore

W, M, V = ObjectKind.WEIGHT, ObjectKind.STATE_0, ObjectKind.STATE_1
NUMEL = 4 * BLOCK
FORMS = {"bf16": {M: Narrow.BF16, V: Narrow.BF16}, "8bit": {M: Narrow.SIGNED_8, V: Narrow.UNSIGNED_8}}
BOTH = M.mask | V.mask


def made(moments: str) -> tuple[StrictStore, NarrowedStore]:
    """A trained chunk, and a frozen one."""
    strict = StrictStore(piece_numel=2 * NUMEL)
    store = NarrowedStore(strict, FORMS[moments])
    trained = {int(W): torch.bfloat16, int(M): torch.float32, int(V): torch.float32}
    store.register([ChunkLayout(numel=NUMEL, dtypes=dtypes) for dtypes in (trained, {int(W): torch.bfloat16})])
    return strict, store


def write(store: NarrowedStore, value: float, *, read: int = BOTH, dirty: int = BOTH, dead: int = 0) -> None:
    lease = store.acquire(0, read=read, write=BOTH)
    lease.wait()
    for kind in (M, V):
        (values,) = lease.pieces(kind)
        values[: NUMEL // 2].fill_(value)
    lease.release(dirty=dirty, dead=dead)


def read(store: NarrowedStore, kind: ObjectKind) -> list[float]:
    lease = store.acquire(0, read=kind.mask)
    lease.wait()
    (values,) = lease.pieces(kind)
    found: list[float] = values.tolist()
    lease.release()
    return found


@pytest.mark.parametrize(("moments", "numel"), [("bf16", NUMEL), ("8bit", NUMEL + 4)])
def test_the_store_below_has_fewer_bytes(moments: str, numel: int) -> None:
    strict, _ = made(moments)
    trained, frozen = strict.layouts
    assert {kind: (dtype, trained.numel_of(kind)) for kind, dtype in trained.dtypes.items()} == {
        W: (torch.bfloat16, NUMEL),
        **{kind: (form.dtype, numel) for kind, form in FORMS[moments].items()},
    }
    assert frozen.dtypes == {W: torch.bfloat16}


@pytest.mark.parametrize("moments", FORMS)
@pytest.mark.parametrize("first", [BOTH, 0], ids=["changed", "new"])
def test_what_is_written_is_read_and_the_rest_is_zero(moments: str, first: int) -> None:
    _, store = made(moments)
    write(store, 1.25, read=first)
    for kind in (M, V):
        assert read(store, kind) == [1.25] * (NUMEL // 2) + [0.0] * (NUMEL // 2)


@pytest.mark.parametrize("moments", FORMS)
def test_what_is_not_dirty_stays(moments: str) -> None:
    strict, store = made(moments)
    write(store, 1.25)
    write(store, 3.0, dirty=V.mask)
    assert read(store, M)[0] == 1.25
    assert read(store, V)[0] == 3.0
    before = strict.object(0, M).clone()
    write(store, 5.0, dirty=0)
    assert torch.equal(strict.object(0, M), before)
    assert [entry[1] for entry in strict.released()][:2] == [BOTH, V.mask]


def test_other_kinds_and_chunks_pass_as_they_are() -> None:
    strict, store = made("8bit")
    for chunk in (0, 1):
        lease = store.acquire(chunk, read=W.mask, write=W.mask)
        lease.wait()
        lease.pieces(W)[0].fill_(2.0)
        lease.release(dirty=W.mask)
        assert strict.object(chunk, W).tolist() == [2.0] * NUMEL


def test_memory_is_used_again_and_an_abandoned_lease_takes_none() -> None:
    _, store = made("bf16")
    addresses = set()
    for _ in range(3):
        store.acquire(0, read=BOTH).release()
        lease = store.acquire(0, read=BOTH)
        lease.wait()
        addresses |= {lease.pieces(kind)[0].data_ptr() for kind in (M, V)}
        lease.release()
    assert len(addresses) == 2


def test_a_negative_value_without_a_sign_ends_the_store() -> None:
    strict, store = made("8bit")
    with pytest.raises(ConfigError, match="negative") as caught:
        write(store, -1.0)
    assert (caught.value.key, caught.value.value) == ("io_daemon.moments", "8bit")
    assert strict.num_held == 0
    with pytest.raises(ConfigError, match="negative"):
        store.acquire(0, read=W.mask)
