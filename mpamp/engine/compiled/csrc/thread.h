// One thread's state: the scope of each device, mirrored from Python's, and the casts that the thread keeps.
#pragma once

#include "cache.h"

#include <torch/csrc/autograd/graph_task.h>

namespace mpamp {

struct Thread {
  Thread();
  ~Thread();
  std::array<std::shared_ptr<Scope>, kDevices> scopes;
  Cache in_region, persistent;
  // What mpamp.engine.scope.ThreadState has, as long as it is there. None: nothing is known of the thread, Python's kernels
  // run.
  PyObject *entries = nullptr, *python_scopes = nullptr, *python_casts = nullptr;
  const void* attached = nullptr; // who holds them

  Cache* cache(Keep keep) { return keep == kInRegion ? &in_region : keep == kPersistently ? &persistent : nullptr; }
};

struct Threads {
  std::mutex lock;
  std::vector<Thread*> all;

  template <class Do>
  void each(Do&& run) {
    std::lock_guard<std::mutex> guard(lock);
    for (auto* thread : all) run(*thread);
  }
};
inline Threads& threads() {
  static auto* found = new Threads; // outlives every thread
  return *found;
}

inline Thread::Thread() {
  auto& every = threads();
  std::lock_guard<std::mutex> guard(every.lock);
  every.all.push_back(this);
}
inline Thread::~Thread() {
  auto& every = threads();
  std::lock_guard<std::mutex> guard(every.lock);
  every.all.erase(std::find(every.all.begin(), every.all.end(), this));
}

inline Thread& this_thread() {
  static thread_local Thread thread;
  return thread;
}

// -- All threads' casts --------------------------------------------------------------------------------

inline void clear_all() {
  ++drops;
  threads().each([](Thread& thread) {
    thread.in_region.clear();
    thread.persistent.clear();
  });
}

// Drop the casts of weights that share memory with these storages; those that the calling thread keeps persistently only
// go out of use if `may_be_remade`.
inline void forget(const std::vector<c10::Storage>& storages, bool for_good, bool may_be_remade) {
  ++drops; // before entries go: a cast that was begun before isn't kept after
  std::unordered_set<const c10::StorageImpl*> written;
  for (auto& storage : storages) {
    written.insert(storage.unsafeGetStorageImpl());
    if (for_good) rewritten.add(storage);
  }
  auto wanted = [&](const Entry& entry) { return written.count(entry.state.storage) > 0; };
  auto* mine = &this_thread();
  threads().each([&](Thread& thread) {
    thread.in_region.drop_if(wanted);
    if (&thread == mine && may_be_remade)
      thread.persistent.mark_stale_if(wanted);
    else
      thread.persistent.drop_if(wanted);
  });
}

struct Copy {
  Key key;
  State state; // from before the copy: who writes meanwhile leaves an entry that is never served
  Tensor low, high;
};

// Nobody reads the cast's memory: no graph holds it, and no other stream was given it.
inline bool is_free(const Entry& entry) {
  if (entry.readiness && (entry.readiness->ready.size() != 1 || entry.readiness->made_on != current_stream(entry.low.device())))
    return false;
  bool has_memory = storage_of(entry.low)->nbytes() > 0; // a device in pure Python has it elsewhere
  bool has_leaf = entry.leaf.defined() && entry.leaf.use_count() == 1; // which goes, then
  return has_memory && entry.low.use_count() == 1 && entry.low.storage().use_count() == size_t(has_leaf ? 2 : 1);
}

// The casts of these weights to a dtype that the thread keeps and has used, with memory for new ones.
inline std::vector<Copy> to_remake(Cache& cache, const std::vector<Tensor>& weights, ScalarType dtype) {
  std::vector<Copy> copies;
  std::vector<Entry> gone;
  std::vector<Tensor> leaves;
  std::lock_guard<std::mutex> guard(cache.lock);
  for (auto& weight : weights) {
    auto it = weight.has_storage() ? cache.entries.find({storage_of(weight), dtype}) : cache.entries.end();
    if (it == cache.entries.end()) continue;
    auto& entry = it->second;
    bool is_same = entry.weight == weight.unsafeGetTensorImpl() && entry.low.sizes() == weight.sizes() &&
        entry.low.strides() == weight.strides();
    if (!entry.is_used || !is_same || !is_plain(weight) || !is_weight(weight)) {
      gone.push_back(std::move(entry));
      cache.entries.erase(it);
      continue;
    }
    entry.is_stale = true; // what is half written isn't served
    copies.push_back({it->first, State(weight), is_free(entry) ? entry.low : Tensor(), weight.detach()});
    leaves.push_back(std::move(entry.leaf));
  }
  return copies;
}

inline void remake(Cache& cache, std::vector<Copy> copies) {
  std::unordered_map<c10::Device, std::pair<std::vector<Tensor>, std::vector<Tensor>>> by_device;
  for (auto& copy : copies) {
    if (!copy.low.defined()) copy.low = at::empty_like(copy.high, copy.high.options().dtype(copy.key.dtype));
    auto& [lows, highs] = by_device[copy.low.device()];
    lows.push_back(copy.low);
    highs.push_back(copy.high);
  }
  for (auto& [device, lists] : by_device) at::_foreach_copy_(lists.first, lists.second);
  std::vector<Tensor> gone;
  std::lock_guard<std::mutex> guard(cache.lock);
  for (auto& copy : copies) {
    auto it = cache.entries.find(copy.key);
    if (it == cache.entries.end()) continue;
    auto& entry = it->second;
    gone.push_back(std::move(entry.low));
    entry.low = copy.low;
    entry.low_version = version_of(copy.low);
    entry.state = copy.state;
    entry.graph.reset();
    entry.is_stale = entry.is_used = false;
    if (entry.readiness) entry.readiness.emplace(current_stream(copy.low.device()));
  }
  cache.casts += static_cast<int64_t>(copies.size());
  cache.recasts += static_cast<int64_t>(copies.size());
}

// After an optimizer's step: make the casts that this thread keeps persistently anew, by one copy a device and dtype.
inline void remake(const std::vector<Tensor>& weights) {
  auto& cache = this_thread().persistent;
  c10::InferenceMode off(false);
  at::NoGradGuard no_grad;
  for (auto dtype : {at::kHalf, at::kBFloat16}) remake(cache, to_remake(cache, weights, dtype));
}

} // namespace mpamp
