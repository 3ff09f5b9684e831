// The native I/O engine: one drive's file, a queue of requests and the threads that serve it.
//
// A request is a list of pieces (memory address, file offset, bytes) that all go one way. Workers take pieces in the
// order of submission and run them in parallel; the request is done when its last piece is.
//
// Invariants:
//  1. A piece is transferred whole or its request fails: EINTR and short transfers are continued, end of file is an
//     error. Every other piece of a failed request is still attempted, and the failure kept is that of the lowest
//     piece.
//  2. A piece has a record in a table of the caller. A write stores the checksum and makes the record `valid`, or
//     `invalid` when it failed. A read looks at the record first: `blank` gives zeros without touching the file,
//     `valid` is read and verified, anything else fails.
//  3. Offsets are multiples of kBlock (submit refuses others). With a direct descriptor, memory that is not aligned,
//  and
//     a tail shorter than kBlock, go through the worker's bounce buffer, and the file is written and read up to the
//     next multiple of kBlock: it must be that long. Without one, exactly the piece's bytes are touched.
//  4. close() and the destructor wait for everything submitted. Nothing is ever dropped silently.
//  5. In a forked child there are no workers: submit and waits that would block throw, close() does nothing, and the
//     state is left alone, as a lock may have been held while forking.
//
// Lifetime: memory, record table and both descriptors belong to the caller and outlive the request (memory, table) or
// close() (descriptors). Knows addresses and byte counts only: no Python, no torch.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace tiered {

constexpr std::size_t kBlock = 4096;  // the granularity of direct I/O, for memory, offsets and lengths alike

enum class Op : std::uint8_t { read, write };

enum class PieceState : std::uint32_t { blank = 0, writing = 1, valid = 2, invalid = 3 };

// Lies in the caller's table, so the layout is fixed: two 32-bit words.
struct PieceRecord {
  std::uint32_t checksum;
  std::uint32_t state;  // a PieceState, accessed atomically
};
static_assert(sizeof(PieceRecord) == 8, "the caller's table is made of pairs of 32-bit words");

struct Piece {
  unsigned char* address;
  std::uint64_t offset;
  std::size_t nbytes;
  std::size_t record;  // index in the caller's table
};

enum class Fault : std::uint8_t {
  none,
  system,     // a system call failed: `error` is its errno
  short_end,  // the file ended inside the piece
  checksum,   // bytes read differ from the bytes written
  invalid     // the last write of this piece failed or has not finished
};

struct Failure {
  Fault fault = Fault::none;
  int error = 0;
  std::size_t piece = 0;  // index in the request

  bool failed() const noexcept { return fault != Fault::none; }
};

// One submitted request, shared by its submitter and the workers.
class Request {
 public:
  Request(Op op, std::vector<Piece> pieces, PieceRecord* records);

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  // Waits up to `seconds` (no limit when negative); returns done().
  bool wait(double seconds) const;

  // The first failed piece; fault none while running and after success.
  Failure failure() const;

  // Asks for `token` among the engine's notifications on completion; false, and no notification, if already done.
  bool notify(std::uint64_t token);

 private:
  friend class IoEngine;

  // Counts one piece as finished; gives the tokens to announce if it was the last.
  std::vector<std::uint64_t> finish(std::size_t piece, const Failure& failure);

  const Op op_;
  const std::vector<Piece> pieces_;
  PieceRecord* const records_;
  const pid_t owner_;
  std::size_t next_ = 0;  // first piece no worker has taken; guarded by the engine's mutex

  mutable std::mutex mutex_;  // guards what follows
  mutable std::condition_variable finished_;
  std::size_t remaining_;
  Failure failure_;
  std::vector<std::uint64_t> tokens_;
  std::atomic<bool> done_;
};

struct Counters {
  std::uint64_t bytes_read = 0;     // of pieces that succeeded; zeros of blank pieces are not read and not counted
  std::uint64_t bytes_written = 0;  // of pieces that succeeded, without padding
  double busy_seconds = 0;          // wall time with at least one piece in flight
};

class IoEngine {
 public:
  // `direct_fd` < 0 means the file system takes no direct I/O. Throws std::invalid_argument on impossible sizes and
  // std::system_error when threads cannot be started.
  IoEngine(int buffered_fd, int direct_fd, unsigned threads, std::size_t piece_bytes);
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Throws std::logic_error after close() or in a forked child, std::invalid_argument on an impossible piece.
  std::shared_ptr<Request> submit(Op op, std::vector<Piece> pieces, PieceRecord* records);

  // Blocks until a request that asked for it is done and gives its token; no value once closed and drained.
  std::optional<std::uint64_t> next_notification();

  // Waits for all requests and ends the workers. Idempotent, but not for two threads at once.
  void close();

  Counters counters() const;

 private:
  struct State;
  class Bounce;

  void work(State& state);
  Failure transfer(const Request& request, std::size_t index, Bounce& bounce, std::size_t& moved) const;
  Failure write_piece(const Piece& piece, PieceRecord& record, Bounce& bounce) const;
  Failure read_piece(const Piece& piece, const PieceRecord& record, Bounce& bounce) const;
  bool in_owner() const noexcept;

  const int buffered_fd_;
  const int direct_fd_;
  const std::size_t piece_bytes_;
  const pid_t owner_;
  std::unique_ptr<State> state_;  // leaked on purpose in a forked child
};

}  // namespace tiered
