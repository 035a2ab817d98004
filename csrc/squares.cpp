#include "squares.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "clones.hpp"

// No product and sum may become one operation, which rounds once: see CMakeLists.txt.

namespace infinity {
namespace {

[[gnu::always_inline]] inline float number(float value) noexcept { return value; }

[[gnu::always_inline]] inline float number(std::int16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(static_cast<std::uint16_t>(bits)) << 16);
}

// Numbers that are asked for ahead: half the time of what no cache has.
constexpr std::size_t kPrefetchDistance = 1024;

// A row is one vector by name: from lanes in arrays GCC makes vectors across rows, whose numbers it
// then adds up one by one, at a sixth of the speed.
using Row [[gnu::vector_size(kSquareLanes * sizeof(float))]] = float;
using RowBits [[gnu::vector_size(kSquareLanes * sizeof(std::uint32_t))]] = std::uint32_t;
using NarrowBits [[gnu::vector_size(kSquareLanes * sizeof(std::uint16_t))]] = std::uint16_t;

[[gnu::always_inline]] inline void load_row(const float* values, Row& row) noexcept {
  std::memcpy(&row, values, sizeof row);
}

[[gnu::always_inline]] inline void load_row(const std::int16_t* values, Row& row) noexcept {
  NarrowBits narrow;
  std::memcpy(&narrow, values, sizeof narrow);
  const RowBits bits = __builtin_convertvector(narrow, RowBits) << 16;
  std::memcpy(&row, &bits, sizeof row);
}

// Both sums are chains, each rounded as it goes: the lanes are all that can be done at a time.
template <typename Value>
[[gnu::always_inline]] inline void add_rows(const Value* values, std::size_t rows,
                                            float* state) noexcept {
  Row lanes;
  load_row(state, lanes);
  Row nothing = {};
  for (std::size_t row = 0; row < rows; ++row, values += kSquareLanes) {
    __builtin_prefetch(values + kPrefetchDistance);
    Row value;
    load_row(values, value);
    lanes += value * value;
    nothing += value * 0.0F;
  }
  std::memcpy(state, &lanes, sizeof lanes);
  for (std::size_t lane = 0; lane < kSquareLanes; ++lane) state[kSquareState - 1] += nothing[lane];
}

INFINITY_CLONES void add_whole_rows(const float* values, std::size_t rows, float* state) noexcept {
  add_rows(values, rows, state);
}

INFINITY_CLONES void add_whole_rows(const std::int16_t* values, std::size_t rows,
                                    float* state) noexcept {
  add_rows(values, rows, state);
}

template <typename Value>
void add(std::span<const Value> values, std::span<float> state, std::size_t first,
         std::size_t count) {
  const std::size_t in_rows = count - count % kSquareLanes;
  const auto add_one = [&](std::size_t index) {
    const std::size_t place = first + index;
    const float value = number(values[index]);
    if (place < in_rows) {
      state[place % kSquareLanes] += value * value;
    } else {
      state[kSquareLanes + place - in_rows] = value;
    }
    state[kSquareState - 1] += value * 0.0F;
  };
  std::size_t done = 0;
  while (done < values.size() && (first + done) % kSquareLanes != 0) add_one(done++);
  const std::size_t end = std::min(values.size(), in_rows > first ? in_rows - first : 0);
  if (done < end) {
    const std::size_t rows = (end - done) / kSquareLanes;
    add_whole_rows(values.data() + done, rows, state.data());
    done += rows * kSquareLanes;
  }
  while (done < values.size()) add_one(done++);
}

}  // namespace

void add_squares(std::span<const float> values, std::span<float> state, std::size_t first,
                 std::size_t count) {
  add(values, state, first, count);
}

void add_squares(std::span<const std::int16_t> values, std::span<float> state, std::size_t first,
                 std::size_t count) {
  add(values, state, first, count);
}

void norms_of_squares(std::span<const float> states, std::span<const std::int64_t> counts,
                      std::span<float> norms) {
  for (std::size_t column = 0; column < counts.size(); ++column) {
    const auto state = states.subspan(column * kSquareState, kSquareState);
    const auto rest = static_cast<std::size_t>(counts[column]) % kSquareLanes;
    float sum = state[0];
    for (std::size_t lane = 1; lane < kSquareLanes; ++lane) sum += state[lane];
    for (std::size_t index = 0; index < rest; ++index) {
      const float value = state[kSquareLanes + index];
      sum = index < rest / 4 * 4 ? sum + value * value : std::fma(value, value, sum);
    }
    norms[column] = std::sqrt(sum);
  }
}

}  // namespace infinity
