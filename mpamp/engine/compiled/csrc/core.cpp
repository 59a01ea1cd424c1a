// The compiled engine of mpamp: what Python sees of it. See mpamp/engine/compiled/__init__.py for who calls what.
#include "region.h"

namespace mpamp {
namespace {

std::vector<c10::Storage> storages_of(const std::vector<Tensor>& tensors) {
  std::vector<c10::Storage> found;
  for (auto& tensor : tensors)
    if (tensor.defined() && tensor.has_storage()) found.push_back(tensor.storage());
  return found;
}

// A kernel in the dispatcher, until it is destroyed.
struct Installed {
  std::unique_ptr<torch::Library> library;
  void destroy() {
    py::gil_scoped_release unlocked; // other threads may be in the kernel and want Python's lock
    library.reset();
  }
};

// torch warns where a kernel goes over another, which is the point here.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::unique_ptr<Installed> install(const std::string& name, Device device, Kernel::Facts facts, py::object kernel) {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard unwarned(&silent);
  auto dot = name.find('.');
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
  auto colons = name.find("::");
  auto made = std::make_unique<Kernel>(device, std::move(facts), std::move(kernel), op);
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, name.substr(0, colons), device.key, __FILE__, __LINE__);
  library->impl(name.substr(colons + 2).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(made)));
  auto result = std::make_unique<Installed>();
  result->library = std::move(library);
  return result;
}

constexpr const char* kTable = "mpamp.table";
constexpr const char* kDevice = "mpamp.device";
constexpr const char* kInstalled = "mpamp.installed";

py::capsule table(int64_t id) { return in_capsule(new std::shared_ptr<Table>(std::make_shared<Table>(id)), kTable); }

py::capsule scope(py::capsule table, int keep, int64_t task) {
  auto& found = from_capsule<std::shared_ptr<Table>>(table, kTable);
  return in_capsule(
      new std::shared_ptr<Scope>(std::make_shared<Scope>(Scope{found, static_cast<Keep>(keep), task})), kScope);
}

py::capsule device(int index, int key, const std::string& type, bool has_streams, size_t capture) {
  return in_capsule(new Device{index, static_cast<DispatchKey>(key), c10::Device(type).type(), has_streams,
                               reinterpret_cast<int (*)(void*, int*)>(capture)}, kDevice);
}

py::dict codes() {
  const std::pair<const char*, Code> all[] = {
      {"outside", kOutside}, {"below", kBelow}, {"lower", kLower}, {"float32", kFloat32},
      {"set_dtype", kSetDtype}, {"promote", kPromote}, {"as_called", kAsCalled}, {"python", kPython}};
  py::dict found;
  for (auto& [name, code] : all) found[name] = static_cast<int>(code);
  return found;
}

ScalarType scalar_type(py::handle dtype) { return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type; }

py::capsule spec(py::capsule on, py::object dtype, py::object scope, py::object name, py::object key, py::object index,
                 const std::vector<std::tuple<int, py::object, py::object, py::object>>& carriers,
                 const std::vector<py::object>& undo) {
  auto& device = from_capsule<Device>(on, kDevice);
  py::object core = scope.attr("core");
  auto& found = from_capsule<std::shared_ptr<Scope>>(core, kScope);
  auto* made = new Spec{device.key, device.type, scalar_type(dtype), device.index, found, {}, settings().choice,
                        scope.ptr(), py::object(scope.attr("mark")).ptr(), name.ptr(), key.ptr(), index.ptr(), {}};
  for (size_t i = 0; i < undo.size() && i < made->undo.size(); ++i) made->undo[i] = py::object(undo[i]).release().ptr();
  for (auto& [number, carrier_key, carrier_name, carrier_dtype] : carriers)
    made->carriers.push_back({static_cast<DispatchKey>(number), c10::Device(carrier_name.cast<std::string>()).type(),
                              carrier_dtype.is_none() ? std::nullopt : std::optional(scalar_type(carrier_dtype)),
                              py::object(carrier_key).release().ptr(), py::object(carrier_name).release().ptr()});
  return in_capsule(made, kSpec);
}

