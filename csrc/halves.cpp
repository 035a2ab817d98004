#include "halves.hpp"

#include <algorithm>

#include "clones.hpp"

namespace infinity {
namespace {

// One pass over a block without a branch, which compilers turn into vector instructions; only a
// block in which something was found is looked at again, while the caches have it. Markers are
// looked at there alone: their signs mean something beside ties and NaNs only, and reading all of
// them would be a quarter of the memory that moves. A tie comes every 65,536 values.
constexpr std::size_t kBlock = 1024;
constexpr std::uint32_t kSign = 0x8000'0000;
constexpr std::uint32_t kInfinity = 0x7F80;
constexpr std::uint32_t kFirstNan = 0x7F81, kLastNan = 0x7FFF;
constexpr std::int32_t kTie = -0x8000;
constexpr std::uint32_t kMark = 0x1'0000;

[[gnu::always_inline]] inline std::uint32_t shifted(std::int16_t number) noexcept {
  return static_cast<std::uint32_t>(static_cast<std::uint16_t>(number)) << 16;
}

// Whether a marker may have a meaning somewhere in the block.
INFINITY_CLONES std::uint32_t join_block(const std::int16_t* __restrict numbers,
                                         const std::int16_t* __restrict rests,
                                         std::int32_t* __restrict values,
                                         std::size_t count) noexcept {
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t number = shifted(numbers[i]);
    const std::int32_t rest = rests[i];
    values[i] = static_cast<std::int32_t>(number + static_cast<std::uint32_t>(rest));
    const std::uint32_t is_tie = rest == kTie ? 1U : 0U;
    const std::uint32_t is_nan = (number & ~kSign) > kInfinity << 16 ? 1U : 0U;
    found |= is_tie | is_nan;
  }
  return found;
}

// Whether there is a tie or a NaN in the block: all else is its rounding and a rest of 16 bits.
INFINITY_CLONES std::uint32_t cut_block(const std::int32_t* __restrict values,
                                        std::int16_t* __restrict numbers,
                                        std::int16_t* __restrict rests,
                                        std::size_t count) noexcept {
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = static_cast<std::uint32_t>(values[i]);
    const std::uint32_t number = (value + 0x7FFF + (value >> 16 & 1)) >> 16;
    numbers[i] = static_cast<std::int16_t>(number);
    rests[i] = static_cast<std::int16_t>(value - (number << 16));
    const std::uint32_t is_tie = (value & 0xFFFF) == 0x8000 ? 1U : 0U;
    const std::uint32_t is_nan = (value & ~kSign) > kInfinity << 16 ? 1U : 0U;
    found |= is_tie | is_nan;
  }
  return found;
}

// Takes one value apart that its own rounding and a rest may not give; whether it needs a mark.
bool cut_by_hand(std::uint32_t value, std::int16_t& number, std::int16_t& rest) noexcept {
  const std::uint32_t sign = value & kSign, magnitude = value & ~kSign, half = magnitude >> 16;
  const bool is_nan = magnitude > kInfinity << 16;
  const std::uint32_t upper = is_nan ? std::clamp((magnitude + 0x8000) >> 16, kFirstNan, kLastNan)
                                     : (magnitude + 0x7FFF + (half & 1)) >> 16;
  const auto lower = static_cast<std::int32_t>(magnitude - (upper << 16));
  number = static_cast<std::int16_t>(upper | sign >> 16);
  rest = static_cast<std::int16_t>(lower);  // modulo 2^16: what a mark adds or takes away
  return lower < kTie || lower >= -kTie;
}

// What a mark adds to a value as an integer: 0 where there is none.
std::uint32_t meaning(std::int16_t number, std::int16_t rest) noexcept {
  const auto magnitude = static_cast<std::uint32_t>(number) & 0x7FFF;
  if (rest == kTie && magnitude < kInfinity && magnitude % 2 == 0) return kMark;
  if (magnitude == kLastNan && rest < 0) return kMark;
  return magnitude == kFirstNan && rest > 0 ? 0 - kMark : 0;
}

void flip(std::int32_t& marker) noexcept {
  marker = static_cast<std::int32_t>(static_cast<std::uint32_t>(marker) ^ kSign);
}

}  // namespace

std::vector<std::int64_t> join_halves(std::span<const std::int16_t> numbers,
                                      std::span<const std::int16_t> rests,
                                      std::span<std::int32_t> markers,
                                      std::span<std::int32_t> values) {
  std::vector<std::int64_t> marks;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, values.size());
    if (join_block(&numbers[begin], &rests[begin], &values[begin], end - begin) == 0) continue;
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t change = markers[i] < 0 ? meaning(numbers[i], rests[i]) : 0;
      if (change == 0) continue;
      values[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(values[i]) + change);
      flip(markers[i]);
      marks.push_back(static_cast<std::int64_t>(i));
    }
  }
  return marks;
}

std::optional<std::vector<std::int64_t>> cut_halves(std::span<const std::int32_t> values,
                                                    std::span<std::int16_t> numbers,
                                                    std::span<std::int16_t> rests,
                                                    std::span<std::int32_t> markers) {
  std::vector<std::int64_t> marks;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, values.size());
    if (cut_block(&values[begin], &numbers[begin], &rests[begin], end - begin) == 0) continue;
    for (std::size_t i = begin; i < end; ++i) {
      if (cut_by_hand(static_cast<std::uint32_t>(values[i]), numbers[i], rests[i])) {
        marks.push_back(static_cast<std::int64_t>(i));
      }
      if (markers[i] < 0 && meaning(numbers[i], rests[i]) != 0) return std::nullopt;
    }
  }
  for (const std::int64_t place : marks) flip(markers[static_cast<std::size_t>(place)]);
  return marks;
}

}  // namespace infinity
