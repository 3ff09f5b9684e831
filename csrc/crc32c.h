// CRC-32C (Castagnoli, RFC 3720 appendix B.4): the checksum of every piece in the swap files.
//
// 1. Both implementations give the same value for the same bytes, whatever the alignment and however they are split.
// 2. The SSE4.2 one is chosen at run time, once; no build flag is needed and none is assumed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tiered {

// The checksum of `nbytes` at `data`; pass an earlier result as `crc` to continue over the next bytes.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc = 0) noexcept;

// The table implementation alone, on every machine: what `crc32c` is tested against.
std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t crc = 0) noexcept;

// Whether `crc32c` uses the processor's instruction here.
bool crc32c_hardware() noexcept;

}  // namespace tiered
