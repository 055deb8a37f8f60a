// Calls of fused kernels with no Python between the call and the kernel: launches, and the autograd formula around them.
//
// `flexsn/launch_native.py` builds this against the headers of the PyTorch that runs, says what a launch and a door are made of, and
// uses them where it can. They serve the usual call alone; any other (operands to be laid out anew, a backward that was not
// seen before, ...) they decline, and the Python that they stand in for takes it. How many operands there are, and which places
// of theirs are read, Python has settled when it makes a launch or a door; what tensors stand there is looked at in every call.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace flexsn {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Raised {};  // a Python error is set

struct Locked {  // Python's lock, while it lives
  PyGILState_STATE state = PyGILState_Ensure();
  ~Locked() { PyGILState_Release(state); }
};

struct Reference {  // to a Python object; made under Python's lock, and dropped anywhere
  explicit Reference(PyObject* object) : object(Py_NewRef(object)) {}
  Reference(const Reference&) = delete;
  ~Reference() {
    if (!Py_IsInitialized()) return;
    const Locked locked;
    Py_DECREF(object);
  }
  PyObject* const object;
};

// --- tensors as Python passes them ------------------------------------------------------------------------------------------
// Undefined where Python has None. Nothing if one is something else.
std::optional<variable_list> tensors(PyObject* sequence) {
  PyObject** items = PySequence_Fast_ITEMS(sequence);
  variable_list found(PySequence_Fast_GET_SIZE(sequence));
  for (size_t i = 0; i < found.size(); ++i) {
    if (items[i] == Py_None) continue;
    if (!THPVariable_Check(items[i])) return std::nullopt;
    found[i] = THPVariable_Unpack(items[i]);
  }
  return found;
}

PyObject* listed(const variable_list& values) {
  PyObject* list = PyList_New(values.size());
  for (size_t i = 0; list && i < values.size(); ++i)
    PyList_SET_ITEM(list, i, values[i].defined() ? THPVariable_Wrap(values[i]) : Py_NewRef(Py_None));
  return list;
}

// --- launches ---------------------------------------------------------------------------------------------------------------
std::atomic<int64_t> generation{0};  // launches of an earlier one decline

