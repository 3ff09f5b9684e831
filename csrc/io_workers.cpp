// The workers behind io_workers.h, and what they do with a piece.
#include "io_workers.h"

#include <cerrno>
#include <cstring>
#include <utility>

namespace tiered {
namespace {

bool aligned(const void* address) noexcept { return reinterpret_cast<std::uintptr_t>(address) % kBlock == 0; }

}  // namespace

PieceState state_of(const PieceRecord& record) noexcept {
  return static_cast<PieceState>(__atomic_load_n(&record.state, __ATOMIC_ACQUIRE));
}

void set_state(PieceRecord& record, PieceState state) noexcept {
  __atomic_store_n(&record.state, static_cast<std::uint32_t>(state), __ATOMIC_RELEASE);
}

void IoEngine::State::work(Worker& self, std::shared_ptr<Request> again, std::size_t index) {
  Bounce bounce(piece_bytes);
  Lock lock(mutex);
  bool stays = again == nullptr || attempt(lock, again, index, false, bounce);
  again.reset();
  while (stays) {
    work_ready.wait(lock, [this] { return stopping || !queue.empty(); });
    if (queue.empty()) break;
    const std::shared_ptr<Request> request = queue.front();
    const std::size_t next = request->next_++;
    if (request->next_ == request->pieces_.size()) queue.pop_front();
    stays = attempt(lock, request, next, true, bounce);
  }
  self.left = true;
  settled.notify_all();
}

// False where the worker was replaced meanwhile and has to leave.
bool IoEngine::State::attempt(Lock& lock, const std::shared_ptr<Request>& request, std::size_t index, bool first,
                              Bounce& bounce) {
  if (request->claimed_[index]) return true;  // the first call has come back after all
  const Piece& piece = request->pieces_[index];
  PieceRecord& record = request->records_[piece.record];
  Outcome outcome;
  if (request->op_ == Op::write) {
    lock.unlock();
    outcome.failure = prepare_write(piece, record, bounce);
    lock.lock();
  } else {
    const PieceState state = state_of(record);
    outcome.blank = state == PieceState::blank;
    if (!outcome.blank && state != PieceState::valid) outcome.failure.fault = Fault::invalid;
  }
  if (absent > 0 && !outcome.blank) outcome.failure = Failure{Fault::refused, ETIMEDOUT, 0, 0};
  if (!outcome.failure.failed() && !outcome.blank) {
    call(lock, Attempt{request, index, Clock::now(), first}, record.checksum, bounce, outcome);
  }
  if (first && request->claim(index)) {
    lock.unlock();
    deliver(*request, index, outcome, outcome.spare ? *outcome.spare : bounce);
    lock.lock();
    const std::size_t moved = outcome.failure.failed() || outcome.blank ? 0 : piece.nbytes;
    (request->op_ == Op::read ? counters.bytes_read : counters.bytes_written) += moved;
    // After the counters: whoever waited for the request finds its bytes counted.
    settle(*request, index, outcome.failure);
  }
  return !outcome.replaced;
}

// The part of an attempt that may be late.
void IoEngine::State::call(Lock& lock, Attempt attempt, std::uint32_t checksum, Bounce& bounce, Outcome& outcome) {
  const Request& request = *attempt.request;
  const Piece& piece = request.pieces_[attempt.index];
  const std::uint64_t id = next_id++;
  Attempt& mine = under_way.emplace(id, std::move(attempt)).first->second;
  if (in_flight++ == 0) busy_since = mine.begun;
  lock.unlock();

  if (request.op_ == Op::write) {
    outcome.failure = write_piece(piece, bounce);
  } else {
    outcome.in_place = mine.first ? direct_bytes(piece) : 0;
    outcome.failure = read_piece(piece, outcome.in_place, checksum, bounce);
    if (outcome.failure.transient() && worth_another(lock, mine)) {
      outcome.trouble = outcome.failure;
      outcome.failure = read_piece(piece, outcome.in_place, checksum, bounce);
    }
  }

  lock.lock();
  if (--in_flight == 0) counters.busy_seconds += seconds_since(busy_since);
  if (outcome.trouble.failed()) {
    troubles.push_back({outcome.trouble, piece.offset, piece.nbytes});
    ++counters.retries;
  }
  if (mine.given_up) --absent;
  Attempt* const other = other_of(mine);
  if (mine.first && other != nullptr) std::swap(mine.replaced, other->replaced);  // whoever is out is replaced
  if (!mine.first && other != nullptr && !outcome.failure.failed()) {
    other->spare = std::exchange(bounce, Bounce(piece_bytes));
  }
  if (outcome.failure.failed() && mine.spare) {
    outcome.failure = Failure{};
    outcome.in_place = 0;
    outcome.spare = std::move(mine.spare);
  }
  outcome.replaced = mine.replaced;
  under_way.erase(id);
}

// Whether a read that failed on its way is to be made once more by its attempt.
bool IoEngine::State::worth_another(Lock& lock, const Attempt& attempt) {
  lock.lock();
  const bool worth = !attempt.given_up && !attempt.spare;
  lock.unlock();
  return worth;
}

// The other attempt at the same piece, where that is under way.
IoEngine::State::Attempt* IoEngine::State::other_of(const Attempt& attempt) noexcept {
  for (auto& [_, each] : under_way) {
    if (&each != &attempt && each.request == attempt.request && each.index == attempt.index) return &each;
  }
  return nullptr;
}

// Bytes that move between the file and the caller's memory; the others go through the bounce buffer.
std::size_t IoEngine::State::direct_bytes(const Piece& piece) const noexcept {
  if (fds.direct < 0) return piece.nbytes;
  return aligned(piece.address) ? piece.nbytes / kBlock * kBlock : 0;
}

Failure IoEngine::State::prepare_write(const Piece& piece, PieceRecord& record, Bounce& bounce) const {
  record.checksum = file_calls().checksum(piece.address, piece.nbytes, 0);
  const std::size_t whole = direct_bytes(piece);
  const std::size_t rest = piece.nbytes - whole;
  if (rest == 0) return Failure{};
  unsigned char* const buffer = bounce.get();
  if (buffer == nullptr) return Failure{Fault::system, ENOMEM, 0, 0};
  std::memcpy(buffer, piece.address + whole, rest);
  std::memset(buffer + rest, 0, round_up(rest) - rest);
  return Failure{};
}

Failure IoEngine::State::write_piece(const Piece& piece, Bounce& bounce) const {
  const std::size_t whole = direct_bytes(piece);
  const Failure failure = write_whole(fds, piece.address, whole, piece.offset);
  const std::size_t rest = piece.nbytes - whole;
  if (failure.failed() || rest == 0) return failure;
  return write_whole(fds, bounce.get(), round_up(rest), piece.offset + whole);
}

// The first `in_place` bytes go to the caller's memory, the others to the bounce buffer.
Failure IoEngine::State::read_piece(const Piece& piece, std::size_t in_place, std::uint32_t checksum,
                                    Bounce& bounce) const {
  std::uint32_t found = 0;
  if (in_place > 0) {
    const Failure failure = read_whole(fds, piece.address, in_place, piece.offset);
    if (failure.failed()) return failure;
    found = file_calls().checksum(piece.address, in_place, found);
  }
  if (const std::size_t rest = piece.nbytes - in_place; rest > 0) {
    unsigned char* const buffer = bounce.get();
    if (buffer == nullptr) return Failure{Fault::system, ENOMEM, 0, 0};
    const Failure failure = read_whole(fds, buffer, fds.direct < 0 ? rest : round_up(rest), piece.offset + in_place);
    if (failure.failed()) return failure;
    found = file_calls().checksum(buffer, rest, found);
  }
  return found == checksum ? Failure{} : Failure{Fault::checksum, 0, 0, 0};
}

// What a claimed piece brings its caller: bytes, or the state of its record.
void IoEngine::State::deliver(const Request& request, std::size_t index, const Outcome& outcome, Bounce& bounce) const {
  const Piece& piece = request.pieces_[index];
  if (request.op_ == Op::write) {
    set_state(request.records_[piece.record], outcome.failure.failed() ? PieceState::invalid : PieceState::valid);
  } else if (outcome.blank) {
    std::memset(piece.address, 0, piece.nbytes);
  } else if (!outcome.failure.failed() && outcome.in_place < piece.nbytes) {
    std::memcpy(piece.address + outcome.in_place, bounce.get(), piece.nbytes - outcome.in_place);
  }
}

void IoEngine::State::settle(Request& request, std::size_t index, const Failure& failure) {
  --unsettled;
  settled.notify_all();
  const std::vector<std::uint64_t> tokens = request.finish(index, failure);
  if (tokens.empty()) return;
  notifications.insert(notifications.end(), tokens.begin(), tokens.end());
  notification_ready.notify_all();
}

void IoEngine::State::refuse(Request& request) {
  for (; request.next_ < request.pieces_.size(); ++request.next_) {
    request.claim(request.next_);
    PieceRecord& record = request.records_[request.pieces_[request.next_].record];
    if (request.op_ == Op::write) set_state(record, PieceState::invalid);
    settle(request, request.next_, Failure{Fault::refused, ETIMEDOUT, 0, 0});
  }
}

}  // namespace tiered
