// Errors of the C API as Python's: each status is a class of modelhost._errors, with the text as
// the library gives it. Call with the GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "modelhost/modelhost.h"

namespace modelhost::python {

[[noreturn]] void Raise(mh_status status, const std::string& text);
[[noreturn]] inline void Raise(const mh_error& error) { Raise(error.status, error.message); }
// An exception of Python's own (PyExc_TypeError, ...).
[[noreturn]] void RaisePython(PyObject* type, const std::string& text);

}  // namespace modelhost::python
