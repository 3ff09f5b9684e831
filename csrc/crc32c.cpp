// The two implementations behind crc32c.h.
//
// Portable: eight tables, eight bytes a round. Hardware: the crc32 instruction has a latency of three cycles and a
// throughput of one, so three independent lanes run side by side and are joined with a table that multiplies by
// x^(8 * lane bytes) modulo the polynomial. Tables are built once, on first use (20 KiB). What moves to and from a
// drive is in no near cache, and the processor's own prefetching ends with each page, as a lane does: asking for the
// next round ahead takes memory from 9 to 17 GB/s on one core.
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace tiered {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // 0x1EDC6F41, bits reversed

struct SliceTables {
  std::array<std::array<std::uint32_t, 256>, 8> table;

  SliceTables() noexcept {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? kPolynomial : 0u);
      table[0][byte] = crc;
    }
    for (std::size_t slice = 1; slice < 8; ++slice) {
      for (std::size_t byte = 0; byte < 256; ++byte) {
        const std::uint32_t before = table[slice - 1][byte];
        table[slice][byte] = (before >> 8) ^ table[0][before & 0xFFu];
      }
    }
  }
};

const SliceTables& slice_tables() noexcept {
  static const SliceTables tables;
  return tables;
}

// Takes and returns the register as it stands, without the inversions before the first and after the last byte.
std::uint32_t update_portable(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) noexcept {
  const auto& table = slice_tables().table;
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    word ^= crc;
    crc = 0;
    for (std::size_t byte = 0; byte < 8; ++byte) crc ^= table[7 - byte][(word >> (8 * byte)) & 0xFFu];
  }
  for (; nbytes > 0; ++data, --nbytes) crc = (crc >> 8) ^ table[0][(crc ^ *data) & 0xFFu];
  return crc;
}

#if defined(__x86_64__)

constexpr std::size_t kLane = 4096;  // bytes a lane; three lanes are one round
constexpr std::size_t kLine = 64;    // bytes of a cache line

// What a register becomes when kLane zero bytes pass through it, as four byte-indexed tables (the map is linear).
struct LaneShift {
  std::array<std::array<std::uint32_t, 256>, 4> table;

  LaneShift() noexcept {
    static const unsigned char zeros[kLane] = {};
    std::array<std::uint32_t, 32> basis;
    for (std::size_t bit = 0; bit < 32; ++bit) basis[bit] = update_portable(1u << bit, zeros, kLane);
    for (std::size_t place = 0; place < 4; ++place) {
      for (std::size_t byte = 0; byte < 256; ++byte) {
        std::uint32_t sum = 0;
        for (std::size_t bit = 0; bit < 8; ++bit) {
          if ((byte >> bit) & 1u) sum ^= basis[8 * place + bit];
        }
        table[place][byte] = sum;
      }
    }
  }

  std::uint32_t operator()(std::uint32_t crc) const noexcept {
    return table[0][crc & 0xFFu] ^ table[1][(crc >> 8) & 0xFFu] ^ table[2][(crc >> 16) & 0xFFu] ^ table[3][crc >> 24];
  }
};

std::uint64_t word_at(const unsigned char* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

__attribute__((target("sse4.2"))) std::uint32_t update_sse42(std::uint32_t crc, const unsigned char* data,
                                                             std::size_t nbytes) noexcept {
  static const LaneShift shift;
  for (; nbytes >= 3 * kLane; data += 3 * kLane, nbytes -= 3 * kLane) {
    std::uint64_t first = crc, second = 0, third = 0;
    for (std::size_t line = 0; line < kLane; line += kLine) {
      const unsigned char* const next = data + 3 * kLane + line;  // of the next round; past the end it is no fault
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(next + kLane), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(next + 2 * kLane), _MM_HINT_T0);
      for (std::size_t at = line; at < line + kLine; at += 8) {
        first = _mm_crc32_u64(first, word_at(data + at));
        second = _mm_crc32_u64(second, word_at(data + kLane + at));
        third = _mm_crc32_u64(third, word_at(data + 2 * kLane + at));
      }
    }
    crc = shift(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    crc = shift(crc) ^ static_cast<std::uint32_t>(third);
  }
  std::uint64_t wide = crc;
  for (; nbytes >= 8; data += 8, nbytes -= 8) wide = _mm_crc32_u64(wide, word_at(data));
  crc = static_cast<std::uint32_t>(wide);
  for (; nbytes > 0; ++data, --nbytes) crc = _mm_crc32_u8(crc, *data);
  return crc;
}

#endif

using Update = std::uint32_t (*)(std::uint32_t, const unsigned char*, std::size_t) noexcept;

Update choose_update() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return update_sse42;
#endif
  return update_portable;
}

Update chosen_update() noexcept {
  static const Update update = choose_update();
  return update;
}

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc) noexcept {
  return ~chosen_update()(~crc, static_cast<const unsigned char*>(data), nbytes);
}

std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t crc) noexcept {
  return ~update_portable(~crc, static_cast<const unsigned char*>(data), nbytes);
}

bool crc32c_hardware() noexcept { return chosen_update() != update_portable; }

}  // namespace tiered
