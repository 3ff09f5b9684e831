// The threads of the CPU kernels: a caller hands over numbered blocks, and idle workers help it run them.
//
// Invariants
// 1. run() returns after every block ran exactly once and no worker refers to the job any longer. The caller works too,
//    so a pool without workers (thread limits, a fresh fork) finishes the same work, only later.
// 2. Several callers may run at once; each drains its own job, so none waits for another's blocks to be started.
// 3. Idle workers sleep on a condition variable. They never spin, so they take nothing from torch's own threads.
// 4. Blocks must not throw and must not call run(). Which thread runs a block is not defined.
//
// Left to callers: the size of a block (a wake-up costs some 50 us), and results that do not depend on the order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tiered {

class ThreadPool {
 public:
  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();  // joins the workers; no run() may be in progress

  // Calls body(block) for block = 0 .. blocks - 1 on up to `threads` threads, the caller's included.
  template <class Body>
  void run(int64_t blocks, int threads, Body& body) {
    Job job;
    job.blocks = blocks;
    job.body = &body;
    job.call = [](void* erased, int64_t block) { (*static_cast<Body*>(erased))(block); };
    run_job(job, threads);
  }

  // The process's pool. Never destroyed: at exit its sleeping workers end with the process, so exit cannot hang.
  // A forked child gets a new one, as threads do not survive fork().
  static ThreadPool& shared();

 private:
  struct Job {
    int64_t blocks = 0;
    void* body = nullptr;
    void (*call)(void*, int64_t) = nullptr;
    std::atomic<int64_t> next{0};  // first block that nobody claimed yet
    int seats = 0;                 // workers that may still join; under mutex_
    int helpers = 0;               // workers inside the job; under mutex_
  };

  void run_job(Job& job, int threads);
  void start_workers(int wanted);  // mutex_ held
  Job* job_with_seat();            // mutex_ held
  void work();
  static void drain(Job& job) noexcept;

  std::mutex mutex_;
  std::condition_variable wake_;      // a job was added, or the pool stops
  std::condition_variable finished_;  // a job lost its last helper
  std::vector<Job*> jobs_;            // each lives on its caller's stack, and leaves before run_job returns
  std::vector<std::thread> workers_;
  bool stopping_ = false;
};

}  // namespace tiered
