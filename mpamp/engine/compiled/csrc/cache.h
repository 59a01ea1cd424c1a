// The casts of weights that are kept, as mpamp.engine.casts.cache: an entry counts while what it was made of is
// unchanged. A thread has a cache for its regions; one cache of the process outlives them. Any thread may drop entries.
#pragma once

#include "aliases.h"

#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace mpamp {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// -- The autograd link ---------------------------------------------------------------------------------

// This torch holds nodes by std::shared_ptr up to 2.12, then by c10::intrusive_ptr.
using NodePointer = decltype(torch::autograd::Edge::function);
template <class Pointer>
struct WeakOf {
  using type = c10::weak_intrusive_ptr<typename Pointer::element_type>;
};
template <class T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};

// The node that casts a gradient back: torch's own of a cast, which compiled autograd knows.
template <class Pointer>
Pointer new_node(const at::TensorOptions& options) {
  using Node = torch::autograd::generated::ToCopyBackward0;
  auto fill = [&](auto node) {
    node->self_options = options;
    return Pointer(std::move(node));
  };
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return fill(std::make_shared<Node>());
  } else {
    return fill(c10::make_intrusive<Node>());
  }
}

// Give low-precision data the gradient of the float32 tensor that it is a cast of.
inline Tensor linked(const Tensor& low, const Tensor& tensor) {
  namespace ag = torch::autograd;
  needs_no_lock("a node of autograd is made");
  auto node = new_node<NodePointer>(tensor.options());
  node->set_next_edges({ag::impl::gradient_edge(tensor)});
  Tensor result = low.tensor_data(); // as detach(), the version counter too, without a call of the dispatcher
  ag::set_history(result, node);
  return result;
}

// A cast that is linked to the weight's gradient, for all of its uses as long as a graph has one of them: so the
// gradient is summed up in low precision and is cast back once. Some ops keep no tensor, but all keep the node.
struct Link {
  explicit Link(const Tensor& graph)
      : cast_(graph.getIntrusivePtr()), node_(torch::autograd::impl::gradient_edge(graph).function) {}

  Tensor use(const Tensor& low) const { // undefined where no graph has it any more
    namespace ag = torch::autograd;
    if (auto cast = cast_.lock()) return Tensor(std::move(cast));
    auto node = node_.lock();
    if (!node) return {};
    Tensor result = low.tensor_data();
    ag::impl::set_gradient_edge(result, ag::Edge(std::move(node), 0));
    return result;
  }

 private:
  Weak cast_;
  WeakOf<NodePointer>::type node_;
};

// -- What is a weight ----------------------------------------------------------------------------------

enum Kind : int { kUnseen, kNever, kLeaf, kAlways };

// Python's answers by type: is every tensor of it a weight, are its leaves, or is none? Types in here live for good.
struct Kinds {
  std::array<std::pair<std::atomic<PyTypeObject*>, std::atomic<int>>, 64> known{};
  py::handle ask, ask_viewable;

  Kind of(const Tensor& tensor) {
    auto* object = python_object(tensor.unsafeGetTensorImpl()->pyobj_slot(), 0);
    if (!object) return kLeaf; // C++ made it, and Python hasn't seen it
    auto* type = Py_TYPE(object);
    for (auto& [each, kind] : known) {
      auto* found = each.load(std::memory_order_acquire);
      if (found == type) return static_cast<Kind>(kind.load());
      if (!found) break;
    }
    return learn(type);
  }
  Kind learn(PyTypeObject* type) {
    needs_no_lock("Python is asked");
    py::gil_scoped_acquire lock;
    auto kind = static_cast<Kind>(ask(py::handle(reinterpret_cast<PyObject*>(type))).cast<int>());
    for (auto& [each, known_kind] : known) {
      if (each.load()) continue;
      Py_INCREF(type);
      known_kind = kind;
      each.store(type, std::memory_order_release);
      break;
    }
    return kind;
  }
};
inline Kinds kinds;

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Storages that something sets version counters back of: their weights are never kept.
struct Rewritten {
  Mutex lock;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> storages; // none has the address of one that is in here
  size_t sweep_at = 64;
  std::atomic<bool> any{false};

