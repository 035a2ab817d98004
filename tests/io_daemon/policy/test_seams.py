"""Who may touch what inside the policy: read off its sources."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_imports import ROOT

POLICY = sorted((ROOT / "io_daemon/policy").glob("*.py"))


def _assigned_attributes(tree: ast.AST) -> set[str]:
    """Names of the attributes that are assigned to anywhere, and of the keywords that constructors are given."""
    names: set[str] = set()
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call):
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
        for target in targets:
            names |= {each.attr for each in ast.walk(target) if isinstance(each, ast.Attribute)}
    return names


def test_an_objects_flags_change_in_one_file() -> None:
    writers = [path.name for path in POLICY if "flags" in _assigned_attributes(ast.parse(path.read_text()))]
    assert writers == ["swap_object.py"]


def test_the_scheduler_does_not_reach_past_the_host_tier() -> None:
    """It asks ``self._tier``; what that stands on (transfers, cursor, eviction order) it neither imports for work nor
    finds behind it."""
    tree = ast.parse(Path(ROOT / "io_daemon/policy/scheduler.py").read_text())
    private = [
        f"{node.lineno}: ._tier.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "_tier"
        and node.attr.startswith("_")
    ]
    assert not private
    imported = {
        node.module: {name.name for name in node.names} for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    assert not {"io_daemon.policy.cursor", "io_daemon.policy.eviction"} & imported.keys()
    assert imported.get("io_daemon.policy.transfers") == {"Transfer"}, "what an ended I/O was, not who ran it"
