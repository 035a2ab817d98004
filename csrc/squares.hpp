#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace infinity {

// The norm of a column of numbers that comes in parts, in the order of torch's norm of a contiguous
// fp32 tensor on a CPU: eight lanes, to which whole rows of eight are added one after another, each
// product and each sum rounded; the lanes are then added up, and behind them what is left of the
// column, which makes no whole row: four squares, if there are as many, and the rest by operations
// that round product and sum once.
constexpr std::size_t kSquareLanes = 8;

// The lanes, the (at most seven) numbers behind the last whole row, and 0, or NaN where a number of
// the column is not finite: a sum of squares may also be too large for fp32.
constexpr std::size_t kSquareState = 2 * kSquareLanes;

// Goes on with numbers [first, first + values.size()) of `count` in all. A column begins with a
// state of zeros.
void add_squares(std::span<const float> values, std::span<float> state, std::size_t first,
                 std::size_t count);

// The same of numbers in bf16, given by their bits.
void add_squares(std::span<const std::int16_t> values, std::span<float> state, std::size_t first,
                 std::size_t count);

// What comes of columns: `states` has one after another, `counts` how many numbers each column had.
void norms_of_squares(std::span<const float> states, std::span<const std::int64_t> counts,
                      std::span<float> norms);

}  // namespace infinity
