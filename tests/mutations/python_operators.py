"""Mutants of Python sources, found in the syntax tree and spliced into the text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from tests.mutations.mutant import Mutant

COMPARISONS: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "+"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
REMOVED: Final = (ast.Expr, ast.AugAssign, ast.Raise, ast.Return, ast.Continue, ast.Break, ast.Delete)
WORDS: Final = ("__repr__", "__str__")
"""Methods that only say something to people."""


class PythonMutants(ast.NodeVisitor):
    """Collects them. Left alone is what no promise depends on: annotations, docstrings, messages, ``__repr__``; numbers
    that a module chooses and names (another choice is as good); decorators; and what is inside of an invariant, since
    nothing gets there: of an ``if`` that only raises AssertionError the whole condition is turned round, and the
    ``strict`` of a ``zip`` stays.
    """

    def __init__(self, path: str, source: bytes) -> None:
        self.mutants: list[Mutant] = []
        self._path = path
        self._source = source
        self._in_function = ""
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self.visit(ast.parse(source))

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError("a parsed node has an end")
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._source[self._start(node) : self._end(node)].decode()

    def _add(self, start: int, end: int, text: str, what: str) -> None:
        self.mutants.append(Mutant(self._path, start, end, text, what))

    def _swap(self, left: ast.expr, right: ast.expr, before: str, after: str, what: str) -> None:
        """Replace the operator that stands between two operands."""
        start, end = self._end(left), self._start(right)
        at = self._source.find(before.encode(), start, end)
        if at >= 0:
            self._add(at, at + len(before), after, what)

    # --- expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            before = self._source[self._end(left) : self._start(right)].decode().strip("() \n")
            self._swap(left, right, before, COMPARISONS[type(operator)], "comparison")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC and not any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right)):
            self._swap(node.left, node.right, *ARITHMETIC[type(node.op)], "arithmetic")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap(left, right, before, after, "boolean")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(self._start(node), self._end(node), f"({self._text(node.operand)})", "dropped not")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(self._start(node), self._end(node), str(not node.value), "boolean constant")
        elif isinstance(node.value, int):
            for change in (1, -1):
                self._add(self._start(node), self._end(node), str(node.value + change), "constant")

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self._add(self._start(bound), self._end(bound), f"({self._text(bound)}) + 1", "slice")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add(self._start(node.test), self._end(node.test), f"not ({self._text(node.test)})", "swapped branches")
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    # --- statements

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._add(self._start(node.test), self._end(node.test), f"not ({self._text(node.test)})", "swapped branches")
        if not _is_invariant(node):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Of an attribute or an entry that there is already; a name would only be missing."""
        if self._in_function not in ("", "__init__") and all(
            isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets
        ):
            self._add(self._start(node), self._end(node), "pass", "removed statement")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        chosen = self._in_function == "" and ast.unparse(node.annotation) == "Final"
        if node.value is not None and not (chosen and _is_number(node.value)):
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in WORDS:
            return
        outer, self._in_function = self._in_function, node.name
        self._visit_function(node)
        self._in_function = outer

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 -- the name that ast asks for

    def visit_Raise(self, node: ast.Raise) -> None:
        pass  # what the message says is not behaviour; that it is raised is (see visit)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, REMOVED) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            self._add(self._start(node), self._end(node), "pass", "removed statement")
        super().visit(node)


def _is_invariant(node: ast.If) -> bool:
    if len(node.body) != 1 or node.orelse or not isinstance(node.body[0], ast.Raise):
        return False
    raised = node.body[0].exc
    return isinstance(raised, ast.Call) and isinstance(raised.func, ast.Name) and raised.func.id == "AssertionError"


def _is_number(value: ast.expr) -> bool:
    """Of literals alone, as ``1 << 20``."""
    return all(isinstance(each, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context))
               for each in ast.walk(value))  # fmt: skip


def python_mutants(path: str, source: bytes) -> Iterator[Mutant]:
    return iter(PythonMutants(path, source).mutants)
