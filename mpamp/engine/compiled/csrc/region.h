// Entering and leaving an ordinary region, as mpamp.regions.region: the same entries, so that Python can leave in any
// order what C++ entered. No exception can strike between two changes here. What isn't ordinary is left to Python.
#pragma once

#include "kernel.h"

namespace mpamp {

// One carrier's part of a mark (mpamp.engine.marks): torch's autocast state of a device type that no program uses.
struct Carrier {
  DispatchKey key;
  c10::DeviceType type;
  std::optional<ScalarType> dtype; // none: it is off
  PyObject *key_object, *name; // borrowed from those who live for good

  void put() const {
    c10::impl::tls_set_dispatch_key_excluded(key, !dtype);
    if (dtype) at::autocast::set_autocast_dtype(type, *dtype);
  }
};

// What one region sets, as mpamp.regions.region._Spec; in a capsule that the spec holds.
struct Spec {
  DispatchKey key;
  c10::DeviceType type;
  ScalarType dtype;
  Py_ssize_t index;
  std::shared_ptr<Scope> scope;
  std::vector<Carrier> carriers; // of the mark that stands for a table of the region's own; none for the default one
  int64_t choice; // of the carriers that were chosen then
  // Borrowed: the spec, or torch, holds them.
  PyObject *scope_object, *mark, *name, *key_object, *index_object;
  // Of a disabled region, which excludes the key and no more: what undoes that where it wasn't, and where it was. For good.
  std::array<PyObject*, 2> undo;

  bool is_disabled() const { return undo[0]; }
};

struct Names {
  PyObject *spec, *ready, *device, *version, *core, *clear;
};
struct Python {
  Names names;
  PyObject *enter, *leave; // the methods in Python
  PyObject *default_mark, *carrier; // the first carrier's key
  Py_ssize_t mark; // where a thread's list of scopes has the mark
};
inline Python& python() {
  static auto* found = new Python{};
  return *found;
}
constexpr const char* kScope = "mpamp.scope";
constexpr const char* kSpec = "mpamp.spec";

// Have kernels see what a thread's list of scopes has at an index.
inline int mirror(Py_ssize_t index, PyObject* scope) {
  if (index >= kDevices) return 0;
  auto& place = this_thread().scopes[index];
  if (scope == Py_None) {
    place.reset();
    return 0;
  }
  auto capsule = py::reinterpret_steal<py::object>(PyObject_GetAttr(scope, python().names.core));
  if (!capsule) return -1;
  if (capsule.is_none() && settings().mirror) // it is made when it is first needed
    capsule = py::reinterpret_steal<py::object>(PyObject_CallOneArg(settings().mirror.ptr(), scope));
  if (!capsule) return -1;
  if (!PyCapsule_CheckExact(capsule.ptr())) { // Python's alone
    place = std::make_shared<Scope>(Scope{nullptr, kNothing, kPythons});
    return 0;
  }
  auto* found = static_cast<std::shared_ptr<Scope>*>(PyCapsule_GetPointer(capsule.ptr(), kScope));
  if (!found) return -1;
  place = *found;
  return 0;
}

// One thread's lists, in a capsule that the thread's state has: once that is gone the thread is as it was before.
struct Attached {
  py::object entries, scopes, casts;

