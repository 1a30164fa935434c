// A caller and the threads that help it: they stay between calls, and so does their memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "host_attention.h"

#if !defined(_WIN32)
#include <unistd.h>
#endif

namespace host_attention {

// Memory that only grows, aligned to cache lines; what it held before is lost.
class Buffer {
  public:
    float *floats(int64_t n) {
        if (n > size_) {
            memory_.reset();
            memory_.reset(new float[size_t(n) + 16]);
            size_ = n;
        }
        const auto address = reinterpret_cast<uintptr_t>(memory_.get());
        return reinterpret_cast<float *>((address + 63) & ~uintptr_t(63));
    }

  private:
    std::unique_ptr<float[]> memory_;
    int64_t size_ = 0;
};

// Something to do in numbered pieces, in any order. `worker` is below the number of threads.
class Job {
  public:
    virtual void piece(int64_t index, int worker) = 0;

  protected:
    ~Job() = default;
};

class Team {
  public:
    Buffer memory, scratch, queries;
    std::vector<Partial> partials;  // cut from `memory`

    // Does all pieces and returns. Helpers that wake up too late are not waited for.
    void run(Job &job, int64_t n_pieces, int n_threads) {
        n_threads = int(std::min<int64_t>(n_threads, n_pieces));
        if (n_threads > 1) open(job, n_pieces, n_threads);
        else next_ = 0;
        work(job, n_pieces, 0);
        if (n_threads > 1) close();
    }

    // Borrows a team that nobody uses; concurrent callers get one each. Teams are never destroyed:
    // at the end of a process its threads cannot be waited for safely.
    static Team &borrow() {
        std::lock_guard<std::mutex> lock(idle_mutex());
        auto &teams = idle();
        if (teams.empty()) return *new Team;
        Team *team = teams.back();
        teams.pop_back();
        return *team;
    }
    static void give_back(Team &team) {
        std::lock_guard<std::mutex> lock(idle_mutex());
        idle().push_back(&team);
    }

  private:
    std::mutex mutex_;
    std::condition_variable opened_, left_;
    std::vector<std::thread> helpers_;
    std::atomic<int64_t> next_{0};
    Job *job_ = nullptr;
    int64_t n_pieces_ = 0, n_jobs_ = 0;
    int n_wanted_ = 0, n_active_ = 0;

    void work(Job &job, int64_t n_pieces, int worker) {
        for (;;) {
            const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
            if (index >= n_pieces) return;
            job.piece(index, worker);
        }
    }

    void open(Job &job, int64_t n_pieces, int n_threads) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            n_pieces_ = n_pieces;
            n_wanted_ = n_threads;
            n_jobs_++;
            next_ = 0;
        }
        try {
            while (int(helpers_.size()) < n_threads - 1) {
                const int worker = int(helpers_.size()) + 1;
                helpers_.emplace_back([this, worker] { help(worker); });
            }
        } catch (const std::system_error &) {
            // The system gives no more threads: those there are do the work.
        }
        opened_.notify_all();
    }

    void close() {
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = nullptr;
        left_.wait(lock, [this] { return n_active_ == 0; });
    }

    void help(int worker) {
        int64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            opened_.wait(lock, [&] { return job_ && n_jobs_ != seen && worker < n_wanted_; });
            seen = n_jobs_;
            Job &job = *job_;
            const int64_t n_pieces = n_pieces_;
            n_active_++;
            lock.unlock();
            work(job, n_pieces, worker);
            lock.lock();
            if (--n_active_ == 0) left_.notify_one();
        }
    }

    static std::mutex &idle_mutex() {
        static std::mutex mutex;
        return mutex;
    }

    // A forked child has its parent's teams without their threads, so it starts with none.
    static std::vector<Team *> &idle() {
        static auto *teams = new std::vector<Team *>;
#if !defined(_WIN32)
        static pid_t owner = getpid();
        if (owner != getpid()) {
            owner = getpid();
            teams = new std::vector<Team *>;
        }
#endif
        return *teams;
    }
};

class Borrowed {
  public:
    Team &team = Team::borrow();
    Borrowed() = default;
    Borrowed(const Borrowed &) = delete;
    Borrowed &operator=(const Borrowed &) = delete;
    ~Borrowed() { Team::give_back(team); }
};

}  // namespace host_attention
