// The workers, the queue and the transfers behind io_engine.h.
//
// Locks: State::mutex guards the queue, the notifications and the counters; Request::mutex_ guards one request's
// outcome and is the inner one where both are held. Neither is held over a transfer.
#include "io_engine.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "crc32c.h"

namespace tiered {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t round_up(std::size_t nbytes) noexcept { return (nbytes + kBlock - 1) / kBlock * kBlock; }

bool aligned(const void* address) noexcept { return reinterpret_cast<std::uintptr_t>(address) % kBlock == 0; }

PieceState state_of(const PieceRecord& record) noexcept {
  return static_cast<PieceState>(__atomic_load_n(&record.state, __ATOMIC_ACQUIRE));
}

void set_state(PieceRecord& record, PieceState state) noexcept {
  __atomic_store_n(&record.state, static_cast<std::uint32_t>(state), __ATOMIC_RELEASE);
}

// The two descriptors of the file. A transfer that was cut short goes on with the buffered one, as the rest of it may
// no longer be aligned; so does one that direct I/O calls invalid, which hides a limit reached inside a block (EFBIG).
struct Descriptors {
  int first;
  int rest;
};

template <typename Call>
Failure run_whole(Call call, Descriptors fds, std::size_t nbytes, std::uint64_t offset) noexcept {
  int fd = fds.first;
  std::size_t moved = 0;
  while (moved < nbytes) {
    const ssize_t got = call(fd, moved, nbytes - moved, static_cast<off_t>(offset + moved));
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && fd != fds.rest) {
        fd = fds.rest;
        continue;
      }
      return Failure{Fault::system, errno, 0};
    }
    if (got == 0) return Failure{Fault::short_end, 0, 0};
    moved += static_cast<std::size_t>(got);
    fd = fds.rest;
  }
  return Failure{};
}

Failure write_whole(Descriptors fds, const unsigned char* from, std::size_t nbytes, std::uint64_t offset) noexcept {
  const auto call = [from](int fd, std::size_t moved, std::size_t left, off_t at) {
    return ::pwrite(fd, from + moved, left, at);
  };
  return run_whole(call, fds, nbytes, offset);
}

Failure read_whole(Descriptors fds, unsigned char* into, std::size_t nbytes, std::uint64_t offset) noexcept {
  const auto call = [into](int fd, std::size_t moved, std::size_t left, off_t at) {
    return ::pread(fd, into + moved, left, at);
  };
  return run_whole(call, fds, nbytes, offset);
}

}  // namespace

// --- request ---------------------------------------------------------------------------------------------------------

Request::Request(Op op, std::vector<Piece> pieces, PieceRecord* records)
    : op_(op),
      pieces_(std::move(pieces)),
      records_(records),
      owner_(::getpid()),
      remaining_(pieces_.size()),
      done_(pieces_.empty()) {}

bool Request::wait(double seconds) const {
  if (done()) return true;
  if (::getpid() != owner_) throw std::logic_error("this request was submitted before a fork, by another process");
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_done = [this] { return remaining_ == 0; };
  if (seconds < 0) {
    finished_.wait(lock, is_done);
    return true;
  }
  // Capped, as a far deadline would overflow the clock's integer; callers wait again while done() is false.
  const auto limit = std::chrono::duration<double>(seconds < 1e6 ? seconds : 1e6);
  return finished_.wait_until(lock, Clock::now() + std::chrono::duration_cast<Clock::duration>(limit), is_done);
}

Failure Request::failure() const {
  if (!done()) return Failure{};
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

bool Request::notify(std::uint64_t token) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (remaining_ == 0) return false;
  tokens_.push_back(token);
  return true;
}

std::vector<std::uint64_t> Request::finish(std::size_t piece, const Failure& failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure.failed() && (!failure_.failed() || piece < failure_.piece)) {
    failure_ = failure;
    failure_.piece = piece;
  }
  if (--remaining_ > 0) return {};
  done_.store(true, std::memory_order_release);
  // Under the lock: a waiter that saw the result may drop the last reference as soon as the lock is free.
  finished_.notify_all();
  return std::move(tokens_);
}