  Attached(py::object entries, py::object scopes, py::object casts)
      : entries(std::move(entries)), scopes(std::move(scopes)), casts(std::move(casts)) {
    auto& thread = this_thread();
    thread.entries = this->entries.ptr();
    thread.python_scopes = this->scopes.ptr();
    thread.python_casts = this->casts.ptr();
    thread.attached = this;
  }
  ~Attached() {
    auto& thread = this_thread();
    if (thread.attached != this) return; // it has been attached again, or is another's
    thread.entries = thread.python_scopes = thread.python_casts = nullptr;
    thread.attached = nullptr;
    thread.scopes.fill(nullptr);
  }
};
constexpr const char* kAttached = "mpamp.attached";

// list.__setitem__ of the thread's scopes, which kernels see at once.
inline PyObject* put(PyObject* self, PyObject* const* args, Py_ssize_t) {
  auto* attached = static_cast<Attached*>(PyCapsule_GetPointer(self, kAttached));
  if (!attached) return nullptr;
  auto* scopes = attached->scopes.ptr();
  auto index = PyLong_AsSsize_t(args[0]);
  if (index < 0 && PyErr_Occurred()) return nullptr;
  if (mirror(index, args[1]) < 0) return nullptr;
  Py_INCREF(args[1]);
  if (PyList_SetItem(scopes, index, args[1]) < 0) return nullptr;
  Py_RETURN_NONE;
}

struct Object { // a new reference, given up at the end of the scope
  PyObject* const p;
  ~Object() { Py_XDECREF(p); }
};

inline const Spec* ordinary(PyObject* region) {
  auto& names = python().names;
  if (at::impl::torch_function_mode_enabled()) return nullptr;
  Object spec{PyObject_GetAttr(region, names.spec)};
  Object core{spec.p ? PyObject_GetAttr(spec.p, names.core) : nullptr};
  if (!core.p || core.p == Py_None) return nullptr;
  auto* found = static_cast<const Spec*>(PyCapsule_GetPointer(core.p, kSpec));
  if (!found || found->is_disabled()) return found;
  Object ready{PyObject_GetAttr(spec.p, names.ready)}, device{PyObject_GetAttr(spec.p, names.device)};
  if (!ready.p || !device.p) return nullptr;
  Object version{PyObject_GetAttr(device.p, names.version)};
  return version.p && PyObject_RichCompareBool(ready.p, version.p, Py_EQ) == 1 ? found : nullptr;
}

// Append an entry of mpamp.engine.entries to the thread's.
inline bool append(PyObject* entries, PyObject* region, PyObject* flag, PyObject* undo) {
  Object entry{PyList_New(3)};
  if (!entry.p) return false;
  PyList_SET_ITEM(entry.p, 0, Py_NewRef(region));
  PyList_SET_ITEM(entry.p, 1, Py_NewRef(flag));
  PyList_SET_ITEM(entry.p, 2, Py_NewRef(undo));
  return PyList_Append(entries, entry.p) == 0;
}

inline bool is_excluded(DispatchKey key) { return c10::impl::tls_is_dispatch_key_excluded(key); }
inline void set_excluded(DispatchKey key, bool is_off) { c10::impl::tls_set_dispatch_key_excluded(key, is_off); }
inline PyObject* as_bool(bool value) { return value ? Py_True : Py_False; }

inline PyObject* dtype_object(c10::DeviceType type) {
  return settings().dtypes.at(static_cast<int64_t>(at::autocast::get_autocast_dtype(type))).ptr();
}

// What undoes a mark, for mpamp.engine.entries: each carrier's key, whether that is excluded, name and dtype.
inline PyObject* carriers_now(const std::vector<Carrier>& carriers) {
  Object found{PyTuple_New(static_cast<Py_ssize_t>(carriers.size()))};
  for (size_t i = 0; found.p && i < carriers.size(); ++i) {
    auto& each = carriers[i];
    auto* now = PyTuple_Pack(4, each.key_object, as_bool(is_excluded(each.key)), each.name, dtype_object(each.type));
    if (!now) return nullptr;
    PyTuple_SET_ITEM(found.p, static_cast<Py_ssize_t>(i), now);
  }
  return Py_XNewRef(found.p);
}

inline PyObject* enter(PyObject* self, PyObject* const*, Py_ssize_t) {
  auto& thread = this_thread();
  auto& known = python();
  const Spec* spec = thread.entries ? ordinary(self) : nullptr;
  if (PyErr_Occurred()) return nullptr;
  if (spec && spec->is_disabled()) {
    if (!append(thread.entries, self, Py_None, spec->undo[is_excluded(spec->key)])) return nullptr;
    set_excluded(spec->key, true);
    return Py_NewRef(self);
  }
  if (!spec || torch::autograd::get_current_graph_task_id() != -1 || spec->choice != settings().choice)
    return PyObject_CallOneArg(known.enter, self);
  auto *entries = thread.entries, *scopes = thread.python_scopes;
  auto carrier = static_cast<DispatchKey>(settings().carriers[0].load());
  if (settings().carriers[0] < 0) return PyObject_CallOneArg(known.enter, self);
  bool is_outermost = !settings().has_mark(), flag = at::autocast::is_autocast_cache_enabled();
  auto* own = PyList_GET_ITEM(scopes, known.mark);
  if (!is_outermost && !(PyList_GET_SIZE(entries) && !flag && own == known.default_mark))
    return PyObject_CallOneArg(known.enter, self);
  bool is_off = is_excluded(spec->key);
  Object before{carriers_now(spec->carriers)};
  if (!before.p) return nullptr;
  Object undo{PyTuple_Pack(10, spec->key_object, as_bool(is_off), spec->name, dtype_object(spec->type), spec->index_object,
                           PyList_GET_ITEM(scopes, spec->index), own, known.carrier, as_bool(is_outermost), before.p)};
  if (!undo.p || !append(entries, self, as_bool(flag), undo.p)) return nullptr;
  at::autocast::set_autocast_cache_enabled(false);
  thread.scopes[spec->index] = spec->scope;
  PyList_SetItem(scopes, spec->index, Py_NewRef(spec->scope_object));
  PyList_SetItem(scopes, known.mark, Py_NewRef(spec->mark));
  at::autocast::set_autocast_dtype(spec->type, spec->dtype);
  for (auto& each : spec->carriers) each.put();
  if (is_outermost && spec->carriers.empty()) set_excluded(carrier, false);
  set_excluded(spec->key, false);
  return Py_NewRef(self);
}

// Whether an entry's changes are those that `enter` made for a region of this spec, so that `restore` can undo them.
inline bool is_own(const Spec& spec, PyObject* undo) {
  if (spec.is_disabled()) return undo == spec.undo[0] || undo == spec.undo[1];
  return PyTuple_GET_SIZE(undo) == 10 && PyTuple_GET_ITEM(undo, 4) == spec.index_object &&
      PyTuple_GET_ITEM(undo, 0) == spec.key_object &&
      PyTuple_GET_SIZE(PyTuple_GET_ITEM(undo, 9)) == static_cast<Py_ssize_t>(spec.carriers.size());
}

inline int restore(const Spec& spec, PyObject* flag, PyObject* undo) {
  auto *scopes = this_thread().python_scopes, *carriers = PyTuple_GET_ITEM(undo, 9);
  auto item = [&](int i) { return PyTuple_GET_ITEM(undo, i); };
  set_excluded(spec.key, item(1) == Py_True);
  if (item(8) == Py_True) set_excluded(static_cast<DispatchKey>(settings().carriers[0].load()), true);
  for (size_t i = 0; i < spec.carriers.size(); ++i) {
    auto* was = PyTuple_GET_ITEM(carriers, static_cast<Py_ssize_t>(i));
    set_excluded(spec.carriers[i].key, PyTuple_GET_ITEM(was, 1) == Py_True);
    at::autocast::set_autocast_dtype(spec.carriers[i].type, reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(was, 3))->scalar_type);
  }
  if (mirror(spec.index, item(5)) < 0) return -1;
  PyList_SetItem(scopes, spec.index, Py_NewRef(item(5)));
  PyList_SetItem(scopes, python().mark, Py_NewRef(item(6)));
  at::autocast::set_autocast_dtype(spec.type, reinterpret_cast<THPDtype*>(item(3))->scalar_type);
  at::autocast::set_autocast_cache_enabled(flag == Py_True);
  return 0;
}

