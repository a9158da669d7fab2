// Between the C API and the library: errors into the caller's buffer, exceptions into errors,
// structs that are extended over time. Pure but for what they are given; any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <span>
#include <string_view>
#include <utility>

#include "modelhost/modelhost.h"
#include "proto/handle/error.h"

namespace modelhost {

// Writes into `error`, which may be null, and returns the status. Cuts at a character of UTF-8.
mh_status Report(mh_error* error, mh_status status, std::string_view text);
mh_status Report(mh_error* error, const Error& what);
mh_status ReportOk(mh_error* error);

// Runs `body`, which returns an mh_status; no exception leaves.
template <typename Body>
mh_status Guarded(mh_error* error, Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Report(error, MH_RESOURCE_EXHAUSTED, "out of memory");
  } catch (const std::exception& failure) {
    return Report(error, MH_INTERNAL, failure.what());
  } catch (...) {
    return Report(error, MH_INTERNAL, "unknown exception");
  }
}

// Copies a caller's size-first struct into one of ours: what it does not have stays default, what
// we do not have must be zero. False: it is too small to be any version of the struct, or it wants
// more than we know.
template <typename T>
bool CopyIn(const T* from, size_t least, T* to) {
  if (from == nullptr) return true;
  if (from->size < least) return false;
  std::memcpy(to, from, std::min(from->size, sizeof(T)));
  to->size = sizeof(T);
  for (size_t i = sizeof(T); i < from->size; ++i) {
    if (reinterpret_cast<const unsigned char*>(from)[i] != 0) return false;
  }
  return true;
}

// Copies our view into a caller's, as far as that goes, but for the fields that are the caller's.
// False when it is too small to be any version of the view.
template <typename T>
bool CopyOut(T view, size_t least, T* to) {
  if (to->size < least) return false;
  const size_t size = to->size;
  view.size = size;
  std::memcpy(to, &view, std::min(size, sizeof(T)));
  return true;
}

}  // namespace modelhost
