#include "client/python/native/errors.h"

#include "client/python/native/gil.h"
#include "client/python/native/tensor.h"

namespace modelhost::python {

namespace py = pybind11;

py::object ErrorOf(mh_status status, const std::string& text) {
  return CallPython(py::module_::import("modelhost._errors").attr("error_of"),
                    py::make_tuple(static_cast<int>(status), Text(text)));
}

void Raise(mh_status status, const std::string& text) {
  const py::object error = ErrorOf(status, text);
  PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  throw py::error_already_set();
}

void RaisePython(PyObject* type, const std::string& text) {
  PyErr_SetObject(type, Text(text).ptr());
  throw py::error_already_set();
}

}  // namespace modelhost::python
