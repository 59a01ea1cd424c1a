// What every part of the compiled engine knows: tables, scopes, one thread's state, and how torch's versions differ.
#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <bitset>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace mpamp {

namespace py = pybind11;
using at::ScalarType;
using at::Tensor;
using c10::DispatchKey;

constexpr int kDevices = 32;
constexpr int kOps = 2048;

// What an op's row says in one table and dtype, as Python writes it into a table.
enum Code : int8_t { kUnknown, kOutside, kBelow, kLower, kFloat32, kSetDtype, kPromote, kAsCalled, kPython };

constexpr int kScalarTypes = static_cast<int>(ScalarType::NumOptions);
using ScalarTypes = std::bitset<kScalarTypes>;

// What Python says once of dtypes: which rows of a table hold in regions of one, and which of mpamp.rules.policy.CASTABLE
// are cast, with the largest number that each holds.
struct Dtypes {
  Dtypes() { rows.fill(-1); }
  std::array<int, kScalarTypes> rows;
  ScalarTypes castable;
  std::array<double, kScalarTypes> largest{};
};
inline Dtypes& dtypes() {
  static auto* found = new Dtypes;
  return *found;
}
// The number of a region's dtype; -1 where its regions are left to Python.
inline int index_of(ScalarType dtype) { return dtypes().rows[static_cast<int>(dtype)]; }
inline bool is_castable(ScalarType dtype) { return dtypes().castable[static_cast<int>(dtype)]; }

// One op table as dense arrays, an array a dtype, by the op's number. Python fills a row in when it is first asked for.
struct Table {
  explicit Table(int64_t id) : id(id) {}
  ~Table() {
    for (auto& rows : rows) delete[] rows.load();
  }
  Code code(int dtype, int op) const {
    auto* found = rows[dtype].load(std::memory_order_acquire);
    return found ? static_cast<Code>(found[op].load(std::memory_order_relaxed)) : kUnknown;
  }
  void set(int dtype, int op, Code code) {
    auto* found = rows[dtype].load();
    if (!found) {
      auto* made = new std::atomic<int8_t>[kOps]();
      if (rows[dtype].compare_exchange_strong(found, made)) {
        found = made;
      } else {
        delete[] made;
      }
    }
    found[op].store(code);
  }
  const int64_t id;
  std::array<std::atomic<std::atomic<int8_t>*>, 3> rows{};
};

enum Keep { kNothing, kInRegion, kPersistently };

constexpr int64_t kPythons = -3; // the task of a scope that only Python's kernels know: no task is it

// What a kernel needs to know of a region, as mpamp.engine.scope.Scope.
struct Scope {
  std::shared_ptr<Table> table;
  Keep keep;
  int64_t task;
};

// -- Differences between versions of torch ------------------------------------------------------------

template <class Slot>
auto python_object(Slot* slot, int) -> decltype(slot->load_pyobj()) {
  return slot->load_pyobj();
}
template <class Slot>
auto python_object(Slot* slot, long) -> decltype(slot->_unchecked_untagged_pyobj()) {
  return slot->_unchecked_untagged_pyobj();
}

// Whether torch gives a stream's handle at its vendor away, as it does from 2.9 on.
template <class Stream, class = void>
struct Handles {
  static constexpr bool are_known = false;
  static void* of(const Stream&) { return nullptr; }
};
template <class Stream>
struct Handles<Stream, std::void_t<decltype(std::declval<const Stream&>().native_handle())>> {
  static constexpr bool are_known = true;
  static void* of(const Stream& stream) { return stream.native_handle(); }
};

inline bool is_alive() { return Py_IsInitialized(); }

// An object of Python's that C++ holds beyond the lock that protects it.
struct Held {
  explicit Held(py::object object) : object(object.release().ptr()) {}
  Held(const Held&) = delete;
  ~Held() {
    if (is_alive()) {
      py::gil_scoped_acquire lock;
      Py_DECREF(object);
    }
  }
  PyObject* const object;
};

// -- What Python holds of ours, and gives back ---------------------------------------------------------
// Capsules with a name each, not types: the registry where pybind11 looks types up is of torch's pybind11, whose ABI
// changes between versions of torch.

template <class T>
py::capsule in_capsule(T* value, const char* name) {
  return py::capsule(value, name, [](PyObject* capsule) {
    delete static_cast<T*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
  });
}

template <class T>
T& from_capsule(py::handle capsule, const char* name) {
  auto* found = static_cast<T*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (!found) throw py::error_already_set();
  return *found;
}

// An object that was to be made; what went wrong if it wasn't.
inline py::object made(py::object object, const char* what) {
  if (object) return object;
  if (PyErr_Occurred()) throw py::error_already_set();
  throw py::type_error(std::string("mpamp: Python has no object for ") + what);
}

} // namespace mpamp
