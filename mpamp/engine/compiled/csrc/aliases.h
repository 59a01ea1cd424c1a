// Writes into a weight's memory that the weight's own version counter doesn't show, as mpamp.engine.casts.aliases:
// those through tensors with a counter of their own, such as `weight.data`, and through pointers without any.
#pragma once

#include "common.h"
#include "locks.h"

#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <functional>
#include <unordered_map>

namespace mpamp {

// Another number for each state of any weight's memory that is told apart from the one before.
inline std::atomic<int64_t> epochs{0};

// Whether two tensors' versions are counted by the same counter, which has no name. One that is held isn't made again.
inline bool is_same_counter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "a version counter is one pointer");
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// What is known of a storage: a cast that was made in another epoch may be of what isn't there any more.
struct Record {
  int64_t now(const c10::StorageImpl* storage) {
    return is_armed.load(std::memory_order_acquire) ? settle(storage) : epoch.load(std::memory_order_acquire);
  }
  void note(const Tensor& alias) {
    auto& counter = alias.unsafeGetTensorImpl()->version_counter();
    Guard guard(lock);
    if (!counter.enabled()) {
      is_uncounted = true; // an inference tensor
    } else if (std::none_of(notes.begin(), notes.end(), [&](const Note& note) { return is_same_counter(note.counter, counter); })) {
      if (notes.size() >= prune_at) {
        look(false);
        prune_at = std::max<size_t>(8, 2 * notes.size());
      }
      notes.push_back({counter, counter.current_version()});
    }
    is_armed = true;
  }
  void touch() {
    Guard guard(lock);
    epoch = ++epochs;
  }
  void hand_out() {
    Guard guard(lock);
    ++pointers;
    is_armed = true;
  }
  void take_back() {
    Guard guard(lock);
    epoch = ++epochs;
    --pointers;
  }
  Mutex lock;
  std::atomic<bool> is_complete{false}; // aliases that were made before the first cast have been looked for

 private:
  // Holding a counter shows the writes of all that share it, also of those whose alias is gone.
  struct Note {
    c10::VariableVersion counter;
    uint32_t seen;
  };
  std::vector<Note> notes;
  size_t prune_at = 8;
  int64_t pointers = 0; // that are out, without a counter
  bool is_uncounted = false; // somebody may write who isn't known, as long as anybody else holds the memory
  std::atomic<bool> is_armed{false};
  std::atomic<int64_t> epoch{0};

  // Let go of the counters that nobody else has. What is held is asked before what is written: not the other way round.
  void look(bool is_alone) {
    bool is_changed = pointers > 0 || is_uncounted;
    size_t kept = 0;
    for (auto& note : notes) {
      bool is_last = is_alone || note.counter.unique();
      std::atomic_thread_fence(std::memory_order_acquire);
      auto version = note.counter.current_version();
      is_changed |= version != note.seen;
      note.seen = version;
      if (!is_last) std::swap(notes[kept++], note);
    }
    notes.resize(kept, {c10::VariableVersion(c10::VariableVersion::DISABLED), 0});
    if (is_alone) is_uncounted = false;
    if (is_changed) epoch = ++epochs;
    is_armed = !notes.empty() || pointers > 0 || is_uncounted;
  }
  int64_t settle(const c10::StorageImpl* storage) {
    Guard guard(lock);
    look(c10::raw::intrusive_ptr::use_count(const_cast<c10::StorageImpl*>(storage)) <= 1);
    return epoch;
  }
};

// The records of storages that a cast was made of or something was handed out of, until the storage goes.
struct Records {
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::shared_ptr<Record> record;
  };
  std::shared_ptr<Record> find(const c10::StorageImpl* storage) {
    Guard guard(lock);
    auto found = records.find(storage);
    return found == records.end() ? nullptr : found->second.record;
  }
  std::shared_ptr<Record> of(const c10::Storage& storage) {
    std::vector<Known> gone; // not under the lock
    Guard guard(lock);
    auto found = records.find(storage.unsafeGetStorageImpl());
    if (found != records.end()) return found->second.record;
    if (records.size() >= sweep_at) {
      for (auto it = records.begin(); it != records.end();) {
        if (it->second.storage.expired()) {
          gone.push_back(std::move(it->second));
          it = records.erase(it);
        } else {
          ++it;
        }
      }
      sweep_at = std::max<size_t>(256, 2 * records.size());
    }
    auto made = std::make_shared<Record>();
    // A storage that is held weakly keeps its address: no other is taken for it.
    records.emplace(storage.unsafeGetStorageImpl(), Known{c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl()), made});
    return made;
  }

  Mutex lock;
  std::unordered_map<const c10::StorageImpl*, Known> records;

 private:
  size_t sweep_at = 256;
};
inline Records& records() {
  static auto* found = new Records; // outlives every thread
  return *found;
}

