// Block checksums: CRC-32C (Castagnoli, RFC 3720 appendix B.4), reflected, init and final xor ~0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace infinity {

// By the CPU's CRC instructions where it has them.
std::uint32_t crc32c(std::span<const std::byte> bytes) noexcept;

// By tables alone; equal to crc32c on every input.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes) noexcept;

// True if crc32c uses CRC instructions on this machine.
bool crc32c_is_accelerated() noexcept;

}  // namespace infinity
