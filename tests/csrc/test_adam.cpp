// Exercises adam.h and thread_pool.h without Python, so that a sanitizer sees every load, store and hand-over.
//
// Built from this file, csrc/adam.cpp, csrc/adam_avx2.cpp, csrc/adam_avx512.cpp and csrc/thread_pool.cpp with
// -std=c++17 -pthread; no other flag is needed (the vector functions carry their own target attributes). Arrays are
// allocated to the exact size, so that one element too far is a heap overflow. Exits 0, or names what failed first.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/adam.h"
#include "../../csrc/thread_pool.h"

namespace {

using tiered::DType;
using tiered::Isa;

constexpr DType kTypes[] = {DType::fp32, DType::bf16, DType::fp16};
constexpr Isa kWideIsas[] = {Isa::avx2, Isa::avx512};
constexpr int64_t kSizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 255, 16385, 2 * 65536 + 19};  // the last: threads help

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Exactly n elements of one type on the heap, `shift` elements past the start of their allocation.
class Array {
 public:
  Array(DType type, int64_t n, int shift = 0)
      : type_(type), bytes_(static_cast<size_t>(n) * width()), skip_(static_cast<size_t>(shift) * width()) {
    memory_ = std::make_unique<unsigned char[]>(skip_ + bytes_);
  }

  tiered::ArrayRef ref() { return {memory_.get() + skip_, type_}; }
  float* floats() { return static_cast<float*>(ref().data); }

  // Every bit pattern is possible, with ordinary values more often than chance would give.
  void fill(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < bytes_ / width(); ++i) {
      uint32_t bits = static_cast<uint32_t>(random());
      if (bits % 4 != 0) {
        const float x = normal(random);
        std::memcpy(&bits, &x, sizeof bits);
      }
      if (type_ != DType::fp32) bits >>= 16;
      std::memcpy(memory_.get() + skip_ + i * width(), &bits, width());
    }
  }

  void copy_values(const Array& other) {
    if (bytes_ != 0) std::memcpy(memory_.get() + skip_, other.memory_.get() + other.skip_, bytes_);
  }

  // Equal bits, where one NaN is as good as another.
  bool same_values(const Array& other) const {
    for (size_t at = 0; at < bytes_; at += width()) {
      uint32_t a = 0, b = 0;
      std::memcpy(&a, memory_.get() + skip_ + at, width());
      std::memcpy(&b, other.memory_.get() + other.skip_ + at, width());
      if (a != b && !(is_nan(a) && is_nan(b))) return false;
    }
    return true;
  }

 private:
  size_t width() const { return type_ == DType::fp32 ? 4 : 2; }
  bool is_nan(uint32_t bits) const {
    if (type_ == DType::fp32) return (bits & 0x7fffffff) > 0x7f800000;
    return (bits & 0x7fff) > (type_ == DType::bf16 ? 0x7f80u : 0x7c00u);
  }

  DType type_;
  size_t bytes_;
  size_t skip_;
  std::unique_ptr<unsigned char[]> memory_;
};

struct AdamCase {
  AdamCase(int64_t n, DType grad_type, DType out_type, int shift)
      : master(DType::fp32, n, shift),
        exp_avg(DType::fp32, n, shift),
        exp_avg_sq(DType::fp32, n, shift),
        grad(grad_type, n, shift),
        out(out_type, n, shift) {}

  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    for (Array* array : {&master, &exp_avg, &exp_avg_sq, &grad, &out}) array->fill(random);
  }

  void copy_values(const AdamCase& other) {
    master.copy_values(other.master);
    exp_avg.copy_values(other.exp_avg);
    exp_avg_sq.copy_values(other.exp_avg_sq);
    grad.copy_values(other.grad);
    out.copy_values(other.out);
  }

  bool same_values(const AdamCase& other) const {
    return master.same_values(other.master) && exp_avg.same_values(other.exp_avg) &&
           exp_avg_sq.same_values(other.exp_avg_sq) && out.same_values(other.out);
  }

  void update(Isa isa, int threads, const std::vector<int64_t>& cuts) {
    std::vector<tiered::AdamUpdate> updates;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      updates.push_back({cuts[i], cuts[i + 1], 0.7f, 0.99f, 0.1f, false, 0.95f, 0.05f, 0.3f, 1e-8f, 0.02f});
    }
    const tiered::AdamArrays arrays{master.floats(), exp_avg.floats(), exp_avg_sq.floats(), grad.ref().data,
                                    grad.ref().type, out.ref().data,   out.ref().type};
    tiered::adamw(updates.data(), updates.size(), arrays, isa, threads);
  }

  Array master, exp_avg, exp_avg_sq, grad, out;
};

