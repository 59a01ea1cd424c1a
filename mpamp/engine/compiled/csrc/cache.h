// The casts of weights that a thread keeps, as mpamp.engine.casts.cache: an entry counts while what it was made of is
// unchanged. Other threads may drop entries, so each cache has a lock; only its own thread adds.
#pragma once

#include "aliases.h"

#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace mpamp {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// -- The autograd link ---------------------------------------------------------------------------------

struct CastBack : torch::autograd::Node {
  using Node::Node;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return {grads[0].defined() ? grads[0].to(at::kFloat) : grads[0]};
  }
  std::string name() const override { return "MpampCastBackward"; }
};

// A new node, in what this torch holds nodes by: std::shared_ptr up to 2.12, then c10::intrusive_ptr.
template <class Pointer, class Node = CastBack>
Pointer new_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Node>();
  } else {
    return c10::make_intrusive<Node>();
  }
}

// Give low-precision data the gradient of the float32 tensor that it is a cast of.
inline Tensor linked(const Tensor& low, const Tensor& tensor) {
  namespace ag = torch::autograd;
  auto node = new_node<decltype(ag::Edge::function)>();
  node->set_next_edges({ag::impl::gradient_edge(tensor)});
  Tensor result = low.tensor_data(); // as detach(), the version counter too, without a call of the dispatcher
  ag::set_history(result, node);
  return result;
}

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

// Storages that something sets version counters back of: their weights are never kept.
struct Rewritten {
  std::mutex lock;
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  std::atomic<bool> any{false};

  void add(const c10::Storage& storage) {
    std::lock_guard<std::mutex> guard(lock);
    for (auto it = storages.begin(); it != storages.end();)
      it = it->second.expired() ? storages.erase(it) : std::next(it);
    storages.emplace(storage.unsafeGetStorageImpl(), c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl()));
    any = true;
  }
  bool has(const c10::StorageImpl* storage) {
    if (!any) return false;
    std::lock_guard<std::mutex> guard(lock);
    auto found = storages.find(const_cast<c10::StorageImpl*>(storage));
    return found != storages.end() && !found->second.expired();
  }
};
inline Rewritten rewritten;

// Storage and autograd state, without going through Python or hooks.
inline c10::StorageImpl* storage_of(const Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}
inline uint32_t version_of(const Tensor& t) { return t.unsafeGetTensorImpl()->version_counter().current_version(); }