// Whether a pointer leads to what a tensor means.
bool is_plain(const Tensor& t) {
  static constexpr c10::DispatchKeySet special({
      c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched,
      c10::DispatchKey::Functionalize, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return t.defined() && !t.key_set().has_any(special) && t.layout() == at::kStrided;
}

struct Array {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  int64_t place = 0;  // among the operands, of one that is read
  bool dense = true;  // in the order of its own dims

  // Whether a kernel can read the tensor in its place as it is.
  bool fits(const Tensor& t) const {
    if (!is_plain(t) || t.scalar_type() != dtype) return false;
    if (t.sizes() != at::IntArrayRef(sizes) || !(dense ? t.is_contiguous() : lies_so(t.strides()))) return false;
    return t.has_storage() && t.const_data_ptr();
  }

 private:
  bool lies_so(at::IntArrayRef found) const {
    for (size_t d = 0; d < sizes.size(); ++d)
      if (sizes[d] != 1 && found[d] != strides[d]) return false;
    return true;
  }
};

using Run = int (*)(void* const* arrays, const int64_t* dims, int64_t T, int64_t N, int64_t tile, int threads, int large);
using CuLaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

struct Binary {  // of a kernel for GPUs; without a function if there is none yet
  void* function = nullptr;
  unsigned programs = 0, threads = 0, shared = 0;
};

// A kernel at given sizes on a device: which operands it reads, and what is allocated for it.
struct Launch {
  at::Device device = at::kCPU;
  std::vector<Array> reads, writes;
  std::vector<int64_t> arguments;  // places among reads and writes, -1 where nothing is passed
  std::vector<int64_t> dims;       // two sizes per param
  int64_t T = 0, N = 0, made = 0;
  Run run = nullptr;  // on a CPU
  int64_t tile = 0;
  int threads = 0, large = 0, allowed = 0;
  std::array<Binary, 2> binaries;  // on a GPU: for any addresses, and for multiples of 16
  std::vector<int32_t> flags;
  std::unique_ptr<Reference> kernel;

  // What it has written; nothing if it declines. `locked`: Python's lock is held.
  std::optional<variable_list> operator()(const variable_list& operands, bool locked) const {
    if (made != generation || (run && at::get_num_threads() != allowed)) return std::nullopt;
    const c10::OptionalDeviceGuard there(device.is_cuda() ? std::optional(device) : std::nullopt);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<void*> addresses, given;
    for (const Array& array : reads) {
      if (array.place >= static_cast<int64_t>(operands.size())) return std::nullopt;
      const Tensor& t = operands[array.place];
      if (!array.fits(t) || t.device() != device) return std::nullopt;
      addresses.push_back(const_cast<void*>(t.const_data_ptr()));
    }
    variable_list written;
    for (const Array& array : writes) {
      written.push_back(at::empty_strided(array.sizes, array.strides, at::TensorOptions(array.dtype).device(device)));
      addresses.push_back(written.back().mutable_data_ptr());
    }
    for (const int64_t place : arguments) given.push_back(place < 0 ? nullptr : addresses[place]);
    return (run ? on_cpu(given, locked) : on_gpu(given)) ? std::optional(std::move(written)) : std::nullopt;
  }

 private:
  bool on_cpu(const std::vector<void*>& given, bool locked) const {
    PyThreadState* const state = locked ? PyEval_SaveThread() : nullptr;
    const bool done = !run(given.data(), dims.data(), T, N, tile, threads, large);
    if (locked) PyEval_RestoreThread(state);
    return done;  // else there is no memory: Python tries once more, and says so
  }

  bool on_gpu(std::vector<void*>& given) const {
    static const auto launch = reinterpret_cast<CuLaunchKernel>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchKernel"));
    uintptr_t bits = N;
    for (void* address : given) bits |= reinterpret_cast<uintptr_t>(address);
    const Binary& binary = binaries[bits % 16 == 0];
    if (!binary.function || !launch) return false;
    int32_t steps = T;
    int64_t neurons = N;
    void* scratch = nullptr;  // two pointers to memory of the whole launch, which it does not use (`_torch.cuda.triton_function`)
    std::vector<void*> parameters;
    for (void*& address : given) parameters.push_back(&address);
    for (const int64_t& size : dims) parameters.push_back(const_cast<int64_t*>(&size));
    parameters.insert(parameters.end(), {&steps, &neurons});
    for (const int32_t& flag : flags) parameters.push_back(const_cast<int32_t*>(&flag));
    parameters.insert(parameters.end(), {&scratch, &scratch});
    const c10::impl::VirtualGuardImpl gpus(device.type());
    void* const stream = gpus.getStreamNativeHandle(gpus.getStream(device));
    // an error is Python's to meet: on a thread that has no CUDA context yet, it makes one
    return !launch(binary.function, binary.programs, 1, 1, binary.threads, 1, 1, binary.shared, stream, parameters.data(), nullptr);
  }
};

// --- what Python is asked for -----------------------------------------------------------------------------------------------
struct {
  PyObject *backward, *params, *statics;  // of `doors.py`
} python;

// What a function makes of a call and more; the references to the latter, made under Python's lock, are dropped.
template <size_t n>
variable_list ask(PyObject* function, PyObject* call, const std::array<PyObject*, n>& more) {
  std::array<PyObject*, n + 1> arguments{call};
  std::copy(more.begin(), more.end(), arguments.begin() + 1);
  const bool made = std::find(more.begin(), more.end(), nullptr) == more.end();  // else there is no memory
  PyObject* const found = made ? PyObject_Vectorcall(function, arguments.data(), n + 1, nullptr) : nullptr;
  for (PyObject* object : more) Py_XDECREF(object);
  if (!found) {
    python_error error;
    error.persist();
    throw error;
  }
  variable_list values = *tensors(found);
  Py_DECREF(found);
  return values;
}

// The params of a launch: statics (params and captured tensors of a call) as they are, or what a prologue computes from them.
struct Params {
  std::vector<int64_t> places;
  std::unique_ptr<Reference> prologue;  // for `doors._params_of_door(call, prologue, statics)`; null if there is none

  void append_to(variable_list& operands, PyObject* call, const variable_list& statics) const {
    for (const int64_t place : places) operands.push_back(statics[place]);
    if (!prologue) return;
    const Locked locked;
    for (Tensor& param : ask<2>(python.params, call, {Py_NewRef(prologue->object), listed(statics)})) operands.push_back(std::move(param));
  }
};

// --- the autograd formula ---------------------------------------------------------------------------------------------------
// The way back for some needs, from the cotangents that are present.
struct Backward {
  std::vector<bool> needs, present;
  std::shared_ptr<Launch> launch;  // takes inputs, states, checkpoints, the cotangents that are there, and params
  std::vector<int64_t> places;     // of the gradient of each input and state in what it writes, -1 where there is none
  Params params;
  std::unique_ptr<Reference> statics;  // for `doors._statics_of_door`; null if none of them needs a gradient
};

// Calls of one kind.
struct Door {
  std::shared_ptr<Launch> forward;
  std::vector<int64_t> results, saved;  // places in what it writes
  std::vector<int64_t> constant;        // of the results, those through which no gradient flows
  std::vector<bool> present;            // of inputs, states and statics (params and captured tensors): the others start at zero
  int64_t rows = 0;                     // how many are inputs and states
  Params params;                        // of the forward
  bool differentiable = false;
  std::vector<std::shared_ptr<const Backward>> backwards;
  std::mutex learning;  // backwards run on several threads, without Python's lock

  std::shared_ptr<const Backward> known(const std::vector<bool>& needs, const variable_list& grads) {
    const auto same = [](bool flag, const Tensor& g) { return flag == g.defined(); };
    const std::lock_guard<std::mutex> locked(learning);
    for (const auto& way : backwards)
      if (way->needs == needs && std::equal(way->present.begin(), way->present.end(), grads.begin(), same)) return way;
    return nullptr;
  }

  void learn(std::shared_ptr<const Backward> way) {
    const std::lock_guard<std::mutex> locked(learning);
    for (auto& old : backwards)
      if (old->needs == way->needs && old->present == way->present) return old.swap(way);  // what it held dies after the lock
    backwards.push_back(std::move(way));
  }
};

variable_list picked(const variable_list& written, const std::vector<int64_t>& places) {
  variable_list found;
  for (const int64_t place : places) found.push_back(place < 0 ? Tensor() : written[place]);
  return found;
}

// What a node of the graph keeps of its call.
struct Call {
  Call(PyObject* call, std::shared_ptr<Door> door) : python(call), door(std::move(door)) {}
  const Reference python;  // the `run.Call`
  const std::shared_ptr<Door> door;
};

// Compiled autograd takes numbers, strings and tensors from a node: so the call travels as the memory of a tensor.
Tensor as_tensor(std::unique_ptr<Call> call) {
  void* const memory = call.release();
  return at::from_blob(memory, {1}, [](void* held) { delete static_cast<Call*>(held); }, at::TensorOptions(at::kByte));
}

const Call& of_tensor(const Tensor& holder) { return *static_cast<const Call*>(holder.const_data_ptr()); }

struct Made {
  std::unique_ptr<Call> call;
  const variable_list& written;
};

// `doors._backward_of_door(call, saved, grads, needs)`; `saved`: None if an earlier backward freed it.
variable_list by_python(const Call& call, const variable_list& saved, const variable_list& grads, const std::vector<bool>& needs) {
  const Locked locked;
  PyObject* const flags = PyTuple_New(needs.size());
  for (size_t i = 0; flags && i < needs.size(); ++i) PyTuple_SET_ITEM(flags, i, PyBool_FromLong(needs[i]));
  return ask<3>(python.backward, call.python.object, {saved.empty() ? Py_NewRef(Py_None) : listed(saved), listed(grads), flags});
}

struct Scan : torch::autograd::Function<Scan> {
  static variable_list forward(AutogradContext* ctx, Made& made, at::TensorList operands) {
    const Door& door = *made.call->door;
    variable_list results = picked(made.written, door.results), saved = picked(made.written, door.saved);
    saved.insert(saved.begin(), operands.begin(), operands.end());
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    if (!door.constant.empty()) ctx->mark_non_differentiable(picked(results, door.constant));
    ctx->saved_data["call"] = as_tensor(std::move(made.call));
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor holder = ctx->saved_data["call"].toTensor();
    const Call& call = of_tensor(holder);
    const Door& door = *call.door;
    std::vector<bool> needs;
    size_t edge = 0;
    for (const bool there : door.present) needs.push_back(there && ctx->needs_input_grad(edge++));
    const variable_list gradients = way_back(call, unpacked(*ctx), grads, needs);
    variable_list found(1);  // none for `made`
    for (size_t i = 0; i < door.present.size(); ++i)
      if (door.present[i]) found.push_back(gradients[i]);
    return found;
  }

 private:
  static variable_list unpacked(const AutogradContext& ctx) {
    try {
      return ctx.get_saved_variables();
    } catch (const c10::Error& error) {
      if (std::string(error.what_without_backtrace()).find("second time") == std::string::npos) throw;
      return {};
    }
  }

  static variable_list way_back(const Call& call, const variable_list& saved, const variable_list& grads, const std::vector<bool>& needs) {
    const bool usual = std::all_of(saved.begin(), saved.end(), is_plain) && !saved.empty() && !at::GradMode::is_enabled();
    const auto known = usual ? call.door->known(needs, grads) : nullptr;
    if (known)
      if (auto found = by_kernel(*known, call, saved, grads)) return *found;
    return by_python(call, saved, grads, needs);
  }

  static std::optional<variable_list> by_kernel(const Backward& way, const Call& call, const variable_list& saved, const variable_list& grads) {
    const Door& door = *call.door;
    variable_list operands, statics;
    auto next = saved.begin();
    for (size_t i = 0; i < door.present.size(); ++i)
      (i < static_cast<size_t>(door.rows) ? operands : statics).push_back(door.present[i] ? *next++ : Tensor());
    operands.insert(operands.end(), next, saved.end());
    for (const Tensor& g : grads)
      if (g.defined()) operands.push_back(g);
    way.params.append_to(operands, call.python.object, statics);
    const auto written = (*way.launch)(operands, false);
    if (!written) return std::nullopt;
    variable_list found = picked(*written, way.places), of_statics(statics.size());
    if (way.statics) {
      const Locked locked;
      of_statics = ask<3>(python.statics, call.python.object, {Py_NewRef(way.statics->object), listed(statics), listed(*written)});
    }
    found.insert(found.end(), of_statics.begin(), of_statics.end());
    return found;
  }
};

// Results of a call; nothing if the door declines.
std::optional<variable_list> through(const std::shared_ptr<Door>& door, PyObject* call, const variable_list& operands) {
  if (operands.size() != door->present.size()) return std::nullopt;
  variable_list present;
  for (const Tensor& t : operands) {
    if (door->differentiable && t.defined() && t.is_inference()) return std::nullopt;  // autograd saves none
    if (t.defined()) present.push_back(t);
  }
  variable_list given(operands.begin(), operands.begin() + door->rows);
  door->params.append_to(given, call, {operands.begin() + door->rows, operands.end()});
  const auto written = (*door->forward)(given, true);
  if (!written) return std::nullopt;
  if (!door->differentiable) return picked(*written, door->results);
  Made made{std::make_unique<Call>(call, door), *written};
  return Scan::apply(made, at::TensorList(present));
}

// --- the module ---------------------------------------------------------------------------------------------------------------
template <class T>
T& inside(PyObject* capsule) {
  void* const held = PyCapsule_GetPointer(capsule, nullptr);
  if (!held) throw Raised();
  return *static_cast<T*>(held);
}

template <class T>
PyObject* capsule(std::unique_ptr<T> held) {
  PyObject* const made = PyCapsule_New(held.get(), nullptr, [](PyObject* self) { delete static_cast<T*>(PyCapsule_GetPointer(self, nullptr)); });
  if (made) held.release();
  return made;
}

int64_t number(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw Raised();
  return value;
}

// What `each` makes of every item of a list or tuple.
template <class F>
auto all(PyObject* sequence, F each) {
  std::vector<decltype(each(sequence))> found;
  PyObject* const fast = PySequence_Fast(sequence, "expected a list or tuple");
  if (!fast) throw Raised();
  const std::unique_ptr<PyObject, void (*)(PyObject*)> held(fast, [](PyObject* o) { Py_DECREF(o); });
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); ++i) found.push_back(each(PySequence_Fast_GET_ITEM(fast, i)));
  return found;
}

