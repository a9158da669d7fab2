#include "proto/cuda/driver.h"

#include "gmock/gmock.h"
#include "tests/fakes/fakecuda/in_child.h"

namespace modelhost::cuda {
namespace {

using ::testing::HasSubstr;

TEST(CudaDriver, NoLibraryIsAnAnswer) {
  const DriverLoad load = Driver::Load("libcuda-that-is-nowhere.so.1");
  EXPECT_EQ(load.driver, nullptr);
  EXPECT_EQ(load.why, NoDriver::kNoLibrary);
  EXPECT_THAT(load.text, HasSubstr("no CUDA driver: libcuda-that-is-nowhere.so.1"));
}

TEST(CudaDriver, ALibraryThatIsNoDriverLacksASymbol) {
  const DriverLoad load = Driver::Load("libm.so.6");
  EXPECT_EQ(load.why, NoDriver::kMissingSymbol);
  EXPECT_THAT(load.text, HasSubstr("it lacks cuInit"));
}

TEST(CudaDriver, WhatCuInitSaysHasItsNameAndAdvice) {
  InChild(
      [] {
        const DriverLoad load = Driver::Load(FAKECUDA_PATH);
        EXPECT_EQ(load.why, NoDriver::kInitFailed);
        EXPECT_EQ(load.rc, Rc::kStubLibrary);
        EXPECT_THAT(load.text, HasSubstr("CUDA_ERROR_STUB_LIBRARY (34) (this is the toolkit's"));
      },
      {{"FAKECUDA_INIT", "34"}});
  InChild(
      [] {
        const DriverLoad load = Driver::Load(FAKECUDA_PATH);
        EXPECT_EQ(load.why, NoDriver::kInitFailed);
        EXPECT_THAT(load.text, HasSubstr("cuInit says CUDA error (4711)"));
      },
      {{"FAKECUDA_INIT", "4711"}});
  InChild([] { EXPECT_EQ(Driver::Load(FAKECUDA_PATH).why, NoDriver::kNoDevice); },
          {{"FAKECUDA_DEVICES", "0"}});
  InChild([] { EXPECT_EQ(Driver::Load(FAKECUDA_PATH).why, NoDriver::kNoDevice); },
          {{"CUDA_VISIBLE_DEVICES", ""}});
}

TEST(CudaDriver, AnOldDriverServesWithoutDescriptors) {
  InChild([] {
    const DriverLoad load = Driver::Load(FAKECUDA_OLD_PATH);
    ASSERT_NE(load.driver, nullptr) << load.text;
    EXPECT_THAT(load.driver->no_vmm(), HasSubstr("the driver lacks cuMemGetAllocationGranularity"));
    EXPECT_TRUE(load.driver->has_ipc());
    EXPECT_TRUE(load.driver->UuidText(0).ok());
  });
  InChild(
      [] {
        const DriverLoad load = Driver::Load(FAKECUDA_PATH);
        ASSERT_NE(load.driver, nullptr) << load.text;
        EXPECT_EQ(load.driver->no_vmm(), "driver 11.4 is older than 12.0");
      },
      {{"FAKECUDA_DRIVER_VERSION", "11040"}});
}

TEST(CudaDriver, AGpuIsFoundByItsUuid) {
  InChild(
      [] {
        const DriverLoad load = Driver::Load(FAKECUDA_PATH);
        ASSERT_NE(load.driver, nullptr) << load.text;
        EXPECT_EQ(load.driver->no_vmm(), "");
        EXPECT_EQ(load.driver->device_count(), 3);
        const auto found = load.driver->FindDevice("GPU-02fafafa-fafa-fafa-fafa-fafafafafa02");
        ASSERT_TRUE(found.ok()) << found.error().text;
        EXPECT_EQ(*found, 2);
        const auto none = load.driver->FindDevice("GPU-77");
        ASSERT_FALSE(none.ok());
        EXPECT_EQ(none.error().code, Code::kNotFound);
        EXPECT_EQ(load.driver->AttributeOf(0, Attribute::kPosixFdHandles), 1);
        EXPECT_EQ(load.driver->AttributeOf(0, static_cast<Attribute>(9999)), 0);
      },
      {{"FAKECUDA_DEVICES", "3"}});
}

TEST(CudaDriver, OnlySomeErrorsEndAContext) {
  EXPECT_FALSE(IsSticky(Rc::kOutOfMemory));
  EXPECT_TRUE(IsSticky(Rc::kIllegalAddress));
  EXPECT_TRUE(IsSticky(static_cast<Rc>(719)));
}

}  // namespace
}  // namespace modelhost::cuda
