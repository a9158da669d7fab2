// The owner of one file descriptor. By value: you own it now. By const reference: it is lent.
//
// Nothing else in the tree closes a descriptor. Every descriptor here was opened close-on-exec.
#pragma once

#include <utility>

#include "proto/handle/error.h"

namespace modelhost {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { Reset(); }

  bool valid() const { return fd_ >= 0; }
  // For a system call only; the number is good while this object lives.
  int get() const { return fd_; }
  // Gives the number to something that will close it.
  [[nodiscard]] int Release() && { return std::exchange(fd_, -1); }
  void Reset();
  // A second descriptor of the same open file, close-on-exec. RESOURCE_EXHAUSTED at the limit.
  Result<UniqueFd> Duplicate() const;

 private:
  int fd_ = -1;
};

}  // namespace modelhost
