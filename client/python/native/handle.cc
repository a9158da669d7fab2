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

Tensor FindTensor(const Handle& self, const std::string& name) {
  mh_error error = {};
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  view.error = &error;
  if (mh_tensor(self.get(), name.c_str(), &view) != MH_OK) Raise(error);
  return Tensor(self.held(), view);
}

bool HasTensor(const Handle& self, const std::string& name) {
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  const mh_status status = mh_tensor(self.get(), name.c_str(), &view);
  if (status == MH_DATA_LOSS) static_cast<void>(FindTensor(self, name));  // Raises.
  return status == MH_OK;
}

// (key, tensor) of `component`, or of all with null. A key finds its tensor again: it is the bare
// name, or "component/name" where several components have that name. Tensors are sorted by name,
// so equal names are neighbours. Of one component all keys are bare.
template <typename Visit>
void ForEachTensor(const Handle& self, const std::string* component, Visit visit) {
  const mh_handle* handle = self.get();
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
    if (component != nullptr) {
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
  py::list keys;
  ForEachTensor(self, component.has_value() ? &*component : nullptr,
                [&](py::str key, const mh_tensor_view&) { keys.append(std::move(key)); });
  return keys;
}

py::list Items(const Handle& self, const std::optional<std::string>& component) {
  py::list items;
  ForEachTensor(self, component.has_value() ? &*component : nullptr,
                [&](py::str key, const mh_tensor_view& view) {
                  items.append(py::make_tuple(std::move(key), Tensor(self.held(), view)));
                });
  return items;
}

// (name, dtype, capsule) for each tensor of `component`; no capsule for types that DLPack lacks.
py::list TorchCapsules(const Handle& self, const std::optional<std::string>& component) {
  py::list capsules;
  ForEachTensor(self, component.has_value() ? &*component : nullptr,
                [&](py::str key, const mh_tensor_view& view) {
                  Tensor tensor(self.held(), view);
                  py::object capsule = py::none();
                  if (tensor.type() != nullptr) {
                    capsule = Dlpack(tensor, {std::nullopt, std::nullopt, false, true});
                  }
                  capsules.append(py::make_tuple(std::move(key), Text(view.dtype), capsule));
                });
  return capsules;
}

File FindFile(const Handle& self, const std::string& path) {
  const HeldPtr held = self.held();
  mh_error error = {};
  mh_file_view view = MH_FILE_VIEW_INIT;
  view.error = &error;
  mh_status status = MH_OK;
  {
    const py::gil_scoped_release release;
    status = mh_file(held->get(), path.c_str(), &view);
  }
  if (status != MH_OK) Raise(error);
  return File(held, view);
}

py::list FileNames(const Handle& self) {
  py::list names;
  const size_t count = mh_file_count(self.get());
  for (size_t i = 0; i < count; ++i) {
    mh_error error = {};
    mh_file_view view = MH_FILE_VIEW_INIT;
    view.error = &error;
    if (mh_file_at(self.get(), i, &view) != MH_OK) Raise(error);
    names.append(Text(view.path));
  }
  return names;
}

py::dict Metadata(const Handle& self) {
  py::dict metadata;
  const size_t count = mh_metadata_count(self.get());
  for (size_t i = 0; i < count; ++i) {
    const char *key = nullptr, *value = nullptr;
    const mh_status status = mh_metadata_at(self.get(), i, &key, &value);
    if (status != MH_OK) Raise(status, self.name() + ": the version's index is broken");
    size_t length = 0;
    // Values may have NULs; keys that are listed are found.
    const char* found = mh_metadata(self.get(), key, &length);
    metadata[Text(key)] =
        Text(found == nullptr ? std::string_view(value) : std::string_view(found, length));
  }
  return metadata;
}

py::dict Components(const Handle& self) {
  py::dict components;
  const size_t count = mh_component_count(self.get());
  for (size_t i = 0; i < count; ++i) {
    const char *name = nullptr, *format = nullptr;
    const mh_status status = mh_component_at(self.get(), i, &name, &format);
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

void Handle::Close() {
  HeldPtr last = std::move(held_);
  held_ = nullptr;
  const py::gil_scoped_release release;
  last.reset();
}

void BindHandle(py::module_& module) {
  py::class_<Handle>(module, "Handle")
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
