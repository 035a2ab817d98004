#include "halves.hpp"

#include <algorithm>

namespace infinity {
namespace {

// One pass over a block without a branch, which compilers turn into vector instructions; only a
// block in which something was found is looked at again.
constexpr std::size_t kBlock = 4096;

std::uint32_t shifted(std::int16_t upper) noexcept {
  return static_cast<std::uint32_t>(static_cast<std::uint16_t>(upper)) << 16;
}

std::uint32_t difference(std::int32_t value, std::int16_t upper) noexcept {
  return static_cast<std::uint32_t>(value) - shifted(upper);
}

std::uint32_t beyond_rest(std::uint32_t difference) noexcept { return (difference + 0x8000) >> 16; }

void join_block(const std::int16_t* __restrict uppers, const std::int16_t* __restrict rests,
                const std::int32_t* __restrict markers, std::int32_t* __restrict values,
                std::size_t count, std::int32_t& signs) noexcept {
  std::int32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto rest = static_cast<std::uint32_t>(static_cast<std::int32_t>(rests[i]));
    values[i] = static_cast<std::int32_t>(shifted(uppers[i]) + rest);
    found |= markers[i];
  }
  signs = found;
}

void cut_block(const std::int32_t* __restrict values, const std::int16_t* __restrict uppers,
               std::int16_t* __restrict rests, const std::int32_t* __restrict markers,
               std::size_t count, std::uint32_t& beyond, std::int32_t& signs) noexcept {
  std::uint32_t misfits = 0;
  std::int32_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t rest = difference(values[i], uppers[i]);
    rests[i] = static_cast<std::int16_t>(rest);
    misfits |= beyond_rest(rest);
    found |= markers[i];
  }
  beyond = misfits;
  signs = found;
}

template <typename Predicate>
void collect(std::vector<std::int64_t>& places, std::size_t begin, std::size_t end,
             Predicate&& is_wanted) {
  for (std::size_t i = begin; i < end; ++i) {
    if (is_wanted(i)) places.push_back(static_cast<std::int64_t>(i));
  }
}

}  // namespace

std::vector<std::int64_t> join_halves(std::span<const std::int16_t> uppers,
                                      std::span<const std::int16_t> rests,
                                      std::span<const std::int32_t> markers,
                                      std::span<std::int32_t> values) {
  std::vector<std::int64_t> negative;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, values.size());
    std::int32_t signs = 0;
    join_block(&uppers[begin], &rests[begin], &markers[begin], &values[begin], end - begin, signs);
    if (signs < 0) collect(negative, begin, end, [&](std::size_t i) { return markers[i] < 0; });
  }
  return negative;
}

CutPlaces cut_halves(std::span<const std::int32_t> values, std::span<const std::int16_t> uppers,
                     std::span<std::int16_t> rests, std::span<const std::int32_t> markers) {
  CutPlaces places;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, values.size());
    std::uint32_t beyond = 0;
    std::int32_t signs = 0;
    cut_block(&values[begin], &uppers[begin], &rests[begin], &markers[begin], end - begin, beyond,
              signs);
    if (beyond != 0) {
      collect(places.misfits, begin, end,
              [&](std::size_t i) { return beyond_rest(difference(values[i], uppers[i])) != 0; });
    }
    if (signs < 0) {
      collect(places.negative, begin, end, [&](std::size_t i) { return markers[i] < 0; });
    }
  }
  return places;
}

}  // namespace infinity