// --- engine ----------------------------------------------------------------------------------------------------------

struct IoEngine::State {
  mutable std::mutex mutex;
  std::condition_variable work_ready;
  std::condition_variable notification_ready;
  std::deque<std::shared_ptr<Request>> queue;
  std::deque<std::uint64_t> notifications;
  std::vector<std::thread> threads;
  bool stopping = false;  // no new requests; workers leave when the queue is empty
  bool drained = false;   // workers have left; no further notification can appear
  std::size_t in_flight = 0;
  Clock::time_point busy_since;
  Counters counters;
};

// A worker's aligned buffer of one piece, made when first needed: most transfers never do.
class IoEngine::Bounce {
 public:
  explicit Bounce(std::size_t nbytes) : nbytes_(round_up(nbytes)) {}

  // Null when memory is short; the piece then fails with ENOMEM.
  unsigned char* get() noexcept {
    if (!memory_) memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(kBlock, nbytes_)));
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(unsigned char* memory) const noexcept { std::free(memory); }
  };
  const std::size_t nbytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

IoEngine::IoEngine(int buffered_fd, int direct_fd, unsigned threads, std::size_t piece_bytes)
    : buffered_fd_(buffered_fd),
      direct_fd_(direct_fd),
      piece_bytes_(piece_bytes),
      owner_(::getpid()),
      state_(std::make_unique<State>()) {
  if (threads == 0) throw std::invalid_argument("threads must be at least 1");
  if (piece_bytes == 0 || piece_bytes % kBlock != 0) {
    throw std::invalid_argument("piece_bytes must be a positive multiple of 4096");
  }
  try {
    for (unsigned index = 0; index < threads; ++index) {
      state_->threads.emplace_back([this, state = state_.get()] { work(*state); });
    }
  } catch (...) {
    close();  // the destructor of a half-made object does not run, and joinable threads would end the process
    throw;
  }
}

IoEngine::~IoEngine() {
  if (in_owner()) {
    close();
  } else {
    static_cast<void>(state_.release());
  }
}

bool IoEngine::in_owner() const noexcept { return ::getpid() == owner_; }

std::shared_ptr<Request> IoEngine::submit(Op op, std::vector<Piece> pieces, PieceRecord* records) {
  if (!in_owner()) throw std::logic_error("this engine was opened before a fork, by another process");
  for (const Piece& piece : pieces) {
    if (piece.nbytes == 0 || piece.nbytes > piece_bytes_ || piece.offset % kBlock != 0) {
      throw std::invalid_argument("a piece must have 1 to piece_bytes bytes at a multiple of 4096");
    }
  }
  auto request = std::make_shared<Request>(op, std::move(pieces), records);
  if (request->done()) return request;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->stopping) throw std::logic_error("this engine is closed");
  state_->queue.push_back(request);
  state_->work_ready.notify_all();
  return request;
}

void IoEngine::work(State& state) {
  Bounce bounce(piece_bytes_);
  std::unique_lock<std::mutex> lock(state.mutex);
  while (true) {
    state.work_ready.wait(lock, [&state] { return state.stopping || !state.queue.empty(); });
    if (state.queue.empty()) return;
    const std::shared_ptr<Request> request = state.queue.front();
    const std::size_t index = request->next_++;
    if (request->next_ == request->pieces_.size()) state.queue.pop_front();
    if (state.in_flight++ == 0) state.busy_since = Clock::now();
    lock.unlock();

    std::size_t moved = 0;
    const Failure failure = transfer(*request, index, bounce, moved);

    lock.lock();
    if (--state.in_flight == 0) {
      state.counters.busy_seconds += std::chrono::duration<double>(Clock::now() - state.busy_since).count();
    }
    (request->op_ == Op::read ? state.counters.bytes_read : state.counters.bytes_written) += moved;
    // After the counters: whoever waited for the request finds its bytes counted.
    const std::vector<std::uint64_t> tokens = request->finish(index, failure);
    if (!tokens.empty()) {
      state.notifications.insert(state.notifications.end(), tokens.begin(), tokens.end());
      state.notification_ready.notify_one();
    }
  }
}

