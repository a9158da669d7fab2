// What the tests of the C API share: a fake daemon on a directory of its own, and short calls.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/src/testing/fake_server.h"
#include "client/src/testing/fake_version.h"
#include "modelhost/modelhost.h"

namespace modelhost::testing {

struct Disconnecter {
  void operator()(mh_client* client) const { mh_disconnect(client); }
};
struct Releaser {
  void operator()(mh_handle* handle) const { mh_release(handle); }
  void operator()(mh_live* live) const { mh_live_release(live); }
  void operator()(mh_live_set* live) const { mh_live_set_release(live); }
};
using ClientPtr = std::unique_ptr<mh_client, Disconnecter>;
using HandlePtr = std::unique_ptr<mh_handle, Releaser>;
using LivePtr = std::unique_ptr<mh_live, Releaser>;
using LiveSetPtr = std::unique_ptr<mh_live_set, Releaser>;

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() {
    std::string name = "/tmp/modelhost-test-XXXXXX";
    dir_ = ::mkdtemp(name.data());
    server_ = std::make_unique<FakeServer>(dir_);
  }
  ~ClientTest() override {
    server_->Stop();
    std::filesystem::remove_all(dir_);
  }

  // planner versions 7 and 8 (stable is 7), detector 1 and 2 (stable is 1); all values of version N
  // are N.
  void StartUsual() {
    server_->Add(MakeVersion("planner", 7, 10, 16, 7));
    server_->Add(MakeVersion("planner", 8, 10, 16, 8));
    server_->Add(MakeVersion("detector", 1, 3, 16, 1));
    server_->Add(MakeVersion("detector", 2, 3, 16, 2));
    server_->SetLabels({{{"planner", "stable"}, 7}, {{"detector", "stable"}, 1}});
    server_->Start();
  }

  mh_client* TryConnect(uint64_t deadline_ms) {
    mh_options options = MH_OPTIONS_INIT;
    options.runtime_dir = dir_.c_str();
    options.deadline_ms = deadline_ms;
    return mh_connect(&options, &error_);
  }
  ClientPtr Connect(uint64_t deadline_ms = 5000) {
    ClientPtr client(TryConnect(deadline_ms));
    EXPECT_NE(client, nullptr) << error_.message;
    return client;
  }
  mh_status Acquire(const ClientPtr& client, const char* ref, HandlePtr* handle, bool wait = false,
                    uint64_t deadline_ms = 0) {
    mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
    options.wait = wait ? 1 : 0;
    options.deadline_ms = deadline_ms;
    mh_handle* made = nullptr;
    const mh_status status = mh_acquire(client.get(), ref, &options, &made, &error_);
    handle->reset(made);
    return status;
  }
  HandlePtr Acquired(const ClientPtr& client, const char* ref) {
    HandlePtr handle;
    EXPECT_EQ(Acquire(client, ref, &handle), MH_OK) << error_.message;
    return handle;
  }
  // The one value of all elements of all tensors; -1 when they differ or cannot be read.
  static float ValueOf(const mh_handle* handle) {
    float value = -1;
    for (size_t i = 0; i < mh_tensor_count(handle); ++i) {
      mh_tensor_view view = MH_TENSOR_VIEW_INIT;
      if (mh_tensor_at(handle, i, &view) != MH_OK || view.data == nullptr) return -1;
      const auto* values = static_cast<const float*>(view.data);
      for (size_t k = 0; k < view.nbytes / sizeof(float); ++k) {
        if (i == 0 && k == 0) value = values[0];
        if (values[k] != value) return -1;
      }
    }
    return value;
  }

  std::string dir_;
  std::unique_ptr<FakeServer> server_;
  mh_error error_{};
};

}  // namespace modelhost::testing
