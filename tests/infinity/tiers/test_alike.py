"""What ranks compare, of which only what differs is sent."""

from __future__ import annotations

import pytest

from infinity.errors import WorldError
from tests.support.threaded_ranks import ThreadedCollectives, on_ranks


def test_the_first_line_that_differs_is_told_of_each_rank() -> None:
    lines = [f"line {number}" for number in range(1000)]

    def work(collectives: ThreadedCollectives) -> list[list[str]]:
        last = collectives.rank == 2
        unlike = [*lines[:700], "another" if last else "line 700", *lines[701:900]]
        found = [collectives.first_unlike(given, "compare") for given in (lines, unlike, lines[: 999 + last])]
        assert len(collectives.sent) == 4, "how many lines there are, and one of them, twice"
        assert all(isinstance(sent, int) or len(sent) < 10 for sent in collectives.sent)
        return found

    same, other, shorter = on_ranks(3, work)[0]
    assert same == []
    assert other == ["line 700", "line 700", "another"]
    assert shorter == ["nothing", "nothing", "line 999"]


def test_places_are_unlike_where_those_differ_that_have_one() -> None:
    def work(collectives: ThreadedCollectives) -> list[int]:
        assert collectives.unlike([], "compare nothing") == []
        rank = collectives.rank
        return collectives.unlike([None, "a" if rank else None, str(rank), "b", str(rank) if rank else None], "compare")

    assert on_ranks(3, work) == [[2, 4]] * 3


def test_words_are_sent_only_where_something_failed() -> None:
    def work(collectives: ThreadedCollectives) -> str:
        assert collectives.together(lambda: collectives.rank, "do it") == collectives.rank
        assert collectives.sent == []
        try:
            collectives.together(lambda: 1 // collectives.rank, "divide")
        except (WorldError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    first, *others = on_ranks(3, work)
    assert first.startswith("ZeroDivisionError")
    assert set(others) == {f"WorldError: rank 0 failed: {first}"}


def test_all_that_fail_alike_raise_their_own_error() -> None:
    def work(collectives: ThreadedCollectives) -> None:
        with pytest.raises(ZeroDivisionError):
            collectives.together(lambda: 1 // 0, "divide")

    on_ranks(2, work)
