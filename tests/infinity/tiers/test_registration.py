"""What of an arena is registered with CUDA at once."""

from __future__ import annotations

import pytest

from infinity.tiers import daemon
from infinity.tiers.daemon import pieces_of_frames
from io_daemon.shared.arena import arena_bytes, frame_offset


@pytest.mark.parametrize("piece_bytes_max", [1, 4096, 10_000, 65_536, 1 << 30])
@pytest.mark.parametrize(("num_frames", "frame_bytes"), [(1, 4096), (7, 4096), (5, 12_288), (3, 65_536)])
def test_every_frame_lies_in_one_piece(
    num_frames: int, frame_bytes: int, piece_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "CUDA_REGISTER_BYTES_MAX", piece_bytes_max)
    pieces = pieces_of_frames(arena_bytes(num_frames, frame_bytes), frame_bytes)
    for frame in range(num_frames):
        first = frame_offset(frame, frame_bytes)
        assert sum(begin <= first and first + frame_bytes <= end for begin, end in pieces) == 1
    assert all(begin % 4096 == 0 and end - begin <= max(piece_bytes_max, frame_bytes) for begin, end in pieces)
    assert [begin for begin, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
