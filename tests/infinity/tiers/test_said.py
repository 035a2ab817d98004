"""What thousands of ranks said, in a message that somebody reads."""

from __future__ import annotations

from infinity.tiers.said import SHOWN_MAX, in_words


def test_ranks_that_said_the_same_stand_together() -> None:
    assert in_words(enumerate("ab"), ": ") == "rank 0: a; rank 1: b"
    assert in_words(enumerate("aab"), " has ", " have ") == "ranks 0, 1 have a; rank 2 has b"
    assert in_words(enumerate(["a", *"b" * 4094, "a"]), ": ") == "ranks 0, 4095: a; ranks 1 to 4094: b"
    assert in_words([(3, "x"), (5, "x"), (6, "x"), (7, "x")], " failed: ") == "ranks 3, 5 to 7 failed: x"


def test_a_message_does_not_grow_with_the_ranks() -> None:
    each = in_words(enumerate(map(str, range(4096))), ": ")
    assert each.endswith("; rank 7: 7; 4088 more ranks with other words")
    assert in_words(enumerate(map(str, range(SHOWN_MAX + 1))), ": ").endswith("; 1 more rank with other words")
    assert in_words(((rank, "x") for rank in range(0, 4096, 2)), ": ") == (
        "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2040 more runs: x"
    )
