// The inside of the I/O engine: what is queued and under way, and the workers that move it.
//
// 1. `mutex` guards all that is not const here, and each Request's `next_` and `claimed_`. Request::mutex_, which
// guards
//    one request's outcome, is the inner one where both are held. Neither is held over a transfer, a checksum or a
//    copy.
// 2. An attempt is under way from just before its first system call to just after its last. Between the two a worker
//    changes no byte of the caller's but where a first read is to go: what it needs of the record it has noted, what it
//    writes from the bounce buffer it has copied. So a piece that is under way can be given up at any moment.
// 3. Of two attempts at a read the first settles the piece, once its own calls are over; what the second has brought by
//    then is its `spare`.
//
// Included by io_engine.cpp and io_workers.cpp alone.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "io_engine.h"

namespace tiered {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

inline double seconds_since(Clock::time_point begun) {
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

// Capped, as a far deadline would overflow the clock's integer; callers wait again while there is need.
inline Clock::time_point after(double seconds) {
  const auto limit = std::chrono::duration<double>(seconds < 1e6 ? seconds : 1e6);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
}

struct IoEngine::State {
  // One worker's try at one piece.
  struct Attempt {
    std::shared_ptr<Request> request;
    std::size_t index;
    Clock::time_point begun;
    bool first;             // of the two that a late read gets
    bool replaced = false;  // another worker has the place of this one
    bool given_up = false;
    std::optional<Bounce> spare;  // the piece's bytes, should this attempt fail
  };
  struct Worker {
    std::thread thread;
    bool left = false;  // said as its last act under the mutex
  };
  // What became of an attempt.
  struct Outcome {
    Failure failure;
    Failure trouble;  // that of the first read, where it was made once more
    bool blank = false;
    bool replaced = false;
    std::size_t in_place = 0;     // bytes of a good read that are where they belong; the rest lies in the
    std::optional<Bounce> spare;  // or else in the worker's own buffer
  };

  State(Descriptors descriptors, std::size_t bytes) : fds(descriptors), piece_bytes(bytes) {}

  // A worker's life. `again`: a piece whose worker is late, to begin with.
  void work(Worker& self, std::shared_ptr<Request> again, std::size_t index);
  // Ends a claimed piece.
  void settle(Request& request, std::size_t index, const Failure& failure);
  // Ends what no worker has taken of a request.
  void refuse(Request& request);

  const Descriptors fds;
  const std::size_t piece_bytes;

  mutable std::mutex mutex;
  std::condition_variable work_ready;
  std::condition_variable notification_ready;
  std::condition_variable settled;  // a piece is, or a worker has left
  std::deque<std::shared_ptr<Request>> queue;
  std::map<std::uint64_t, Attempt> under_way;
  std::uint64_t next_id = 0;
  std::size_t unsettled = 0;  // pieces submitted and not settled
  std::size_t absent = 0;     // attempts given up whose call has not come back
  std::deque<std::uint64_t> notifications;
  std::vector<Trouble> troubles;
  std::list<Worker> workers;
  bool stopping = false;  // no new requests; workers leave when the queue is empty
  bool drained = false;   // every request is done; no further notification can appear
  std::size_t in_flight = 0;
  Clock::time_point busy_since;
  Counters counters;

 private:
  bool attempt(Lock& lock, const std::shared_ptr<Request>& request, std::size_t index, bool first, Bounce& bounce);
  std::size_t direct_bytes(const Piece& piece) const noexcept;
  Attempt* other_of(const Attempt& attempt) noexcept;
  static bool worth_another(Lock& lock, const Attempt& attempt);
  Failure prepare_write(const Piece& piece, PieceRecord& record, Bounce& bounce) const;
  Failure write_piece(const Piece& piece, Bounce& bounce) const;
  Failure read_piece(const Piece& piece, std::size_t in_place, std::uint32_t checksum, Bounce& bounce) const;
  void call(Lock& lock, Attempt attempt, std::uint32_t checksum, Bounce& bounce, Outcome& outcome);
  void deliver(const Request& request, std::size_t index, const Outcome& outcome, Bounce& bounce) const;
};

PieceState state_of(const PieceRecord& record) noexcept;
void set_state(PieceRecord& record, PieceState state) noexcept;

}  // namespace tiered