void set_types(const std::vector<py::object>& dtypes, const std::vector<py::object>& layouts, const std::vector<py::object>& formats) {
  auto fill = [](auto& known, auto& objects, c10::TypePtr type) {
    for (auto& object : objects) known.emplace(torch::jit::toIValue(object, type).toInt(), object);
  };
  fill(settings().dtypes, dtypes, c10::ScalarTypeType::get());
  fill(settings().layouts, layouts, c10::LayoutType::get());
  fill(settings().formats, formats, c10::MemoryFormatType::get());
}

void set_dtypes(const std::vector<py::object>& rows, const std::vector<std::pair<py::object, double>>& castable) {
  for (size_t i = 0; i < rows.size(); ++i) dtypes().rows[static_cast<int>(scalar_type(rows[i]))] = static_cast<int>(i);
  for (auto& [dtype, largest] : castable) {
    dtypes().castable.set(static_cast<int>(scalar_type(dtype)));
    dtypes().largest[static_cast<int>(scalar_type(dtype))] = largest;
  }
}

PyMethodDef put_def = {"put", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(put)), METH_FASTCALL, nullptr};
PyMethodDef enter_def = {"__enter__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(enter)), METH_FASTCALL, nullptr};
PyMethodDef leave_def = {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(leave)), METH_FASTCALL, nullptr};

// Give a class the methods here, which fall back to its own.
void adopt(py::object cls, py::object default_mark, Py_ssize_t mark) {
  auto& known = python();
  known.enter = py::object(cls.attr("__enter__")).release().ptr();
  known.leave = py::object(cls.attr("__exit__")).release().ptr();
  known.default_mark = default_mark.release().ptr();
  known.mark = mark;
  auto* type = reinterpret_cast<PyTypeObject*>(cls.ptr());
  cls.attr("__enter__") = made(py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &enter_def)), "a method");
  cls.attr("__exit__") = made(py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &leave_def)), "a method");
}

// Make this thread's lists known, and return the function that writes into its scopes; they are known as long as it lives.
py::object attach(py::object entries, py::object scopes, py::object casts) {
  auto attached = in_capsule(new Attached(std::move(entries), scopes, std::move(casts)), kAttached);
  for (Py_ssize_t i = 0; i < kDevices; ++i)
    if (mirror(i, PyList_GET_ITEM(scopes.ptr(), i)) < 0) throw py::error_already_set();
  return made(py::reinterpret_steal<py::object>(PyCFunction_New(&put_def, attached.ptr())), "a function");
}

void set_carriers(const std::vector<int>& keys, py::object first) {
  for (size_t i = 0; i < settings().carriers.size(); ++i) settings().carriers[i] = i < keys.size() ? keys[i] : -1;
  python().carrier = first.release().ptr(); // for good: threads may be reading it
  ++settings().choice;
}

std::tuple<int64_t, int64_t, int64_t> info() {
  auto entries = this_thread().in_region->sweep() + caches().lasting->sweep();
  auto& made = counts();
  return {made.casts[0] + made.casts[1], static_cast<int64_t>(entries), made.recasts};
}

// Where the calling thread keeps casts, and the stream on which they are queued, for Python's kernels: those keep no casts
// of their own but under dispatch modes.
Cache& cache_of(bool is_persistent) { return *this_thread().cache(is_persistent ? kPersistently : kInRegion); }
std::optional<c10::Stream> stream_of(const Tensor& weight, bool has_streams) {
  return has_streams ? std::optional(current_stream(weight.device())) : std::nullopt;
}

// Each cast that is kept and may be served, and a tensor of what is where its weight was.
std::vector<std::pair<Tensor, Tensor>> kept(bool of_all_threads) {
  std::vector<std::pair<Tensor, Tensor>> found;
  for (auto& cache : caches().all()) {
    if (!of_all_threads && cache != this_thread().in_region && cache != caches().lasting) continue;
    for (auto& entry : cache->all()) {
      auto storage = entry->storage.lock();
      if (!storage || entry->is_stale || storage->data() != entry->state.data || version_of(entry->low) != entry->low_version)
        continue;
      at::NoGradGuard no_grad;
      auto weight = at::empty({0}, entry->low.options().dtype(at::kFloat));
      weight.set_(c10::Storage(std::move(storage)), entry->state.offset, entry->state.sizes, entry->state.strides);
      found.emplace_back(entry->low, std::move(weight));
    }
  }
  return found;
}

