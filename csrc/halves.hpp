#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace infinity {

// 32-bit values as an upper half that was rounded and a signed rest: value = (upper << 16) + rest,
// modulo 2^32. Which values need more than that, and what is done with them, others decide: the
// places of such are returned, in order.

// Puts values together. Returns where `markers` are negative.
std::vector<std::int64_t> join_halves(std::span<const std::int16_t> uppers,
                                      std::span<const std::int16_t> rests,
                                      std::span<const std::int32_t> markers,
                                      std::span<std::int32_t> values);

struct CutPlaces {
  std::vector<std::int64_t> misfits;   // whose rest takes more than 16 bits
  std::vector<std::int64_t> negative;  // of `markers`
};

// Takes values apart, beside given upper halves.
CutPlaces cut_halves(std::span<const std::int32_t> values, std::span<const std::int16_t> uppers,
                     std::span<std::int16_t> rests, std::span<const std::int32_t> markers);

}  // namespace infinity
