// One thread's state: the scope of each device, mirrored from Python's, and the casts that the thread keeps.
#pragma once

#include "cache.h"

#include <torch/csrc/autograd/graph_task.h>
#ifndef _WIN32
#include <pthread.h>
#endif

namespace mpamp {

struct Thread {
  Thread();
  ~Thread();
  std::array<std::shared_ptr<Scope>, kDevices> scopes;
  const std::shared_ptr<Cache> in_region;
  // What mpamp.engine.scope.ThreadState has, as long as it is there. None: nothing is known of the thread, Python's kernels
  // run.
  PyObject *entries = nullptr, *python_scopes = nullptr, *python_casts = nullptr;
  const void* attached = nullptr; // who holds them

  Cache* cache(Keep keep) const;
};

// Every cache that there is; none is destroyed under the lock.
struct Caches {
  Mutex lock;
  std::vector<std::shared_ptr<Cache>> of_regions;
  const std::shared_ptr<Cache> lasting = std::make_shared<Cache>(true); // of all threads: a weight's cast is there once

  std::vector<std::shared_ptr<Cache>> all() {
    Guard guard(lock);
    auto found = of_regions;
    found.push_back(lasting);
    return found;
  }
};
inline Caches& caches() {
  static auto* found = new Caches; // outlives every thread
  return *found;
}

inline Thread::Thread() : in_region(std::make_shared<Cache>(false)) {
  Guard guard(caches().lock);
  caches().of_regions.push_back(in_region);
}
inline Thread::~Thread() {
  Guard guard(caches().lock);
  auto& every = caches().of_regions;
  every.erase(std::remove(every.begin(), every.end(), in_region), every.end()); // this thread has it still
}
inline Cache* Thread::cache(Keep keep) const {
  return keep == kInRegion ? in_region.get() : keep == kPersistently ? caches().lasting.get() : nullptr;
}

inline Thread& this_thread() {
  static thread_local Thread thread;
  return thread;
}

// -- Forks ---------------------------------------------------------------------------------------------

// A process forks with all locks held, so that they are free in the child and nothing is half done there.
struct Fork {
  static std::vector<Mutex*> locks() { // with those of the caches and the records held, which come first
    std::vector<Mutex*> found;
    for (auto& [storage, known] : records().records) found.push_back(&known.record->lock);
    for (auto& cache : caches().of_regions) found.push_back(&cache->lock);
    found.push_back(&caches().lasting->lock);
    found.push_back(&rewritten.lock);
    found.push_back(&Readiness::homes().lock);
    return found;
  }
  static void before() {
    caches().lock.lock_to_fork();
    records().lock.lock_to_fork();
    for (auto* lock : locks()) lock->lock_to_fork();
  }
  static void after() {
    for (auto* lock : locks()) lock->unlock_after_fork();
    records().lock.unlock_after_fork();
    caches().lock.unlock_after_fork();
  }
  static void watch() {
#ifndef _WIN32
    pthread_atfork(&before, &after, &after);
#endif
  }
};

// -- All threads' casts --------------------------------------------------------------------------------

inline void clear_all() {
  ++drops;
  for (auto& cache : caches().all()) cache->clear();
}

// Drop the casts of weights that share memory with these storages; those that outlive regions only go out of use if
// `may_be_remade`.
inline void forget(const std::vector<c10::Storage>& storages, bool for_good, bool may_be_remade) {
  ++drops; // before entries go: a cast that was begun before isn't kept after
  if (for_good) rewritten.add(storages);
  for (auto& cache : caches().all()) {
    if (cache == caches().lasting && may_be_remade)
      cache->outdate(storages);
    else
      cache->drop(storages);
  }
}

// Nobody reads the cast's memory: no graph holds it, and no other stream was given it. It is stale, so nobody else finds
// it; who has found it before has it by now, or has the entry.
inline bool Cache::is_free(const EntryPointer& entry) {
  if (entry.use_count() > 2) return false; // it is in here, and the caller has it
  std::atomic_thread_fence(std::memory_order_acquire);
  auto leaf = swap(entry->leaf, {}); // which goes, then
  bool has_leaf = leaf && leaf.use_count() == 1 && leaf->use_count() == 1;
  if (entry->readiness && (entry->readiness->ready.size() != 1 || entry->readiness->made_on != current_stream(entry->low.device())))
    return false;
  bool has_memory = storage_of(entry->low)->nbytes() > 0; // a device in pure Python has it elsewhere
  return has_memory && entry->low.use_count() == 1 && entry->low.storage().use_count() == size_t(has_leaf ? 2 : 1);
}

inline void Cache::remake(const std::vector<Tensor>& weights, ScalarType dtype) {
  struct Copy {
    Tensor weight;
    EntryPointer old;
    State state; // from before the copy: who writes meanwhile leaves an entry that is never served
    c10::Storage storage;
  };
  std::vector<Copy> copies;
  std::vector<c10::Storage> unused;
  std::unordered_map<c10::Device, std::pair<std::vector<Tensor>, std::vector<Tensor>>> by_device;
  auto dropped = drops.load();
  for (auto& weight : weights) {
    auto old = weight.has_storage() ? entry_at({storage_of(weight), dtype}) : nullptr;
    if (!old) continue;
    auto storage = held(weight);
    bool is_same = old->weight == weight.unsafeGetTensorImpl() && is_plain(weight) &&
        old->low.sizes() == weight.sizes() && old->low.strides() == weight.strides();
    if (!old->is_used || !is_same || !is_weight(weight) || (storage.nbytes() == 0 && storage_of(old->low)->nbytes() != 0)) {
      unused.push_back(std::move(storage));
      continue;
    }
    old->is_stale = true; // what is half written isn't served
    copies.push_back({weight, std::move(old), State(weight), std::move(storage)});
  }
  std::vector<Tensor> lows;
  try {
    for (auto& copy : copies) {
      auto high = copy.weight.detach();
      lows.push_back(is_free(copy.old) ? copy.old->low : at::empty_like(high, high.options().dtype(dtype)));
      auto& [low, highs] = by_device[high.device()];
      low.push_back(lows.back());
      highs.push_back(std::move(high));
    }
    for (auto& [device, lists] : by_device) at::_foreach_copy_(lists.first, lists.second);
  } catch (const c10::Error&) { // out of memory, mostly: the step was done, and the next use makes them
    for (auto& copy : copies) unused.push_back(copy.storage);
    copies.clear();
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    auto& [weight, old, state, storage] = copies[i];
    std::optional<c10::Stream> stream;
    if (old->readiness) stream = current_stream(lows[i].device());
    auto entry = std::make_shared<Entry>(weight, storage, lows[i], std::move(state), stream);
    entry->is_alike = old->is_alike;
    entry->is_used = false;
    keep(weight, dtype, std::move(entry), dropped);
  }
  drop(unused);
  counts().casts[is_lasting_] += static_cast<int64_t>(copies.size());
  counts().recasts += static_cast<int64_t>(copies.size());
}

// After an optimizer's step: make the casts that outlive regions anew, by one copy a device and dtype.
inline void remake(const std::vector<Tensor>& weights) {
  c10::InferenceMode off(false);
  at::NoGradGuard no_grad;
  for (auto dtype : kLowerDtypes) caches().lasting->remake(weights, dtype);
}

} // namespace mpamp
