#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace infinity {

// fp32 values, by their bits, in fewer of them.

// Rounds values, in place, to those whose lowest `dropped` bits are zero: up with the chance of
// what is cut off, by a number drawn from `seed` and the value's place, which is `first` and
// onwards. What is not finite stays as it is.
void round_by_chance(std::span<std::int32_t> values, unsigned dropped, std::uint32_t seed,
                     std::uint64_t first);

// Blocks of 64 values as one byte each, and behind all of them one byte a block. A code is the
// value's bits without its sign, rounded (to nearest, ties to even) to 3 bits behind the point, or
// 4 where it is unsigned, less the block's base: 16 powers of two below the block's largest value
// can be told. Code 0 is zero, the largest one NaN, which infinity becomes, too. Below its range a
// signed value becomes zero, and an unsigned one the least that is not: what divides by it must not
// find zero.
constexpr std::size_t kNarrowBlock = 64;

// `stored` has values.size() bytes and one more for each block; values.size() is a multiple of 64.
// Returns whether a value had a sign that unsigned codes have no bit for; it is stored without.
bool narrow_blocks(std::span<const std::int32_t> values, std::span<std::uint8_t> stored,
                   bool is_signed);

void widen_blocks(std::span<const std::uint8_t> stored, std::span<std::int32_t> values,
                  bool is_signed);

}  // namespace infinity
