// One op's kernel at a device's Autocast key: scope, policy, dtype, casts, the op itself. What is rare is left to the
// kernel in Python, which is whole: dispatch modes, transforms, backward passes, marks, ops with rules of their own.
#pragma once

#include "thread.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>
#include <torch/version.h>

#include <cmath>

namespace mpamp {

using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

#if TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR >= 209
#define MPAMP_HAS_COMPUTED_KERNEL 1
#endif

// What Python sets once: the first carrier of marks (mpamp.engine.marks), and who fills rows of tables in.
struct Settings {
  std::array<std::atomic<int>, 3> carriers{-1, -1, -1};
  std::atomic<int64_t> choice{0}; // goes up with each choice of them
  py::handle ask, mirror, key_set; // the last makes a DispatchKeySet of its bits
  std::atomic<bool> is_observed{false}; // somebody wants to see every call: Python's kernels run
  std::unordered_map<int64_t, py::object> dtypes, layouts, formats;

  bool has_mark() const { // any carrier on
    for (auto& carrier : carriers)
      if (carrier < 0 || !c10::impl::tls_is_dispatch_key_excluded(static_cast<DispatchKey>(carrier.load()))) return true;
    return false;
  }
};
inline Settings& settings() {
  static auto* found = new Settings;
  return *found;
}

// What a device's kernels share.
struct Device {
  int index;
  DispatchKey key;
  c10::DeviceType type;
  bool has_streams;
  // Tells of a stream (a handle of the vendor's) whether it records a graph: int status(handle, int* out).
  int (*capture)(void*, int*) = nullptr;

  // The stream that is current, and whether it records a graph; asked once a call.
  struct Moment {
    c10::Device place;
    std::optional<c10::Stream> stream;
    bool is_capturing;
  };
  const Moment& now(c10::Device place, std::optional<Moment>& known) const {
    if (!known || known->place != place) {
      int status = 0;
      std::optional<c10::Stream> stream;
      if (has_streams || capture) stream = current_stream(place);
      bool is_capturing = capture && (capture(Handles<c10::Stream>::of(*stream), &status) != 0 || status != 0);
      known.emplace(Moment{place, has_streams ? stream : std::nullopt, is_capturing});
    }
    return *known;
  }
};

class Kernel final : public c10::OperatorKernel {
 public:
  struct Facts { // what Python knows of the op
    int number;
    bool keeps; // returns no argument, so a kept cast may be given to it
    std::vector<std::string> held; // arguments that are numbers which a result may hold
    std::vector<std::string> parameters; // tensors whose being float64 says nothing
  };

