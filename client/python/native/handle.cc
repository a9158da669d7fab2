#include "client/python/native/handle.h"

#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string_view>

#include "client/python/native/dlpack.h"
#include "client/python/native/errors.h"
#include "client/python/native/tensor.h"

namespace modelhost::python {
namespace {

namespace py = pybind11;

// By number; raises.
mh_tensor_view TensorAt(const mh_handle* handle, size_t number) {
  mh_error error = {};
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  view.error = &error;
  if (mh_tensor_at(handle, number, &view) != MH_OK) Raise(error);
  return view;
}

// As UTF-8. Lone surrogates, which UTF-8 lacks, become bytes that are in no name of an index.
std::string Utf8(const py::str& text) {
  Py_ssize_t length = 0;
  if (const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &length); utf8 != nullptr) {
    return {utf8, static_cast<size_t>(length)};
  }
  PyErr_Clear();
  PyObject* bytes = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogatepass");
  if (bytes == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(bytes);
}

// The C API's texts end at a NUL: one within a text would name something else.
void CheckName(const Handle& self, const char* what, const std::string& text) {
  if (text.find('\0') == std::string::npos) return;
  Raise(MH_NOT_FOUND, self.name() + ": " + what + ": a name with a NUL character is none");
}

Tensor FindTensor(const Handle& self, const py::str& key) {
  const std::string name = Utf8(key);
  CheckName(self, "tensor", name);
  mh_error error = {};
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  view.error = &error;
  if (mh_tensor(self.get(), name.c_str(), &view) != MH_OK) Raise(error);
  return Tensor(self.held(), view);
}

bool HasTensor(const Handle& self, const py::str& key) {
  const std::string name = Utf8(key);
  if (name.find('\0') != std::string::npos) return false;
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  const mh_status status = mh_tensor(self.get(), name.c_str(), &view);
  if (status == MH_DATA_LOSS) static_cast<void>(FindTensor(self, key));  // Raises.
  return status == MH_OK;
}

// (key, tensor) of `component`, or of all with null. A key finds its tensor again: it is the bare
// name, or "component/name" where several components have that name. Tensors are sorted by name,
// so equal names are neighbours. Of one component all keys are bare. Making Python's objects may
// run any code of Python's, also what closes the handle: `held` keeps it.
template <typename Visit>
void ForEachTensor(const HeldPtr& held, const std::optional<std::string>& component, Visit visit) {
  const mh_handle* handle = held->get();
  const size_t count = mh_tensor_count(handle);
  if (count == 0) return;
  mh_tensor_view view = TensorAt(handle, 0);
  bool same_as_before = false;
  for (size_t i = 0; i < count; ++i) {
    mh_tensor_view next = MH_TENSOR_VIEW_INIT;
    bool same_as_next = false;
    if (i + 1 < count) {
      next = TensorAt(handle, i + 1);
      same_as_next = std::strcmp(view.name, next.name) == 0;
    }
    if (component.has_value()) {
      if (*component == view.component) visit(Text(view.name), view);
    } else if (same_as_before || same_as_next) {
      visit(Text(std::string(view.component) + "/" + view.name), view);
    } else {
      visit(Text(view.name), view);
    }
    same_as_before = same_as_next;
    view = next;
  }
}

py::list Keys(const Handle& self, const std::optional<std::string>& component) {
  const HeldPtr held = self.held();
  py::list keys;
  ForEachTensor(held, component,
                [&](py::str key, const mh_tensor_view&) { keys.append(std::move(key)); });
  return keys;
}

py::list Items(const Handle& self, const std::optional<std::string>& component) {
  const HeldPtr held = self.held();
  py::list items;
  ForEachTensor(held, component, [&](py::str key, const mh_tensor_view& view) {
    items.append(py::make_tuple(std::move(key), Tensor(held, view)));
  });
  return items;
}

// (name, dtype, capsule) for each tensor of `component`; no capsule for types that DLPack lacks and
// for what cannot be mapped.
py::list TorchCapsules(const Handle& self, const std::optional<std::string>& component) {
  const HeldPtr held = self.held();
  py::list capsules;
  ForEachTensor(held, component, [&](py::str key, const mh_tensor_view& view) {
    Tensor tensor(held, view);
    py::object capsule = py::none();
    if (tensor.type() != nullptr && tensor.mappable()) {
      capsule = Dlpack(tensor, {std::nullopt, std::nullopt, false, true});
    }
    capsules.append(py::make_tuple(std::move(key), Text(view.dtype), capsule));
  });
  return capsules;
}

File FindFile(const Handle& self, const py::str& name) {
  const std::string path = Utf8(name);
  CheckName(self, "file", path);
  const HeldPtr held = self.held();
  mh_file_view view = MH_FILE_VIEW_INIT;
  Wait([&](mh_error* error) {
    view.error = error;
    return mh_file(held->get(), path.c_str(), &view);
  });
  return File(held, view);
}

py::list FileNames(const Handle& self) {
  const HeldPtr held = self.held();
  py::list names;
  const size_t count = mh_file_count(held->get());
  for (size_t i = 0; i < count; ++i) {
    mh_error error = {};
    mh_file_view view = MH_FILE_VIEW_INIT;
    view.error = &error;
    if (mh_file_at(held->get(), i, &view) != MH_OK) Raise(error);
    names.append(Text(view.path));
  }
  return names;
}

py::dict Metadata(const Handle& self) {
  const HeldPtr held = self.held();
  py::dict metadata;
  const size_t count = mh_metadata_count(held->get());
  for (size_t i = 0; i < count; ++i) {
    const char *key = nullptr, *value = nullptr;
    const mh_status status = mh_metadata_at(held->get(), i, &key, &value);
    if (status != MH_OK) Raise(status, self.name() + ": the version's index is broken");
    size_t length = 0;
    // Values may have NULs; keys that are listed are found.
    const char* found = mh_metadata(held->get(), key, &length);
    metadata[Text(key)] =
        Text(found == nullptr ? std::string_view(value) : std::string_view(found, length));
  }
  return metadata;
}

py::dict Components(const Handle& self) {
  const HeldPtr held = self.held();
  py::dict components;
  const size_t count = mh_component_count(held->get());
  for (size_t i = 0; i < count; ++i) {
    const char *name = nullptr, *format = nullptr;
    const mh_status status = mh_component_at(held->get(), i, &name, &format);
    if (status != MH_OK) Raise(status, self.name() + ": the version's index is broken");
    components[Text(name)] = Text(format);
  }
  return components;
}

}  // namespace

const HeldPtr& Handle::held() const {
  if (held_ == nullptr) {
    Raise(MH_FAILED_PRECONDITION, name_ + ": the handle is closed (acquire it again)");
  }
  return held_;
}

void BindHandle(py::module_& module) {
  py::class_<Handle>(module, "Handle", NotConstructible())
      .def("close", &Handle::Close)
      .def_property_readonly("closed", &Handle::closed)
      .def_property_readonly("name", [](const Handle& self) { return Text(self.name()); })
      .def_property_readonly("model",
                             [](const Handle& self) { return Text(mh_handle_model(self.get())); })
      .def_property_readonly("label",
                             [](const Handle& self) { return Text(mh_handle_label(self.get())); })
      .def_property_readonly("version",
                             [](const Handle& self) { return mh_handle_version(self.get()); })
      .def_property_readonly("generation",
                             [](const Handle& self) { return mh_handle_generation(self.get()); })
      .def_property_readonly("digest",
                             [](const Handle& self) { return Text(mh_handle_digest(self.get())); })
      .def_property_readonly("format",
                             [](const Handle& self) { return Text(mh_handle_format(self.get())); })
      .def_property_readonly("gpu",
                             [](const Handle& self) { return Text(mh_handle_gpu(self.get())); })
      .def_property_readonly(
          "device_mode", [](const Handle& self) { return Text(mh_handle_device_mode(self.get())); })
      .def_property_readonly(
          "device_reason",
          [](const Handle& self) { return Text(mh_handle_device_reason(self.get())); })
      .def_property_readonly("superseded",
                             [](const Handle& self) { return mh_superseded(self.get()) == 1; })
      .def("count", [](const Handle& self) { return mh_tensor_count(self.get()); })
      .def("tensor", &FindTensor)
      .def("has", &HasTensor)
      .def("keys", &Keys)
      .def("items", &Items)
      .def("torch_capsules", &TorchCapsules)
      .def("file", &FindFile)
      .def("files", &FileNames)
      .def("metadata", &Metadata)
      .def("components", &Components);
}

}  // namespace modelhost::python
