// Following: what mh_live and mh_live_set own becomes references that Python's objects own.
#include <pybind11/stl.h>

#include <utility>

#include "client/python/native/errors.h"
#include "client/python/native/handle.h"
#include "client/python/native/tensor.h"

namespace modelhost::python {
namespace {

namespace py = pybind11;

// None, or the exception that says why the last try to attach a newer version failed.
template <typename Following>
py::object LastFailure(const Following& self) {
  mh_error error = {};
  if (self.Status(&error) == MH_OK) return py::none();
  return ErrorOf(error.status, error.message);
}

class FlagWhile {
 public:
  explicit FlagWhile(bool& flag) : flag_(flag) { flag_ = true; }
  FlagWhile(const FlagWhile&) = delete;
  FlagWhile& operator=(const FlagWhile&) = delete;
  ~FlagWhile() { flag_ = false; }

 private:
  bool& flag_;
};

constexpr char kClosed[] = "the live model is closed (follow it again)";

}  // namespace

void Live::CheckUsable() const {
  if (live_ == nullptr) Raise(MH_FAILED_PRECONDITION, kClosed);
  if (remapping_) {
    Raise(MH_FAILED_PRECONDITION,
          "the live model is being remapped by another thread (it is for one at a time)");
  }
}

HeldPtr Live::Adopt() {
  CheckUsable();
  return Keep(mh_live_adopt(live_));
}

HeldPtr Live::Remap() {
  CheckUsable();
  const mh_handle* newest = nullptr;
  {
    const FlagWhile remapping(remapping_);
    Wait([&](mh_error* error) { return mh_live_remap(live_, &newest, error); });
  }
  return Keep(newest);
}

HeldPtr Live::Keep(const mh_handle* newest) {
  if (current_ == nullptr || current_->get() != newest) {
    current_ = std::make_shared<Held>(mh_retain(newest), session_);
  }
  return current_;
}

mh_status Live::Status(mh_error* error) const {
  CheckUsable();
  return mh_live_status(live_, error);
}

void Live::Close() {
  if (remapping_) CheckUsable();
  mh_live_release(std::exchange(live_, nullptr));
  current_.reset();
  session_.reset();
}

std::vector<HeldPtr> LiveSet::Adopt() {
  if (live_ == nullptr) Raise(MH_FAILED_PRECONDITION, kClosed);
  std::vector<const mh_handle*> newest(current_.size());
  static_cast<void>(mh_live_set_adopt(live_, newest.data(), newest.size()));
  for (size_t i = 0; i < newest.size(); ++i) {
    if (current_[i] == nullptr || current_[i]->get() != newest[i]) {
      current_[i] = std::make_shared<Held>(mh_retain(newest[i]), session_);
    }
  }
  return current_;
}

mh_status LiveSet::Status(mh_error* error) const {
  if (live_ == nullptr) Raise(MH_FAILED_PRECONDITION, kClosed);
  return mh_live_set_status(live_, error);
}

void LiveSet::Close() {
  mh_live_set_release(std::exchange(live_, nullptr));
  current_.clear();
  session_.reset();
}

void BindLive(py::module_& module) {
  py::class_<Live>(module, "Live", NotConstructible())
      // A handle of the newest version, or None when it is the version of `known`.
      .def("adopt",
           [](Live& self, const Handle* known) -> py::object {
             const HeldPtr newest = self.Adopt();
             if (known != nullptr && known->SameVersionAs(newest->get())) return py::none();
             return py::cast(Handle(newest));
           })
      .def("remap",
           [](Live& self, const Handle* known) -> py::object {
             const HeldPtr newest = self.Remap();
             if (known != nullptr && known->SameVersionAs(newest->get())) return py::none();
             return py::cast(Handle(newest));
           })
      .def_property_readonly("error", &LastFailure<Live>)
      .def_property_readonly("closed", &Live::closed)
      .def("close", &Live::Close);
  py::class_<LiveSet>(module, "LiveSet", NotConstructible())
      // The same for each member; `known` has one for each of them, or is empty.
      .def("adopt",
           [](LiveSet& self, const py::list& known) {
             const std::vector<HeldPtr> newest = self.Adopt();
             py::list handles;
             for (size_t i = 0; i < newest.size(); ++i) {
               const bool same = i < known.size() &&
                                 known[i].cast<const Handle&>().SameVersionAs(newest[i]->get());
               handles.append(same ? py::none() : py::cast(Handle(newest[i])));
             }
             return handles;
           })
      .def_property_readonly("error", &LastFailure<LiveSet>)
      .def_property_readonly("closed", &LiveSet::closed)
      .def("close", &LiveSet::Close);
}

}  // namespace modelhost::python
