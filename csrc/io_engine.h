// The native I/O engine: one drive's file, a queue of requests and the threads that serve it.
//
// A request is a list of pieces (memory address, file offset, bytes) that all go one way. Workers take pieces in the
// order of submission and run them in parallel; the request is done when its last piece is.
//
//     queued --worker--> under way --call comes back--> settled
//                          |  `- late -- replace() -- under way twice (reads) --the first of them--> settled
//                          `- late -- give_up() --> settled (stalled); what is queued then --> settled (refused)
//
// Invariants:
//  1. A piece is transferred whole or its request fails (file.h). Every other piece of a failed request is still
//     attempted, and the failure kept is that of the lowest piece. A read that failed on its way is tried once more.
//  2. A piece has a record in a table of the caller. A write stores the checksum and makes the record `valid`, or
//     `invalid` when it failed. A read looks at the record first: `blank` gives zeros without touching the file,
//     `valid` is read and verified, anything else fails.
//  3. Offsets are multiples of kBlock (submit refuses others). With a direct descriptor, memory that is not aligned,
//  and
//     a tail shorter than kBlock, go through the worker's bounce buffer, and the file is written and read up to the
//     next multiple of kBlock: it must be that long. Without one, exactly the piece's bytes are touched.
//  4. A piece is settled once, by whoever claims it under the mutex. The first call of a read moves bytes to the
//     caller's memory, the second one to a bounce buffer, which serves should the first come back with nothing good. So
//     a request that is done never touches its memory again, unless it is `stranded`: a read of it was given up, and
//     the call may fill that memory at any later moment.
//  5. A late write reads the caller's memory through the kernel alone, for a piece that is `invalid` until it is
//  written
//     again; and while a call that was given up is out, nothing is begun. So no two writes of a piece race.
//  6. A worker whose call is late is replaced, and leaves when the call comes back: late calls cost no throughput. Of
//     two attempts at a read it is the one still out whose worker is replaced.
//  7. close() and the destructor wait for every request. Nothing is ever dropped silently. What outlives close() are
//     threads in calls that do not come back; they share the state, never the engine, and touch only what is their own.
//  8. In a forked child there are no workers: submit and waits that would block throw, close() does nothing, and the
//     state is left alone, as a lock may have been held while forking.
//
// Lifetime: memory and record table belong to the caller and outlive the request; both descriptors outlive close(), and
// the process where it leaves threads behind. Who is late, and when that is enough, is the caller's to say. Knows
// addresses and byte counts only: no Python, no torch.
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

#include "file.h"

namespace tiered {

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

// One submitted request, shared by its submitter and the workers.
class Request {
 public:
  Request(Op op, std::vector<Piece> pieces, PieceRecord* records);

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  // Waits up to `seconds` (no limit when negative); returns done().
  bool wait(double seconds) const;

  // The first failed piece; fault none while running and after success.
  Failure failure() const;

  // Whether a read of it was given up: its memory belongs to a call that may not have come back.
  bool stranded() const noexcept { return stranded_.load(std::memory_order_acquire); }

  // Asks for `token` among the engine's notifications on completion; false, and no notification, if already done.
  bool notify(std::uint64_t token);

 private:
  friend class IoEngine;

  // True for the first who asks for a piece: it is theirs to settle. Guarded by the engine's mutex.
  bool claim(std::size_t piece);

  // Counts one piece as finished; gives the tokens to announce if it was the last.
  std::vector<std::uint64_t> finish(std::size_t piece, const Failure& failure);

  const Op op_;
  const std::vector<Piece> pieces_;
  PieceRecord* const records_;
  const pid_t owner_;
  std::size_t next_ = 0;       // first piece no worker has taken; guarded by the engine's mutex,
  std::vector<bool> claimed_;  // and so are these

  mutable std::mutex mutex_;  // guards what follows
  mutable std::condition_variable finished_;
  std::size_t remaining_;
  Failure failure_;
  std::vector<std::uint64_t> tokens_;
  std::atomic<bool> done_;
  std::atomic<bool> stranded_{false};
};

struct Counters {
  std::uint64_t bytes_read = 0;     // of pieces that succeeded; zeros of blank pieces are not read and not counted
  std::uint64_t bytes_written = 0;  // of pieces that succeeded, without padding
  double busy_seconds = 0;          // wall time with at least one piece in flight
  std::uint64_t retries = 0;        // reads made once more, after a failure or because they were late
  std::uint64_t stalls = 0;         // calls that were late
};

// A piece whose call has been out for `seconds`.
struct Late {
  std::uint64_t id;
  Op op;
  std::uint64_t offset;
  std::size_t nbytes;
  double seconds;
};

// A read that failed on its way and was made once more.
struct Trouble {
  Failure failure;
  std::uint64_t offset;
  std::size_t nbytes;
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

  // Pieces whose first call has been out for more than `seconds`.
  std::vector<Late> late(double seconds) const;

  // Puts another worker in the place of one that is late; for a read it begins by trying the piece again. False where
  // the piece is settled or was tried again, or the system has no thread.
  bool replace(std::uint64_t id);

  // Settles a piece as stalled, and what is queued as refused. False where the piece is settled.
  bool give_up(std::uint64_t id);

  // Reads made once more after a failure, since the last call.
  std::vector<Trouble> troubles();

  // Waits for all requests, and then up to `seconds` (no limit when negative) for calls that are late; ends the workers
  // and returns how many had to be left in the system. Idempotent, but not for two threads at once.
  std::size_t close(double seconds = -1);

  Counters counters() const;

 private:
  struct State;

  bool in_owner() const noexcept;
  void start(std::shared_ptr<Request> again, std::size_t index);

  const pid_t owner_;
  std::shared_ptr<State> state_;  // leaked on purpose in a forked child
};

}  // namespace tiered
