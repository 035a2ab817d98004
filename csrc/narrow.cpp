#include "narrow.hpp"

#include <algorithm>

#include "clones.hpp"

namespace infinity {
namespace {

constexpr std::uint32_t kMagnitude = 0x7FFF'FFFF;
constexpr std::uint32_t kInfinity = 0x7F80'0000;
constexpr std::uint32_t kNan = 0x7FC0'0000;
constexpr std::uint32_t kMantissaBits = 23;

[[gnu::always_inline]] inline std::uint32_t mixed(std::uint32_t bits) noexcept {
  bits ^= bits >> 16;
  bits *= 0x85EB'CA6BU;
  bits ^= bits >> 13;
  bits *= 0xC2B2'AE35U;
  return bits ^ bits >> 16;
}

INFINITY_CLONES void round_all(std::uint32_t* __restrict values, std::size_t count,
                               unsigned dropped, std::uint32_t seed, std::uint32_t first) noexcept {
  const std::uint32_t cut = (1U << dropped) - 1;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t value = values[i];
    const std::uint32_t drawn =
        mixed((first + static_cast<std::uint32_t>(i)) * 0x9E37'79B1U ^ seed);
    const std::uint32_t rounded = (value + (drawn & cut)) & ~cut;
    values[i] = (value & kMagnitude) < kInfinity ? rounded : value;
  }
}

[[gnu::always_inline]] inline std::uint32_t rounded_magnitude(std::uint32_t value,
                                                              unsigned dropped) noexcept {
  const std::uint32_t magnitude = value & kMagnitude;
  return (magnitude + (1U << (dropped - 1)) - 1 + (magnitude >> dropped & 1)) >> dropped;
}

// The values of a block are the `2^code_bits` largest numbers that its base reaches up from: the
// base is a whole power of two, so that one byte holds it, and the largest value gets a code below
// NaN's.
template <unsigned mantissa, bool is_signed>
[[gnu::always_inline]] inline std::uint32_t narrow_block(const std::uint32_t* __restrict values,
                                                         std::uint8_t* __restrict codes,
                                                         std::uint8_t& power) noexcept {
  constexpr unsigned dropped = kMantissaBits - mantissa;
  constexpr std::int32_t code_max = is_signed ? 127 : 255;
  constexpr std::int32_t powers = (code_max + 1) >> mantissa;
  constexpr std::uint32_t infinite = kInfinity >> dropped;
  std::uint32_t rounded[kNarrowBlock];
  std::uint32_t largest = 0, signs = 0;
  for (std::size_t i = 0; i < kNarrowBlock; ++i) {
    const std::uint32_t magnitude = values[i] & kMagnitude;
    rounded[i] = rounded_magnitude(values[i], dropped);
    signs |= values[i] & (0U - magnitude);  // the highest bit, of all but a zero
  }
  for (std::size_t i = 0; i < kNarrowBlock; ++i) {
    const std::uint32_t finite =
        rounded[i] & (0U - static_cast<std::uint32_t>(rounded[i] < infinite));
    largest = std::max(largest, finite);
  }
  const auto top = static_cast<std::int32_t>((largest + 1) >> mantissa);
  const std::int32_t base = (top - (powers - 1)) * (1 << mantissa);
  for (std::size_t i = 0; i < kNarrowBlock; ++i) {
    const std::uint32_t value = values[i];
    constexpr std::int32_t least = is_signed ? 0 : 1;
    std::int32_t code = static_cast<std::int32_t>(rounded[i]) - base;
    code = code < least ? least : code;
    code = (value & kMagnitude) == 0 ? 0 : code;
    code = rounded[i] >= infinite ? code_max : code;
    const std::uint32_t sign = is_signed ? value >> 31 << 7 : 0U;
    codes[i] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(code) | sign);
  }
  power = static_cast<std::uint8_t>(top);
  return signs >> 31;
}

template <unsigned mantissa, bool is_signed>
[[gnu::always_inline]] inline void widen_block(const std::uint8_t* __restrict codes,
                                               std::uint8_t power,
                                               std::uint32_t* __restrict values) noexcept {
  constexpr unsigned dropped = kMantissaBits - mantissa;
  constexpr std::int32_t code_max = is_signed ? 127 : 255;
  constexpr std::int32_t powers = (code_max + 1) >> mantissa;
  const std::int32_t base = (static_cast<std::int32_t>(power) - (powers - 1)) * (1 << mantissa);
  for (std::size_t i = 0; i < kNarrowBlock; ++i) {
    const auto code = static_cast<std::int32_t>(codes[i]) & code_max;
    std::uint32_t value = static_cast<std::uint32_t>(code + base) << dropped;
    value = code == 0 ? 0U : value;
    value = code == code_max ? kNan : value;
    const std::uint32_t sign = is_signed ? static_cast<std::uint32_t>(codes[i]) >> 7 << 31 : 0U;
    values[i] = value | sign;
  }
}

INFINITY_CLONES std::uint32_t narrow_signed(const std::uint32_t* values, std::uint8_t* codes,
                                            std::uint8_t* powers, std::size_t blocks) noexcept {
  for (std::size_t b = 0; b < blocks; ++b) {
    narrow_block<3, true>(values + b * kNarrowBlock, codes + b * kNarrowBlock, powers[b]);
  }
  return 0;
}

INFINITY_CLONES std::uint32_t narrow_unsigned(const std::uint32_t* values, std::uint8_t* codes,
                                              std::uint8_t* powers, std::size_t blocks) noexcept {
  std::uint32_t negative = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    negative |=
        narrow_block<4, false>(values + b * kNarrowBlock, codes + b * kNarrowBlock, powers[b]);
  }
  return negative;
}

