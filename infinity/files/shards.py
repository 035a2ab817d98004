"""Which tensor goes to which file, as Transformers cuts a model: in order, a new file where one would grow too large.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infinity.errors import ConfigError
from infinity.files.entry import Entry

WHOLE_BYTES: Final = 1 << 62
"""A limit of a file's bytes above any file: everything goes into one."""
_UNITS: Final = {"": 1, "B": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for ending, base in (("B", 1000), ("IB", 1024))
}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file, and what goes into it in which order."""

    file: str
    entries: Mapping[str, Entry]


def parse_size(key: str, size: str | int) -> int:
    """``"5GB"`` is 5e9 bytes and ``"5GiB"`` 5 * 2**30, as Transformers reads them. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(size).strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or isinstance(size, bool) or float(found[1]) * unit < 1:
        raise ConfigError(key, size, 'write a number of bytes, or one with a unit, like "5GB" or "500MiB"')
    return int(float(found[1]) * unit)


def cut(entries: Mapping[str, Entry], file: str, max_bytes: int) -> list[Shard]:
    """Files of at most ``max_bytes``, but for tensors that alone are larger; ``file`` itself if there is one only."""
    cuts: list[dict[str, Entry]] = [{}]
    size_bytes = 0
    for name, entry in entries.items():
        if cuts[-1] and size_bytes + entry.nbytes > max_bytes:
            cuts.append({})
            size_bytes = 0
        cuts[-1][name] = entry
        size_bytes += entry.nbytes
    stem, dot, ending = file.rpartition(".")
    files = [f"{stem}-{number:05}-of-{len(cuts):05}{dot}{ending}" for number in range(1, len(cuts) + 1)]
    return [
        Shard(file=name, entries=each) for name, each in zip([file] if len(cuts) == 1 else files, cuts, strict=True)
    ]


def index_of(shards: Sequence[Shard], aliases: Mapping[str, str]) -> str:
    """The JSON that says which file has which tensor, also by its other names."""
    entries = [entry for shard in shards for entry in shard.entries.values()]
    total = {"total_parameters": sum(e.numel for e in entries), "total_size": sum(e.nbytes for e in entries)}
    names = {name: shard.file for shard in shards for name in shard.entries}
    names |= {alias: names[name] for alias, name in aliases.items()}
    return json.dumps({"metadata": total, "weight_map": names}, indent=2, sort_keys=True) + "\n"


def is_part_of(name: str, file: str) -> bool:
    """Whether a file of this name belongs to a model that is called ``file``: it, one of its shards, or its index."""
    stem, dot, ending = (re.escape(part) for part in file.rpartition("."))
    shard = r"(-\d{5}-of-\d{5})?"
    return re.fullmatch(rf"{stem}{shard}{dot}{ending}|{stem}{dot}{ending}\.index\.json", name) is not None