inline bool is_plain(const Tensor& t) {
  return t.scalar_type() == at::kFloat && t.layout() == at::kStrided && !t.unsafeGetTensorImpl()->is_inference() &&
      storage_of(t);
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

// What changes where a weight is written to or given other data.
struct State {
  explicit State(const Tensor& t)
      : version(version_of(t)), storage(storage_of(t)), data(storage->data()), offset(t.storage_offset()),
        sizes(t.sizes()), strides(t.strides()), record(records().find(storage)), epoch(record ? record->now(storage) : 0) {}
  bool is_of(const Tensor& t) const {
    return version == version_of(t) && storage == storage_of(t) && data == storage->data() &&
        offset == t.storage_offset() && t.sizes() == at::IntArrayRef(sizes) && t.strides() == at::IntArrayRef(strides) &&
        (!record || epoch == record->now(storage));
  }
  uint32_t version;
  c10::StorageImpl* storage;
  const void* data;
  int64_t offset;
  c10::SmallVector<int64_t, 4> sizes, strides;
  std::shared_ptr<Record> record;
  int64_t epoch; // of the memory: writes through aliases of the weight begin another
};

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Which streams may read a cast: as mpamp.engine.casts.streams.
struct Readiness {
  c10::Stream made_on;
  std::vector<int64_t> ready;
  std::shared_ptr<c10::Event> event; // none where the device's first stream made it: one is recorded when needed

  static c10::Stream home(c10::Stream stream) {
    static std::mutex lock;
    static std::unordered_map<c10::Device, c10::Stream> homes;
    std::lock_guard<std::mutex> guard(lock);
    return homes.emplace(stream.device(), stream).first->second;
  }
  explicit Readiness(c10::Stream stream) : made_on(stream), ready{stream.id()} {
    if (home(stream) != stream) event = recorded(stream);
  }
  static std::shared_ptr<c10::Event> recorded(c10::Stream stream) {
    auto event = std::make_shared<c10::Event>(stream.device_type());
    event->record(stream);
    return event;
  }
  void admit(const Tensor& low, c10::Stream stream) {
    if (std::find(ready.begin(), ready.end(), stream.id()) != ready.end()) return;
    (event ? event : recorded(made_on))->block(stream);
    low.record_stream(stream); // else its memory could be given away while this stream still reads it
    ready.push_back(stream.id());
  }
};

// Nothing refers to the weight itself, not even weakly: torch.utils.swap_tensors would refuse it then. An entry hangs on
// the weight's storage; of two weights that share all of it, the one used last has the entry.
struct Entry {
  Entry(const Tensor& weight, const c10::Storage& storage, Tensor made, State state)
      : weight(weight.unsafeGetTensorImpl()), storage(storage.getWeakStorageImpl()), state(std::move(state)),
        low(std::move(made)), low_version(version_of(low)) {}
  const c10::TensorImpl* weight; // only ever compared
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  State state;
  Tensor low;
  uint32_t low_version;
  Tensor leaf; // the cast where no gradients are recorded, as a weight that wants some; made when it is first asked for
  std::optional<Weak> graph; // the cast that is linked to the weight's gradient, while a graph holds it
  std::optional<Readiness> readiness;
  bool is_stale = false; // written to without a counter; it may be made anew
  bool is_alike = false; // views of the weight say by their strides where they lie in the cast, too
  bool is_used = true; // an op has had it since it was made

  bool is_of(const Tensor& t) const {
    return !is_stale && weight == t.unsafeGetTensorImpl() && state.is_of(t) && version_of(low) == low_version;
  }
  // As mpamp.engine.casts.entries.Entry.as_weight: matmul goes by whether a weight wants gradients.
  const Tensor& as_weight() {
    if (!leaf.defined()) {
      leaf = low.tensor_data();
      leaf.set_requires_grad(true);
    }
    return leaf;
  }
  bool is_dead() const {
    auto alive = storage.lock(); // a storage has no Python object that would need Python's lock to go
    return !alive || alive->nbytes() == 0;
  }
};

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

// Goes up whenever entries are dropped for a reason that no version counter shows.
inline std::atomic<uint64_t> drops{0};

// Whether a view of a dense weight only turns it: its own cast has all of the elements, where they lie.
inline bool is_all_of(const Tensor& view, const Tensor& base) {
  return view.numel() == base.numel() && view.storage_offset() == base.storage_offset() && view.is_non_overlapping_and_dense();
}

constexpr int64_t kWorthwhile = 8; // as mpamp.engine.casts.cache: up to how many times a view's elements are cast for it
constexpr int64_t kSmall = 1 << 16;

struct Cache {
  std::mutex lock;
  std::unordered_map<Key, Entry, Hash> entries;
  std::atomic<int64_t> casts{0}, recasts{0};
  size_t sweep_at = 64;

  void clear() {
    decltype(entries) gone; // what dies with them may run code of others: not under the lock
    std::lock_guard<std::mutex> guard(lock);
    gone.swap(entries);
  }
  size_t sweep() {
    std::vector<Entry> gone;
    std::lock_guard<std::mutex> guard(lock);
    return swept(gone);
  }
  template <class Wanted>
  void mark_stale_if(Wanted wanted) {
    std::lock_guard<std::mutex> guard(lock);
    for (auto& [key, entry] : entries)
      if (wanted(entry)) entry.is_stale = true;
  }
  template <class Wanted>
  void drop_if(Wanted wanted) {
    std::vector<Entry> gone;
    std::lock_guard<std::mutex> guard(lock);
    for (auto it = entries.begin(); it != entries.end();) {
      if (!wanted(it->second)) {
        ++it;
        continue;
      }
      gone.push_back(std::move(it->second));
      it = entries.erase(it);
    }
  }

  // The kept cast of a weight, linked to the gradient of `user` (the weight or a view of it) where one is needed. The
  // stream is the current one, where the device has any.
  std::optional<Tensor> find(const Tensor& weight, ScalarType dtype, const Tensor& user, const std::optional<c10::Stream>& stream) {
    std::lock_guard<std::mutex> guard(lock);
    auto it = entries.find({storage_of(weight), dtype});
    if (it == entries.end()) return std::nullopt;
    auto& entry = it->second;
    if (!entry.is_of(weight)) return std::nullopt;
    if (stream && entry.readiness && entry.readiness->made_on != *stream) entry.readiness->admit(entry.low, *stream);
    if (!weight.is_same(user) && !entry.is_alike) return std::nullopt;
    entry.is_used = true;
    return use(entry, weight, user);
  }

  // Cast a weight, and keep the result if nobody has written to the weight meanwhile.
  Tensor add(const Tensor& weight, ScalarType dtype, const Tensor& user, const std::optional<c10::Stream>& stream) {
    ++casts;
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
    Entry entry(weight, storage, std::move(low), state);
    entry.is_alike = is_view; // a view's base was asked about; else it is made anew for the first view
    if (graph.requires_grad() && !is_view) entry.graph = Weak(graph.getIntrusivePtr());
    if (stream) entry.readiness.emplace(*stream);
    if (!is_whole || (!is_view && !graph.requires_grad())) graph = use(entry, weight, user);
    std::vector<Entry> gone;
    std::lock_guard<std::mutex> guard(lock);
    if (dropped == drops.load() && state.is_of(weight) && state.storage == storage.unsafeGetStorageImpl()) {
      if (entries.size() >= sweep_at) sweep_at = std::max<size_t>(64, 2 * swept(gone));
      Key key{storage_of(weight), dtype};
      auto old = entries.find(key);
      if (old != entries.end()) {
        gone.push_back(std::move(old->second));
        entries.erase(old);
      }
      entries.emplace(key, std::move(entry));
    }
    return graph;
  }

  static Tensor data(const Tensor& weight, ScalarType dtype) {
    c10::InferenceMode off(false);
    at::NoGradGuard no_grad;
    return weight.to(dtype);
  }

 private:
  // Another thread may be giving the weight other data; that has Python's lock, and the old storage may go with it.
  static c10::Storage held(const Tensor& weight) {
    py::gil_scoped_acquire lock;
    return weight.storage();
  }
  size_t swept(std::vector<Entry>& gone) {
    for (auto it = entries.begin(); it != entries.end();) {
      if (it->second.is_dead()) {
        gone.push_back(std::move(it->second));
        it = entries.erase(it);
      } else {
        ++it;
      }
    }
    return entries.size();
  }
  static Tensor detached(const Tensor& graph) {
    at::NoGradGuard no_grad;
    return graph.detach();
  }
  static Tensor cast(const Tensor& weight, ScalarType dtype) {
    if (!c10::InferenceMode::is_enabled()) return weight.to(dtype);
    return data(weight, dtype); // so that a later backward pass can save it
  }
  static Tensor use(Entry& entry, const Tensor& weight, const Tensor& user) {
    bool needs_grad = at::GradMode::is_enabled() && user.requires_grad();
    if (weight.is_same(user)) {
      if (!weight.requires_grad() || c10::InferenceMode::is_enabled()) return entry.low;
      if (!needs_grad) return entry.as_weight();
      if (entry.graph) {
        if (auto graph = entry.graph->lock()) return Tensor(std::move(graph));
      }
      auto graph = linked(entry.low, weight);
      entry.graph = Weak(graph.getIntrusivePtr());
      return graph;
    }
    Tensor view;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      view = at::as_strided(entry.low, user.sizes(), user.strides(), user.storage_offset() - weight.storage_offset());
    }
    return needs_grad ? linked(view, user) : view;
  }
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
