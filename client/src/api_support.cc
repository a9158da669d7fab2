#include "client/src/api_support.h"

namespace modelhost {

mh_status Report(mh_error* error, mh_status status, std::string_view text) {
  if (error == nullptr) return status;
  error->status = status;
  size_t length = std::min(text.size(), sizeof(error->message) - 1);
  if (length < text.size()) {
    // Never half a character: step back over its continuation bytes.
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80) --length;
  }
  if (length != 0) std::memcpy(error->message, text.data(), length);
  error->message[length] = '\0';
  return status;
}

mh_status Report(mh_error* error, const Error& what) {
  return Report(error, static_cast<mh_status>(what.code), what.text);
}

mh_status ReportOk(mh_error* error) { return Report(error, MH_OK, {}); }

}  // namespace modelhost