std::unique_ptr<Reference> reference(PyObject* object) { return object == Py_None ? nullptr : std::make_unique<Reference>(object); }

std::vector<int64_t> numbers(PyObject* sequence) { return all(sequence, number); }

Params params_of(PyObject* object) {  // (places, prologue or None)
  PyObject *places, *prologue;
  if (!PyArg_ParseTuple(object, "OO", &places, &prologue)) throw Raised();
  return {numbers(places), reference(prologue)};
}

std::vector<bool> truths(PyObject* sequence) {
  return all(sequence, [](PyObject* o) { return PyObject_IsTrue(o) == 1; });
}

Array array(PyObject* object) {  // (sizes, strides, dtype, place)
  PyObject *sizes, *strides, *dtype;
  Array made;
  if (!PyArg_ParseTuple(object, "OOO!L", &sizes, &strides, &THPDtypeType, &dtype, &made.place)) throw Raised();
  made.sizes = numbers(sizes), made.strides = numbers(strides), made.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  int64_t expected = 1;
  for (size_t d = made.sizes.size(); d-- > 0; expected *= made.sizes[d])
    made.dense = made.dense && (made.sizes[d] == 1 || made.strides[d] == expected);
  return made;
}

Binary binary(PyObject* object) {  // (function, programs, threads, shared), or None
  Binary made;
  unsigned long long function = 0;
  if (object != Py_None && !PyArg_ParseTuple(object, "KIII", &function, &made.programs, &made.threads, &made.shared)) throw Raised();
  made.function = reinterpret_cast<void*>(function);
  return made;
}

