// The C API: what can be read from a handle.
#include <bit>
#include <cstddef>
#include <string>

#include "client/src/api_support.h"
#include "client/src/handle.h"
#include "client/src/index_reader.h"

namespace modelhost {
namespace {

// To the end of what was last in the first version: structs grow, these do not.
constexpr size_t kLeastTensorView = offsetof(mh_tensor_view, reason) + sizeof(const char*);
constexpr size_t kLeastFileView = offsetof(mh_file_view, reserved) + sizeof(int);
constexpr uint32_t kMostAlignment = uint32_t{1} << 21;

mh_status Broken(mh_error* error, const Model& model) {
  return Report(error, MH_DATA_LOSS,
                model.Name() + ": the version's index is broken (report this)");
}

mh_status OutOfRange(mh_error* error, const char* what, size_t number, size_t count) {
  if (error == nullptr) return MH_OUT_OF_RANGE;
  return Report(
      error, MH_OUT_OF_RANGE,
      std::string(what) + " " + std::to_string(number) + ": there are " + std::to_string(count));
}

mh_status StatusOf(Find find) {
  switch (find) {
    case Find::kFound:
      return MH_OK;
    case Find::kMissing:
      return MH_NOT_FOUND;
    case Find::kAmbiguous:
      return MH_INVALID_ARGUMENT;
    case Find::kBroken:
      break;
  }
  return MH_DATA_LOSS;
}

// Strings of an index are followed by a NUL, and names of types are literals.
mh_status FillTensor(const Model& model, size_t number, mh_tensor_view* view) {
  IndexTensor tensor;
  if (!model.index().Tensor(number, &tensor)) return Broken(view->error, model);
  const abi::TensorEntry& entry = *tensor.entry;
  mh_tensor_view made = MH_TENSOR_VIEW_INIT;
  made.error = view->error;
  made.name = tensor.name.data();
  made.component = tensor.component.data();
  made.file = tensor.file.data();
  made.dtype = abi::DTypeName(static_cast<abi::DType>(entry.dtype)).data();
  made.dtype_code = entry.dtype;
  made.rank = entry.rank;
  made.shape = tensor.shape;
  made.strides = tensor.strides;
  made.nbytes = entry.nbytes;
  made.block_elements = entry.block_elements;
  made.block_bytes = entry.block_bytes;
  made.reason = tensor.reason.data();
  made.alignment = 1;
  if ((entry.flags & abi::kTensorMappable) != 0) {
    made.flags = MH_TENSOR_MAPPABLE;
    const std::byte* region = model.RegionData(entry.region);
    if (entry.nbytes != 0) {
      if (region == nullptr) return Broken(view->error, model);
      made.data = region + entry.region_offset;
      const int zeros = std::countr_zero(reinterpret_cast<uintptr_t>(made.data));
      made.alignment = std::min(kMostAlignment, uint32_t{1} << std::min(zeros, 31));
    }
  }
  made.device_data = model.DeviceData(entry);
  if (view->error != nullptr) ReportOk(view->error);
  CopyOut(made, kLeastTensorView, view);
  return MH_OK;
}

void FillFile(const IndexFile& file, mh_file_view* made) {
  made->path = file.path.data();
  made->role = file.role.data();
  made->nbytes = file.entry->bytes;
  made->digest = file.entry->digest;
}

}  // namespace
}  // namespace modelhost

using modelhost::Find;
using modelhost::Guarded;
using modelhost::Report;
using modelhost::ReportOk;

