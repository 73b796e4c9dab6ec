// Thread pool of a process with work stealing.
//
// Threads claim pieces of work, so a preempted thread delays a call by at most the piece that it is
// computing. A thread first claims the pieces of its own share, which is the same in every call,
// because its cache holds their weights. Then it claims remaining pieces of other shares.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace {

class Crew {
 public:
  // Calls f(begin, end) for pieces of ``grain`` that cover [0, num). The pool serves one caller at
  // a time. Concurrent callers, and forks of a caller, compute everything on their own thread.
  template <class F>
  void run(int64_t num, int64_t grain, const F& f) {
    int64_t num_pieces = (num + grain - 1) / grain;
    int num_shares = std::min<int64_t>({num_threads(), num_pieces, kMost});
    auto piece = [&](int64_t i) { f(i * grain, std::min(num, (i + 1) * grain)); };
    std::unique_lock<std::mutex> mine(busy_, std::defer_lock);
    if (num_shares > 1 && mine.try_lock()) {
      open([](const void* of, int64_t i) { (*static_cast<const decltype(piece)*>(of))(i); }, &piece,
           num_pieces, num_shares);
      work(0);
      close();
    } else if (num > 0) {
      f(int64_t(0), num);
    }
  }

  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }
  void use(int64_t num) { num_threads_.store(num, std::memory_order_relaxed); }

 private:
  static constexpr int kMost = 64;
  static constexpr int kLooks = 4000;  // spins for about 50 us; few gaps within a step last longer

  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };

  void open(void (*call)(const void*, int64_t), const void* of, int64_t num_pieces,
            int num_shares) {
    while (num_others_ < num_shares - 1) std::thread(&Crew::stand_by, this, ++num_others_).detach();
    call_ = call, of_ = of, num_shares_ = num_shares;
    for (int64_t i = 0; i < num_shares; i++) {
      shares_[i].next.store(num_pieces * i / num_shares, std::memory_order_relaxed);
      shares_[i].end = num_pieces * (i + 1) / num_shares;
    }
    number_.fetch_add(1);
    number_.notify_all();
  }

  void work(int first) {
    for (int i = 0; i < num_shares_; i++) {
      Share& share = shares_[(first + i) % num_shares_];
      int64_t piece;
      while ((piece = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end)
        call_(of_, piece);
    }
  }

  // Waits for pieces in progress. Afterwards no other thread accesses the caller's data.
  void close() {
    number_.fetch_add(1);
    for (int looks = 0, num; (num = num_inside_.load()) > 0; looks++)
      looks < kLooks ? rest() : num_inside_.wait(num);
  }

  void stand_by(int me) {
    uint32_t seen = 0;
    for (int looks = 0;; looks++) {
      uint32_t number = number_.load();
      if (number % 2 == 1 && number != seen) {
        help(number, me);
        seen = number, looks = 0;
      } else if (looks < kLooks) {
        rest();
      } else {
        number_.wait(number);
        looks = 0;
      }
    }
  }

  void help(uint32_t number, int me) {
    num_inside_.fetch_add(1);
    if (number_.load() == number && me < num_shares_) work(me);
    if (num_inside_.fetch_sub(1) == 1) num_inside_.notify_one();
  }

  static void rest() {
#ifdef __SSE2__
    __builtin_ia32_pause();
#endif
  }

  std::atomic<int> num_threads_{1};
  std::mutex busy_;
  void (*call_)(const void*, int64_t) = nullptr;  // these four change only while the pool is closed
  const void* of_ = nullptr;
  int num_shares_ = 0;
  Share shares_[kMost];
  int num_others_ = 0;
  alignas(64) std::atomic<uint32_t> number_{0};  // number of the call, odd while it is open
  alignas(64) std::atomic<int> num_inside_{0};
};

inline Crew& crew() {
  static Crew* all = new Crew;  // never destroyed, because its threads never end
  return *all;
}

// Sets the number of threads of this process, including the caller.
void use_threads(int64_t num) {
  TORCH_CHECK(num > 0, "threads: ", num);
  crew().use(num);
}

template <class F>
void in_pieces(int64_t num, int64_t grain, const F& f) {
  crew().run(num, grain, f);
}

}  // namespace