  void add(const std::vector<c10::Storage>& written) {
    std::vector<WeakStorage> gone;
    std::vector<std::pair<const c10::StorageImpl*, WeakStorage>> all;
    for (auto& each : written) all.emplace_back(each.unsafeGetStorageImpl(), each.getWeakStorageImpl());
    Guard guard(lock);
    any = true;
    for (auto& [storage, weak] : all) storages.try_emplace(storage, std::move(weak));
    if (storages.size() < sweep_at) return;
    for (auto it = storages.begin(); it != storages.end();) {
      if (!it->second.expired()) {
        ++it;
        continue;
      }
      gone.push_back(std::move(it->second));
      it = storages.erase(it);
    }
    sweep_at = std::max<size_t>(64, 2 * storages.size());
  }
  bool has(const c10::StorageImpl* storage) {
    if (!any) return false;
    Guard guard(lock);
    return storages.count(storage) > 0;
  }
};
inline Rewritten rewritten;

// Storage and autograd state, without going through Python or hooks.
inline c10::StorageImpl* storage_of(const Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}
inline uint32_t version_of(const Tensor& t) { return t.unsafeGetTensorImpl()->version_counter().current_version(); }

inline bool is_plain(const Tensor& t) {
  return t.scalar_type() == at::kFloat && t.layout() == at::kStrided && !t.is_nested() &&
      !t.unsafeGetTensorImpl()->is_inference() && storage_of(t);
}

// As mpamp.engine.casts.cache.is_weight. The tensor is a plain one.
inline bool is_weight(const Tensor& t) {
  auto kind = kinds.of(t);
  if (kind == kNever || (kind == kLeaf && (!t.requires_grad() || t.is_view() || !t.is_leaf()))) return false;
  auto* storage = storage_of(t);
  auto bytes = storage->sym_nbytes().maybe_as_int();
  if (!bytes || (*bytes != 0 && *bytes != 4 * t.numel())) return false;
  return !rewritten.has(storage);
}

// -- Entries -------------------------------------------------------------------------------------------

// What changes where a weight is written to or given other data. It holds the counter: a tensor that gets the address of
// a weight that is gone, and its storage, has another one.
struct State {
  explicit State(const Tensor& t)
      : counter(t.unsafeGetTensorImpl()->version_counter()), version(version_of(t)), storage(storage_of(t)),
        data(storage->data()), offset(t.storage_offset()), sizes(t.sizes()), strides(t.strides()),
        record(records().find(storage)), epoch(record ? record->now(storage) : 0) {}
  bool is_of(const Tensor& t) const {
    return is_same_counter(counter, t.unsafeGetTensorImpl()->version_counter()) && version == version_of(t) &&
        storage == storage_of(t) && data == storage->data() && offset == t.storage_offset() &&
        t.sizes() == at::IntArrayRef(sizes) && t.strides() == at::IntArrayRef(strides) &&
        (!record || epoch == record->now(storage));
  }
  c10::VariableVersion counter;
  uint32_t version;
  c10::StorageImpl* storage;
  const void* data;
  int64_t offset;
  c10::SmallVector<int64_t, 4> sizes, strides;
  std::shared_ptr<Record> record;
  int64_t epoch; // of the memory: writes through aliases of the weight begin another
};