// launch(kernel, gpu, reads, writes, arguments, dims, T, N, on_cpu, on_gpu): `gpu` is -1 on a CPU; `on_cpu` is
// (address, tile, threads, large, allowed) there, `on_gpu` (binaries, flags) elsewhere, and the other None.
PyObject* make_launch(PyObject* args) {
  PyObject *kernel, *reads, *writes, *arguments, *dims, *on_cpu, *on_gpu;
  int gpu;
  auto made = std::make_shared<Launch>();
  if (!PyArg_ParseTuple(args, "OiOOOOLLOO", &kernel, &gpu, &reads, &writes, &arguments, &dims, &made->T, &made->N, &on_cpu, &on_gpu)) throw Raised();
  made->reads = all(reads, array), made->writes = all(writes, array), made->arguments = numbers(arguments), made->dims = numbers(dims);
  made->made = generation, made->kernel = std::make_unique<Reference>(kernel);
  if (on_cpu != Py_None) {
    unsigned long long address;
    if (!PyArg_ParseTuple(on_cpu, "KLiii", &address, &made->tile, &made->threads, &made->large, &made->allowed)) throw Raised();
    made->run = reinterpret_cast<Run>(address);
  } else {
    PyObject *any, *aligned, *flags;
    if (!PyArg_ParseTuple(on_gpu, "(OO)O", &any, &aligned, &flags)) throw Raised();
    made->device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu));
    made->binaries = {binary(any), binary(aligned)};
    for (const int64_t flag : numbers(flags)) made->flags.push_back(static_cast<int32_t>(flag));
  }
  return capsule(std::make_unique<std::shared_ptr<Launch>>(std::move(made)));
}

