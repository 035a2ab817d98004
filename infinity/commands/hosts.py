"""Which devices of which nodes a job runs on: hostfiles and the filters of DeepSpeed's launcher. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinity.errors import ConfigError

Nodes = dict[str, list[int]]
"""Numbers of the devices to use, by node, in the order of their ranks."""


def nodes_of_hostfile(lines: Sequence[str], name: str) -> Nodes:
    """What a hostfile says: lines such as ``worker-0 slots=4``; empty ones and comments are passed over.

    Raises:
        ConfigError: a line says something else, or a node stands twice.
    """
    nodes: Nodes = {}
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) == 2 and words[1].startswith("slots=") else ""
        if not slots.isdigit():
            raise ConfigError("hostfile", f"{name}: {line.strip()}", "write lines such as: worker-0 slots=4")
        if words[0] in nodes:
            raise ConfigError("hostfile", f"{name}: {words[0]}", "stands there twice: write one line for it")
        nodes[words[0]] = list(range(int(slots)))
    if not nodes:
        raise ConfigError("hostfile", name, "names no node: write lines such as: worker-0 slots=4")
    return nodes


def chosen(nodes: Mapping[str, Sequence[int]], *, include: str, exclude: str) -> Nodes:
    """The nodes and devices that are left.

    Args:
        include: ``worker-0@worker-1:0,2``: those alone; a node without numbers stands for all its devices.
        exclude: all but those.

    Raises:
        ConfigError: both are given, or one names what is not there, or nothing is left.
    """
    if include and exclude:
        raise ConfigError("--include", include, "cannot stand beside --exclude: write one of them")
    if not include and not exclude:
        return {node: list(slots) for node, slots in nodes.items()}
    named = _named(nodes, include or exclude, "--include" if include else "--exclude")
    if include:
        return named
    left = {node: [slot for slot in slots if slot not in named.get(node, ())] for node, slots in nodes.items()}
    left = {node: slots for node, slots in left.items() if slots}
    if not left:
        raise ConfigError("--exclude", exclude, "leaves nothing to run on: name fewer")
    return left


def first(nodes: Mapping[str, Sequence[int]], *, num_nodes: int, num_devices: int) -> Nodes:
    """The first so many nodes, and of each the first so many devices; -1 or 0: all.

    Raises:
        ConfigError: there are fewer.
    """
    if num_nodes > len(nodes):
        raise ConfigError("--num_nodes", num_nodes, f"there are {len(nodes)}: {', '.join(nodes)}")
    kept = dict(list(nodes.items())[: num_nodes if num_nodes > 0 else None])
    for node, slots in kept.items():
        if num_devices > len(slots):
            raise ConfigError("--num_gpus", num_devices, f"{node} has {len(slots)}")
    return {node: list(slots)[: num_devices if num_devices > 0 else None] for node, slots in kept.items()}


def _named(nodes: Mapping[str, Sequence[int]], text: str, option: str) -> Nodes:
    found: Nodes = {}
    for part in text.split("@"):
        node, _, numbers = part.partition(":")
        if node not in nodes:
            raise ConfigError(option, part, f"there is no node {node!r}: there are {', '.join(nodes)}")
        slots = [slot for number in numbers.split(",") for slot in _range(number, option)] if numbers else nodes[node]
        for slot in slots:
            if slot not in nodes[node]:
                raise ConfigError(option, part, f"{node} has no slot {slot}: it has {len(nodes[node])}")
        found.setdefault(node, []).extend(slot for slot in slots if slot not in found[node])
    return {node: sorted(found[node]) for node in nodes if node in found}


def _range(text: str, option: str) -> range:
    begin, dash, end = text.partition("-")
    if not begin.isdigit() or (dash and not end.isdigit()):
        raise ConfigError(option, text, "is no number of a device: write such as worker-0:0,2 or worker-0:0-3")
    return range(int(begin), int(end or begin) + 1)
