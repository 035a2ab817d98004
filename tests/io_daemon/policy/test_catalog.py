"""What a catalog takes and refuses to the last byte and frame, and what is left when it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from io_daemon.errors import BudgetError, SwapSpaceError
from io_daemon.policy.catalog import Catalog
from io_daemon.policy.extents import ExtentAllocator
from io_daemon.policy.trace import Geometry
from io_daemon.shared.protocol import FRAMES_PER_OBJECT_MAX, KINDS_MAX, NO_EXTENT, PAGE_BYTES, ChunkSpec
from io_daemon.shared.states import ObjectFlags

FRAME = 4 * PAGE_BYTES
ONE = ChunkSpec((PAGE_BYTES,))


def catalog_of(
    *, num_frames: int = 8, chunks_max: int = 16, pages: tuple[int, ...] = (64,), block_bytes: int = PAGE_BYTES
) -> Catalog:
    return Catalog(
        num_frames=num_frames,
        frame_bytes=FRAME,
        block_bytes=block_bytes,
        extents=[ExtentAllocator(count * PAGE_BYTES) for count in pages],
        chunks_max=chunks_max,
    )


def free_pages(catalog: Catalog) -> list[int]:
    return [allocator.free_bytes // PAGE_BYTES for allocator in catalog._extents]


@pytest.mark.parametrize(
    ("frame_bytes", "block_bytes"),
    [(0, PAGE_BYTES), (-PAGE_BYTES, PAGE_BYTES), (PAGE_BYTES + 1, PAGE_BYTES), (PAGE_BYTES, 0),
     (PAGE_BYTES, -PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES + 1)],
)  # fmt: skip
def test_frames_and_blocks_are_whole_pages(frame_bytes: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        Catalog(num_frames=1, frame_bytes=frame_bytes, block_bytes=block_bytes, extents=[], chunks_max=1)


@pytest.mark.parametrize("sizes", [(), (PAGE_BYTES,) * (KINDS_MAX + 1), (PAGE_BYTES, -1)], ids=["none", "many", "less"])
def test_a_chunk_has_so_many_kinds(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"1 to {KINDS_MAX} sizes, none negative"):
        catalog_of().register([ChunkSpec(sizes)])


def test_objects_lie_one_behind_another_in_whole_pages_and_pinned_ones_nowhere() -> None:
    catalog = catalog_of(num_frames=16, pages=(64, 64), block_bytes=2 * PAGE_BYTES)
    specs = [ONE, ChunkSpec((1, 0, 3 * PAGE_BYTES + 1, PAGE_BYTES, 5 * PAGE_BYTES), pinned_mask=1 << 3)]
    _, chunk = catalog.register(specs)
    assert (chunk.file, chunk.extent_offset, chunk.extent_bytes) == (1, 0, 10 * PAGE_BYTES)
    assert chunk.kind_mask == 0b11101
    items = [item for item in chunk.objects if item is not None]
    assert items == chunk.present()
    assert len(chunk.objects) == KINDS_MAX
    assert [(item.kind, item.object_bytes // PAGE_BYTES, item.num_frames) for item in items] == [
        (0, 1, 1), (2, 4, 1), (3, 1, 1), (4, 5, 2),
    ]  # fmt: skip
    assert [item.extent_offset for item in items] == [0, PAGE_BYTES, NO_EXTENT, 5 * PAGE_BYTES]
    assert [item.object_id for item in items] == [KINDS_MAX + kind for kind in (0, 2, 3, 4)]
    assert {item.checksum_index // item.object_id for item in items} == {FRAMES_PER_OBJECT_MAX * 2}, "2 blocks a frame"
    assert [bool(item.flags & ObjectFlags.PINNED) for item in items] == [False, False, True, False]
    assert [(item.file, item.chunk) for item in items] == [(1, 1)] * 4
    assert [item.kind for item in chunk.select(0b10101)] == [0, 2, 4]
    assert chunk.select(0b10) == ()


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        (ChunkSpec((FRAMES_PER_OBJECT_MAX * FRAME,)), True),
        (ChunkSpec((FRAMES_PER_OBJECT_MAX * FRAME + 1,)), False),
        (ChunkSpec((PAGE_BYTES,) * KINDS_MAX), True),
        (ChunkSpec((PAGE_BYTES,) * (KINDS_MAX + 1)), False),
        (ChunkSpec(()), False),
        (ChunkSpec((0,)), True),
        (ChunkSpec((PAGE_BYTES, -1)), False),
        (ChunkSpec((PAGE_BYTES, 0), pinned_mask=0b10), False),
        (ChunkSpec((PAGE_BYTES, 1), pinned_mask=0b10), True),
    ],
    ids=str,
)
def test_specs_are_taken_up_to_their_limits(spec: ChunkSpec, fits: bool) -> None:
    catalog = catalog_of()
    if fits:
        catalog.check([spec])
        assert len(catalog.register([spec])) == 1
        return
    for refuse in (catalog.check, catalog.register):
        with pytest.raises(ValueError):
            refuse([spec])
    assert catalog.chunks == {}


def test_what_is_not_pinned_needs_a_swap_file() -> None:
    catalog = catalog_of(pages=())
    catalog.register([ChunkSpec((PAGE_BYTES, PAGE_BYTES), pinned_mask=0b11), ChunkSpec((0,))])
    with pytest.raises(ValueError, match="need a swap file"):
        catalog.register([ChunkSpec((PAGE_BYTES, PAGE_BYTES), pinned_mask=0b10)])
    assert catalog.swap_bytes_needed([]) == []


def test_as_many_chunks_as_the_table_has_room_for() -> None:
    catalog = catalog_of(chunks_max=3)
    catalog.register([ONE, ONE])
    for refuse in (catalog.check, catalog.register):
        with pytest.raises(ValueError, match="1 of the table's 3 are free"):
            refuse([ONE, ONE])
    (last,) = catalog.register([ONE])
    assert last.chunk_id == 2


def test_chunks_need_places_in_a_row() -> None:
    catalog = catalog_of(chunks_max=3)
    first, _, last = catalog.register([ONE, ONE, ONE])
    for chunk in (first, last):
        catalog.retire(chunk)
        catalog.remove(chunk)
    for refuse in (catalog.check, catalog.register):
        with pytest.raises(ValueError, match="in a row: 2 of the table's 3 are free"):
            refuse([ONE, ONE])
    assert [chunk.chunk_id for chunk in catalog.register([ONE])] == [0]


def test_the_budget_is_exact_and_follows_what_comes_and_goes() -> None:
    catalog = catalog_of(num_frames=6)
    pinned = ChunkSpec((FRAME, 2 * FRAME), pinned_mask=0b01)
    large = ChunkSpec((FRAME, FRAME, FRAME))
    first, second, _ = catalog.register([pinned, large, large])
    assert (catalog.pinned_frames, catalog.demand_frames_max, catalog.usable_frames) == (1, 3, 5)
    catalog.check([ChunkSpec((FRAME, FRAME, 3 * FRAME))])
    catalog.check([pinned] * 2)
    for spec, smallest in ((ChunkSpec((FRAME, FRAME, 3 * FRAME + 1)), 7), (ChunkSpec((FRAME,) * 8), 9)):
        with pytest.raises(BudgetError) as caught:
            catalog.register([spec])
        assert caught.value.smallest_bytes == smallest * FRAME
        assert caught.value.budget_bytes == 6 * FRAME
    with pytest.raises(BudgetError) as caught:
        catalog.register([pinned] * 3)
    assert caught.value.smallest_bytes == 7 * FRAME
    catalog.retire(second)
    assert catalog.demand_frames_max == 3, "another one is as large"
    catalog.retire(first)
    assert (catalog.pinned_frames, catalog.usable_frames) == (0, 6)
    catalog.check([ChunkSpec((FRAME,) * 6)])


def test_a_refusal_for_space_gives_everything_back() -> None:
    catalog = catalog_of(pages=(3, 2), chunks_max=4)
    before = catalog.geometry()
    with pytest.raises(SwapSpaceError) as caught:
        catalog.register([ChunkSpec((PAGE_BYTES,)), ChunkSpec((0,)), ChunkSpec((PAGE_BYTES,)),
                          ChunkSpec((3 * PAGE_BYTES,))])  # fmt: skip
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (3 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert free_pages(catalog) == [3, 2]
    assert (catalog.geometry(), catalog.chunks, catalog.demand_frames_max) == (before, {}, 0)
    assert [chunk.chunk_id for chunk in catalog.register([ONE] * 4)] == [0, 1, 2, 3], "ids, too"
    assert [catalog.chunks[i].file for i in range(4)] == [0, 1, 0, 1]


def test_files_take_turns_from_one_registration_to_the_next() -> None:
    catalog = catalog_of(pages=(9, 9, 9))
    assert [chunk.file for chunk in catalog.register([ONE] * 2)] == [0, 1]
    assert [chunk.file for chunk in catalog.register([ONE] * 2)] == [2, 0]
    specs = [ChunkSpec((9 * PAGE_BYTES,)), ChunkSpec((10 * PAGE_BYTES,)), ONE]
    assert catalog.swap_bytes_needed(specs) == [0, PAGE_BYTES, 2 * PAGE_BYTES]


def test_a_chunk_that_goes_leaves_its_id_and_extent() -> None:
    catalog = catalog_of(pages=(4,))
    first, second = catalog.register([ChunkSpec((2 * PAGE_BYTES,)), ChunkSpec((FRAME,), pinned_mask=1)])
    catalog.retire(first)
    assert free_pages(catalog) == [2], "its extent may still be written"
    assert catalog.kind_masks()[:3].tolist() == [0, 1, 0]
    assert first.retired
    catalog.remove(first)
    catalog.retire(second)
    catalog.remove(second)
    assert free_pages(catalog) == [4]
    assert catalog.chunks == {}
    assert [chunk.chunk_id for chunk in catalog.register([ONE])] == [0]


def test_views_for_a_plan_count_what_streams_by_id() -> None:
    catalog = catalog_of(num_frames=16)
    specs = [ONE, ChunkSpec((2 * FRAME, FRAME), pinned_mask=0b10), ChunkSpec((0, 3 * FRAME))]
    chunks = catalog.register(specs)
    frames = catalog.object_frames()
    assert (frames.dtype, len(frames)) == (np.dtype(np.uint8), 3 * KINDS_MAX)
    assert {int(i): int(frames[i]) for i in np.flatnonzero(frames)} == {0: 1, KINDS_MAX: 2, 2 * KINDS_MAX + 1: 3}
    assert catalog.kind_masks()[:4].tolist() == [0b1, 0b11, 0b10, 0]
    assert catalog.geometry() == Geometry(FRAME, tuple(specs))
    catalog.retire(chunks[0])
    absent = ChunkSpec((0,) * KINDS_MAX)
    assert catalog.geometry() == Geometry(FRAME, (absent, *specs[1:])), "it is as good as gone"
    catalog.remove(chunks[0])
    assert catalog.geometry() == Geometry(FRAME, (absent, *specs[1:]))
    assert catalog_of().object_frames().tolist() == []
    assert catalog_of().geometry() == Geometry(FRAME, ())