Failure IoEngine::transfer(const Request& request, std::size_t index, Bounce& bounce, std::size_t& moved) const {
  const Piece& piece = request.pieces_[index];
  PieceRecord& record = request.records_[piece.record];
  Failure failure;
  if (request.op_ == Op::write) {
    failure = write_piece(piece, record, bounce);
    set_state(record, failure.failed() ? PieceState::invalid : PieceState::valid);
  } else {
    switch (state_of(record)) {
      case PieceState::blank:
        std::memset(piece.address, 0, piece.nbytes);
        return failure;
      case PieceState::valid:
        failure = read_piece(piece, record, bounce);
        break;
      default:
        failure = Failure{Fault::invalid, 0, 0};
    }
  }
  moved = failure.failed() ? 0 : piece.nbytes;
  return failure;
}

Failure IoEngine::write_piece(const Piece& piece, PieceRecord& record, Bounce& bounce) const {
  record.checksum = crc32c(piece.address, piece.nbytes);
  if (direct_fd_ < 0) return write_whole({buffered_fd_, buffered_fd_}, piece.address, piece.nbytes, piece.offset);

  const Descriptors fds{direct_fd_, buffered_fd_};
  const std::size_t whole = aligned(piece.address) ? piece.nbytes / kBlock * kBlock : 0;
  const Failure failure = write_whole(fds, piece.address, whole, piece.offset);
  const std::size_t rest = piece.nbytes - whole;
  if (failure.failed() || rest == 0) return failure;

  unsigned char* const buffer = bounce.get();
  if (buffer == nullptr) return Failure{Fault::system, ENOMEM, 0};
  std::memcpy(buffer, piece.address + whole, rest);
  std::memset(buffer + rest, 0, round_up(rest) - rest);
  return write_whole(fds, buffer, round_up(rest), piece.offset + whole);
}

Failure IoEngine::read_piece(const Piece& piece, const PieceRecord& record, Bounce& bounce) const {
  Failure failure;
  if (direct_fd_ < 0) {
    failure = read_whole({buffered_fd_, buffered_fd_}, piece.address, piece.nbytes, piece.offset);
  } else {
    const Descriptors fds{direct_fd_, buffered_fd_};
    const std::size_t whole = aligned(piece.address) ? piece.nbytes / kBlock * kBlock : 0;
    const std::size_t rest = piece.nbytes - whole;
    failure = read_whole(fds, piece.address, whole, piece.offset);
    if (!failure.failed() && rest > 0) {
      unsigned char* const buffer = bounce.get();
      if (buffer == nullptr) return Failure{Fault::system, ENOMEM, 0};
      failure = read_whole(fds, buffer, round_up(rest), piece.offset + whole);
      if (!failure.failed()) std::memcpy(piece.address + whole, buffer, rest);
    }
  }
  if (!failure.failed() && crc32c(piece.address, piece.nbytes) != record.checksum) {
    failure = Failure{Fault::checksum, 0, 0};
  }
  return failure;
}

std::optional<std::uint64_t> IoEngine::next_notification() {
  if (!in_owner()) return std::nullopt;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->notification_ready.wait(lock, [this] { return state_->drained || !state_->notifications.empty(); });
  if (state_->notifications.empty()) return std::nullopt;
  const std::uint64_t token = state_->notifications.front();
  state_->notifications.pop_front();
  return token;
}

void IoEngine::close() {
  if (!in_owner()) return;
  std::vector<std::thread> threads;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
    threads.swap(state_->threads);
    state_->work_ready.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->drained = true;
  state_->notification_ready.notify_all();
}

Counters IoEngine::counters() const {
  if (!in_owner()) return Counters{};
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->counters;
}

}  // namespace tiered