inline c10::Stream current_stream(c10::Device device) {
  needs_no_lock("a device is asked");
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Which streams may read a cast: as mpamp.engine.casts.streams.
struct Readiness {
  const c10::Stream made_on;
  std::vector<int64_t> ready; // behind the cache's lock
  std::shared_ptr<c10::Event> event; // none where the device's first stream made it: one is recorded when needed

  struct Homes {
    Mutex lock;
    std::unordered_map<c10::Device, c10::Stream> streams;
  };
  static Homes& homes() {
    static auto* found = new Homes;
    return *found;
  }
  static c10::Stream home(c10::Stream stream) {
    Guard guard(homes().lock);
    return homes().streams.emplace(stream.device(), stream).first->second;
  }
  explicit Readiness(c10::Stream stream) : made_on(stream), ready{stream.id()} {
    if (home(stream) != stream) event = recorded(stream);
  }
  static std::shared_ptr<c10::Event> recorded(c10::Stream stream) {
    needs_no_lock("a device is asked");
    auto event = std::make_shared<c10::Event>(stream.device_type());
    event->record(stream);
    return event;
  }
  bool has(c10::Stream stream) const { return std::find(ready.begin(), ready.end(), stream.id()) != ready.end(); }
  void admit(const Tensor& low, c10::Stream stream) const {
    (event ? event : recorded(made_on))->block(stream);
    low.record_stream(stream); // else its memory could be given away while this stream still reads it
  }
};

// Nothing refers to the weight itself, not even weakly: torch.utils.swap_tensors would refuse it then. An entry hangs on
// the weight's storage; of two weights that share all of it, the one used last has the entry. Threads share it: what
// changes is atomic, or behind the cache's lock.
struct Entry {
  Entry(const Tensor& weight, const c10::Storage& storage, Tensor made, State state, const std::optional<c10::Stream>& stream)
      : weight(weight.unsafeGetTensorImpl()), storage(storage.getWeakStorageImpl()), state(std::move(state)),
        low(std::move(made)), low_version(version_of(low)), bytes(low.nbytes()), passes(kinds.of(weight) == kLeaf) {
    if (stream) readiness.emplace(*stream);
  }
  ~Entry() { needs_no_lock("a cast is let go of"); }
  const c10::TensorImpl* const weight; // only ever compared
  const WeakStorage storage;
  const State state;
  const Tensor low;
  const uint32_t low_version;
  const size_t bytes;
  const bool passes; // no parameter: an input, say, which is gone after a step
  bool is_alike = false; // views of the weight say by their strides where they lie in the cast, too; from its making on
  std::optional<Readiness> readiness;
  std::atomic<bool> is_stale{false}; // written to without a counter; it may be made anew
  std::atomic<bool> is_used{true}; // an op has had it since it was made
  // Behind the cache's lock.
  std::shared_ptr<const Tensor> leaf; // the cast where no gradients are recorded, as a weight that wants some
  std::shared_ptr<const Link> link;

  bool is_of(const Tensor& t) const {
    return !is_stale && weight == t.unsafeGetTensorImpl() && state.is_of(t) && version_of(low) == low_version;
  }
  Tensor cast() const {
    needs_no_lock("a cast is copied");
    return low;
  }
  bool is_dead() const {
    needs_no_lock("a storage is copied");
    if (storage.expired()) return true;
    auto alive = storage.lock();
    return !alive || alive->nbytes() == 0;
  }
};
using EntryPointer = std::shared_ptr<Entry>;

struct Key {
  const c10::StorageImpl* storage;
  ScalarType dtype;
  bool operator==(const Key& other) const { return storage == other.storage && dtype == other.dtype; }
};
struct Hash {
  size_t operator()(const Key& key) const {
    return (reinterpret_cast<size_t>(key.storage) >> 4) * 31 + static_cast<size_t>(key.dtype);
  }
};
constexpr ScalarType kLowerDtypes[] = {at::kHalf, at::kBFloat16}; // all that weights are cast to

// Goes up whenever entries are dropped for a reason that no version counter shows.
inline std::atomic<uint64_t> drops{0};

// How many casts the calling thread has made: in regions, and to outlive them.
struct Counts {
  std::array<int64_t, 2> casts{};
  int64_t recasts = 0;
};
inline Counts& counts() {
  static thread_local Counts found;
  return found;
}

// Whether a view of a dense weight only turns it: its own cast has all of the elements, where they lie.
inline bool is_all_of(const Tensor& view, const Tensor& base) {
  return view.numel() == base.numel() && view.storage_offset() == base.storage_offset() && view.is_non_overlapping_and_dense();
}

constexpr int64_t kWorthwhile = 8; // as mpamp.engine.casts.cache: up to how many times a view's elements are cast for it
constexpr int64_t kSmall = 1 << 16;

// When to look for entries whose weight is gone: once as much has been added as there was, so that it costs little.
struct Growth {
  size_t count = 0, bytes = 0, count_at = 64, bytes_at = 1 << 16;

  bool add(const Entry& entry) {
    ++count;
    bytes += entry.bytes;
    return count >= count_at || bytes >= bytes_at;
  }
  void start(const std::vector<EntryPointer>& alive) {
    Growth fresh;
    for (auto& entry : alive) fresh.bytes += entry->bytes;
    bytes_at = std::max(fresh.bytes_at, fresh.bytes);
    count_at = std::max(fresh.count_at, alive.size());
    count = bytes = 0;
  }
};

class Cache {
 public:
  explicit Cache(bool is_lasting) : is_lasting_(is_lasting) {}
  Mutex lock;

  bool is_empty() const { return size_ == 0; }
  std::vector<EntryPointer> all() {
    std::vector<EntryPointer> found;
    Guard guard(lock);
    found.reserve(entries_.size());
    for (auto& [key, entry] : entries_) found.push_back(entry);
    return found;
  }
  EntryPointer entry_at(const Key& key) {
    Guard guard(lock);
    auto it = entries_.find(key);
    return it == entries_.end() ? nullptr : it->second;
  }
  // The entry that serves a weight's cast, if one does.
  EntryPointer of(const Tensor& weight, ScalarType dtype) {
    auto entry = entry_at({storage_of(weight), dtype});
    return entry && entry->is_of(weight) ? entry : nullptr; // which takes the lock of a record
  }
  void clear() {
    decltype(entries_) gone;
    decltype(passing_) passed;
    Guard guard(lock);
    gone.swap(entries_);
    passed.swap(passing_);
    size_ = 0;
    weights_ = inputs_ = Growth();
  }
  // Drop the entries of storages that are gone, or were freed in place, and return how many are left.
  size_t sweep() {
    auto alive = sweep(all());
    return alive.size();
  }
  void drop(const std::vector<c10::Storage>& storages) {
    std::vector<EntryPointer> gone;
    if (is_empty()) return;
    Guard guard(lock);
    for (auto& storage : storages)
      for (auto dtype : kLowerDtypes) take({storage.unsafeGetStorageImpl(), dtype}, gone);
  }
  // Have the entries of these storages be served no more, but stay until they are made anew.
  void outdate(const std::vector<c10::Storage>& storages) {
    if (is_empty()) return;
    Guard guard(lock);
    for (auto& storage : storages)
      for (auto dtype : kLowerDtypes) {
        auto it = entries_.find({storage.unsafeGetStorageImpl(), dtype});
        if (it != entries_.end()) it->second->is_stale = true;
      }
  }

  // The kept cast of a weight, linked to the gradient of `user` (the weight or a view of it) where one is needed. The
  // stream is the current one, where the device has any.
  std::optional<Tensor> find(const Tensor& weight, ScalarType dtype, const Tensor& user, const std::optional<c10::Stream>& stream) {
    auto entry = of(weight, dtype);
    if (!entry || (!weight.is_same(user) && !entry->is_alike)) return std::nullopt;
    if (stream && entry->readiness && entry->readiness->made_on != *stream) admit(*entry, *stream);
    entry->is_used = true;
    return use(*entry, weight, user);
  }

  // Cast a weight, and keep the result if nobody has written to the weight meanwhile.
  Tensor add(const Tensor& weight, ScalarType dtype, const Tensor& user, const std::optional<c10::Stream>& stream) {
    ++counts().casts[is_lasting_];
    auto dropped = drops.load();
    auto storage = held(weight);
    begin_record(weight, storage);
    State state(weight);
    bool is_view = !weight.is_same(user), is_whole = !is_view || is_all_of(user, weight);
    Tensor graph = is_whole ? cast(user, dtype) : data(weight, dtype);
    Tensor low = graph.requires_grad() ? detached(graph) : graph;
    if (is_view && is_whole) {
      at::AutoDispatchBelowADInplaceOrView below;
      low = at::as_strided(low, weight.sizes(), weight.strides(), 0);
    }
    auto entry = std::make_shared<Entry>(weight, storage, std::move(low), std::move(state), stream);
    entry->is_alike = is_view; // a view's base was asked about; else it is made anew for the first view
    if (graph.requires_grad() && !is_view) entry->link = std::make_shared<const Link>(graph);
    if (!is_whole || (!is_view && !graph.requires_grad())) graph = use(*entry, weight, user);
    if (entry->state.storage == storage.unsafeGetStorageImpl()) keep(weight, dtype, std::move(entry), dropped);
    return graph;
  }

  // Make the casts of these weights anew that were used since they were made, by one copy a device; drop the others.
  void remake(const std::vector<Tensor>& weights, ScalarType dtype);

  static Tensor data(const Tensor& weight, ScalarType dtype) {
    c10::InferenceMode off(false);
    at::NoGradGuard no_grad;
    return weight.to(dtype);
  }
  // Another thread may be giving the weight other data; that has Python's lock, and the old storage may go with it.
  static c10::Storage held(const Tensor& weight) {
    needs_no_lock("Python is asked");
    py::gil_scoped_acquire lock;
    return weight.storage();
  }

 private:
  // Under the lock: move an entry to those that die after it.
  void take(const Key& key, std::vector<EntryPointer>& gone) {
    auto it = entries_.find(key);
    if (it == entries_.end()) return;
    gone.push_back(std::move(it->second));
    entries_.erase(it);
    size_ = entries_.size();
  }
  void keep(const Tensor& weight, ScalarType dtype, EntryPointer entry, uint64_t dropped) {
    std::vector<EntryPointer> gone;
    Key key{entry->state.storage, dtype};
    bool is_due = false;
    if (!entry->is_of(weight)) return;
    auto other = of(weight, dtype); // another thread's, made meanwhile
    if (other && (other->is_alike || !entry->is_alike)) return;
    {
      Guard guard(lock);
      if (dropped != drops.load()) return;
      take(key, gone);
      entries_.emplace(key, entry);
      size_ = entries_.size();
      is_due = (entry->passes ? inputs_ : weights_).add(*entry);
      if (entry->passes) passing_.push_back(entry);
    }
    if (!is_due) return;
    if (entry->passes) {
      sweep_passing();
    } else {
      auto alive = sweep(all());
      Guard guard(lock);
      weights_.start(alive);
    }
  }
  std::vector<EntryPointer> sweep(std::vector<EntryPointer> entries) {
    auto dead = std::stable_partition(entries.begin(), entries.end(), [](auto& entry) { return !entry->is_dead(); });
    std::vector<EntryPointer> gone(dead, entries.end());
    entries.erase(dead, entries.end());
    Guard guard(lock);
    for (size_t i = 0, count = gone.size(); i < count; ++i) remove(gone[i], gone);
    return entries;
  }
  void remove(const EntryPointer& entry, std::vector<EntryPointer>& gone) {
    auto it = entries_.find({entry->state.storage, entry->low.scalar_type()});
    if (it != entries_.end() && it->second == entry) take(it->first, gone);
  }
  void sweep_passing() {
    std::vector<std::weak_ptr<Entry>> passing;
    std::vector<EntryPointer> entries;
    {
      Guard guard(lock);
      passing.swap(passing_);
    }
    for (auto& each : passing)
      if (auto entry = each.lock()) entries.push_back(std::move(entry));
    entries = sweep(std::move(entries));
    Guard guard(lock);
    passing_.insert(passing_.end(), entries.begin(), entries.end());
    inputs_.start(entries);
  }
  void admit(Entry& entry, c10::Stream stream) {
    {
      Guard guard(lock);
      if (entry.readiness->has(stream)) return;
    }
    entry.readiness->admit(entry.low, stream);
    Guard guard(lock);
    entry.readiness->ready.push_back(stream.id());
  }
  static Tensor detached(const Tensor& graph) {
    at::NoGradGuard no_grad;
    return graph.detach();
  }
  static Tensor cast(const Tensor& weight, ScalarType dtype) {
    if (!c10::InferenceMode::is_enabled()) return weight.to(dtype);
    return data(weight, dtype); // so that a later backward pass can save it
  }
  template <class T>
  T get(const T& place) {
    Guard guard(lock);
    return place;
  }
  template <class T>
  T swap(T& place, T value) { // and return what was there
    Guard guard(lock);
    place.swap(value);
    return value;
  }

  Tensor use(Entry& entry, const Tensor& weight, const Tensor& user) {
    bool needs_grad = at::GradMode::is_enabled() && user.requires_grad();
    if (weight.is_same(user)) {
      if (!weight.requires_grad() || c10::InferenceMode::is_enabled()) return entry.cast();
      return needs_grad ? with_gradient(entry, weight) : as_weight(entry);
    }
    Tensor view;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      view = at::as_strided(entry.low, user.sizes(), user.strides(), user.storage_offset() - weight.storage_offset());
    }
    return needs_grad ? linked(view, user) : view;
  }
  Tensor with_gradient(Entry& entry, const Tensor& weight) {
    if (auto link = get(entry.link)) {
      auto found = link->use(entry.low);
      if (found.defined()) return found;
    }
    auto graph = linked(entry.low, weight);
    swap(entry.link, std::make_shared<const Link>(graph));
    return graph;
  }
  // As mpamp.engine.casts.entries.Entry.as_weight: matmul goes by whether a weight wants gradients.
  Tensor as_weight(Entry& entry) {
    if (auto leaf = get(entry.leaf)) return *leaf;
    Tensor made = entry.low.tensor_data();
    made.set_requires_grad(true);
    swap(entry.leaf, std::make_shared<const Tensor>(made));
    return made;
  }
  bool is_free(const EntryPointer& entry);

  const bool is_lasting_;
  std::atomic<size_t> size_{0};
  // Behind the lock.
  std::unordered_map<Key, EntryPointer, Hash> entries_;
  std::vector<std::weak_ptr<Entry>> passing_;
  Growth weights_, inputs_;
};

// The weight that a tensor is a view of, if that may be kept. A negative view isn't told by where it lies.
inline std::optional<Tensor> viewed(const Tensor& t) {
  if (!t.is_view() || t.is_neg() || t._fw_grad(0).defined()) return std::nullopt;
  Tensor base(at::TensorBase(t._base()));
  if (!is_plain(base) || storage_of(base) != storage_of(t) || !is_weight(base)) return std::nullopt;
  if (version_of(base) != version_of(t) || !base.is_non_overlapping_and_dense()) return std::nullopt;
  return base;
}

} // namespace mpamp
