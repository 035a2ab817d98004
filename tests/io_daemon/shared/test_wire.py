"""The Python and the C++ side of the wire are the same, struct by struct and field by field."""

from __future__ import annotations

import numpy as np
import pytest

from io_daemon._native import WIRE_CONSTANTS, WIRE_LAYOUT
from io_daemon.shared import protocol, wire
from io_daemon.shared.states import ObjectRecord

LAYOUTS = {
    "ObjectRecord": wire.OBJECT_RECORD,
    "FrameRecord": wire.FRAME_RECORD,
    "TableHeader": wire.TABLE_HEADER,
    "ArenaHeader": wire.ARENA_HEADER,
    "SwapHeader": wire.SWAP_HEADER,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_codec_and_dtype_lie_as_the_struct_does(name: str) -> None:
    """Every field, written by the codec with bytes of its own, is where the compiled core has it, padding is 0."""
    layout, native = LAYOUTS[name], dict(WIRE_LAYOUT[name])
    assert native.pop("")[0] == layout.num_bytes == layout.dtype.itemsize == layout.codec.size
    values: list[int | bytes] = []
    expected = bytearray(layout.num_bytes)
    for number, field in enumerate(layout.names, 1):
        offset, num_bytes, item_bytes = native[field]
        data = bytes([number]) * num_bytes
        expected[offset : offset + num_bytes] = data
        items = [int.from_bytes(data[:item_bytes], "little")] * (num_bytes // item_bytes)
        values += [data] if item_bytes == 1 and num_bytes > 1 else items
        assert layout.offset_of(field) == offset
    assert layout.codec.pack(*values) == expected
    record = np.frombuffer(bytes(expected), layout.dtype)[0]
    assert np.concatenate([np.ravel(record[field]).astype(object) for field in layout.names]).tolist() == values
    with pytest.raises(KeyError):
        layout.offset_of("pad")


def test_text_and_numbers_survive() -> None:
    values = dict.fromkeys(wire.SWAP_HEADER.names, 7) | {"boot_id": b"boot", "job": b"job", "machine": b"m"}
    found = wire.SWAP_HEADER.unpack(wire.SWAP_HEADER.pack(values) + b"behind")
    texts = {"boot_id": b"boot".ljust(40, b"\0"), "job": b"job".ljust(64, b"\0"), "machine": b"m".ljust(64, b"\0")}
    assert found == values | texts


def test_magics_are_words_that_people_can_read() -> None:
    magics = (wire.TABLE_MAGIC, wire.ARENA_MAGIC, wire.SWAP_MAGIC, WIRE_CONSTANTS["RING_MAGIC"])
    assert [magic.to_bytes(8, "little") for magic in magics] == [b"INFITBL1", b"INFIARN1", b"INFISWP1", b"INFIRNG1"]


def test_constants_agree() -> None:
    twins = {
        "PROTOCOL_VERSION": protocol.PROTOCOL_VERSION,
        "PAGE_BYTES": protocol.PAGE_BYTES,
        "KINDS_MAX": protocol.KINDS_MAX,
        "FRAMES_PER_OBJECT_MAX": protocol.FRAMES_PER_OBJECT_MAX,
        "NO_FRAME": protocol.NO_FRAME,
        "NO_EXTENT": protocol.NO_EXTENT,
    }
    assert {name: WIRE_CONSTANTS[name] for name in twins} == twins


@pytest.mark.parametrize("entry", [protocol.Sqe, protocol.Cqe], ids=lambda entry: entry.__name__)
def test_the_rings_entries_unpack_in_the_order_of_the_struct(entry: type[protocol.Sqe | protocol.Cqe]) -> None:
    native = {field: place for field, place in WIRE_LAYOUT[entry.__name__].items() if field not in ("", "reserved")}
    assert list(entry._fields) == sorted(native, key=lambda field: native[field][0])


def test_the_record_that_the_policy_keeps_names_every_field_of_the_table() -> None:
    assert set(wire.OBJECT_RECORD.names) == set(ObjectRecord.__slots__)
