// The I/O engine and the checksum without Python, to be run under sanitizers (test_sanitizers.py).
//
// Usage: test_io_engine DIRECTORY. Exits 0, or prints the first claim that does not hold and exits 1.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/crc32c.h"
#include "../../csrc/file.h"
#include "../../csrc/io_engine.h"

namespace {

using tiered::Fault;
using tiered::IoEngine;
using tiered::kBlock;
using tiered::Op;
using tiered::Piece;
using tiered::PieceRecord;
using tiered::PieceState;
using tiered::Request;

// Threads of this process, a sanitizer's own among them.
std::size_t tasks() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

void require(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", claim);
  std::exit(1);
}

// A preallocated file with both descriptors; the direct one is -1 where the file system refuses it.
class File {
 public:
  File(const std::string& path, std::size_t nbytes) : path_(path) {
    buffered = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    require(buffered >= 0 && ::ftruncate(buffered, static_cast<off_t>(nbytes)) == 0, "the test file is made");
    direct = ::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  }
  ~File() {
    ::close(buffered);
    if (direct >= 0) ::close(direct);
    ::unlink(path_.c_str());
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int buffered = -1;
  int direct = -1;

 private:
  std::string path_;
};

// `nbytes` of memory at `misalignment` bytes past a multiple of kBlock.
class Memory {
 public:
  explicit Memory(std::size_t nbytes, std::size_t misalignment = 0) : backing_(nbytes + 2 * kBlock) {
    const auto address = reinterpret_cast<std::uintptr_t>(backing_.data());
    data = backing_.data() + (kBlock - address % kBlock) % kBlock + misalignment;
  }
  unsigned char* data;

