// The extension modelhost._native: what the pure-Python files of the package stand on.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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

// Runs `call(mh_error*)` without the GIL; raises what it returns.
template <typename Call>
void Wait(Call call) {
  mh_error error = {};
  mh_status status = MH_OK;
  {
    const py::gil_scoped_release release;
    status = call(&error);
  }
  if (status != MH_OK) Raise(error);
}

Request MakeRequest(const std::vector<std::string>& refs, bool wait, uint64_t deadline_ms,
                    std::string device) {
  for (const std::string& ref : refs) {
    if (ref.find('\0') != std::string::npos) {
      Raise(MH_INVALID_ARGUMENT, "acquire: a reference with a NUL character is none");
    }
  }
  return {wait, deadline_ms, std::move(device)};
}

SessionPtr Connect(const std::optional<std::string>& runtime_dir, uint64_t deadline_ms) {
  SessionPtr session;
  Wait([&](mh_error* error) {
    session = Session::Connect(runtime_dir, deadline_ms, error);
    return session == nullptr ? error->status : MH_OK;
  });
  return session;
}

Handle AcquireOne(const SessionPtr& self, const std::string& ref, bool wait, uint64_t deadline_ms,
                  std::string device) {
  const Request request = MakeRequest({ref}, wait, deadline_ms, std::move(device));
  HeldPtr held;
  Wait([&](mh_error* error) { return self->Acquire(ref, request, &held, error); });
  return Handle(std::move(held));
}

std::vector<Handle> AcquireSeveral(const SessionPtr& self, const std::vector<std::string>& refs,
                                   bool wait, uint64_t deadline_ms, std::string device) {
  const Request request = MakeRequest(refs, wait, deadline_ms, std::move(device));
  std::vector<HeldPtr> held;
  Wait([&](mh_error* error) { return self->AcquireSet(refs, request, &held, error); });
  std::vector<Handle> handles;
  for (HeldPtr& each : held) handles.emplace_back(std::move(each));
  return handles;
}

std::unique_ptr<Live> FollowOne(const SessionPtr& self, const std::string& ref, bool wait,
                                uint64_t deadline_ms, std::string device) {
  const Request request = MakeRequest({ref}, wait, deadline_ms, std::move(device));
  mh_live* live = nullptr;
  Wait([&](mh_error* error) { return self->Follow(ref, request, &live, error); });
  return std::make_unique<Live>(live, self);
}

std::unique_ptr<LiveSet> FollowSeveral(const SessionPtr& self, const std::vector<std::string>& refs,
                                       bool wait, uint64_t deadline_ms, std::string device) {
  const Request request = MakeRequest(refs, wait, deadline_ms, std::move(device));
  mh_live_set* live = nullptr;
  Wait([&](mh_error* error) { return self->FollowSet(refs, request, &live, error); });
  return std::make_unique<LiveSet>(live, refs.size(), self);
}

py::tuple Resolve(const SessionPtr& self, const std::string& ref) {
  uint64_t version = 0;
  uint64_t generation = 0;
  Wait([&](mh_error* error) {
    const Session::Use client(self);
    if (client.get() == nullptr) return ClientIsClosed(error);
    return mh_resolve(client.get(), ref.c_str(), &version, &generation, error);
  });
  return py::make_tuple(version, generation);
}

py::dict State(const SessionPtr& self) {
  const Session::Use client(self);
  mh_error error = {};
  if (client.get() == nullptr) {
    ClientIsClosed(&error);
    Raise(error);
  }
  mh_client_view view = MH_CLIENT_VIEW_INIT;
  const mh_status status = mh_client_state(client.get(), &view);
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
  int fd = -1;
  Wait([&](mh_error* error) {
    const Session::Use client(self);
    if (client.get() == nullptr) return ClientIsClosed(error);
    fd = mh_event_fd(client.get());
    return MH_OK;
  });
  if (fd < 0) {
    Raise(MH_RESOURCE_EXHAUSTED,
          "events: no descriptor or thread can be had, or this is a forked child (raise "
          "RLIMIT_NOFILE; connect again in the child)");
  }
  return fd;
}

void ClearEvents(const SessionPtr& self) {
  const Session::Use client(self);
  mh_clear_events(client.get());
}

}  // namespace

void BindClient(py::module_& module) {
  module.def("connect", &Connect, py::arg("runtime_dir"), py::arg("deadline_ms"));
  py::class_<Session, SessionPtr>(module, "Client")
      .def("acquire", &AcquireOne)
      .def("acquire_set", &AcquireSeveral)
      .def("follow", &FollowOne)
      .def("follow_set", &FollowSeveral)
      .def("resolve", &Resolve)
      .def("state", &State)
      .def("event_fd", &EventFd)
      .def("clear_events", &ClearEvents)
      .def("close", &Session::Close, py::call_guard<py::gil_scoped_release>());
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
