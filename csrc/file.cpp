// The loops and the system calls behind file.h.
#include "file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "crc32c.h"

namespace tiered {
namespace {

std::int64_t system_read(int fd, void* into, std::size_t nbytes, std::int64_t offset) {
  const ssize_t got = ::pread(fd, into, nbytes, static_cast<off_t>(offset));
  return got < 0 ? -errno : got;
}

std::int64_t system_write(int fd, const void* from, std::size_t nbytes, std::int64_t offset) {
  const ssize_t got = ::pwrite(fd, from, nbytes, static_cast<off_t>(offset));
  return got < 0 ? -errno : got;
}

FileCalls calls{system_read, system_write, crc32c};

template <typename Call>
Failure run_whole(Call call, Descriptors fds, std::size_t nbytes, std::uint64_t offset) noexcept {
  int fd = fds.direct < 0 ? fds.buffered : fds.direct;
  std::size_t moved = 0;
  while (moved < nbytes) {
    const std::int64_t got = call(fd, moved, nbytes - moved, static_cast<std::int64_t>(offset + moved));
    if (got == -EINTR) continue;
    if (got == -EINVAL && fd != fds.buffered) {
      fd = fds.buffered;
      continue;
    }
    if (got < 0) return Failure{Fault::system, static_cast<int>(-got), 0, 0};
    if (got == 0) return Failure{Fault::short_end, 0, 0, 0};
    moved += static_cast<std::size_t>(got);
    fd = fds.buffered;
  }
  return Failure{};
}

}  // namespace

FileCalls& file_calls() noexcept { return calls; }

bool Failure::transient() const noexcept {
  if (fault == Fault::checksum) return true;
  if (fault != Fault::system) return false;
  switch (error) {
    case EIO:
    case ENODATA:  // from here on what the block layer itself says of a medium, its protection, a lost command, a link
    case EILSEQ:   //
    case ETIMEDOUT:  //
    case ENOLINK:    //
    case EREMOTEIO:  //
      return true;
    default:
      return false;
  }
}

Failure read_whole(Descriptors fds, unsigned char* into, std::size_t nbytes, std::uint64_t offset) noexcept {
  const auto call = [into](int fd, std::size_t moved, std::size_t left, std::int64_t at) {
    return calls.read(fd, into + moved, left, at);
  };
  return run_whole(call, fds, nbytes, offset);
}

Failure write_whole(Descriptors fds, const unsigned char* from, std::size_t nbytes, std::uint64_t offset) noexcept {
  const auto call = [from](int fd, std::size_t moved, std::size_t left, std::int64_t at) {
    return calls.write(fd, from + moved, left, at);
  };
  return run_whole(call, fds, nbytes, offset);
}

unsigned char* Bounce::get() noexcept {
  if (!memory_) memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(kBlock, nbytes_)));
  return memory_.get();
}

void Bounce::Free::operator()(unsigned char* memory) const noexcept { std::free(memory); }

}  // namespace tiered
