// One file, below the I/O engine: whole transfers, the checksum of a piece, and the buffer a thread reads into.
//
// 1. A transfer is whole or failed: EINTR and short transfers are continued, end of file is an error.
// 2. Every read, write and checksum goes through `file_calls()`. A test puts a drive that fails in their place, the
// same
//    for whatever engine; left alone they cost a call through a pointer for each piece.
// 3. A Bounce belongs to one thread, which alone hands out and frees its memory.
//
// Leaves to io_engine.h which bytes go where, and what a failure means for its request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tiered {

constexpr std::size_t kBlock = 4096;  // the granularity of direct I/O, for memory, offsets and lengths alike

enum class Fault : std::uint8_t {
  none,
  system,     // a system call failed: `error` is its errno
  short_end,  // the file ended inside the piece
  checksum,   // bytes read differ from the bytes written
  invalid,    // the last write of this piece failed or has not finished
  stalled,    // given up after `seconds`; the system call has not come back
  refused     // not begun: another call on this file was given up and has not come back
};

struct Failure {
  Fault fault = Fault::none;
  int error = 0;
  std::size_t piece = 0;  // index in the request
  double seconds = 0;

  bool failed() const noexcept { return fault != Fault::none; }
  // Whether reading the piece once more may help: a transfer went wrong on its way, not the request for it.
  bool transient() const noexcept;
};

// What stands between the engine and the system. `read` and `write` give the bytes moved or the negated errno. Changed
// only while no engine is open. The layout is fixed: three pointers, in this order.
struct FileCalls {
  std::int64_t (*read)(int fd, void* into, std::size_t nbytes, std::int64_t offset);
  std::int64_t (*write)(int fd, const void* from, std::size_t nbytes, std::int64_t offset);
  std::uint32_t (*checksum)(const void* data, std::size_t nbytes, std::uint32_t before);
};

FileCalls& file_calls() noexcept;

// The two descriptors of the file; `direct` < 0 where the file system takes no direct I/O. A transfer that was cut
// short goes on with the buffered one, as the rest of it may no longer be aligned; so does one that direct I/O calls
// invalid, which hides a limit reached inside a block (EFBIG).
struct Descriptors {
  int buffered;
  int direct;
};

Failure read_whole(Descriptors fds, unsigned char* into, std::size_t nbytes, std::uint64_t offset) noexcept;
Failure write_whole(Descriptors fds, const unsigned char* from, std::size_t nbytes, std::uint64_t offset) noexcept;

constexpr std::size_t round_up(std::size_t nbytes) noexcept { return (nbytes + kBlock - 1) / kBlock * kBlock; }

// A thread's aligned buffer of one piece, made when first needed.
class Bounce {
 public:
  explicit Bounce(std::size_t nbytes) : nbytes_(round_up(nbytes)) {}

  // Null when memory is short; the piece then fails with ENOMEM.
  unsigned char* get() noexcept;

 private:
  struct Free {
    void operator()(unsigned char* memory) const noexcept;
  };
  std::size_t nbytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

}  // namespace tiered