 private:
  std::vector<unsigned char> backing_;
};

void fill(unsigned char* data, std::size_t nbytes, unsigned seed) {
  for (std::size_t at = 0; at < nbytes; ++at) {
    seed = seed * 1664525u + 1013904223u;
    data[at] = static_cast<unsigned char>(seed >> 24);
  }
}

// One piece after another in memory, a whole piece apart in the file.
std::vector<Piece> pieces_over(unsigned char* data, std::size_t nbytes, std::size_t piece_bytes) {
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < nbytes; at += piece_bytes) {
    pieces.push_back({data + at, at, std::min(piece_bytes, nbytes - at), at / piece_bytes});
  }
  return pieces;
}

PieceState state_of(const PieceRecord& record) {
  return static_cast<PieceState>(__atomic_load_n(&record.state, __ATOMIC_ACQUIRE));
}

void checksums_agree() {
  require(tiered::crc32c("123456789", 9) == 0xE3069283u, "the check value of RFC 3720");
  std::vector<unsigned char> data(50000);
  fill(data.data(), data.size(), 7);
  for (const std::size_t nbytes : {0u, 1u, 7u, 8u, 9u, 12287u, 12288u, 12289u, 49000u}) {
    for (std::size_t start = 0; start < 9; ++start) {
      const std::uint32_t whole = tiered::crc32c(data.data() + start, nbytes);
      require(whole == tiered::crc32c_portable(data.data() + start, nbytes), "both implementations agree");
      const std::size_t half = nbytes / 3;
      const std::uint32_t first = tiered::crc32c(data.data() + start, half);
      require(tiered::crc32c(data.data() + start + half, nbytes - half, first) == whole, "a checksum can be continued");
    }
  }
}

void bytes_come_back(const std::string& directory, bool direct) {
  constexpr std::size_t kPiece = 2 * kBlock;
  for (const std::size_t nbytes : {std::size_t{1}, kBlock, kPiece - 1, 5 * kPiece, 4 * kPiece + 13}) {
    for (const std::size_t misalignment : {0u, 1u, 64u}) {
      File file(directory + "/bytes", 6 * kPiece);
      IoEngine engine(file.buffered, direct ? file.direct : -1, 3, kPiece);
      Memory from(nbytes, misalignment), into(nbytes, misalignment);
      fill(from.data, nbytes, static_cast<unsigned>(nbytes + misalignment));
      std::vector<PieceRecord> records((nbytes + kPiece - 1) / kPiece);

      std::memset(into.data, 0xA5, nbytes);
      auto zeros = engine.submit(Op::read, pieces_over(into.data, nbytes, kPiece), records.data());
      require(zeros->wait(-1) && !zeros->failure().failed(), "a blank read succeeds");
      for (std::size_t at = 0; at < nbytes; ++at) require(into.data[at] == 0, "a blank piece reads as zeros");

      auto written = engine.submit(Op::write, pieces_over(from.data, nbytes, kPiece), records.data());
      require(written->wait(-1) && !written->failure().failed(), "a write succeeds");
      auto read = engine.submit(Op::read, pieces_over(into.data, nbytes, kPiece), records.data());
      require(read->wait(-1) && !read->failure().failed(), "a read succeeds");
      require(std::memcmp(from.data, into.data, nbytes) == 0, "the bytes come back");
      require(engine.counters().bytes_read == nbytes && engine.counters().bytes_written == nbytes, "bytes are counted");
    }
  }
}

void faults_are_told_apart(const std::string& directory) {
  constexpr std::size_t kPiece = kBlock;
  File file(directory + "/faults", 4 * kPiece);
  IoEngine engine(file.buffered, file.direct, 2, kPiece);
  Memory memory(4 * kPiece);
  fill(memory.data, 4 * kPiece, 3);
  std::vector<PieceRecord> records(4);
  engine.submit(Op::write, pieces_over(memory.data, 4 * kPiece, kPiece), records.data())->wait(-1);

  const unsigned char other = static_cast<unsigned char>(memory.data[kPiece + 5] ^ 1u);
  require(::pwrite(file.buffered, &other, 1, kPiece + 5) == 1 && ::fsync(file.buffered) == 0, "a byte is changed");
  require(::ftruncate(file.buffered, 3 * kPiece) == 0, "the file is cut");
  auto read = engine.submit(Op::read, pieces_over(memory.data, 4 * kPiece, kPiece), records.data());
  read->wait(-1);
  require(read->failure().fault == Fault::checksum && read->failure().piece == 1,
          "the lowest failed piece is reported");
  auto last = engine.submit(Op::read, {{memory.data, 3 * kPiece, kPiece, 3}}, records.data());
  last->wait(-1);
  require(last->failure().fault == Fault::short_end, "the end of the file is an error");

  const int read_only = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  {
    IoEngine broken(read_only, -1, 1, kPiece);
    auto write = broken.submit(Op::write, {{memory.data, 0, kPiece, 0}}, records.data());
    write->wait(-1);
    require(write->failure().fault == Fault::system && write->failure().error == EBADF, "a system error has its errno");
  }
  ::close(read_only);
  require(state_of(records[0]) == PieceState::invalid, "a failed write invalidates its piece");
  auto stale = engine.submit(Op::read, {{memory.data, 0, kPiece, 0}}, records.data());
  stale->wait(-1);
  require(stale->failure().fault == Fault::invalid, "an invalid piece is not read");
}

void misuse_throws(const std::string& directory) {
  File file(directory + "/misuse", kBlock);
  std::vector<PieceRecord> records(1);
  Memory memory(kBlock);
  const auto throws = [](auto&& call) {
    try {
      call();
    } catch (const std::logic_error&) {
      return true;
    }
    return false;
  };
  require(throws([&] { IoEngine(file.buffered, -1, 0, kBlock); }), "no threads are refused");
  require(throws([&] { IoEngine(file.buffered, -1, 1, kBlock + 1); }), "odd piece sizes are refused");
  IoEngine engine(file.buffered, -1, 1, kBlock);
  const auto submit = [&](Piece piece) { engine.submit(Op::read, {piece}, records.data()); };
  require(throws([&] { submit({memory.data, 1, kBlock, 0}); }), "odd offsets are refused");
  require(throws([&] { submit({memory.data, 0, kBlock + 1, 0}); }), "a piece too long is refused");
  require(throws([&] { submit({memory.data, 0, 0, 0}); }), "an empty piece is refused");
  require(engine.submit(Op::read, {}, nullptr)->done(), "a request of no pieces is done");
  engine.close();
  engine.close();
  require(throws([&] { submit({memory.data, 0, kBlock, 0}); }), "a closed engine is refused");
}

void many_threads_share_an_engine(const std::string& directory) {
  constexpr std::size_t kThreads = 4, kRounds = 40, kBytes = 3 * kBlock + 5, kRoom = 4 * kBlock;
  File file(directory + "/shared", kThreads * kRoom);
  IoEngine engine(file.buffered, file.direct, 3, kBlock);
  std::atomic<std::uint64_t> expected{0}, announced{0};
  std::thread listener([&] {
    while (engine.next_notification()) announced.fetch_add(1);
  });
  std::vector<std::thread> users;
  for (std::size_t user = 0; user < kThreads; ++user) {
    users.emplace_back([&, user] {
      Memory from(kBytes, user), into(kBytes, user);
      std::vector<PieceRecord> records(4);
      for (std::size_t round = 0; round < kRounds; ++round) {
        fill(from.data, kBytes, static_cast<unsigned>(user * 1000 + round));
        auto pieces = pieces_over(from.data, kBytes, kBlock);
        for (Piece& piece : pieces) piece.offset += user * kRoom;
        auto write = engine.submit(Op::write, pieces, records.data());
        for (std::uint64_t token = 0; token < 3; ++token) expected.fetch_add(write->notify(token) ? 1 : 0);
        while (!write->wait(0.001)) {
        }
        for (Piece& piece : pieces) piece.address = into.data + (piece.address - from.data);
        engine.submit(Op::read, pieces, records.data())->wait(-1);
        require(std::memcmp(from.data, into.data, kBytes) == 0, "each user reads its own bytes");
      }
    });
  }
  for (std::thread& user : users) user.join();
  engine.close();
  listener.join();
  require(announced.load() == expected.load(), "each notification asked for comes once");
}

void closing_waits_and_requests_outlive_the_engine(const std::string& directory) {
  constexpr std::size_t kBytes = 200 * kBlock;
  File file(directory + "/closing", kBytes);
  Memory memory(kBytes);
  std::vector<PieceRecord> records(200);
  std::shared_ptr<Request> request;
  {
    IoEngine engine(file.buffered, file.direct, 2, kBlock);
    request = engine.submit(Op::write, pieces_over(memory.data, kBytes, kBlock), records.data());
  }
  require(request->done() && !request->failure().failed(), "the destructor waits for what was submitted");
  require(!request->notify(1), "a late notification is refused");
}

void a_forked_child_does_not_hang(const std::string& directory) {
  constexpr std::size_t kBytes = 200 * kBlock;
  File file(directory + "/fork", kBytes);
  Memory memory(kBytes);
  std::vector<PieceRecord> records(200);
  auto engine = std::make_unique<IoEngine>(file.buffered, file.direct, 2, kBlock);
  auto request = engine->submit(Op::write, pieces_over(memory.data, kBytes, kBlock), records.data());
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    bool refused = false;
    try {
      engine->submit(Op::write, pieces_over(memory.data, kBytes, kBlock), records.data());
    } catch (const std::logic_error&) {
      refused = true;
    }
    engine.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  require(::waitpid(child, &status, 0) == child && status == 0, "a forked child is refused and ends");
  require(request->wait(-1) && !request->failure().failed(), "the parent goes on");
}

// A drive whose reads, or writes, at one offset do not come back before `release`.
class Stalling {
 public:
  static Stalling& one() {
    static Stalling stalling;
    return stalling;
  }
  void stall(bool writes, std::int64_t at, int calls) {
    const std::lock_guard<std::mutex> lock(mutex_);
    writes_ = writes;
    at_ = at;
    left_ = calls;
  }
  // What has stalled comes back, with an error where one is given.
  void release(int error = 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_ = 0;
    error_ = error;
    released_ = stalled_;
    changed_.notify_all();
  }
  int pass(bool write, std::int64_t at) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (write != writes_ || at != at_ || left_ == 0) return 0;
    --left_;
    const int mine = ++stalled_;
    changed_.wait(lock, [&] { return released_ >= mine; });
    return error_;
  }
  // The one that has stalled for longest comes back.
  void release_first() {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = 0;
    ++released_;
    changed_.notify_all();
  }
  int left() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return left_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool writes_ = false;
  std::int64_t at_ = 0;
  int left_ = 0;
  int stalled_ = 0;   // so far,
  int released_ = 0;  // of them
  int error_ = 0;
};