// Tell whether a cast would be served for a tensor.
bool serves(const Tensor& tensor, const Tensor& low) {
  if (!tensor.has_storage() || !is_plain(tensor)) return false;
  for (auto& cache : caches().all()) {
    auto entry = cache->of(tensor, low.scalar_type());
    if (entry && entry->low.is_same(low)) return true;
  }
  return false;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  Fork::watch();
  auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  python().names = {name("_spec"), name("ready"), name("device"), name("version"), name("core"), name("clear")};
  m.attr("codes") = codes();
  m.def("table", &table);
  m.def("device", &device);
  m.def("install", [](const std::string& name, py::capsule device, int number, bool keeps, std::vector<std::string> held,
                      std::vector<std::string> parameters, py::object kernel) {
    return in_capsule(
        install(name, from_capsule<Device>(device, kDevice), {number, keeps, std::move(held), std::move(parameters)}, std::move(kernel)).release(), kInstalled);
  });
  m.def("destroy", [](py::capsule installed) { from_capsule<Installed>(installed, kInstalled).destroy(); });
  m.def("scope", &scope);
  m.def("spec", &spec);
  m.def("set_types", &set_types);
  m.def("set_dtypes", &set_dtypes);
  m.def("set_carriers", &set_carriers);
  m.def("set_asked", [](py::object rows, py::object kind, py::object mirror, py::object viewable, py::object key_set) {
    kinds.ask_viewable = viewable.release();
    settings().key_set = key_set.release();
    settings().ask = rows.release();
    settings().mirror = mirror.release();
    kinds.ask = kind.release();
  });
  m.def("adopt", &adopt);
  m.def("attach", &attach);
  m.def("observe", [](bool is_observed) { settings().is_observed = is_observed; });
  m.def("info", &info);
  m.def("find", [](const Tensor& weight, py::handle dtype, const Tensor& user, bool is_persistent, bool has_streams) {
    auto target = scalar_type(dtype);
    py::gil_scoped_release unlocked;
    return cache_of(is_persistent).find(weight, target, user, stream_of(weight, has_streams));
  });
  m.def("add", [](const Tensor& weight, py::handle dtype, const Tensor& user, bool is_persistent, bool has_streams) {
    auto target = scalar_type(dtype);
    py::gil_scoped_release unlocked;
    return cache_of(is_persistent).add(weight, target, user, stream_of(weight, has_streams));
  });
  m.def("casts", [](bool is_persistent) { return counts().casts[is_persistent]; });
  m.def("kept", &kept);
  m.def("has_casts", [] { return !this_thread().in_region->is_empty(); });
  m.def("clear_region", [] { this_thread().in_region->clear(); }, py::call_guard<py::gil_scoped_release>());
  m.def("clear", &clear_all, py::call_guard<py::gil_scoped_release>());
  m.def("clear_mine", [](bool is_persistent) { cache_of(is_persistent).clear(); }, py::call_guard<py::gil_scoped_release>());
  m.def("forget", [](const std::vector<Tensor>& tensors, bool for_good) { forget(storages_of(tensors), for_good, false); },
        py::call_guard<py::gil_scoped_release>());
  m.def("outdate", [](const std::vector<Tensor>& tensors) { forget(storages_of(tensors), false, true); },
        py::call_guard<py::gil_scoped_release>());
  m.def("remake", py::overload_cast<const std::vector<Tensor>&>(&remake), py::call_guard<py::gil_scoped_release>());
  m.def("serves", &serves);
  bind_aliases(m);
  m.attr("max_ops") = kOps;
  m.attr("knows_handles") = Handles<c10::Stream>::are_known;
}

} // namespace mpamp