INFINITY_CLONES void widen_signed(const std::uint8_t* codes, const std::uint8_t* powers,
                                  std::uint32_t* values, std::size_t blocks) noexcept {
  for (std::size_t b = 0; b < blocks; ++b) {
    widen_block<3, true>(codes + b * kNarrowBlock, powers[b], values + b * kNarrowBlock);
  }
}

INFINITY_CLONES void widen_unsigned(const std::uint8_t* codes, const std::uint8_t* powers,
                                    std::uint32_t* values, std::size_t blocks) noexcept {
  for (std::size_t b = 0; b < blocks; ++b) {
    widen_block<4, false>(codes + b * kNarrowBlock, powers[b], values + b * kNarrowBlock);
  }
}

// fp32 values and their bits have one size, and integers of both signs may alias.
std::uint32_t* bits_of(std::int32_t* values) noexcept {
  return reinterpret_cast<std::uint32_t*>(values);
}

const std::uint32_t* bits_of(const std::int32_t* values) noexcept {
  return reinterpret_cast<const std::uint32_t*>(values);
}

}  // namespace

void round_by_chance(std::span<std::int32_t> values, unsigned dropped, std::uint32_t seed,
                     std::uint64_t first) {
  round_all(bits_of(values.data()), values.size(), dropped,
            seed ^ mixed(static_cast<std::uint32_t>(first >> 32)),
            static_cast<std::uint32_t>(first));
}

bool narrow_blocks(std::span<const std::int32_t> values, std::span<std::uint8_t> stored,
                   bool is_signed) {
  const auto narrow = is_signed ? narrow_signed : narrow_unsigned;
  return narrow(bits_of(values.data()), stored.data(), stored.data() + values.size(),
                values.size() / kNarrowBlock) != 0;
}

void widen_blocks(std::span<const std::uint8_t> stored, std::span<std::int32_t> values,
                  bool is_signed) {
  const auto widen = is_signed ? widen_signed : widen_unsigned;
  widen(stored.data(), stored.data() + values.size(), bits_of(values.data()),
        values.size() / kNarrowBlock);
}

}  // namespace infinity