class BadDrive {
 public:
  BadDrive() : before_(tiered::file_calls()) {
    tiered::file_calls().read = [](int fd, void* into, std::size_t nbytes, std::int64_t offset) -> std::int64_t {
      if (const int error = Stalling::one().pass(false, offset)) return -error;
      return ::pread(fd, into, nbytes, offset);
    };
    tiered::file_calls().write = [](int fd, const void* from, std::size_t nbytes, std::int64_t offset) -> std::int64_t {
      if (const int error = Stalling::one().pass(true, offset)) return -error;
      return ::pwrite(fd, from, nbytes, offset);
    };
  }
  ~BadDrive() { tiered::file_calls() = before_; }
  BadDrive(const BadDrive&) = delete;
  BadDrive& operator=(const BadDrive&) = delete;

 private:
  const tiered::FileCalls before_;
};

// The only piece that is out for long, once it is.
tiered::Late the_late_one(const IoEngine& engine) {
  while (true) {
    const auto late = engine.late(0.02);
    if (!late.empty()) return late.front();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void a_late_read_is_made_again_and_serves_where_the_first_fails(const std::string& directory) {
  const BadDrive bad;
  constexpr std::size_t kBytes = 8 * kBlock;
  File file(directory + "/late", kBytes);
  std::vector<PieceRecord> records(8);
  IoEngine engine(file.buffered, file.direct, 1, kBlock);
  auto from = std::make_unique<Memory>(kBytes);
  fill(from->data, kBytes, 5);
  engine.submit(Op::write, pieces_over(from->data, kBytes, kBlock), records.data())->wait(-1);
  for (const int error : {0, EBADMSG, EIO}) {
    Stalling::one().stall(false, 2 * kBlock, 1);
    auto into = std::make_unique<Memory>(kBytes);
    auto read = engine.submit(Op::read, pieces_over(into->data, kBytes, kBlock), records.data());
    require(engine.replace(the_late_one(engine).id), "a late worker is replaced");
    Memory other(kBlock);  // read by the only worker there is, after it has made the late read again
    require(engine.submit(Op::read, pieces_over(other.data, kBlock, kBlock), records.data())->wait(-1), "it goes on");
    require(!read->done(), "the first read may still fill the memory");
    Stalling::one().release(error);
    require(read->wait(-1) && !read->failure().failed() && !read->stranded(), "one of the two reads counts");
    require(std::memcmp(from->data, into->data, kBytes) == 0, "its bytes are right");
    into.reset();
  }
  engine.close(-1);
  require(engine.counters().retries == 3 && engine.counters().stalls == 3, "retries are counted");
}

void a_second_read_that_is_lost_costs_no_worker(const std::string& directory) {
  const BadDrive bad;
  File file(directory + "/lost", kBlock);
  std::vector<PieceRecord> records(1);
  Memory memory(kBlock);
  IoEngine engine(file.buffered, file.direct, 1, kBlock);
  const auto pieces = [&] { return pieces_over(memory.data, kBlock, kBlock); };
  engine.submit(Op::write, pieces(), records.data())->wait(-1);
  for (int round = 0; round < 3; ++round) {
    Stalling::one().stall(false, 0, 1);
    auto read = engine.submit(Op::read, pieces(), records.data());
    const auto late = the_late_one(engine);
    Stalling::one().stall(false, 0, 1);  // the second
    require(engine.replace(late.id), "a late worker is replaced");
    while (Stalling::one().left() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Stalling::one().release_first();
    require(read->wait(-1) && !read->failure().failed(), "the first read counts");
    require(engine.submit(Op::write, pieces(), records.data())->wait(10), "and its worker works on");
    Stalling::one().release();
  }
  engine.close(-1);
}

void what_is_given_up_touches_nothing(const std::string& directory) {
  // Both stay, for workers that are left behind; volatile, so that a leak check finds it held.
  static BadDrive* volatile bad = new BadDrive;
  static_cast<void>(bad);
  constexpr std::size_t kBytes = 8 * kBlock;
  const std::string path = directory + "/given_up";
  static File& file = *new File(path, kBytes);
  ::unlink(path.c_str());
  const std::size_t tasks_before = tasks();
  for (const bool writes : {false, true}) {
    IoEngine engine(file.buffered, file.direct, 2, kBlock);
    Memory good(kBytes);
    std::vector<PieceRecord> kept(8);
    engine.submit(Op::write, pieces_over(good.data, kBytes, kBlock), kept.data())->wait(-1);
    auto memory = std::make_unique<Memory>(kBytes, 8);
    auto records = std::make_unique<std::vector<PieceRecord>>(kept);
    Stalling::one().stall(writes, 3 * kBlock, 2);
    auto request =
        engine.submit(writes ? Op::write : Op::read, pieces_over(memory->data, kBytes, kBlock), records->data());
    const auto late = the_late_one(engine);
    require(late.offset == 3 * kBlock && (late.op == Op::write) == writes, "what is late is told");
    engine.replace(late.id);
    require(engine.give_up(late.id) && !engine.give_up(late.id), "a piece is given up once");
    request->wait(-1);
    require(request->failure().fault == Fault::stalled && request->failure().piece == 3, "it is a stall");
    require(request->stranded() == !writes, "memory that a read may yet fill is stranded");
    static std::vector<std::unique_ptr<Memory>>& stranded = *new std::vector<std::unique_ptr<Memory>>;
    if (!writes) stranded.push_back(std::move(memory));
    memory.reset();
    records.reset();
    auto refused = engine.submit(Op::write, pieces_over(good.data, kBytes, kBlock), kept.data());
    require(refused->done() && refused->failure().fault == Fault::refused, "nothing is begun meanwhile");
    require(state_of(kept[0]) == PieceState::invalid, "what was refused is not there");
    if (writes) {
      Stalling::one().release();
      while (engine.submit(Op::write, pieces_over(good.data, kBytes, kBlock), kept.data())->failure().failed()) {
      }
      engine.close(-1);
    } else {
      require(engine.close(0.01) > 0, "closing leaves a call that does not come back");
    }
  }
  Stalling::one().release();  // the workers that were left behind end by themselves
  while (tasks() > tasks_before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 2, "one argument names a directory");
  const std::string directory = argv[1];
  checksums_agree();
  bytes_come_back(directory, true);
  bytes_come_back(directory, false);
  faults_are_told_apart(directory);
  misuse_throws(directory);
  many_threads_share_an_engine(directory);
  closing_waits_and_requests_outlive_the_engine(directory);
  a_forked_child_does_not_hang(directory);
  a_late_read_is_made_again_and_serves_where_the_first_fails(directory);
  a_second_read_that_is_lost_costs_no_worker(directory);
  what_is_given_up_touches_nothing(directory);
  return 0;
}
