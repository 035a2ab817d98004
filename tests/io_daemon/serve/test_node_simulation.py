"""A hundred seeded worlds around one node: faults, reordering, drain, close, unregister, death. ``--seeds N`` runs N
of them, ``--first-seed S --seeds 1`` replays one."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.support.node_world import World

REPLAYED = range(3)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("--first-seed"), metafunc.config.getoption("--seeds")
        metafunc.parametrize("seed", range(first, first + count))


@pytest.fixture(scope="module", autouse=True)
def nothing_else_to_collect() -> Iterator[None]:
    """Each world collects before it begins: of a process that has run thousands of tests that is most of its time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_whatever_happens_contents_hold_and_everything_is_given_back(seed: int) -> None:
    World(seed).run()


def test_the_same_seed_gives_the_same_world() -> None:
    for number in REPLAYED:
        one, other = World(number), World(number)
        one.run()
        other.run()
        assert one.log == other.log
        assert len(one.log) > 10


def test_the_worlds_meet_what_they_are_for() -> None:
    """Else they would prove nothing: drains, ranks that die, failed leases, refused registers, late ranks."""
    seen: dict[str, int] = {}
    for number in range(40):
        world = World(number)
        world.run()
        for what, count in world.met.items():
            seen[what] = seen.get(what, 0) + count
    print(seen)
    assert min(seen.get(what, 0) for what in World.MEETS) >= 1, seen