void adamw_is_the_same_on_every_path() {
  for (int64_t n : kSizes) {
    for (DType grad_type : kTypes) {
      for (DType out_type : kTypes) {
        AdamCase start(n, grad_type, out_type, 0);
        start.fill(static_cast<uint32_t>(n));
        AdamCase expected(n, grad_type, out_type, 0);
        expected.copy_values(start);
        expected.update(Isa::scalar, 1, {0, n});
        for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
          if (!tiered::isa_supported(isa)) continue;
          AdamCase shifted(n, grad_type, out_type, 1 + static_cast<int>(isa));
          shifted.copy_values(start);
          shifted.update(isa, 3, {0, n / 7, n / 7, n / 2, n});
          require(shifted.same_values(expected), "adamw depends on the path, the cuts or the alignment");
        }
      }
    }
  }
}

void sums_are_the_same_on_every_path() {
  for (int64_t n : kSizes) {
    for (DType dst_type : kTypes) {
      for (DType src_type : kTypes) {
        for (bool add : {false, true}) {
          std::mt19937 random(static_cast<uint32_t>(n));
          Array dst(dst_type, n), src(src_type, n);
          dst.fill(random);
          src.fill(random);
          Array expected(dst_type, n);
          expected.copy_values(dst);
          const double sum = tiered::accumulate(expected.ref(), src.ref(), n, add, Isa::scalar, 1);
          for (Isa isa : kWideIsas) {
            if (!tiered::isa_supported(isa)) continue;
            Array got(dst_type, n, 1);
            got.copy_values(dst);
            const double got_sum = tiered::accumulate(got.ref(), src.ref(), n, add, isa, 3);
            const double again = tiered::sum_of_squares(got.ref(), n, isa, 2);
            require(got.same_values(expected), "accumulate depends on the path");
            require(got_sum == sum || (got_sum != got_sum && sum != sum), "its sum depends on the path");
            require(again == sum || (again != again && sum != sum), "sum_of_squares differs from accumulate's");
          }
        }
      }
    }
  }
}

// Means of `sources` as one thread of plain C++ computes them, element by element, where everything is fp32.
std::vector<float> plain_mean(std::vector<std::vector<float>>& sources, const std::vector<float>& dst, float divisor) {
  std::vector<float> result = dst;
  for (size_t i = 0; i < dst.size(); ++i) {
    volatile float sum = sources[0][i];  // volatile: each operation is rounded, whatever the compiler would like
    for (size_t s = 1; s < sources.size(); ++s) sum = sum + sources[s][i];
    volatile float mean = sum / divisor;
    result[i] = result[i] + mean;
  }
  return result;
}

void a_mean_is_added_divided_and_added() {
  constexpr int64_t n = 1000;
  for (int count : {1, 2, 3, 7}) {
    for (int divisor : {1, 2, 3, 10, 64, 1 << 24}) {
      std::mt19937 random(static_cast<uint32_t>(count * divisor));
      std::normal_distribution<float> normal;
      std::vector<std::vector<float>> sources(static_cast<size_t>(count), std::vector<float>(n));
      std::vector<float> dst(n);
      std::vector<const void*> arrays;
      for (auto& source : sources) {
        for (float& x : source) x = normal(random);
        arrays.push_back(source.data());
      }
      for (float& x : dst) x = normal(random);
      const std::vector<float> expected = plain_mean(sources, dst, static_cast<float>(divisor));
      const tiered::MeanSources mean{arrays.data(), count, DType::fp32, divisor};
      tiered::average({dst.data(), DType::fp32}, mean, n, true, Isa::scalar, 1);
      require(dst == expected, "average is not the sum over the divisor, added");
    }
  }
}

void means_are_the_same_on_every_path() {
  for (int64_t n : kSizes) {
    for (DType dst_type : kTypes) {
      for (DType src_type : kTypes) {
        for (int divisor : {3, 4}) {
          const bool add = divisor == 3;
          std::mt19937 random(static_cast<uint32_t>(n));
          Array dst(dst_type, n), one(src_type, n), two(src_type, n, 1);
          for (Array* array : {&dst, &one, &two}) array->fill(random);
          const void* arrays[] = {one.ref().data, two.ref().data, one.ref().data};
          const tiered::MeanSources mean{arrays, 3, src_type, divisor};
          Array expected(dst_type, n);
          expected.copy_values(dst);
          const double sum = tiered::average(expected.ref(), mean, n, add, Isa::scalar, 1);
          for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
            if (!tiered::isa_supported(isa)) continue;
            Array got(dst_type, n, 1);
            got.copy_values(dst);
            const double got_sum = tiered::average(got.ref(), mean, n, add, isa, 3);
            const double again = tiered::sum_of_squares(got.ref(), n, isa, 2);
            require(got.same_values(expected), "average depends on the path");
            require(got_sum == sum || (got_sum != got_sum && sum != sum), "its sum depends on the path");
            require(again == sum || (again != again && sum != sum), "sum_of_squares differs from average's");
            if (dst_type != src_type) continue;
            Array onto(src_type, n, 1);  // one of its own sources
            onto.copy_values(one);
            const void* with_itself[] = {onto.ref().data, two.ref().data, onto.ref().data};
            tiered::average(onto.ref(), {with_itself, 3, src_type, divisor}, n, false, isa, 3);
            Array apart(src_type, n);
            tiered::average(apart.ref(), mean, n, false, Isa::scalar, 1);
            require(onto.same_values(apart), "average onto a source differs");
          }
        }
      }
    }
  }
}

