// Giving the GIL away for a call that waits, and Python's end meanwhile.
//
// Once the interpreter is ending, a thread that wants the GIL back never gets it: CPython up
// to 3.13 ends the thread there and then, by unwinding its stack (pthread_exit). No frame of C++
// may be unwound so: destructors would run without the GIL, and those that are noexcept end the
// process. So such threads stop where they are and never come back, as CPython 3.14 does it by
// itself.
#pragma once

#include <pybind11/pybind11.h>

namespace modelhost::python {

// For a thread that has the GIL; without it while this lives.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil();

 private:
  PyThreadState* const state_;
};

// callable(*arguments), which runs code of Python and may so lose the GIL too. Raises what it
// raises.
pybind11::object CallPython(const pybind11::object& callable, const pybind11::tuple& arguments);

}  // namespace modelhost::python