// Whether memory belongs to somebody else, who writes into it without a tensor: NumPy's, DLPack's, that of other processes.
inline bool is_foreign(const c10::Storage& storage) {
  static auto borrowed = c10::InefficientStdFunctionContext::makeDataPtr(nullptr, [](void*) {}, c10::kCPU).get_deleter();
  auto& data = storage.data_ptr();
  return data.get_deleter() == borrowed || at::MapAllocator::fromDataPtr(data) || at::RefcountedMapAllocator::fromDataPtr(data);
}

// Python looks for the aliases that a weight has already, as mpamp.engine.casts.aliases.look.
inline py::handle look_for_aliases;

// What a cast that is made now will be of. No lock may be held: Python may be asked.
inline void begin_record(const Tensor& weight, const c10::Storage& storage) {
  auto record = records().of(storage);
  needs_no_lock("aliases are looked for");
  if (record->is_complete.exchange(true)) return;
  if (is_foreign(storage)) record->hand_out(); // for good
  if (look_for_aliases && storage.use_count() > 2) { // the weight, and who asks
    py::gil_scoped_acquire lock;
    look_for_aliases(weight, 1);
  }
}

inline c10::StorageImpl* storage_if_any(const Tensor& t) {
  return t.defined() && t.has_storage() ? t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

inline void note(const Tensor& alias) {
  if (auto* storage = storage_if_any(alias))
    if (auto record = records().find(storage)) record->note(alias);
}

// What stands for torch.Tensor.data, as mpamp.engine.casts.handouts._Data: `set` is that one's.
struct DataAttribute {
  PyObject_HEAD
  PyObject *below, *set;

  static PyObject* get(PyObject* self, PyObject* object, PyObject* type) {
    auto* below = reinterpret_cast<DataAttribute*>(self)->below;
    if (!object || object == Py_None) return Py_NewRef(below);
    auto* alias = Py_TYPE(below)->tp_descr_get(below, object, type);
    if (!alias || !THPVariable_Check(alias)) return alias;
    try {
      note(THPVariable_Unpack(alias));
    } catch (const std::exception& error) {
      Py_DECREF(alias);
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
    return alias;
  }
  static int put(PyObject* self, PyObject* object, PyObject* value) {
    auto* attribute = reinterpret_cast<DataAttribute*>(self);
    if (!value) return Py_TYPE(attribute->below)->tp_descr_set(attribute->below, object, value);
    auto* done = PyObject_CallFunctionObjArgs(attribute->set, object, value, nullptr);
    Py_XDECREF(done);
    return done ? 0 : -1;
  }
  static py::object make(py::object below, py::object set) {
    static PyType_Slot slots[] = {{Py_tp_descr_get, reinterpret_cast<void*>(&get)}, {Py_tp_descr_set, reinterpret_cast<void*>(&put)}, {0, nullptr}};
    static PyType_Spec spec = {"mpamp_core.DataAttribute", sizeof(DataAttribute), 0, Py_TPFLAGS_DEFAULT, slots};
    static auto* type = PyType_FromSpec(&spec);
    if (!type) throw py::error_already_set();
    auto* made = PyObject_New(DataAttribute, reinterpret_cast<PyTypeObject*>(type));
    if (!made) throw py::error_already_set();
    made->below = below.release().ptr(); // for good: it stays in torch
    made->set = set.release().ptr();
    return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
  }
};

constexpr const char* kRecord = "mpamp.record";
inline Record& record_in(py::handle capsule) { return *from_capsule<std::shared_ptr<Record>>(capsule, kRecord); }

inline void bind_aliases(py::module_& m) {
  m.def("note_alias", [](py::capsule record, const Tensor& alias) { record_in(record).note(alias); });
  m.def("touch", [](py::capsule record) { record_in(record).touch(); });
  m.def("hand_out", [](py::capsule record) { record_in(record).hand_out(); });
  m.def("take_back", [](py::capsule record) { record_in(record).take_back(); });
  m.def("complete", [](py::capsule record) { record_in(record).is_complete = true; });
  m.def("begin", [](const Tensor& weight) {
    c10::Storage held = weight.storage();
    begin_record(weight, held);
  });
  m.def("note", py::overload_cast<const Tensor&>(&note));
  m.def("data_attribute", &DataAttribute::make);
  m.def("set_look_for_aliases", [](py::object look) { look_for_aliases = look.release(); });
  m.def("record", [](const Tensor& t) { return in_capsule(new std::shared_ptr<Record>(records().of(t.storage())), kRecord); });
  m.def("known_record", [](int64_t storage) -> py::object {
    auto found = records().find(reinterpret_cast<const c10::StorageImpl*>(storage));
    if (!found) return py::none();
    return in_capsule(new std::shared_ptr<Record>(std::move(found)), kRecord);
  });
  m.def("epoch", [](const Tensor& t) -> int64_t {
    auto* storage = storage_if_any(t);
    auto record = storage ? records().find(storage) : nullptr;
    return record ? record->now(storage) : 0;
  });
}

} // namespace mpamp