void narrowing_is_the_same_on_every_path() {
  std::vector<float> values;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 8191) {  // prime: every residue of the rounded bits
    const uint32_t word = static_cast<uint32_t>(bits);
    float x;
    std::memcpy(&x, &word, sizeof x);
    values.push_back(x);
  }
  const int64_t n = static_cast<int64_t>(values.size());
  for (DType type : {DType::bf16, DType::fp16}) {
    Array expected(type, n);
    tiered::accumulate(expected.ref(), {values.data(), DType::fp32}, n, false, Isa::scalar, 1);
    for (Isa isa : kWideIsas) {
      if (!tiered::isa_supported(isa)) continue;
      Array got(type, n);
      tiered::accumulate(got.ref(), {values.data(), DType::fp32}, n, false, isa, 2);
      require(got.same_values(expected), "narrowing depends on the path");
    }
  }
}

void every_block_runs_once(tiered::ThreadPool& pool, int64_t blocks, int threads) {
  std::vector<int> runs(static_cast<size_t>(blocks));  // plain ints: a block run twice at once is a data race
  auto body = [&](int64_t block) { ++runs[static_cast<size_t>(block)]; };
  pool.run(blocks, threads, body);
  for (int count : runs) require(count == 1, "a block did not run exactly once");
}

void a_pool_serves_several_callers_and_ends() {
  for (int round = 0; round < 20; ++round) {
    tiered::ThreadPool pool;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&pool, caller] {
        for (int call = 0; call < 20; ++call) every_block_runs_once(pool, 1 + 13 * caller + call, 1 + caller);
      });
    }
    for (std::thread& caller : callers) caller.join();
    every_block_runs_once(pool, 0, 4);
  }
}

void kernels_run_from_several_threads_at_once() {
  std::vector<std::thread> callers;
  for (uint32_t seed = 0; seed < 3; ++seed) {
    callers.emplace_back([seed] {
      AdamCase one(40'000, DType::bf16, DType::bf16, 0), two(40'000, DType::bf16, DType::bf16, 0);
      one.fill(seed);
      two.copy_values(one);
      one.update(Isa::scalar, 1, {0, 40'000});
      two.update(Isa::scalar, 4, {0, 11, 40'000});
      require(one.same_values(two), "concurrent calls disturb each other");
      constexpr int64_t n = 3 * 65536;
      Array first(DType::fp32, n), second(DType::fp32, n), means(DType::fp32, n);
      std::mt19937 random(seed);
      first.fill(random);
      second.fill(random);
      const void* arrays[] = {first.ref().data, second.ref().data};
      const tiered::MeanSources mean{arrays, 2, DType::fp32, 2};
      for (int threads : {1, 3}) {
        tiered::average(means.ref(), mean, n, false, Isa::scalar, threads);
        Array again(DType::fp32, n);
        tiered::average(again.ref(), mean, n, false, Isa::scalar, 4 - threads);
        require(means.same_values(again), "concurrent means disturb each other");
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void a_forked_child_gets_a_pool_of_its_own() {
#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer refuses threads in the child of a threaded process
  every_block_runs_once(tiered::ThreadPool::shared(), 100, 3);
  tiered::ThreadPool* before = &tiered::ThreadPool::shared();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a hang ends as a failure
    require(&tiered::ThreadPool::shared() != before, "the child uses its parent's pool");
    every_block_runs_once(tiered::ThreadPool::shared(), 100, 3);
    _exit(0);
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child && status == 0, "the forked child failed");
#endif
}

}  // namespace

int main() {
  adamw_is_the_same_on_every_path();
  sums_are_the_same_on_every_path();
  a_mean_is_added_divided_and_added();
  means_are_the_same_on_every_path();
  narrowing_is_the_same_on_every_path();
  a_pool_serves_several_callers_and_ends();
  kernels_run_from_several_threads_at_once();
  a_forked_child_gets_a_pool_of_its_own();
  std::puts("ok");
  return 0;
}