  Kernel(Device device, Facts facts, py::object python, const c10::OperatorHandle& op)
      : device_(device), facts_(std::move(facts)), python_(std::move(python)),
        after_(c10::DispatchKeySet(DispatchKeySet::FULL_AFTER, device.key)) {
    auto& arguments = op.schema().arguments();
    auto is_in = [](const std::vector<std::string>& names, const std::string& name) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto kind = arguments[i].real_type();
      if (auto optional = kind->cast<c10::OptionalType>()) kind = optional->getElementType();
      if (auto list = kind->cast<c10::ListType>()) {
        kind = list->getElementType();
        if (auto optional = kind->cast<c10::OptionalType>()) kind = optional->getElementType();
      }
      if (kind->kind() == c10::TypeKind::TensorType) tensors_.push_back(i);
      if (arguments[i].name() == "dtype" && kind->kind() == c10::TypeKind::ScalarTypeType) dtype_ = static_cast<int>(i);
      if (is_in(facts_.held, arguments[i].name())) held_.push_back(i);
      if (is_in(facts_.parameters, arguments[i].name())) parameters_.push_back(i);
    }
    // An op that is only let through has no kernel that could be called.
    const bool has_native = op.hasKernelForDispatchKey(device.key) && !op.isKernelFallthroughKernel(device.key);
#ifdef MPAMP_HAS_COMPUTED_KERNEL
    if (has_native) native_.emplace(op.getComputedKernelForDispatchKey(device.key));
#else
    has_unknown_native_ = has_native;
#endif
  }

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    auto& thread = this_thread();
    auto* scope = thread.scopes[device_.index].get();
    if (!thread.entries || settings().is_observed || is_special()) return run_python(op, keys, stack);
    auto task = torch::autograd::get_current_graph_task_id();
    if (!scope) {
      if (task != -1 || settings().has_mark()) return run_python(op, keys, stack);
      return run_outside(op, keys, stack);
    }
    if (task != scope->task || at::autocast::is_autocast_cache_enabled()) return run_python(op, keys, stack);
    auto lower = at::autocast::get_autocast_dtype(device_.type);
    auto code = row(*scope->table, lower);
    if (code == kPython) return run_python(op, keys, stack);
    if (code == kOutside || c10::impl::tls_is_dispatch_key_excluded(DispatchKey::ADInplaceOrView))
      return run_outside(op, keys, stack);
    if (code == kBelow) return op.redispatchBoxed(keys & after_, stack);
    auto first = stack->size() - op.schema().arguments().size();
    Seen seen = look(*stack, first);
    if (seen.is_odd) return run_python(op, keys, stack);
    auto target = target_of(code, lower, seen, *stack, first);
    c10::impl::ExcludeDispatchKeyGuard off(device_.key);
    if (target) cast(*stack, first, *target, *scope, thread);
    op.callBoxed(stack);
  }

 private:
  struct Seen {
    bool has_double = false, is_odd = false, first_is_castable = false;
    ScalarTypes dtypes; // of castable tensors on the device
  };

  // Dispatch modes, functorch's levels and tracers see programs, not runs: Python knows what to do for each.
  static bool is_special() {
    using namespace c10::impl;
    return TorchDispatchModeTLS::stack_len() > 0 || torch::jit::tracer::isTracing() ||
        tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
        tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerBackMode) ||
        tls_is_dispatch_key_included(DispatchKey::PythonDispatcher);
  }

  Code row(Table& table, ScalarType lower) {
    auto dtype = index_of(lower);
    if (dtype < 0) return kPython;
    auto code = table.code(dtype, facts_.number);
    if (code != kUnknown) return code;
    py::gil_scoped_acquire lock;
    code = static_cast<Code>(settings().ask(table.id, dtype, facts_.number).cast<int>());
    table.set(dtype, facts_.number, code);
    return code;
  }

  template <class Do>
  void each(Stack& stack, size_t first, Do&& run) const {
    for (auto index : tensors_) {
      auto& value = stack[first + index];
      if (value.isTensor()) {
        run(index, value.toTensor());
      } else if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorVector()) run(index, tensor);
      } else if (value.isList()) {
        for (const IValue& item : value.toListRef())
          if (item.isTensor()) run(index, item.toTensor());
      }
    }
  }

  bool is_parameter(size_t index) const {
    return std::find(parameters_.begin(), parameters_.end(), index) != parameters_.end();
  }
  bool is_here(const Tensor& t) const { return t.device().type() == device_.type; }

  Seen look(Stack& stack, size_t first) const {
    Seen seen;
    bool is_first = true;
    each(stack, first, [&](size_t index, const Tensor& t) {
      if (!t.defined()) return;
      bool is_number = t.unsafeGetTensorImpl()->is_wrapped_number();
      bool may_be_cast = is_castable(t.scalar_type());
      if (t.scalar_type() == at::kDouble && !is_number && !is_parameter(index)) seen.has_double = true;
      if (t.layout() != at::kStrided || t.unsafeGetTensorImpl()->is_python_dispatch()) seen.is_odd = true;
      if (may_be_cast && is_here(t)) seen.dtypes.set(static_cast<int>(t.scalar_type()));
      if (std::exchange(is_first, false)) seen.first_is_castable = may_be_cast;
    });
    return seen;
  }

  // As mpamp.rules.policy.target_dtype, and what codegen writes for arguments called dtype and for numbers.
  std::optional<ScalarType> target_of(Code code, ScalarType lower, const Seen& seen, Stack& stack, size_t first) const {
    std::optional<ScalarType> target;
    auto* own = dtype_ >= 0 ? &stack[first + dtype_] : nullptr;
    if (code == kLower) target = lower;
    if (code == kFloat32) target = at::kFloat;
    if (code == kPromote) {
      auto found = seen.dtypes;
      for (auto index : held_)
        if (!hold(seen.dtypes, stack[first + index])) found.set(static_cast<int>(at::kFloat));
      if (found.count() > 1) target = at::kFloat;
    }
    if (seen.has_double) target.reset();
    if (own && !own->isNone()) {
      auto dtype = static_cast<ScalarType>(own->toInt());
      if (at::isFloatingType(dtype) || at::isComplexType(dtype)) target.reset();
    } else if (own && code == kSetDtype && seen.first_is_castable) {
      *own = static_cast<int64_t>(at::kFloat);
    }
    return target;
  }

  static bool hold(const ScalarTypes& seen, const IValue& number) {
    if (!number.isDouble() && !number.isInt()) return true;
    auto size = std::abs(number.isDouble() ? number.toDouble() : static_cast<double>(number.toInt()));
    if (!std::isfinite(size)) return true;
    for (int dtype = 0; dtype < kScalarTypes; ++dtype)
      if (seen[dtype] && size > dtypes().largest[dtype]) return false;
    return true;
  }

  void cast(Stack& stack, size_t first, ScalarType target, const Scope& scope, Thread& thread) const {
    Call call{target, scope, thread, std::nullopt};
    for (auto index : tensors_) {
      auto& value = stack[first + index];
      if (value.isTensor()) {
        const auto& tensor = value.toTensor();
        if (tensor.defined()) value = one(tensor, call, facts_.keeps);
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        bool keeps = facts_.keeps && list.size() > 1; // a product of one tensor may be a view of it
        for (auto& tensor : list)
          if (tensor.defined()) tensor = one(tensor, call, keeps);
        value = std::move(list);
      } else if (value.isList()) {
        c10::List<std::optional<Tensor>> list;
        for (const IValue& item : value.toListRef())
          list.push_back(item.isTensor() ? std::optional<Tensor>(one(item.toTensor(), call, false)) : std::nullopt);
        value = std::move(list);
      }
    }
  }

  struct Call {
    ScalarType target;
    const Scope& scope;
    Thread& thread;
    std::optional<Device::Moment> moment;
  };

  Tensor one(const Tensor& t, Call& call, bool keeps) const {
    auto target = call.target;
    if (t.scalar_type() == target) return even(t);
    if (!is_castable(t.scalar_type()) || !is_here(t)) return t;
    if (keeps && call.scope.keep != kNothing && target != at::kFloat && is_plain(t)) {
      if (auto found = kept(t, call)) return *found;
    }
    return t.to(target);
  }

  // A tensor whose tangent has its dtype: as mpamp.engine.python.building.even, outside of torch.func's levels.
  static Tensor even(const Tensor& t) {
    if (!torch::autograd::impl::get_autograd_meta(t)) return t;
    const auto& tangent = t._fw_grad(0);
    return tangent.defined() && tangent.scalar_type() != t.scalar_type() ? at::_to_copy(t, at::TensorOptions(t.scalar_type())) : t;
  }

  std::optional<Tensor> kept(const Tensor& t, Call& call) const {
    std::optional<Tensor> base;
    if (!is_weight(t)) {
      base = viewed(t);
      if (!base) return std::nullopt;
    }
    const Tensor& weight = base ? *base : t;
    auto& now = device_.now(t.device(), call.moment);
    if (now.is_capturing) return std::nullopt;
    auto& cache = *call.thread.cache(call.scope.keep);
    if (auto found = cache.find(weight, call.target, t, now.stream)) return found;
    if (base) {
      bool pays = call.scope.keep == kPersistently || is_all_of(t, weight) ||
          weight.numel() <= std::max(kWorthwhile * t.numel(), kSmall);
      py::gil_scoped_acquire lock;
      if (!pays || !kinds.ask_viewable(weight).cast<bool>()) return std::nullopt;
    }
    return cache.add(weight, call.target, t, now.stream);
  }

  // What runs where no region of ours decides: torch's own kernel, or what is below.
  void run_outside(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
#ifdef MPAMP_HAS_COMPUTED_KERNEL
    if (native_) return native_->callBoxed(op, keys, stack);
#else
    if (has_unknown_native_) return run_python(op, keys, stack);
#endif
    op.redispatchBoxed(keys & after_, stack);
  }

  // -- The kernel in Python ------------------------------------------------------------------------------

  static py::object to_python(const c10::Argument& argument, IValue value) {
    auto kind = argument.real_type();
    if (auto optional = kind->cast<c10::OptionalType>()) kind = optional->getElementType();
    if (value.isInt()) {
      auto& known = settings();
      auto find = [&](auto& objects) {
        auto it = objects.find(value.toInt());
        return made(it == objects.end() ? py::object() : it->second, argument.name().c_str());
      };
      if (kind->kind() == c10::TypeKind::ScalarTypeType) return find(known.dtypes);
      if (kind->kind() == c10::TypeKind::LayoutType) return find(known.layouts);
      if (kind->kind() == c10::TypeKind::MemoryFormatType) return find(known.formats);
    }
    return made(torch::jit::toPyObject(std::move(value)), argument.name().c_str());
  }

  void run_python(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    py::gil_scoped_acquire lock;
    auto& schema = op.schema();
    auto& arguments = schema.arguments();
    auto values = torch::jit::pop(*stack, arguments.size());
    py::list positional;
    py::dict by_keyword;
    positional.append(settings().key_set(keys.raw_repr()));
    size_t last = arguments.size();
    for (; last > 0; --last) { // defaults are left out, as torch does
      auto& argument = arguments[last - 1];
      if (argument.kwarg_only()) continue;
      if (!argument.default_value() || !same(*argument.default_value(), values[last - 1])) break;
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& argument = arguments[i];
      if (argument.kwarg_only()) {
        if (argument.default_value() && same(*argument.default_value(), values[i])) continue;
        by_keyword[argument.name().c_str()] = to_python(argument, std::move(values[i]));
      } else if (i < last) {
        positional.append(to_python(argument, std::move(values[i])));
      }
    }
    values.clear();
    py::object result = py::handle(python_.object)(*positional, **by_keyword);
    auto& returns = schema.returns();
    if (returns.size() == 1) {
      torch::jit::push(*stack, torch::jit::toIValue(result, returns[0].real_type()));
    } else if (!returns.empty()) {
      auto items = result.cast<py::tuple>();
      for (size_t i = 0; i < returns.size(); ++i)
        torch::jit::push(*stack, torch::jit::toIValue(items[i], returns[i].real_type()));
    }
  }

  static bool same(const IValue& a, const IValue& b) {
    if (a.isNone() || b.isNone()) return a.isNone() && b.isNone();
    return a.tagKind() == b.tagKind() && (a.isInt() || a.isDouble() || a.isBool()) && a == b;
  }

  Device device_;
  Facts facts_;
  Held python_;
  DispatchKeySet after_;
  std::vector<size_t> tensors_, held_, parameters_; // where tensors, or lists of them, and numbers to mind are passed
  int dtype_ = -1;
  bool has_unknown_native_ = false; // torch before 2.9 doesn't give it away
#ifdef MPAMP_HAS_COMPUTED_KERNEL
  std::optional<c10::SafeKernelFunction> native_;
#endif
};

} // namespace mpamp
