#include "client/python/native/dlpack.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "client/python/native/device.h"
#include "client/python/native/errors.h"
#include "client/python/native/gil.h"

namespace modelhost::python {
namespace {

namespace py = pybind11;

constexpr char kLegacy[] = "dltensor";
constexpr char kVersioned[] = "dltensor_versioned";
constexpr uint32_t kMajor = 1;
constexpr uint32_t kMinor = 1;

// What a consumer holds. Freed by its deleter: any thread, no GIL, perhaps no interpreter.
template <typename Managed>
struct Exported {
  Managed managed = {};
  HeldPtr held;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::unique_ptr<std::byte[]> copy;

  static void Delete(Managed* managed) {
    const std::unique_ptr<Exported> last(static_cast<Exported*>(managed->context));
  }
};

// A consumer renames the capsule that it took; one of the old name was never taken.
template <typename Managed>
void DeleteUntaken(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  if (managed->deleter != nullptr) managed->deleter(managed);
}
void DeleteLegacy(PyObject* capsule) { DeleteUntaken<DLManagedTensor>(capsule, kLegacy); }
void DeleteVersioned(PyObject* capsule) {
  DeleteUntaken<DLManagedTensorVersioned>(capsule, kVersioned);
}

template <typename Managed>
py::capsule Capsule(std::unique_ptr<Exported<Managed>> exported, const char* name,
                    PyCapsule_Destructor destructor) {
  exported->managed.context = exported.get();
  exported->managed.deleter = &Exported<Managed>::Delete;
  PyObject* capsule = PyCapsule_New(&exported->managed, name, destructor);
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(exported.release());  // The capsule's, then its consumer's.
  return py::reinterpret_steal<py::capsule>(capsule);
}

DLDataType DlType(const Tensor& tensor, const DlpackRequest& request) {
  const ElementType* type = tensor.type();
  if (type == nullptr) {
    RaisePython(PyExc_BufferError,
                tensor.Describe() + ": DLPack has no such type (.view_bytes() has the bytes)");
  }
  const auto bits = static_cast<uint8_t>(type->size * 8);
  if (request.as_bytes && (type->dl_minor != 0 || type->dl_code == kDLBool)) {
    return {kDLUInt, bits, 1};
  }
  if (type->dl_minor != 0 &&
      request.max_version.value_or(std::pair(0U, 0U)) < std::pair<uint32_t, uint32_t>(1, 1)) {
    RaisePython(PyExc_BufferError, tensor.Describe() +
                                       ": the consumer's DLPack has no such type; it needs 1.1 "
                                       "(.view_bytes() has the bytes, .torch() a torch dtype)");
  }
  return {type->dl_code, bits, 1};
}

struct Place {
  const void* data;
  DLDevice device;
};

Place PlaceOf(const Tensor& tensor, const DlpackRequest& request) {
  const std::pair<int, int> has = DlpackDevice(tensor);
  const std::pair<int, int> want = request.device.value_or(has);
  if (want == std::pair<int, int>(kDLCPU, 0)) return {tensor.HostData(), {kDLCPU, 0}};
  if (request.copy) {
    RaisePython(PyExc_BufferError,
                tensor.Describe() +
                    ": copies are made on the host alone (dl_device=(1, 0), or no "
                    "copy=True)");
  }
  if (want != has) {
    RaisePython(PyExc_BufferError, tensor.Describe() + ": not on device (" +
                                       std::to_string(want.first) + ", " +
                                       std::to_string(want.second) + ")");
  }
  return {tensor.DeviceData(), {kDLCUDA, has.second}};
}

template <typename Managed>
std::unique_ptr<Exported<Managed>> Export(Tensor& tensor, const DlpackRequest& request) {
  const DLDataType type = DlType(tensor, request);
  const Place place = PlaceOf(tensor, request);
  const mh_tensor_view& view = tensor.view();
  auto exported = std::make_unique<Exported<Managed>>();
  exported->shape.assign(view.shape, view.shape + view.rank);
  exported->strides = tensor.Strides();
  // lint: allow(reinterpret-const) DLPack has no pointer to const.
  void* data = const_cast<void*>(place.data);
  if (request.copy) {
    exported->copy = std::make_unique_for_overwrite<std::byte[]>(view.nbytes);
    data = exported->copy.get();
    mh_status status = MH_OK;
    if (view.nbytes != 0) {
      const WithoutGil waiting;
      status = mh_copy(data, place.data, view.nbytes);
    }
    if (status != MH_OK) Raise(status, tensor.Describe() + ": its pages cannot be read");
  } else {
    exported->held = tensor.held();
  }
  exported->managed.tensor = {data, place.device,           static_cast<int32_t>(view.rank),
                              type, exported->shape.data(), exported->strides.data(),
                              0};
  return exported;
}

}  // namespace

std::pair<int, int> DlpackDevice(const Tensor& tensor) {
  if (!tensor.OnDevice()) return {kDLCPU, 0};
  const char* gpu = mh_handle_gpu(tensor.held()->get());
  const std::optional<int> ordinal = OrdinalOf(gpu);
  if (!ordinal.has_value()) {
    Raise(MH_FAILED_PRECONDITION,
          tensor.Describe() + ": the CUDA driver of this process has no " + gpu);
  }
  return {kDLCUDA, *ordinal};
}

py::capsule Dlpack(Tensor& tensor, const DlpackRequest& request) {
  if (request.max_version.value_or(std::pair(0U, 0U)).first < kMajor) {
    return Capsule(Export<DLManagedTensor>(tensor, request), kLegacy, &DeleteLegacy);
  }
  auto exported = Export<DLManagedTensorVersioned>(tensor, request);
  exported->managed.version = {kMajor, kMinor};
  exported->managed.flags = request.copy ? kDLIsCopied : kDLReadOnly;
  return Capsule(std::move(exported), kVersioned, &DeleteVersioned);
}

}  // namespace modelhost::python