// run(launch, operands) -> what it has written, or None if it declines
PyObject* run_launch(PyObject* args) {
  PyObject *launch, *operands;
  if (!PyArg_ParseTuple(args, "OO", &launch, &operands)) throw Raised();
  const auto given = tensors(operands);
  const auto written = given ? (*inside<std::shared_ptr<Launch>>(launch))(*given, true) : std::nullopt;
  return written ? listed(*written) : Py_NewRef(Py_None);
}

// door(launch, results, saved, constant, present, rows, params, differentiable)
PyObject* make_door(PyObject* args) {
  PyObject *launch, *results, *saved, *constant, *present, *params;
  int differentiable;
  auto made = std::make_shared<Door>();
  if (!PyArg_ParseTuple(args, "OOOOOLOp", &launch, &results, &saved, &constant, &present, &made->rows, &params, &differentiable)) throw Raised();
  made->forward = inside<std::shared_ptr<Launch>>(launch), made->results = numbers(results), made->saved = numbers(saved);
  made->constant = numbers(constant), made->present = truths(present), made->params = params_of(params), made->differentiable = differentiable;
  return capsule(std::make_unique<std::shared_ptr<Door>>(std::move(made)));
}

// learn(door, needs, present, launch, places, params, statics): a way back
PyObject* learn(PyObject* args) {
  PyObject *door, *needs, *present, *launch, *places, *params, *statics;
  if (!PyArg_ParseTuple(args, "OOOOOOO", &door, &needs, &present, &launch, &places, &params, &statics)) throw Raised();
  Backward way{truths(needs), truths(present), inside<std::shared_ptr<Launch>>(launch), numbers(places), params_of(params), reference(statics)};
  inside<std::shared_ptr<Door>>(door)->learn(std::make_shared<const Backward>(std::move(way)));
  return Py_NewRef(Py_None);
}