extern "C" {

const char* mh_handle_model(const mh_handle* handle) { return handle->model->model().c_str(); }

const char* mh_handle_label(const mh_handle* handle) { return handle->lease->label.c_str(); }

uint64_t mh_handle_version(const mh_handle* handle) { return handle->model->version(); }

uint64_t mh_handle_generation(const mh_handle* handle) { return handle->lease->generation; }

const char* mh_handle_digest(const mh_handle* handle) {
  return handle->model->digest_hex().c_str();
}

const char* mh_handle_format(const mh_handle* handle) {
  return handle->model->index().format().data();
}

const char* mh_handle_gpu(const mh_handle* handle) {
  const modelhost::CudaImage* image = handle->model->image();
  return image == nullptr ? "" : image->device()->uuid().c_str();
}

const char* mh_handle_device_mode(const mh_handle* handle) {
  const modelhost::CudaImage* image = handle->model->image();
  return modelhost::DeviceModeText(image == nullptr ? modelhost::abi::DeviceMode::kNone
                                                    : image->mode());
}

const char* mh_handle_device_reason(const mh_handle* handle) {
  return handle->model->no_device().c_str();
}

int mh_superseded(const mh_handle* handle) { return handle->lease->Superseded() ? 1 : 0; }

mh_status mh_tensor(const mh_handle* handle, const char* name, mh_tensor_view* view) {
  if (handle == nullptr || name == nullptr || view == nullptr ||
      view->size < modelhost::kLeastTensorView) {
    return MH_INVALID_ARGUMENT;
  }
  return Guarded(view->error, [&] {
    const modelhost::IndexReader& index = handle->model->index();
    size_t number = 0;
    const Find find = index.FindTensor(name, &number);
    if (find == Find::kFound) return modelhost::FillTensor(*handle->model, number, view);
    if (view->error == nullptr) return modelhost::StatusOf(find);
    return Report(view->error, modelhost::StatusOf(find),
                  handle->model->Name() + ": " + index.ExplainTensor(name, find));
  });
}

size_t mh_tensor_count(const mh_handle* handle) { return handle->model->index().tensor_count(); }

mh_status mh_tensor_at(const mh_handle* handle, size_t number, mh_tensor_view* view) {
  if (handle == nullptr || view == nullptr || view->size < modelhost::kLeastTensorView) {
    return MH_INVALID_ARGUMENT;
  }
  return Guarded(view->error, [&] {
    const size_t count = handle->model->index().tensor_count();
    if (number >= count) return modelhost::OutOfRange(view->error, "tensor", number, count);
    return modelhost::FillTensor(*handle->model, number, view);
  });
}

mh_status mh_file(const mh_handle* handle, const char* path, mh_file_view* view) {
  if (handle == nullptr || path == nullptr || view == nullptr ||
      view->size < modelhost::kLeastFileView) {
    return MH_INVALID_ARGUMENT;
  }
  return Guarded(view->error, [&] {
    modelhost::Model& model = *handle->model;
    size_t number = 0;
    const Find find = model.index().FindFile(path, &number);
    if (find != Find::kFound) {
      if (view->error == nullptr) return modelhost::StatusOf(find);
      return Report(view->error, modelhost::StatusOf(find),
                    model.Name() + ": " + model.index().ExplainFile(path, find));
    }
    modelhost::IndexFile file;
    if (!model.index().File(number, &file)) return modelhost::Broken(view->error, model);
    modelhost::Model::OpenFile open;
    const uint32_t region = file.entry->region;
    if (!model.FileOf(region, &open)) {
      auto fetched =
          handle->session->Fetch(handle->lease, region, handle->session->DefaultDeadline());
      if (!fetched.ok()) {
        return Report(view->error, static_cast<mh_status>(fetched.error().code),
                      model.Name() + ": file '" + path + "': " + fetched.error().text);
      }
      if (fetched->ref.region != region) {
        return Report(view->error, MH_INTERNAL,
                      model.Name() + ": file '" + path + "': modelhostd sent another file");
      }
      auto attached = model.AttachFile(fetched->ref, std::move(fetched->fd));
      if (!attached.ok()) return Report(view->error, attached.error());
      if (!model.FileOf(region, &open)) return modelhost::Broken(view->error, model);
    }
    mh_file_view made = MH_FILE_VIEW_INIT;
    made.error = view->error;
    modelhost::FillFile(file, &made);
    made.data = made.nbytes == 0 ? nullptr : open.data;
    made.fd = open.fd;
    made.fd_path = open.path;
    ReportOk(view->error);
    modelhost::CopyOut(made, modelhost::kLeastFileView, view);
    return MH_OK;
  });
}

size_t mh_file_count(const mh_handle* handle) { return handle->model->index().file_count(); }

mh_status mh_file_at(const mh_handle* handle, size_t number, mh_file_view* view) {
  if (handle == nullptr || view == nullptr || view->size < modelhost::kLeastFileView) {
    return MH_INVALID_ARGUMENT;
  }
  return Guarded(view->error, [&] {
    const modelhost::Model& model = *handle->model;
    const size_t count = model.index().file_count();
    if (number >= count) return modelhost::OutOfRange(view->error, "file", number, count);
    modelhost::IndexFile file;
    if (!model.index().File(number, &file)) return modelhost::Broken(view->error, model);
    mh_file_view made = MH_FILE_VIEW_INIT;
    made.error = view->error;
    modelhost::FillFile(file, &made);
    modelhost::Model::OpenFile open;
    if (model.FileOf(file.entry->region, &open)) {
      made.data = made.nbytes == 0 ? nullptr : open.data;
      made.fd = open.fd;
      made.fd_path = open.path;
    }
    ReportOk(view->error);
    modelhost::CopyOut(made, modelhost::kLeastFileView, view);
    return MH_OK;
  });
}

const char* mh_metadata(const mh_handle* handle, const char* key, size_t* length) {
  if (handle == nullptr || key == nullptr) return nullptr;
  const modelhost::IndexReader& index = handle->model->index();
  size_t number = 0;
  std::string_view found;
  std::string_view value;
  if (index.FindMetadata(key, &number) != Find::kFound || !index.Metadata(number, &found, &value)) {
    return nullptr;
  }
  if (length != nullptr) *length = value.size();
  return value.data();
}

size_t mh_metadata_count(const mh_handle* handle) {
  return handle->model->index().metadata_count();
}

mh_status mh_metadata_at(const mh_handle* handle, size_t number, const char** key,
                         const char** value) {
  if (handle == nullptr || key == nullptr || value == nullptr) return MH_INVALID_ARGUMENT;
  const modelhost::IndexReader& index = handle->model->index();
  if (number >= index.metadata_count()) return MH_OUT_OF_RANGE;
  std::string_view key_text;
  std::string_view value_text;
  if (!index.Metadata(number, &key_text, &value_text)) return MH_DATA_LOSS;
  *key = key_text.data();
  *value = value_text.data();
  return MH_OK;
}

size_t mh_component_count(const mh_handle* handle) {
  return handle->model->index().component_count();
}

mh_status mh_component_at(const mh_handle* handle, size_t number, const char** name,
                          const char** format) {
  if (handle == nullptr || name == nullptr || format == nullptr) return MH_INVALID_ARGUMENT;
  const modelhost::IndexReader& index = handle->model->index();
  if (number >= index.component_count()) return MH_OUT_OF_RANGE;
  std::string_view name_text;
  std::string_view format_text;
  if (!index.Component(number, &name_text, &format_text)) return MH_DATA_LOSS;
  *name = name_text.data();
  *format = format_text.data();
  return MH_OK;
}

}  // extern "C"
