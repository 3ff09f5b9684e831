// The requests and the queue behind io_engine.h; the workers are in io_workers.cpp.
#include "io_engine.h"

#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "io_workers.h"

namespace tiered {

// --- request ---------------------------------------------------------------------------------------------------------

Request::Request(Op op, std::vector<Piece> pieces, PieceRecord* records)
    : op_(op),
      pieces_(std::move(pieces)),
      records_(records),
      owner_(::getpid()),
      claimed_(pieces_.size(), false),
      remaining_(pieces_.size()),
      done_(pieces_.empty()) {}

bool Request::wait(double seconds) const {
  if (done()) return true;
  if (::getpid() != owner_) throw std::logic_error("this request was submitted before a fork, by another process");
  Lock lock(mutex_);
  const auto is_done = [this] { return remaining_ == 0; };
  if (seconds < 0) {
    finished_.wait(lock, is_done);
    return true;
  }
  return finished_.wait_until(lock, after(seconds), is_done);
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

bool Request::claim(std::size_t piece) {
  if (claimed_[piece]) return false;
  claimed_[piece] = true;
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

IoEngine::IoEngine(int buffered_fd, int direct_fd, unsigned threads, std::size_t piece_bytes)
    : owner_(::getpid()), state_(std::make_shared<State>(Descriptors{buffered_fd, direct_fd}, piece_bytes)) {
  if (threads == 0) throw std::invalid_argument("threads must be at least 1");
  if (piece_bytes == 0 || piece_bytes % kBlock != 0) {
    throw std::invalid_argument("piece_bytes must be a positive multiple of 4096");
  }
  try {
    for (unsigned index = 0; index < threads; ++index) start(nullptr, 0);
  } catch (...) {
    close(-1);  // the destructor of a half-made object does not run, and joinable threads would end the process
    throw;
  }
}

IoEngine::~IoEngine() {
  if (in_owner()) {
    close(-1);
  } else {
    static_cast<void>(new std::shared_ptr<State>(state_));
  }
}

bool IoEngine::in_owner() const noexcept { return ::getpid() == owner_; }

void IoEngine::start(std::shared_ptr<Request> again, std::size_t index) {
  State::Worker& worker = state_->workers.emplace_back();
  try {
    worker.thread = std::thread([state = state_, &worker, again = std::move(again), index]() mutable {
      state->work(worker, std::move(again), index);
    });
  } catch (...) {
    state_->workers.pop_back();
    throw;
  }
}

std::shared_ptr<Request> IoEngine::submit(Op op, std::vector<Piece> pieces, PieceRecord* records) {
  if (!in_owner()) throw std::logic_error("this engine was opened before a fork, by another process");
  for (const Piece& piece : pieces) {
    if (piece.nbytes == 0 || piece.nbytes > state_->piece_bytes || piece.offset % kBlock != 0) {
      throw std::invalid_argument("a piece must have 1 to piece_bytes bytes at a multiple of 4096");
    }
  }
  auto request = std::make_shared<Request>(op, std::move(pieces), records);
  if (request->done()) return request;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->stopping) throw std::logic_error("this engine is closed");
  state_->unsettled += request->pieces_.size();
  if (state_->absent > 0) {
    state_->refuse(*request);
    return request;
  }
  state_->queue.push_back(request);
  state_->work_ready.notify_all();
  return request;
}

std::optional<std::uint64_t> IoEngine::next_notification() {
  if (!in_owner()) return std::nullopt;
  Lock lock(state_->mutex);
  state_->notification_ready.wait(lock, [this] { return state_->drained || !state_->notifications.empty(); });
  if (state_->notifications.empty()) return std::nullopt;
  const std::uint64_t token = state_->notifications.front();
  state_->notifications.pop_front();
  return token;
}

std::vector<Late> IoEngine::late(double seconds) const {
  std::vector<Late> found;
  if (!in_owner()) return found;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  for (const auto& [id, attempt] : state_->under_way) {
    const double out = seconds_since(attempt.begun);
    if (!attempt.first || out <= seconds || attempt.request->claimed_[attempt.index]) continue;
    const Piece& piece = attempt.request->pieces_[attempt.index];
    found.push_back({id, attempt.request->op_, piece.offset, piece.nbytes, out});
  }
  return found;
}

bool IoEngine::replace(std::uint64_t id) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto found = state_->under_way.find(id);
  if (found == state_->under_way.end()) return false;
  State::Attempt& attempt = found->second;
  if (attempt.replaced || attempt.request->claimed_[attempt.index]) return false;
  state_->workers.remove_if([](State::Worker& worker) {
    if (worker.left) worker.thread.join();  // it needs the mutex no more
    return worker.left;
  });
  const bool reads = attempt.request->op_ == Op::read;
  ++state_->counters.stalls;
  try {
    start(reads ? attempt.request : nullptr, attempt.index);
  } catch (const std::system_error&) {
    return false;
  }
  state_->counters.retries += reads ? 1 : 0;
  attempt.replaced = true;
  return true;
}

bool IoEngine::give_up(std::uint64_t id) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto found = state_->under_way.find(id);
  if (found == state_->under_way.end()) return false;
  const std::shared_ptr<Request> request = found->second.request;
  const std::size_t index = found->second.index;
  if (!request->claim(index)) return false;
  for (auto& [_, attempt] : state_->under_way) {
    if (attempt.request != request || attempt.index != index) continue;
    attempt.given_up = true;
    ++state_->absent;
  }
  if (request->op_ == Op::write) {
    set_state(request->records_[request->pieces_[index].record], PieceState::invalid);
  } else {
    request->stranded_.store(true, std::memory_order_release);
  }
  state_->settle(*request, index, Failure{Fault::stalled, ETIMEDOUT, 0, seconds_since(found->second.begun)});
  for (const std::shared_ptr<Request>& queued : state_->queue) state_->refuse(*queued);
  state_->queue.clear();
  return true;
}

std::vector<Trouble> IoEngine::troubles() {
  std::vector<Trouble> found;
  if (!in_owner()) return found;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  found.swap(state_->troubles);
  return found;
}

std::size_t IoEngine::close(double seconds) {
  if (!in_owner()) return 0;
  Lock lock(state_->mutex);
  const auto behind = [this] {
    std::size_t count = 0;
    for (const State::Worker& worker : state_->workers) count += worker.left ? 0 : 1;
    return count;
  };
  if (state_->drained) return behind();
  state_->stopping = true;
  state_->work_ready.notify_all();
  state_->settled.wait(lock, [this] { return state_->unsettled == 0; });
  const auto all_left = [&behind] { return behind() == 0; };
  if (seconds < 0) {
    state_->settled.wait(lock, all_left);
  } else {
    state_->settled.wait_until(lock, after(seconds), all_left);
  }
  for (State::Worker& worker : state_->workers) {
    if (worker.left) {
      worker.thread.join();  // it needs the mutex no more
    } else {
      worker.thread.detach();
    }
  }
  state_->drained = true;
  state_->notification_ready.notify_all();
  return behind();
}

Counters IoEngine::counters() const {
  if (!in_owner()) return Counters{};
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->counters;
}

}  // namespace tiered
