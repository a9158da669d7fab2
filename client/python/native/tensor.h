// A tensor of a handle as Python sees it, and plain bytes of one.
//
// Both are made on demand and cost a reference to the handle, nothing else. Immutable but for
// what is computed once, under the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/python/native/element_type.h"
#include "client/python/native/session.h"

namespace modelhost::python {

class Tensor {
 public:
  Tensor(HeldPtr held, const mh_tensor_view& view)
      : held_(std::move(held)), view_(view), type_(FindElementType(view.dtype)) {}

  const HeldPtr& held() const { return held_; }
  const mh_tensor_view& view() const { return view_; }
  // Null for types that are not whole bytes per element.
  const ElementType* type() const { return type_; }

  // "planner@7: tensor 'x' (BF16)"
  std::string Describe() const;
  // Where the host bytes are; not null, also for none. Raises MH_FAILED_PRECONDITION with the
  // reason if the tensor cannot be mapped.
  const void* HostData() const;
  // As it is now: memory of a GPU can be taken from a handle. Null: none.
  const void* DeviceData() const;
  // One without bytes has no address there; it is where its version is.
  bool OnDevice() const;
  // The same tensor of the same handle.
  bool Same(const Tensor& other) const {
    return view_.name == other.view_.name && view_.component == other.view_.component;
  }
  bool mappable() const { return (view_.flags & MH_TENSOR_MAPPABLE) != 0; }

  // In elements, outermost first; also for row-major tensors.
  const std::vector<int64_t>& Strides();
  // In bytes. Requires type().
  const std::vector<Py_ssize_t>& ByteStrides();
  bool RowMajor() const { return view_.strides == nullptr; }

 private:
  HeldPtr held_;
  mh_tensor_view view_;
  const ElementType* type_;
  std::vector<int64_t> strides_;
  std::vector<Py_ssize_t> byte_strides_;
};

// A range of bytes of a handle.
class Bytes {
 public:
  Bytes(HeldPtr held, const void* data, uint64_t size)
      : held_(std::move(held)), data_(data), size_(size) {}
  const void* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  HeldPtr held_;
  const void* data_;
  uint64_t size_;
};

// A file of the version.
class File : public Bytes {
 public:
  File(const HeldPtr& held, const mh_file_view& view)
      : Bytes(held, view.data, view.nbytes),
        name(view.path),
        role(view.role),
        fd_path(view.fd_path),
        digest(reinterpret_cast<const char*>(view.digest), 32) {}

  const std::string name, role, fd_path, digest;
};

// Type of Tensor's `__array_interface__` and of `__cuda_array_interface__`, which differ in where.
pybind11::dict ArrayInterface(Tensor& tensor, const void* data);

void BindTensor(pybind11::module_& module);
void BindBytes(pybind11::module_& module);

// Extra of a py::class_ whose objects only this extension makes: T.__new__(T) is refused, where
// pybind11 would make an object without anything in it.
pybind11::custom_type_setup NotConstructible();

// A read-only memoryview of `object`, which has the buffer protocol.
pybind11::object MemoryViewOf(const pybind11::handle& object);
// Text of the index: names are UTF-8 where the daemon checked them; other bytes are replaced.
pybind11::str Text(std::string_view text);

}  // namespace modelhost::python
