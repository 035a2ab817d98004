from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_daemon._native import checksum, checksum_portable

POLYNOMIAL = 0x82F6_3B78
LANES_BYTES = 1024
"""The instructions work on four interleaved lanes of a quarter each."""


def crc32c_by_bits(data: bytes) -> int:
    """CRC-32C as RFC 3720 defines it, a bit at a time."""
    register = 0xFFFF_FFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (POLYNOMIAL if register & 1 else 0)
    return register ^ 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE306_9283),
        (bytes(32), 0x8A91_36AA),
        (b"\xff" * 32, 0x62A8_AB43),
        (bytes(range(32)), 0x46DD_794E),
    ],
)
def test_vectors_of_rfc_3720(data: bytes, expected: int) -> None:
    array = np.frombuffer(data, np.uint8)
    assert (checksum(array), checksum_portable(array)) == (expected, expected)


@given(st.binary(max_size=200))
def test_both_implementations_follow_the_definition(data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    assert checksum(array) == checksum_portable(array) == crc32c_by_bits(data)


@pytest.mark.parametrize("extra_bytes", [-1, 0, 1, 7, 8, 9, 4095, 4096])
@pytest.mark.parametrize("misalignment", [0, 1, 5])
def test_lanes_fold_to_the_same_value(extra_bytes: int, misalignment: int) -> None:
    data = np.random.default_rng(extra_bytes + 1).integers(0, 256, 4 * LANES_BYTES, dtype=np.uint8)
    part = data[misalignment : misalignment + 2 * LANES_BYTES + extra_bytes]
    assert checksum(part) == checksum_portable(part)


def test_every_flipped_bit_of_a_page_is_seen() -> None:
    page = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    sums = {checksum(page)}
    for bit in range(0, 4096 * 8, 61):
        page[bit // 8] ^= 1 << bit % 8
        sums.add(checksum(page))
        page[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + len(range(0, 4096 * 8, 61))


def test_bytes_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(TypeError):
        checksum(np.zeros(64, np.uint8)[::2])
    with pytest.raises(TypeError):
        checksum(np.zeros(64, np.uint16))
