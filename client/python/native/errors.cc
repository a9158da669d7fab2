#include "client/python/native/errors.h"

namespace modelhost::python {

namespace py = pybind11;

void Raise(mh_status status, const std::string& text) {
  // Texts may name files, whose names are any bytes.
  py::object message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  if (!message) throw py::error_already_set();
  const py::object error =
      py::module_::import("modelhost._errors").attr("error_of")(static_cast<int>(status), message);
  PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  throw py::error_already_set();
}

void RaisePython(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  throw py::error_already_set();
}

}  // namespace modelhost::python
