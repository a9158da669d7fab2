#include "client/python/native/gil.h"

#include <cxxabi.h>
#include <unistd.h>

namespace modelhost::python {
namespace {

namespace py = pybind11;

// Holds what it holds: the process is about to end.
[[noreturn]] void StopHere() {
  while (true) ::pause();
}

}  // namespace

WithoutGil::~WithoutGil() {
  try {
    PyEval_RestoreThread(state_);
  } catch (abi::__forced_unwind&) {
    StopHere();
  }
}

py::object CallPython(const py::object& callable, const py::tuple& arguments) {
  PyObject* result = nullptr;
  try {
    result = PyObject_CallObject(callable.ptr(), arguments.ptr());
  } catch (abi::__forced_unwind&) {
    StopHere();
  }
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace modelhost::python
