#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace infinity {

// fp32 values, by their bits, as bf16 numbers that they round to and signed rests of 16 bits:
// value = (number << 16) + rest, modulo 2^32. What that cannot say is marked in the sign of a value
// that is never negative; infinity/tiers/halves.py has the table.

// Puts values together, and takes the marks away. Returns the places of the marks, in order.
std::vector<std::int64_t> join_halves(std::span<const std::int16_t> numbers,
                                      std::span<const std::int16_t> rests,
                                      std::span<std::int32_t> markers,
                                      std::span<std::int32_t> values);

// Takes values apart, and marks. Returns the places of the marks, in order; none at all where a
// marker is negative whose sign would be a mark, and then no marker has changed.
std::optional<std::vector<std::int64_t>> cut_halves(std::span<const std::int32_t> values,
                                                    std::span<std::int16_t> numbers,
                                                    std::span<std::int16_t> rests,
                                                    std::span<std::int32_t> markers);

}  // namespace infinity
