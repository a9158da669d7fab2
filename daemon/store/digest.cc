#include "daemon/store/digest.h"

#include <openssl/evp.h>

#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace modelhost {

std::string Digest::Hex() const {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

std::string Digest::Short() const { return Hex().substr(0, 12); }

absl::StatusOr<Digest> ParseDigest(absl::string_view hex) {
  Digest digest;
  if (hex.size() != 2 * digest.bytes.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a SHA-256 digest has 64 hexadecimal digits, not ", hex.size(), " characters"));
  }
  auto nibble = [](char c) -> int {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  };
  for (size_t i = 0; i < digest.bytes.size(); ++i) {
    const int high = nibble(hex[2 * i]);
    const int low = nibble(hex[2 * i + 1]);
    if (high < 0 || low < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("a SHA-256 digest has 64 hexadecimal digits; character ",
                       2 * i + (high < 0 ? 0 : 1), " is not one"));
    }
    digest.bytes[i] = static_cast<uint8_t>(high * 16 + low);
  }
  return digest;
}

struct Sha256Stream::State {
  EVP_MD_CTX* context = nullptr;
  ~State() { EVP_MD_CTX_free(context); }
};

// OpenSSL fails here only when it is out of memory or has no SHA-256 at all: nothing to go on with.
Sha256Stream::Sha256Stream() : state_(std::make_unique<State>()) {
  state_->context = EVP_MD_CTX_new();
  if (state_->context == nullptr ||
      EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) != 1) {
    std::abort();
  }
}

Sha256Stream::Sha256Stream(Sha256Stream&&) noexcept = default;
Sha256Stream::~Sha256Stream() = default;

void Sha256Stream::Update(std::span<const std::byte> bytes) {
  if (EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) != 1) std::abort();
}

Digest Sha256Stream::Finish() {
  Digest digest;
  unsigned int size = 0;
  if (EVP_DigestFinal_ex(state_->context, digest.bytes.data(), &size) != 1 ||
      size != digest.bytes.size()) {
    std::abort();
  }
  return digest;
}

Digest Sha256(std::span<const std::byte> bytes) {
  Sha256Stream stream;
  stream.Update(bytes);
  return stream.Finish();
}

}  // namespace modelhost
