"""The Python and the C++ side of the wire are the same, struct by struct and field by field."""

from __future__ import annotations

import pytest

from io_daemon._native import WIRE_CONSTANTS, WIRE_LAYOUT
from io_daemon.rank.client import Completion
from io_daemon.shared import protocol, wire
from io_daemon.shared.states import ObjectRecord


@pytest.mark.parametrize("name", wire.LAYOUTS)
def test_layouts_agree(name: str) -> None:
    layout = wire.LAYOUTS[name]
    native = dict(WIRE_LAYOUT[name])
    assert native.pop("")[0] == layout.num_bytes == layout.dtype.itemsize == layout.codec.size
    native.pop("pad", None)
    fields = layout.dtype.fields
    assert fields is not None
    assert native == {
        field: (fields[field][1], fields[field][0].itemsize) for field, code, _ in layout.fields if code != "x"
    }


def test_codec_and_dtype_of_a_layout_agree() -> None:
    import numpy as np

    values = list(range(1, 17))
    packed = wire.OBJECT_RECORD.codec.pack(*values)
    record = np.frombuffer(packed, wire.OBJECT_RECORD.dtype)[0]
    assert record["frames"].tolist() + [record[name].item() for name, _, _ in wire.OBJECT_RECORD.fields[1:]] == values


def test_constants_agree() -> None:
    twins = {
        "PROTOCOL_VERSION": protocol.PROTOCOL_VERSION,
        "TABLE_MAGIC": wire.TABLE_MAGIC,
        "ARENA_MAGIC": wire.ARENA_MAGIC,
        "SWAP_MAGIC": wire.SWAP_MAGIC,
        "PAGE_BYTES": protocol.PAGE_BYTES,
        "KINDS_MAX": protocol.KINDS_MAX,
        "FRAMES_PER_OBJECT_MAX": protocol.FRAMES_PER_OBJECT_MAX,
        "NO_FRAME": protocol.NO_FRAME,
        "NO_EXTENT": protocol.NO_EXTENT,
    }
    assert {name: WIRE_CONSTANTS[name] for name in twins} == twins


def test_completions_unpack_in_the_order_of_the_struct() -> None:
    native = {field: place for field, place in WIRE_LAYOUT["Cqe"].items() if field not in ("", "reserved")}
    assert list(Completion._fields) == sorted(native, key=lambda field: native[field][0])


def test_the_record_that_the_policy_keeps_names_every_field_of_the_table() -> None:
    assert {name for name, _, _ in wire.OBJECT_RECORD.fields} == set(ObjectRecord.__slots__)
