#include "checksum.hpp"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace infinity {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected
using Table = std::array<std::uint32_t, 256>;

// kTables[k][b]: the register after byte b and then k zero bytes.
constexpr std::array<Table, 8> make_tables() {
  std::array<Table, 8> tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      const std::uint32_t previous = tables[k - 1][b];
      tables[k][b] = (previous >> 8) ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}

constexpr std::array<Table, 8> kTables = make_tables();

std::uint64_t load_word(const std::byte* at) noexcept {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

std::uint32_t update_byte(std::uint32_t crc, std::byte byte) noexcept {
  return (crc >> 8) ^ kTables[0][(crc ^ static_cast<std::uint32_t>(byte)) & 0xff];
}

#if defined(__x86_64__) || defined(__aarch64__)

// A CRC instruction takes a word every cycle but answers after three, so four independent lanes
// keep it busy. A lane's register is carried over the lanes behind it by one table look-up per
// byte: kOverLanes[l][k][b] is the register b << 8k after l lanes of zero bytes.
//
// Short lanes, so that all four lie within a few cache lines of one another: from memory that no
// cache holds, lanes of 256 bytes ran at 22 GB/s where lanes of 512 to 2048 ran at 4 to 12, since
// the prefetcher follows one stream but not four within a page.
constexpr std::size_t kLaneBytes = 256;
constexpr std::size_t kLanes = 4;
using ShiftTables = std::array<Table, 4>;

// What the lanes need so many bytes later is asked for: a block that the device has just filled is
// in memory and in no cache, where the prefetcher alone kept the lanes at 13 GB/s; so they run at
// 32 of the 36 that they reach within a cache.
constexpr std::size_t kAheadBytes = 4096;
constexpr std::size_t kCacheLineBytes = 64;

constexpr std::uint32_t multiply(const std::array<std::uint32_t, 32>& matrix, std::uint32_t value) {
  std::uint32_t product = 0;
  for (std::size_t bit = 0; value != 0; ++bit, value >>= 1) {
    if ((value & 1) != 0) product ^= matrix[bit];
  }
  return product;
}

constexpr std::array<std::uint32_t, 32> compose(const std::array<std::uint32_t, 32>& outer,
                                                const std::array<std::uint32_t, 32>& inner) {
  std::array<std::uint32_t, 32> product{};
  for (std::size_t bit = 0; bit < 32; ++bit) product[bit] = multiply(outer, inner[bit]);
  return product;
}

constexpr std::array<ShiftTables, kLanes> make_shifts() {
  // The effect of zero bits on the register is linear: a matrix over GF(2), one column per bit.
  std::array<std::uint32_t, 32> lane{};
  for (std::size_t bit = 0; bit < 32; ++bit) {
    const std::uint32_t value = std::uint32_t{1} << bit;
    lane[bit] = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
  }
  static_assert(std::has_single_bit(kLaneBytes));
  for (std::size_t num_bits = 1; num_bits < kLaneBytes * 8; num_bits *= 2)
    lane = compose(lane, lane);

  std::array<ShiftTables, kLanes> shifts{};
  std::array<std::uint32_t, 32> over = lane;
  for (std::size_t lanes = 1; lanes < kLanes; ++lanes) {
    for (std::size_t k = 0; k < 4; ++k) {
      for (std::uint32_t b = 0; b < 256; ++b) shifts[lanes][k][b] = multiply(over, b << (8 * k));
    }
    over = compose(lane, over);
  }
  return shifts;
}

const std::array<ShiftTables, kLanes> kOverLanes = make_shifts();

std::uint32_t carry(std::uint32_t crc, std::size_t lanes) noexcept {
  const ShiftTables& tables = kOverLanes[lanes];
  return tables[0][crc & 0xff] ^ tables[1][crc >> 8 & 0xff] ^ tables[2][crc >> 16 & 0xff] ^
         tables[3][crc >> 24];
}

#if defined(__x86_64__)
#define INFINITY_CRC_TARGET __attribute__((target("sse4.2")))
INFINITY_CRC_TARGET inline std::uint32_t update_word(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
bool has_crc_instructions() noexcept { return __builtin_cpu_supports("sse4.2") != 0; }
#else
#define INFINITY_CRC_TARGET __attribute__((target("+crc")))
INFINITY_CRC_TARGET inline std::uint32_t update_word(std::uint32_t crc, std::uint64_t word) {
  return __crc32cd(crc, word);
}
bool has_crc_instructions() noexcept { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

INFINITY_CRC_TARGET std::uint32_t crc32c_instructions(std::span<const std::byte> bytes) noexcept {
  std::uint32_t crc = ~std::uint32_t{0};
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= kLanes * kLaneBytes; left -= kLanes * kLaneBytes, at += kLanes * kLaneBytes) {
    for (std::size_t i = 0; i < kLanes * kLaneBytes; i += kCacheLineBytes)
      __builtin_prefetch(at + kAheadBytes + i);
    std::uint32_t lane1 = 0, lane2 = 0, lane3 = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += sizeof(std::uint64_t)) {
      crc = update_word(crc, load_word(at + i));
      lane1 = update_word(lane1, load_word(at + kLaneBytes + i));
      lane2 = update_word(lane2, load_word(at + 2 * kLaneBytes + i));
      lane3 = update_word(lane3, load_word(at + 3 * kLaneBytes + i));
    }
    crc = carry(crc, 3) ^ carry(lane1, 2) ^ carry(lane2, 1) ^ lane3;
  }
  for (; left >= sizeof(std::uint64_t);
       left -= sizeof(std::uint64_t), at += sizeof(std::uint64_t)) {
    crc = update_word(crc, load_word(at));
  }
  for (; left > 0; --left, ++at) crc = update_byte(crc, *at);
  return ~crc;
}

#else

bool has_crc_instructions() noexcept { return false; }
std::uint32_t crc32c_instructions(std::span<const std::byte> bytes) noexcept {
  return crc32c_portable(bytes);
}

#endif

}  // namespace

std::uint32_t crc32c_portable(std::span<const std::byte> bytes) noexcept {
  std::uint32_t crc = ~std::uint32_t{0};
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    const std::uint64_t word = load_word(at) ^ crc;
    crc = kTables[7][word & 0xff] ^ kTables[6][word >> 8 & 0xff] ^ kTables[5][word >> 16 & 0xff] ^
          kTables[4][word >> 24 & 0xff] ^ kTables[3][word >> 32 & 0xff] ^
          kTables[2][word >> 40 & 0xff] ^ kTables[1][word >> 48 & 0xff] ^ kTables[0][word >> 56];
  }
  for (; left > 0; --left, ++at) crc = update_byte(crc, *at);
  return ~crc;
}

bool crc32c_is_accelerated() noexcept {
  static const bool accelerated = has_crc_instructions();
  return accelerated;
}

std::uint32_t crc32c(std::span<const std::byte> bytes) noexcept {
  return crc32c_is_accelerated() ? crc32c_instructions(bytes) : crc32c_portable(bytes);
}

}  // namespace infinity