// call(door, call, operands) -> results, or None if the door declines
PyObject* go_through(PyObject* args) {
  PyObject *door, *call, *operands;
  if (!PyArg_ParseTuple(args, "OOO", &door, &call, &operands)) throw Raised();
  const auto given = tensors(operands);
  const auto results = given ? through(inside<std::shared_ptr<Door>>(door), call, *given) : std::nullopt;
  return results ? listed(*results) : Py_NewRef(Py_None);
}

// start(backward, params, statics): what doors call in Python
PyObject* start(PyObject* args) {
  if (!PyArg_ParseTuple(args, "OOO", &python.backward, &python.params, &python.statics)) throw Raised();
  for (PyObject* function : {python.backward, python.params, python.statics}) Py_INCREF(function);
  return Py_NewRef(Py_None);
}

// renew(): launches made so far decline from now on
PyObject* renew(PyObject*) { return PyLong_FromLongLong(++generation); }

template <PyObject* (*function)(PyObject*)>
PyObject* guarded(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  try {
    return function(args);
  } catch (const Raised&) {
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"launch", guarded<make_launch>, METH_VARARGS, nullptr}, {"run", guarded<run_launch>, METH_VARARGS, nullptr},
    {"door", guarded<make_door>, METH_VARARGS, nullptr},     {"learn", guarded<learn>, METH_VARARGS, nullptr},
    {"call", guarded<go_through>, METH_VARARGS, nullptr},    {"start", guarded<start>, METH_VARARGS, nullptr},
    {"renew", guarded<renew>, METH_VARARGS, nullptr},        {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "flexsn_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace flexsn

PyMODINIT_FUNC PyInit_flexsn_native() { return PyModule_Create(&flexsn::definition); }
