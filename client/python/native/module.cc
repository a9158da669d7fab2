// The extension modelhost._native: what the pure-Python files of the package stand on.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdio>
#include <string>
#include <vector>

#include "client/python/native/errors.h"
#include "client/python/native/handle.h"
#include "client/python/native/session.h"
#include "client/python/native/tensor.h"

namespace modelhost::python {
namespace {

namespace py = pybind11;

using SessionPtr = std::shared_ptr<Session>;

// Asked by the library while a call waits, without the GIL: Ctrl-C need not wait for the deadline.
int Interrupted(void* context) {
  // Others run no handlers, and may find that there is no GIL to be had any more.
  if (PyThread_get_thread_ident() != static_cast<const MainThread*>(context)->ident) return 0;
  const PyGILState_STATE state = PyGILState_Ensure();
  const int raised = PyErr_CheckSignals();  // The exception stays with the thread: Wait raises it.
  PyGILState_Release(state);
  return raised;
}

void CheckOpen(const SessionPtr& self) {
  if (!self->closed()) return;
  Raise(MH_FAILED_PRECONDITION, "the client is closed (modelhost.connect() makes a new one)");
}

void CheckText(const char* what, const std::string& text) {
  if (text.find('\0') == std::string::npos) return;
  Raise(MH_INVALID_ARGUMENT, std::string(what) + " with a NUL character is none");
}

Request MakeRequest(const SessionPtr& self, const std::vector<std::string>& refs, bool wait,
                    uint64_t deadline_ms, std::string device) {
  CheckOpen(self);
  for (const std::string& ref : refs) CheckText("acquire: a reference", ref);
  CheckText("acquire: a device", device);
  return {wait, deadline_ms, std::move(device)};
}

SessionPtr Connect(const std::optional<std::string>& runtime_dir, uint64_t deadline_ms) {
  if (runtime_dir.has_value()) CheckText("connect: a directory", *runtime_dir);
  const py::object main_thread = py::module_::import("threading").attr("main_thread")();
  const MainThread thread{main_thread.attr("ident").cast<unsigned long>()};
  SessionPtr session;
  Wait([&](mh_error* error) {
    session = Session::Connect(runtime_dir, deadline_ms, &Interrupted, thread, error);
    return session == nullptr ? error->status : MH_OK;
  });
  return session;
}

Handle AcquireOne(const SessionPtr& self, const std::string& ref, bool wait, uint64_t deadline_ms,
                  std::string device) {
  const Request request = MakeRequest(self, {ref}, wait, deadline_ms, std::move(device));
  HeldPtr held;
  Wait([&](mh_error* error) { return self->Acquire(ref, request, &held, error); });
  return Handle(std::move(held));
}

std::vector<Handle> AcquireSeveral(const SessionPtr& self, const std::vector<std::string>& refs,
                                   bool wait, uint64_t deadline_ms, std::string device) {
  const Request request = MakeRequest(self, refs, wait, deadline_ms, std::move(device));
  std::vector<HeldPtr> held;
  Wait([&](mh_error* error) { return self->AcquireSet(refs, request, &held, error); });
  std::vector<Handle> handles;
  for (HeldPtr& each : held) handles.emplace_back(std::move(each));
  return handles;
}

std::unique_ptr<Live> FollowOne(const SessionPtr& self, const std::string& ref, bool wait,
                                uint64_t deadline_ms, std::string device, bool same_addresses) {
  Request request = MakeRequest(self, {ref}, wait, deadline_ms, std::move(device));
  request.same_addresses = same_addresses;
  std::unique_ptr<Live> made = std::make_unique<Live>(nullptr, self);
  Wait([&](mh_error* error) { return self->Follow(ref, request, made->place(), error); });
  return made;
}

std::unique_ptr<LiveSet> FollowSeveral(const SessionPtr& self, const std::vector<std::string>& refs,
                                       bool wait, uint64_t deadline_ms, std::string device) {
  const Request request = MakeRequest(self, refs, wait, deadline_ms, std::move(device));
  std::unique_ptr<LiveSet> made = std::make_unique<LiveSet>(nullptr, refs.size(), self);
  Wait([&](mh_error* error) { return self->FollowSet(refs, request, made->place(), error); });
  return made;
}

py::tuple Resolve(const SessionPtr& self, const std::string& ref) {
  CheckOpen(self);
  CheckText("resolve: a reference", ref);
  uint64_t version = 0;
  uint64_t generation = 0;
  Wait([&](mh_error* error) {
    return mh_resolve(self->get(), ref.c_str(), &version, &generation, error);
  });
  return py::make_tuple(version, generation);
}

py::dict State(const SessionPtr& self) {
  CheckOpen(self);
  mh_client_view view = MH_CLIENT_VIEW_INIT;
  const mh_status status = mh_client_state(self->get(), &view);
  if (status != MH_OK) Raise(status, "the state of the client cannot be had");
  py::dict state;
  state["socket"] = Text(view.socket);
  state["epoch"] = view.epoch;
  state["connected"] = view.connected != 0;
  state["leases"] = view.leases;
  state["reconnects"] = view.reconnects;
  return state;
}

int EventFd(const SessionPtr& self) {
  CheckOpen(self);
  int fd = -1;
  Wait([&](mh_error* /*error*/) {
    fd = mh_event_fd(self->get());
    return MH_OK;
  });
  if (fd < 0) {
    CheckOpen(self);
    // In a forked child it says so.
    Wait([&](mh_error* error) {
      mh_client_view view = MH_CLIENT_VIEW_INIT;
      const mh_status status = mh_client_state(self->get(), &view);
      if (status != MH_OK) {
        error->status = status;
        std::snprintf(
            error->message, sizeof(error->message),
            "events: the session is the parent's (connect again in the child after fork)");
      }
      return status;
    });
    Raise(MH_RESOURCE_EXHAUSTED,
          "events: no descriptor or thread can be had (raise RLIMIT_NOFILE)");
  }
  return fd;
}

void Close(const SessionPtr& self) {
  const WithoutGil waiting;
  self->Close();
}

}  // namespace

void BindClient(py::module_& module) {
  module.def("connect", &Connect, py::arg("runtime_dir"), py::arg("deadline_ms"));
  py::class_<Session, SessionPtr>(module, "Client", NotConstructible())
      .def("acquire", &AcquireOne)
      .def("acquire_set", &AcquireSeveral)
      .def("follow", &FollowOne)
      .def("follow_set", &FollowSeveral)
      .def("resolve", &Resolve)
      .def("state", &State)
      .def("event_fd", &EventFd)
      // Also of a closed client, whose descriptor is readable.
      .def("clear_events", [](const SessionPtr& self) { mh_clear_events(self->get()); })
      .def_property_readonly("closed", [](const SessionPtr& self) { return self->closed(); })
      .def("close", &Close);
}

}  // namespace modelhost::python

PYBIND11_MODULE(_native, module) {
  namespace python = modelhost::python;
  module.doc() = "What the package modelhost stands on; not an interface of its own.";
  if (mh_abi_version() != MH_ABI_VERSION) {
    python::RaisePython(PyExc_ImportError,
                        "modelhost: libmodelhost.so has ABI " + std::to_string(mh_abi_version()) +
                            ", this package needs " + std::to_string(MH_ABI_VERSION) +
                            " (install the two from one release)");
  }
  python::BindBytes(module);
  python::BindTensor(module);
  python::BindHandle(module);
  python::BindLive(module);
  python::BindClient(module);
}
