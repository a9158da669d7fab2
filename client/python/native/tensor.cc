#include "client/python/native/tensor.h"

#include <pybind11/stl.h>

#include <functional>
#include <optional>
#include <string_view>

#include "client/python/native/dlpack.h"
#include "client/python/native/errors.h"

namespace modelhost::python {
namespace {

namespace py = pybind11;

// What buffers of no bytes point at: consumers take a null pointer for an error.
constexpr std::byte kNothing{};

void* Writable(const void* data) {
  // lint: allow(reinterpret-const) Py_buffer has no pointer to const; it has a read-only flag.
  return const_cast<void*>(data == nullptr ? &kNothing : data);
}

int RefuseBuffer(Py_buffer* buffer, const std::string& text) {
  buffer->obj = nullptr;
  PyErr_SetString(PyExc_BufferError, text.c_str());
  return -1;
}

// Requests of the buffer protocol name what the consumer can do with; a flag that is absent is
// something that it does not look at.
bool Wants(int flags, int what) { return (flags & what) == what; }

int GetTensorBuffer(PyObject* self, Py_buffer* buffer, int flags) {
  auto& tensor = py::handle(self).cast<Tensor&>();
  const mh_tensor_view& view = tensor.view();
  if (Wants(flags, PyBUF_WRITABLE)) {
    return RefuseBuffer(buffer, tensor.Describe() + ": is read-only (.numpy().copy() is yours)");
  }
  if (!tensor.mappable()) {
    return RefuseBuffer(buffer, tensor.Describe() + ": cannot be viewed: " + view.reason);
  }
  if (tensor.type() == nullptr || tensor.type()->format == nullptr) {
    return RefuseBuffer(
        buffer, tensor.Describe() + ": buffers have no such type (.view_bytes() has the bytes)");
  }
  if (!tensor.RowMajor() && !Wants(flags, PyBUF_STRIDES)) {
    return RefuseBuffer(buffer, tensor.Describe() + ": is not contiguous (.numpy().copy() is)");
  }
  if (Wants(flags, PyBUF_F_CONTIGUOUS) && !(tensor.RowMajor() && view.rank < 2)) {
    return RefuseBuffer(buffer, tensor.Describe() + ": is not Fortran-contiguous");
  }
  if ((Wants(flags, PyBUF_C_CONTIGUOUS) || Wants(flags, PyBUF_ANY_CONTIGUOUS)) &&
      !tensor.RowMajor()) {
    return RefuseBuffer(buffer, tensor.Describe() + ": is not contiguous");
  }
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  buffer->buf = Writable(tensor.HostData());
  buffer->len = static_cast<Py_ssize_t>(view.nbytes);
  if (!tensor.RowMajor()) {
    // `nbytes` is the range in the file; a buffer's length is that of its elements.
    buffer->len = tensor.type()->size;
    for (uint32_t i = 0; i < view.rank; ++i) buffer->len *= view.shape[i];
  }
  buffer->readonly = 1;
  buffer->itemsize = tensor.type()->size;
  // lint: allow(reinterpret-const) The C API of Python has no const here.
  buffer->format = Wants(flags, PyBUF_FORMAT) ? const_cast<char*>(tensor.type()->format) : nullptr;
  buffer->ndim = static_cast<int>(view.rank);
  // lint: allow(reinterpret-const) Consumers do not write to it.
  buffer->shape = Wants(flags, PyBUF_ND) ? const_cast<int64_t*>(view.shape) : nullptr;
  buffer->strides = nullptr;
  if (Wants(flags, PyBUF_STRIDES)) {
    // lint: allow(reinterpret-const) Consumers do not write to it.
    buffer->strides = const_cast<Py_ssize_t*>(tensor.ByteStrides().data());
  }
  if (!Wants(flags, PyBUF_ND)) buffer->ndim = 1;
  buffer->suboffsets = nullptr;
  buffer->internal = nullptr;
  buffer->obj = py::handle(self).inc_ref().ptr();
  return 0;
}

int GetBytesBuffer(PyObject* self, Py_buffer* buffer, int flags) {
  const auto& bytes = py::handle(self).cast<const Bytes&>();
  if (Wants(flags, PyBUF_WRITABLE)) {
    return RefuseBuffer(buffer, "weights and files of a version are read-only (bytes() copies)");
  }
  return PyBuffer_FillInfo(buffer, self, Writable(bytes.data()),
                           static_cast<Py_ssize_t>(bytes.size()), 1, flags);
}

// Exceptions do not cross Python's C interface.
template <int (*kGet)(PyObject*, Py_buffer*, int)>
int GuardedGetBuffer(PyObject* self, Py_buffer* buffer, int flags) {
  try {
    return kGet(self, buffer, flags);
  } catch (py::error_already_set& error) {
    buffer->obj = nullptr;
    error.restore();
  } catch (const std::exception& error) {
    return RefuseBuffer(buffer, error.what());
  }
  return -1;
}

PyObject* RefuseNew(PyTypeObject* type, PyObject* /*arguments*/, PyObject* /*keywords*/) {
  PyErr_Format(PyExc_TypeError, "%.200s: handles and clients make these, you do not",
               type->tp_name);
  return nullptr;
}

template <int (*kGet)(PyObject*, Py_buffer*, int)>
py::custom_type_setup WithBuffer() {
  return py::custom_type_setup([](PyHeapTypeObject* type) {
    type->ht_type.tp_new = &RefuseNew;
    type->as_buffer.bf_getbuffer = &GuardedGetBuffer<kGet>;
    type->as_buffer.bf_releasebuffer = nullptr;
    type->ht_type.tp_as_buffer = &type->as_buffer;
  });
}

py::tuple Ints(const int64_t* numbers, size_t count) {
  py::tuple tuple(count);
  for (size_t i = 0; i < count; ++i) tuple[i] = numbers[i];
  return tuple;
}

// bytes(object). The buffer protocol would do, but type checkers do not see it.
py::object BytesOf(const py::object& object) { return MemoryViewOf(object).attr("tobytes")(); }

py::object DlpackMethod(Tensor& tensor, const py::object& /*stream: nothing writes these*/,
                        std::optional<std::pair<uint32_t, uint32_t>> max_version,
                        std::optional<std::pair<int, int>> dl_device, std::optional<bool> copy) {
  return Dlpack(tensor, {max_version, dl_device, copy.value_or(false), false});
}

py::object CudaArrayInterface(Tensor& tensor) {
  const void* data = tensor.DeviceData();
  if (!tensor.OnDevice()) {
    RaisePython(PyExc_AttributeError,
                tensor.Describe() + ": is not on a GPU (acquire(..., device='cuda'))");
  }
  return ArrayInterface(tensor, data);
}

[[noreturn]] void RefusePickle(const std::string& what) {
  RaisePython(PyExc_TypeError, "cannot pickle or copy " + what +
                                   ": it is a view of memory that modelhostd shares with this "
                                   "process (send the reference and acquire it there, or take "
                                   ".numpy().copy() or bytes())");
}

}  // namespace

py::custom_type_setup NotConstructible() {
  return py::custom_type_setup([](PyHeapTypeObject* type) { type->ht_type.tp_new = &RefuseNew; });
}

py::str Text(std::string_view text) {
  PyObject* made =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(made);
}

std::string Tensor::Describe() const {
  return held_->Name() + ": tensor '" + view_.name + "' (" + view_.dtype + ")";
}

const void* Tensor::HostData() const {
  if (!mappable()) {
    Raise(MH_FAILED_PRECONDITION, Describe() + ": cannot be viewed: " + view_.reason);
  }
  return view_.data == nullptr ? &kNothing : view_.data;
}

const void* Tensor::DeviceData() const {
  if (view_.device_data == nullptr) return nullptr;
  mh_tensor_view now = MH_TENSOR_VIEW_INIT;
  const auto is_this = [&](mh_status status) {
    return status == MH_OK && std::string_view(now.name) == view_.name &&
           std::string_view(now.component) == view_.component;
  };
  const std::string name = std::string(view_.component) + "/" + view_.name;
  if (is_this(mh_tensor(held_->get(), view_.name, &now)) ||
      is_this(mh_tensor(held_->get(), name.c_str(), &now))) {
    return now.device_data;
  }
  // Another component has a tensor that is called as this one with its component.
  for (size_t i = 0; i < mh_tensor_count(held_->get()); ++i) {
    if (is_this(mh_tensor_at(held_->get(), i, &now))) return now.device_data;
  }
  return nullptr;
}

bool Tensor::OnDevice() const {
  if (view_.nbytes != 0) return DeviceData() != nullptr;
  return mappable() && mh_handle_gpu(held_->get())[0] != '\0';
}

const std::vector<int64_t>& Tensor::Strides() {
  if (strides_.empty() && view_.rank != 0) {
    strides_.resize(view_.rank);
    if (view_.strides != nullptr) {
      strides_.assign(view_.strides, view_.strides + view_.rank);
    } else {
      int64_t stride = 1;
      for (size_t i = view_.rank; i-- > 0; stride *= view_.shape[i]) strides_[i] = stride;
    }
  }
  return strides_;
}

const std::vector<Py_ssize_t>& Tensor::ByteStrides() {
  if (byte_strides_.empty()) {
    for (const int64_t stride : Strides()) byte_strides_.push_back(stride * type_->size);
  }
  return byte_strides_;
}

py::dict ArrayInterface(Tensor& tensor, const void* data) {
  const mh_tensor_view& view = tensor.view();
  if (tensor.type() == nullptr || tensor.type()->typestr == nullptr) {
    RaisePython(PyExc_AttributeError,
                tensor.Describe() + ": array interfaces have no such type (DLPack, .torch())");
  }
  py::dict interface;
  interface["version"] = 3;
  interface["shape"] = Ints(view.shape, view.rank);
  interface["typestr"] = tensor.type()->typestr;
  interface["data"] = py::make_tuple(reinterpret_cast<uintptr_t>(data), true);
  interface["strides"] = py::none();
  if (!tensor.RowMajor()) {
    interface["strides"] = Ints(tensor.ByteStrides().data(), view.rank);
  }
  return interface;
}

py::object MemoryViewOf(const py::handle& object) {
  PyObject* made = PyMemoryView_FromObject(object.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

void BindTensor(py::module_& module) {
  py::class_<Tensor>(module, "Tensor", WithBuffer<&GetTensorBuffer>(),
                     "A read-only view of one tensor; it keeps its version mapped.")
      .def_property_readonly(
          "name", [](const Tensor& self) { return Text(self.view().name); },
          "Bare, without its component.")
      .def_property_readonly(
          "component", [](const Tensor& self) { return Text(self.view().component); },
          "The weight set of the version that it is part of.")
      .def_property_readonly(
          "file", [](const Tensor& self) { return Text(self.view().file); },
          "The file of the version that it is in.")
      .def_property_readonly(
          "dtype", [](const Tensor& self) { return Text(self.view().dtype); },
          "\"F32\", \"BF16\", \"Q4_K\", ...: safetensors names, ggml's for block types.")
      .def_property_readonly(
          "shape", [](const Tensor& self) { return Ints(self.view().shape, self.view().rank); },
          "In elements, outermost first; () for a scalar.")
      .def_property_readonly(
          "strides",
          [](Tensor& self) {
            const auto& strides = self.Strides();
            return Ints(strides.data(), strides.size());
          },
          "In elements, outermost first.")
      .def_property_readonly(
          "ndim", [](const Tensor& self) { return self.view().rank; },
          "How many dimensions; 0 for a scalar.")
      .def_property_readonly(
          "nbytes", [](const Tensor& self) { return self.view().nbytes; }, "Bytes of its range.")
      .def_property_readonly(
          "itemsize",
          [](const Tensor& self) { return self.type() == nullptr ? 0 : int{self.type()->size}; },
          "Bytes of an element; 0 for block types and types of less than a byte.")
      .def_property_readonly(
          "format",
          [](const Tensor& self) -> py::object {
            if (self.type() == nullptr || self.type()->format == nullptr) {
              return py::none();
            }
            return py::str(self.type()->format);
          },
          "As memoryview and numpy have it; None: they have no such type. (The module struct lacks "
          "the complex ones, \"Zf\" and \"Zd\".)")
      .def_property_readonly(
          "block",
          [](const Tensor& self) {
            return py::make_tuple(self.view().block_elements, self.view().block_bytes);
          },
          "(elements, bytes) of a block of a quantised type; (1, 0) for plain types.")
      .def_property_readonly(
          "alignment", [](const Tensor& self) { return self.view().alignment; },
          "Of the host address, in bytes.")
      .def_property_readonly("contiguous", &Tensor::RowMajor,
                             "Whether it is row-major without gaps.")
      .def_property_readonly("mappable", &Tensor::mappable,
                             "Whether the bytes are the values as they are.")
      .def_property_readonly(
          "reason", [](const Tensor& self) { return Text(self.view().reason); },
          "Why it is not mappable; \"\" otherwise.")
      .def_property_readonly(
          "data_ptr",
          [](const Tensor& self) { return reinterpret_cast<uintptr_t>(self.HostData()); },
          "The address on the host. Raises FailedPrecondition with the reason if it cannot be "
          "mapped.")
      .def_property_readonly(
          "device_ptr",
          [](const Tensor& self) { return reinterpret_cast<uintptr_t>(self.DeviceData()); },
          "The address on the GPU; 0: it is not on one.")
      .def(
          "view_bytes",
          [](const Tensor& self) {
            return MemoryViewOf(py::cast(Bytes(self.held(), self.HostData(), self.view().nbytes)));
          },
          "Its bytes as they are: a read-only memoryview. Raises FailedPrecondition.")
      .def_property_readonly("__array_interface__",
                             [](Tensor& self) { return ArrayInterface(self, self.HostData()); })
      .def_property_readonly("__cuda_array_interface__", &CudaArrayInterface)
      .def("__dlpack_device__", [](const Tensor& self) { return DlpackDevice(self); })
      .def("__dlpack__", &DlpackMethod, py::kw_only(), py::arg("stream") = py::none(),
           py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(),
           py::arg("copy") = py::none())
      .def("_torch_capsule",
           [](Tensor& self) {
             return Dlpack(self, {std::nullopt, std::nullopt, false, true});
           })
      .def(
          "numpy",
          [](const py::object& self, bool raw) {
            return py::module_::import("modelhost._tensor").attr("to_numpy")(self, raw);
          },
          py::kw_only(), py::arg("raw") = false,
          "A read-only array on the same memory.\n\n"
          "raw: the bits, as unsigned integers of the element's size (C128: 16 bytes as a last "
          "axis); "
          "rows of bytes for block types.\n\n"
          "Raises TypeError for types that numpy does not have, FailedPrecondition for a tensor "
          "that cannot be mapped.")
      .def(
          "torch",
          [](const py::object& self, bool copy) {
            return py::module_::import("modelhost.torch").attr("tensor")(self, copy);
          },
          py::kw_only(), py::arg("copy") = false,
          "A torch tensor on the same memory, on the GPU where the tensor is on one.\n\n"
          "copy: with a private, writable copy. Without, a write ends the process (SIGSEGV): torch "
          "has no read-only tensors.\n\n"
          "Raises TypeError for types that this torch does not have, FailedPrecondition.")
      .def(
          "__array__",
          [](const py::object& self, const py::object& dtype, const py::object& copy) {
            return py::module_::import("modelhost._tensor").attr("to_array")(self, dtype, copy);
          },
          py::arg("dtype") = py::none(), py::arg("copy") = py::none())
      .def("__bytes__", &BytesOf)
      .def(
          "__eq__",
          [](const Tensor& self, const py::object& other) {
            return py::isinstance<Tensor>(other) && self.Same(other.cast<const Tensor&>());
          },
          "Whether both are one tensor of one handle; values are not compared.")
      .def("__hash__",
           [](const Tensor& self) { return std::hash<const void*>()(self.view().name); })
      .def("__reduce_ex__", [](const Tensor&, int) { RefusePickle("a modelhost.Tensor"); })
      .def("__repr__", [](const py::object& self) {
        return py::module_::import("modelhost._tensor").attr("describe")(self);
      });
}

void BindBytes(py::module_& module) {
  py::class_<Bytes>(module, "Bytes", WithBuffer<&GetBytesBuffer>(),
                    "Bytes of a version, read-only; they keep it mapped.")
      .def("__len__", &Bytes::size)
      .def("__bytes__", &BytesOf)
      .def("__reduce_ex__", [](const Bytes&, int) { RefusePickle("bytes of a version"); });
  py::class_<File, Bytes>(module, "File", WithBuffer<&GetBytesBuffer>(),
                          "A file of a version: bytes, and a path for whatever opens paths.")
      .def_property_readonly(
          "name", [](const File& self) { return Text(self.name); },
          "In the version, with '/' between parts.")
      .def_property_readonly(
          "role", [](const File& self) { return Text(self.role); }, "\"weights\" or \"sidecar\".")
      .def_property_readonly(
          "path", [](const File& self) { return Text(self.fd_path); },
          "\"/proc/self/fd/N\": for whatever opens paths in this process, while this object or its "
          "handle lives.")
      .def_property_readonly("nbytes", &File::size, "Its length.")
      .def_property_readonly(
          "sha256", [](const File& self) { return py::bytes(self.digest).attr("hex")(); },
          "64 hex digits.")
      .def_property_readonly(
          "data", [](const py::object& self) { return MemoryViewOf(self); },
          "Its bytes: a read-only memoryview.")
      .def("__fspath__", [](const File& self) { return Text(self.fd_path); })
      .def("__repr__", [](const File& self) {
        return py::str("<modelhost.File {!r}, {} bytes>").format(Text(self.name), self.size());
      });
}

}  // namespace modelhost::python
