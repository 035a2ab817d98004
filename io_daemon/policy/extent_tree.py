"""Disjoint extents in order of offset, among which the first that is long enough is found in logarithmic time. Pure.

A treap: a search tree by offset, a heap by a number drawn from the offset, so that it is balanced whatever the order of
insertion; every node knows the longest extent below it.
"""

from __future__ import annotations

from collections.abc import Iterator


class _Node:
    __slots__ = ("left", "length", "longest", "offset", "priority", "right")

    def __init__(self, offset: int, length: int) -> None:
        self.offset, self.length, self.longest = offset, length, length
        self.priority = hash((offset, length))  # which mixes all bits of both
        self.left: _Node | None = None
        self.right: _Node | None = None

    def measure(self) -> None:
        """Renew ``longest`` from the children."""
        longest = self.length
        if self.left is not None and self.left.longest > longest:
            longest = self.left.longest
        if self.right is not None and self.right.longest > longest:
            longest = self.right.longest
        self.longest = longest


class ExtentTree:
    """Offsets are distinct and extents do not overlap: that is the caller's to see to."""

    def __init__(self) -> None:
        self._root: _Node | None = None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(offset, length), ascending."""
        path: list[_Node] = []
        node = self._root
        while path or node is not None:
            while node is not None:
                path.append(node)
                node = node.left
            node = path.pop()
            yield node.offset, node.length
            node = node.right

    def add(self, offset: int, length: int) -> None:
        below, above = _split(self._root, offset)
        self._root = _merge(_merge(below, _Node(offset, length)), above)

    def remove(self, offset: int) -> None:
        """The extent at exactly ``offset``, if there is one."""
        below, rest = _split(self._root, offset)
        _, above = _split(rest, offset + 1)
        self._root = _merge(below, above)

    def first_fit(self, length: int) -> tuple[int, int] | None:
        """The extent of the lowest offset that is at least this long."""
        node = self._root
        if node is None or node.longest < length:
            return None
        while True:
            if node.left is not None and node.left.longest >= length:
                node = node.left
            elif node.length >= length:
                return node.offset, node.length
            elif node.right is not None:
                node = node.right
            else:
                raise AssertionError(f"an extent of {length} was promised below offset {node.offset}")

    def before(self, offset: int) -> tuple[int, int] | None:
        """The last extent that begins before ``offset``."""
        node, found = self._root, None
        while node is not None:
            if node.offset < offset:
                found, node = node, node.right
            else:
                node = node.left
        return None if found is None else (found.offset, found.length)

    def at_or_after(self, offset: int) -> tuple[int, int] | None:
        """The first extent that begins at ``offset`` or later."""
        node, found = self._root, None
        while node is not None:
            if node.offset >= offset:
                found, node = node, node.left
            else:
                node = node.right
        return None if found is None else (found.offset, found.length)


def _split(node: _Node | None, offset: int) -> tuple[_Node | None, _Node | None]:
    """What begins before ``offset``, and the rest."""
    if node is None:
        return None, None
    if node.offset < offset:
        node.right, rest = _split(node.right, offset)
        node.measure()
        return node, rest
    below, node.left = _split(node.left, offset)
    node.measure()
    return below, node


def _merge(below: _Node | None, above: _Node | None) -> _Node | None:
    """All of both; what is ``below`` comes first."""
    if below is None or above is None:
        return above if below is None else below
    if below.priority > above.priority:
        below.right = _merge(below.right, above)
        below.measure()
        return below
    above.left = _merge(below, above.left)
    above.measure()
    return above
