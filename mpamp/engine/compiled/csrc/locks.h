// The locks of the compiled engine, and Python's (the GIL).
//
// Ours guard plain values, and pointers to what threads share. Their order: a thread that holds one takes no other of
// them (only a fork takes all: `Fork` in thread.h says in which order), and any may be taken with Python's lock held. So
// nothing that may want Python's lock happens under one of ours, nor code of others:
//   - no tensor or storage is copied or let go of, for Python may have seen it; a std::shared_ptr to what has it may be
//     copied or moved under the lock, and dies after it;
//   - no node of autograd is made (anomaly mode asks Python where), no op, allocator, stream or event is called.
// With MPAMP_CHECK_LOCKS=1 in the environment, a process that does so all the same says it and ends; the tests set it.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace mpamp {

inline int& locks_held() {
  static thread_local int count = 0;
  return count;
}
inline const bool checks_locks = [] {
  auto* wanted = std::getenv("MPAMP_CHECK_LOCKS");
  return wanted && wanted[0] == '1';
}();

// To be said where Python's lock, or code of others, may be wanted.
inline void needs_no_lock(const char* what) {
  if (!checks_locks || locks_held() == 0) return;
  std::fprintf(stderr, "mpamp: %s with a lock of the compiled engine held\n", what);
  std::abort();
}

class Mutex {
 public:
  void lock() {
    needs_no_lock("a lock is taken");
    mutex_.lock();
    ++locks_held();
  }
  void unlock() {
    --locks_held();
    mutex_.unlock();
  }
  // For a fork, which takes all of them: the child's only thread is the one that took them.
  void lock_to_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};
using Guard = std::lock_guard<Mutex>;

} // namespace mpamp
