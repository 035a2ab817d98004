"""What a fork can be given as a function's code, and what has to be imported anew."""

from __future__ import annotations

import pytest

from tests.mutations.quick import codes_of, outside_of_functions

SOURCE = """
class A:
    size = 1

    def f(self, y=2):
        return [z + 3 for z in y]

g = lambda: 4
"""


def test_functions_are_found_in_classes_and_modules_and_not_within_each_other() -> None:
    assert [code.co_qualname for code in codes_of(compile(SOURCE, "a.py", "exec"))] == ["A.f", "<lambda>"]


@pytest.mark.parametrize(
    ("before", "after", "is_a_functions"),
    [("3", "5", True), ("4", "5", True), ("y=2", "y=5", False), ("size = 1", "size = 5", False)],
)
def test_what_is_no_functions_own_is_told_apart(before: str, after: str, is_a_functions: bool) -> None:
    original, mutated = (compile(text, "a.py", "exec") for text in (SOURCE, SOURCE.replace(before, after)))
    assert (outside_of_functions(original) == outside_of_functions(mutated)) is is_a_functions
