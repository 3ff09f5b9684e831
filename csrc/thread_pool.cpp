// Implements thread_pool.h. Lock order: one mutex, never held while a block runs.
#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <memory>
#include <system_error>

namespace tiered {

namespace {

std::atomic<ThreadPool*> shared_pool{nullptr};

// The parent's pool stays in the child's memory, unreachable: its mutex may have been held at the fork.
const int fork_hook = pthread_atfork(nullptr, nullptr, [] { shared_pool.store(nullptr); });

// Workers start with every signal blocked, so that handlers run on the threads of the host program.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

ThreadPool& ThreadPool::shared() {
  static_cast<void>(fork_hook);
  ThreadPool* pool = shared_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    // No lock here: one held by another thread at a fork would stay locked in the child.
    auto fresh = std::make_unique<ThreadPool>();
    if (shared_pool.compare_exchange_strong(pool, fresh.get(), std::memory_order_acq_rel)) pool = fresh.release();
  }
  return *pool;
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_job(Job& job, int threads) {
  const int helpers = static_cast<int>(std::min<int64_t>(threads, job.blocks)) - 1;
  if (helpers <= 0) {
    drain(job);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    start_workers(helpers);
    job.seats = helpers;
    jobs_.push_back(&job);
  }
  for (int i = 0; i < helpers; ++i) wake_.notify_one();
  drain(job);
  std::unique_lock<std::mutex> lock(mutex_);
  jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
  finished_.wait(lock, [&job] { return job.helpers == 0; });
}

void ThreadPool::start_workers(int wanted) {
  const SignalsBlocked blocked;
  try {
    while (static_cast<int>(workers_.size()) < wanted) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    // The system has no thread to give: invariant 1 lets the caller finish with the ones there are.
  }
}

ThreadPool::Job* ThreadPool::job_with_seat() {
  for (Job* job : jobs_) {
    if (job->seats > 0) return job;
  }
  return nullptr;
}

void ThreadPool::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Job* job = nullptr;
    wake_.wait(lock, [this, &job] { return stopping_ || (job = job_with_seat()) != nullptr; });
    if (job == nullptr) return;
    --job->seats;
    ++job->helpers;
    lock.unlock();
    drain(*job);
    lock.lock();
    if (--job->helpers == 0) finished_.notify_all();
  }
}

void ThreadPool::drain(Job& job) noexcept {
  int64_t block;
  while ((block = job.next.fetch_add(1, std::memory_order_relaxed)) < job.blocks) job.call(job.body, block);
}

}  // namespace tiered