inline PyObject* leave(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  auto& thread = this_thread();
  auto& known = python();
  auto* entries = thread.entries;
  auto size = entries ? PyList_GET_SIZE(entries) : 0;
  auto* entry = size ? PyList_GET_ITEM(entries, size - 1) : nullptr;
  bool is_ordinary = entry && PyList_GET_ITEM(entry, 0) == self && PyTuple_CheckExact(PyList_GET_ITEM(entry, 2));
  const Spec* spec = is_ordinary ? ordinary(self) : nullptr;
  if (PyErr_Occurred()) PyErr_Clear(); // Python's method will say it
  if (!spec || !is_own(*spec, PyList_GET_ITEM(entry, 2))) {
    PyObject* all[4] = {self, count > 0 ? args[0] : Py_None, count > 1 ? args[1] : Py_None, count > 2 ? args[2] : Py_None};
    return PyObject_Vectorcall(known.leave, all, 4, nullptr);
  }
  Object kept{Py_NewRef(entry)}; // what it holds is let go of at the end
  auto* undo = PyList_GET_ITEM(entry, 2);
  if (spec->is_disabled()) set_excluded(spec->key, undo == spec->undo[1]);
  else if (restore(*spec, PyList_GET_ITEM(entry, 1), undo) < 0) return nullptr;
  if (PyList_SetSlice(entries, size - 1, size, nullptr) < 0) return nullptr;
  if (size == 1) {
    if (!thread.in_region->is_empty()) thread.in_region->clear();
    if (PyDict_GET_SIZE(thread.python_casts)) return PyObject_CallMethodNoArgs(thread.python_casts, known.names.clear);
  }
  Py_RETURN_NONE;
}

} // namespace mpamp
