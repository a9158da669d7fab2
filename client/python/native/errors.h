// Errors of the C API as Python's: each status is a class of modelhost._errors, with the text as
// the library gives it. Texts may name files, whose names are any bytes: those that are no UTF-8
// are replaced. Call with the GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "client/python/native/gil.h"
#include "modelhost/modelhost.h"

namespace modelhost::python {

// The exception, not raised.
pybind11::object ErrorOf(mh_status status, const std::string& text);
[[noreturn]] void Raise(mh_status status, const std::string& text);
[[noreturn]] inline void Raise(const mh_error& error) { Raise(error.status, error.message); }
// An exception of Python's own (PyExc_TypeError, ...).
[[noreturn]] void RaisePython(PyObject* type, const std::string& text);

// Runs `call(mh_error*)` without the GIL; raises what it returns, or what a signal handler raised
// meanwhile.
template <typename Call>
void Wait(Call call) {
  mh_error error = {};
  mh_status status = MH_OK;
  {
    const WithoutGil waiting;
    status = call(&error);
  }
  if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  if (status != MH_OK) Raise(error);
}

}  // namespace modelhost::python
