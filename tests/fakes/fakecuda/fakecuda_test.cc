// What the fake driver promises, through the table and the owners of proto/cuda, between real
// processes; and that every misuse that it knows is refused.
#include <fcntl.h>
#include <sys/mman.h>

#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "proto/cuda/handles.h"
#include "tests/fakes/fakecuda/in_child.h"

namespace modelhost::cuda {
namespace {

constexpr uint64_t kSegment = uint64_t{4} << 20;

std::shared_ptr<const Driver> Load() {
  const DriverLoad load = Driver::Load(FAKECUDA_PATH);
  if (load.driver == nullptr) {
    ADD_FAILURE() << load.text;
    std::_Exit(2);
  }
  return load.driver;
}

template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) {
    ADD_FAILURE() << result.error().text;
    std::fflush(nullptr);
    std::_Exit(2);
  }
  return *std::move(result);
}
void Must(const Result<void>& result) { ASSERT_TRUE(result.ok()) << result.error().text; }

std::vector<uint8_t> Pattern(uint64_t bytes, uint8_t seed) {
  std::vector<uint8_t> values(bytes);
  for (uint64_t i = 0; i < bytes; ++i) values[i] = static_cast<uint8_t>(i * 31 + seed);
  return values;
}

uint64_t Used(const Driver& driver) {
  const DeviceMemory memory = Must(MemoryInfo(driver));
  return memory.total_bytes - memory.free_bytes;
}
uint64_t UsedNow() {
  Child child([](int socket) {
    const auto driver = Load();
    const auto context = Must(PrimaryContext::Retain(*driver, 0));
    Must(context.MakeCurrent());
    Say(socket, static_cast<char>(1 + (Used(*driver) >> 20)));
  });
  const int mib = static_cast<unsigned char>(Hear(child.socket())) - 1;
  child.ExpectGood();
  return static_cast<uint64_t>(mib) << 20;
}

// An exported segment with Pattern(kSegment, seed) in it.
UniqueFd MakeSegment(const Driver& driver, uint8_t seed) {
  const auto allocation = Must(CreateAllocation(driver, 0, kSegment));
  UniqueFd fd = Must(ExportAllocation(driver, allocation));
  const auto context = Must(PrimaryContext::Retain(driver, 0));
  Must(context.MakeCurrent());
  const auto segment = Must(ImportSegment(driver, fd, kSegment, 0, Access::kReadWrite));
  const auto values = Pattern(kSegment, seed);
  Must(driver.Check(driver.call().cuMemcpyHtoD(segment.range().at, values.data(), kSegment),
                    "copy"));
  return fd;
}

void ExpectPattern(const Driver& driver, const UniqueFd& fd, uint8_t seed) {
  const auto context = Must(PrimaryContext::Retain(driver, 0));
  Must(context.MakeCurrent());
  const auto segment = Must(ImportSegment(driver, fd, kSegment, 0, Access::kRead));
  std::vector<uint8_t> got(kSegment);
  Must(driver.Check(driver.call().cuMemcpyDtoH(got.data(), segment.range().at, kSegment), "copy"));
  EXPECT_TRUE(got == Pattern(kSegment, seed));
}

TEST(FakeCuda, MemoryLivesAsLongAsADescriptorWhoeverDies) {
  UniqueFd fd;
  {
    Child maker([](int socket) {
      const auto driver = Load();
      const UniqueFd made = MakeSegment(*driver, 7);
      EXPECT_NE(::fcntl(made.get(), F_GETFD) & FD_CLOEXEC, 0);
      Say(socket, 'f', made.get());
      (void)Hear(socket);  // Until it is killed.
    });
    ASSERT_EQ(Hear(maker.socket(), &fd), 'f');
    maker.Kill();
  }
  EXPECT_EQ(UsedNow(), kSegment);
  for (int i = 0; i < 2; ++i) {
    InChild([&] {
      const auto driver = Load();
      ExpectPattern(*driver, fd, 7);
    });
  }
  fd.Reset();
  EXPECT_EQ(UsedNow(), 0);
}

TEST(FakeCuda, ManyImportersAreOneCopy) {
  UniqueFd fd;
  Child maker([](int socket) {
    const auto driver = Load();
    Say(socket, 'f', MakeSegment(*driver, 3).get());
  });
  ASSERT_EQ(Hear(maker.socket(), &fd), 'f');
  maker.ExpectGood();
  std::vector<std::unique_ptr<Child>> readers;
  for (int i = 0; i < 8; ++i) {
    readers.push_back(std::make_unique<Child>([&](int socket) {
      const auto driver = Load();
      const auto segment = Must(ImportSegment(*driver, fd, kSegment, 0, Access::kRead));
      Say(socket, 'm');
      (void)Hear(socket);
    }));
  }
  for (const auto& reader : readers) ASSERT_EQ(Hear(reader->socket()), 'm');
  EXPECT_EQ(UsedNow(), kSegment);
  fd.Reset();
  EXPECT_EQ(UsedNow(), kSegment);  // The importers hold it.
  for (const auto& reader : readers) reader->Kill();
  EXPECT_EQ(UsedNow(), 0);
}

TEST(FakeCuda, ReadOnlyHoldsForCopiesKernelsAndTheCpu) {
  static constexpr char kPtx[] = ".version 7.0\n.entry modelhost_poke .entry modelhost_peek";
  UniqueFd fd;
  Child maker([](int socket) {
    const auto driver = Load();
    Say(socket, 'f', MakeSegment(*driver, 9).get());
  });
  ASSERT_EQ(Hear(maker.socket(), &fd), 'f');
  maker.ExpectGood();
  const auto with_segment = [&](const std::function<void(const Driver&, DevicePtr)>& body) {
    return [&, body](int) {
      const auto driver = Load();
      const auto context = Must(PrimaryContext::Retain(*driver, 0));
      Must(context.MakeCurrent());
      const auto segment = Must(ImportSegment(*driver, fd, kSegment, 0, Access::kRead));
      body(*driver, segment.range().at);
    };
  };
  Child copy(with_segment([](const Driver& driver, DevicePtr at) {
    const uint64_t word = 0;
    EXPECT_EQ(driver.call().cuMemcpyHtoD(at, &word, sizeof word), Rc::kIllegalAddress);
    EXPECT_EQ(driver.call().cuMemsetD8(at, 0, 8), Rc::kIllegalAddress);
  }));
  copy.ExpectGood();
  Child kernel(with_segment([](const Driver& driver, DevicePtr at) {
    const DriverTable& call = driver.call();
    ModuleHandle module = nullptr;
    FunctionHandle poke = nullptr;
    ASSERT_EQ(call.cuModuleLoadData(&module, kPtx), Rc::kSuccess);
    ASSERT_EQ(call.cuModuleGetFunction(&poke, module, "modelhost_poke"), Rc::kSuccess);
    EXPECT_EQ(call.cuModuleGetFunction(&poke, module, "other"), Rc::kNotFound);
    const Stream stream = Must(CreateStream(driver));
    void* arguments[] = {&at};
    ASSERT_EQ(call.cuLaunchKernel(poke, 1, 1, 1, 1, 1, 1, 0, stream.get(), arguments, nullptr),
              Rc::kSuccess);
    EXPECT_EQ(call.cuStreamSynchronize(stream.get()), Rc::kIllegalAddress);
    uint64_t word = 0;
    EXPECT_EQ(call.cuMemcpyDtoH(&word, at, sizeof word), Rc::kIllegalAddress);  // It sticks.
  }));
  kernel.ExpectGood();
  Child cpu(with_segment([](const Driver&, DevicePtr at) {
    EXPECT_EQ(*reinterpret_cast<const volatile uint8_t*>(at), 9);
    ::signal(SIGSEGV, SIG_DFL);  // A sanitizer has its own end for it.
    *reinterpret_cast<volatile uint8_t*>(at) = 1;
  }));
  EXPECT_EQ(WTERMSIG(cpu.Wait()), SIGSEGV);
  Child opaque(with_segment([](const Driver&, DevicePtr at) {
                 ::signal(SIGSEGV, SIG_DFL);
                 (void)*reinterpret_cast<const volatile uint8_t*>(at);
               }),
               {{"FAKECUDA_DEVPTR", "opaque"}});
  EXPECT_EQ(WTERMSIG(opaque.Wait()), SIGSEGV);
  InChild([&] {
    const auto driver = Load();
    ExpectPattern(*driver, fd, 9);
  });
}

// The bug that a ring without events has.
TEST(FakeCuda, ASlotThatIsFilledAgainTooEarlySpoilsTheCopy) {
  InChild([] {
    const auto driver = Load();
    const auto context = Must(PrimaryContext::Retain(*driver, 0));
    Must(context.MakeCurrent());
    const auto allocation = Must(CreateAllocation(*driver, 0, kSegment));
    const auto reservation = Must(ReserveAddresses(*driver, kSegment));
    const auto mapping =
        Must(MapAllocation(*driver, allocation, reservation.get(), 0, Access::kReadWrite));
    const DevicePtr at = mapping.get().at;
    const Stream stream = Must(CreateStream(*driver));
    const Event event = Must(CreateEvent(*driver));
    const PinnedBuffer slot = Must(PinBuffer(*driver, 4096));
    const DriverTable& call = driver->call();
    for (const bool wait : {true, false}) {
      slot.get()[0] = std::byte{1};
      ASSERT_EQ(call.cuMemcpyHtoDAsync(at, slot.get().data(), 4096, stream.get()), Rc::kSuccess);
      ASSERT_EQ(call.cuEventRecord(event.get(), stream.get()), Rc::kSuccess);
      if (wait) {
        ASSERT_EQ(call.cuEventSynchronize(event.get()), Rc::kSuccess);
      }
      slot.get()[0] = std::byte{2};
      ASSERT_EQ(call.cuStreamSynchronize(stream.get()), Rc::kSuccess);
      uint8_t got = 0;
      ASSERT_EQ(call.cuMemcpyDtoH(&got, at, 1), Rc::kSuccess);
      EXPECT_EQ(got, wait ? 1 : 2);
    }
  });
}

TEST(FakeCuda, EveryMisuseIsRefused) {
  InChild([] {
    const auto driver = Load();
    const DriverTable& call = driver->call();
    size_t size = 0;
    void* host = nullptr;
    StreamHandle stream = nullptr;
    // Without a context.
    EXPECT_EQ(call.cuMemGetInfo(&size, &size), Rc::kInvalidContext);
    EXPECT_EQ(call.cuMemHostAlloc(&host, 4096, 0), Rc::kInvalidContext);
    EXPECT_EQ(call.cuStreamCreate(&stream, 0), Rc::kInvalidContext);
    EXPECT_EQ(call.cuDevicePrimaryCtxRelease(0), Rc::kInvalidContext);
    EXPECT_EQ(call.cuCtxSetCurrent(reinterpret_cast<ContextHandle>(&size)), Rc::kInvalidContext);
    Device device = 0;
    EXPECT_EQ(call.cuDeviceGet(&device, 1), Rc::kInvalidDevice);
    int value = 0;
    EXPECT_EQ(call.cuDeviceGetAttribute(&value, static_cast<Attribute>(9999), 0),
              Rc::kInvalidValue);
    // Another thread has no context either.
    const auto context = Must(PrimaryContext::Retain(*driver, 0));
    Must(context.MakeCurrent());
    EXPECT_EQ(call.cuMemGetInfo(&size, &size), Rc::kSuccess);
    std::thread([&] { EXPECT_EQ(call.cuMemGetInfo(&size, &size), Rc::kInvalidContext); }).join();

    AllocationProp prop{};
    prop.type = AllocationType::kPinned;
    prop.location = {LocationType::kDevice, 0};
    AllocationHandle handle = 0;
    // Sizes, flags, properties.
    EXPECT_EQ(call.cuMemCreate(&handle, kSegment + 4096, &prop, 0), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemCreate(&handle, 0, &prop, 0), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemCreate(&handle, kSegment, &prop, 1), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemCreate(&handle, uint64_t{1} << 40, &prop, 0), Rc::kOutOfMemory);
    AllocationProp strange = prop;
    strange.flags.compression = 1;
    EXPECT_EQ(call.cuMemCreate(&handle, kSegment, &strange, 0), Rc::kInvalidValue);
    // Export that was not asked for.
    ASSERT_EQ(call.cuMemCreate(&handle, kSegment, &prop, 0), Rc::kSuccess);
    int fd = -1;
    EXPECT_EQ(call.cuMemExportToShareableHandle(&fd, handle, HandleType::kPosixFd, 0),
              Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemExportToShareableHandle(&fd, handle, static_cast<HandleType>(8), 0),
              Rc::kNotSupported);
    EXPECT_EQ(call.cuMemRelease(handle), Rc::kSuccess);
    EXPECT_EQ(call.cuMemRelease(handle), Rc::kInvalidValue);  // Twice.

    const Allocation allocation = Must(CreateAllocation(*driver, 0, kSegment));
    const UniqueFd exported = Must(ExportAllocation(*driver, allocation));
    // The address of a descriptor, and strangers.
    EXPECT_EQ(call.cuMemImportFromShareableHandle(&handle, &fd, HandleType::kPosixFd),
              Rc::kInvalidValue);
    for (const int other : {0, ::memfd_create("other", MFD_CLOEXEC)}) {
      EXPECT_EQ(
          call.cuMemImportFromShareableHandle(
              &handle, reinterpret_cast<void*>(static_cast<intptr_t>(other)), HandleType::kPosixFd),
          Rc::kInvalidValue);
    }
    // Addresses.
    DevicePtr at = 0;
    EXPECT_EQ(call.cuMemAddressReserve(&at, kSegment + 1, 0, 0, 0), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemAddressReserve(&at, kSegment, 3, 0, 0), Rc::kInvalidValue);
    ASSERT_EQ(call.cuMemAddressReserve(&at, kSegment, 0, 0, 0), Rc::kSuccess);
    EXPECT_EQ(call.cuMemMap(at, kSegment, 4096, allocation.get(), 0), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemMap(at, 2 * kSegment, 0, allocation.get(), 0), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemMap(at + 4096, kSegment / 2, 0, allocation.get(), 0), Rc::kInvalidValue);
    ASSERT_EQ(call.cuMemMap(at, kSegment, 0, allocation.get(), 0), Rc::kSuccess);
    EXPECT_EQ(call.cuMemMap(at, kSegment, 0, allocation.get(), 0), Rc::kInvalidValue);  // Overlap.
    uint64_t word = 0;
    EXPECT_EQ(call.cuMemcpyDtoH(&word, at, 8), Rc::kIllegalAddress);  // No access was given.
    AccessDesc access{{LocationType::kDevice, 0}, Access::kReadWrite};
    EXPECT_EQ(call.cuMemSetAccess(at, kSegment / 2, &access, 1), Rc::kInvalidValue);
    access.access = static_cast<Access>(2);
    EXPECT_EQ(call.cuMemSetAccess(at, kSegment, &access, 1), Rc::kInvalidValue);
    access.access = Access::kReadWrite;
    ASSERT_EQ(call.cuMemSetAccess(at, kSegment, &access, 1), Rc::kSuccess);
    EXPECT_EQ(call.cuMemcpyHtoD(at + kSegment - 4, &word, 8), Rc::kInvalidValue);  // Past the end.
    // Unmapping with copies in flight; freeing their source.
    const Stream copies = Must(CreateStream(*driver));
    ASSERT_EQ(call.cuMemHostAlloc(&host, 4096, 0), Rc::kSuccess);
    ASSERT_EQ(call.cuMemcpyHtoDAsync(at, host, 4096, copies.get()), Rc::kSuccess);
    EXPECT_EQ(call.cuMemUnmap(at, kSegment), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemFreeHost(host), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemcpyHtoDAsync(at, host, 4096, nullptr), Rc::kInvalidHandle);
    ASSERT_EQ(call.cuStreamSynchronize(copies.get()), Rc::kSuccess);
    EXPECT_EQ(call.cuMemFreeHost(host), Rc::kSuccess);
    EXPECT_EQ(call.cuMemFreeHost(host), Rc::kInvalidValue);
    // Exact ranges.
    EXPECT_EQ(call.cuMemAddressFree(at, kSegment), Rc::kInvalidValue);  // Still mapped.
    EXPECT_EQ(call.cuMemUnmap(at, kSegment / 2), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemUnmap(at, kSegment), Rc::kSuccess);
    EXPECT_EQ(call.cuMemUnmap(at, kSegment), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemAddressFree(at, kSegment / 2), Rc::kInvalidValue);
    EXPECT_EQ(call.cuMemAddressFree(at, kSegment), Rc::kSuccess);
    // A context with something left in it.
    EXPECT_EQ(call.cuDevicePrimaryCtxRelease(0), Rc::kInvalidContext);
    // After fork.
    const pid_t child = ::fork();
    if (child == 0) {
      const bool refused = call.cuInit(0) == Rc::kNotInitialized &&
                           call.cuMemRelease(allocation.get()) == Rc::kNotInitialized &&
                           call.cuDeviceGetCount(&value) == Rc::kNotInitialized;
      std::_Exit(refused ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  });
}

TEST(FakeCuda, HostMemoryIsRegisteredByTheRulesOfItsMapping) {
  const auto body = [](Rc read_only_flag) {
    return [=] {
      const auto driver = Load();
      const DriverTable& call = driver->call();
      const auto context = Must(PrimaryContext::Retain(*driver, 0));
      Must(context.MakeCurrent());
      const int fd = ::memfd_create("host", MFD_CLOEXEC);
      ASSERT_EQ(::ftruncate(fd, 8192), 0);
      void* const rw = ::mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      void* const ro = ::mmap(nullptr, 8192, PROT_READ, MAP_SHARED, fd, 0);
      EXPECT_EQ(call.cuMemHostRegister(rw, 100, 0), Rc::kInvalidValue);
      EXPECT_EQ(call.cuMemHostRegister(ro, 8192, 0), Rc::kInvalidValue);
      EXPECT_EQ(call.cuMemHostRegister(ro, 8192, kHostRegisterReadOnly), read_only_flag);
      ASSERT_EQ(call.cuMemHostRegister(rw, 8192, kHostRegisterDeviceMap), Rc::kSuccess);
      EXPECT_EQ(call.cuMemHostRegister(rw, 8192, 0), Rc::kHostMemoryAlreadyRegistered);
      DevicePtr at = 0;
      EXPECT_EQ(call.cuMemHostGetDevicePointer(&at, rw, 0), Rc::kSuccess);
      EXPECT_EQ(call.cuMemHostUnregister(rw), Rc::kSuccess);
      EXPECT_EQ(call.cuMemHostUnregister(rw), Rc::kHostMemoryNotRegistered);
    };
  };
  InChild(body(Rc::kNotSupported));
  InChild(body(Rc::kSuccess), {{"FAKECUDA_ATTR_113", "1"}});
}

TEST(FakeCuda, LegacyHandlesNeedALivingExporterAndKnowNoProtection) {
  Child exporter([](int socket) {
    const auto driver = Load();
    const auto context = Must(PrimaryContext::Retain(*driver, 0));
    Must(context.MakeCurrent());
    LegacyMemory memory = Must(AllocateLegacy(*driver, kSegment));
    const IpcHandle handle = Must(ExportLegacy(*driver, memory));
    DevicePtr again = 0;
    EXPECT_EQ(driver->call().cuIpcOpenMemHandle(&again, handle, kIpcLazyPeerAccess),
              Rc::kInvalidContext);
    IpcHandle none{};
    EXPECT_EQ(driver->call().cuIpcGetMemHandle(&none, memory.get() + 512), Rc::kInvalidValue);
    EXPECT_EQ(driver->call().cuMemFree(memory.get() + 512), Rc::kInvalidValue);
    ASSERT_EQ(::write(socket, &handle, sizeof handle), static_cast<ssize_t>(sizeof handle));
    if (Hear(socket) != 'f') return;
    memory.Reset();
    Say(socket, 'F');
    (void)Hear(socket);
  });
  IpcHandle handle{};
  ASSERT_EQ(::read(exporter.socket(), &handle, sizeof handle), static_cast<ssize_t>(sizeof handle));
  Child importer([&](int socket) {
    const auto driver = Load();
    const auto context = Must(PrimaryContext::Retain(*driver, 0));
    Must(context.MakeCurrent());
    const IpcMapping mapping = Must(OpenLegacy(*driver, handle));
    const uint64_t word = 5;
    EXPECT_EQ(driver->call().cuMemcpyHtoD(mapping.get(), &word, sizeof word), Rc::kSuccess);
    DevicePtr same = 0;
    EXPECT_EQ(driver->call().cuIpcOpenMemHandle(&same, handle, kIpcLazyPeerAccess), Rc::kSuccess);
    EXPECT_EQ(same, mapping.get());
    EXPECT_EQ(driver->call().cuIpcCloseMemHandle(same), Rc::kSuccess);
    EXPECT_EQ(driver->call().cuIpcOpenMemHandle(&same, handle, 0), Rc::kInvalidValue);
    Say(socket, 'o');
    ASSERT_EQ(Hear(socket), 'g');  // The exporter has freed it.
    uint64_t got = 0;
    EXPECT_EQ(driver->call().cuMemcpyDtoH(&got, mapping.get(), sizeof got), Rc::kIllegalAddress);
  });
  ASSERT_EQ(Hear(importer.socket()), 'o');
  Say(exporter.socket(), 'f');
  ASSERT_EQ(Hear(exporter.socket()), 'F');
  Say(importer.socket(), 'g');
  importer.ExpectGood();
  exporter.Kill();
  InChild([&] {
    const auto driver = Load();
    const auto context = Must(PrimaryContext::Retain(*driver, 0));
    Must(context.MakeCurrent());
    EXPECT_FALSE(OpenLegacy(*driver, handle).ok());
  });
}

TEST(FakeCuda, TheNthCallFailsAsAsked) {
  InChild(
      [] {
        const auto driver = Load();
        EXPECT_TRUE(CreateAllocation(*driver, 0, kSegment).ok());
        const auto failed = CreateAllocation(*driver, 0, kSegment);
        ASSERT_FALSE(failed.ok());
        EXPECT_EQ(failed.error().code, Code::kResourceExhausted);
        EXPECT_THAT(failed.error().text,
                    ::testing::HasSubstr("4194304 bytes: CUDA_ERROR_OUT_OF_MEMORY (2)"));
        EXPECT_TRUE(CreateAllocation(*driver, 0, kSegment).ok());
      },
      {{"FAKECUDA_FAIL", "cuMemCreate:2:2"}});
  Child killed([](int) { (void)CreateAllocation(*Load(), 0, kSegment); },
               {{"FAKECUDA_FAIL", "cuMemCreate:1:kill"}});
  EXPECT_EQ(WTERMSIG(killed.Wait()), SIGKILL);
  InChild(
      [] {
        const auto driver = Load();
        EXPECT_FALSE(CreateAllocation(*driver, 0, kSegment).ok());
        int count = 0;
        EXPECT_EQ(driver->call().cuDeviceGetCount(&count), Rc::kIllegalAddress);
      },
      {{"FAKECUDA_FAIL", "cuMemCreate:1:stick"}});
}

TEST(FakeCuda, GpusAreRenumberedAndKnownByUuid) {
  std::string second;
  const auto uuid = [](Device device) { return Must(Load()->UuidText(device)); };
  UniqueFd fd;
  Child all(
      [&](int socket) {
        const auto driver = Load();
        EXPECT_EQ(driver->device_count(), 2);
        EXPECT_NE(uuid(0), uuid(1));
        const Allocation allocation = Must(CreateAllocation(*driver, 1, kSegment));
        Say(socket, 'f', Must(ExportAllocation(*driver, allocation)).get());
      },
      {{"FAKECUDA_DEVICES", "2"}});
  ASSERT_EQ(Hear(all.socket(), &fd), 'f');
  all.ExpectGood();
  InChild(
      [&] {
        const auto driver = Load();
        ASSERT_EQ(driver->device_count(), 1);
        // The second GPU is this process's first.
        const Allocation allocation = Must(ImportAllocation(*driver, fd));
        EXPECT_EQ(Must(DeviceOf(*driver, allocation)), 0);
        EXPECT_EQ(Must(driver->FindDevice("GPU-01fafafa-fafa-fafa-fafa-fafafafafa01")), 0);
        const auto hidden = driver->FindDevice("GPU-00fafafa-fafa-fafa-fafa-fafafafafa00");
        ASSERT_FALSE(hidden.ok());
        EXPECT_EQ(hidden.error().code, Code::kNotFound);
      },
      {{"FAKECUDA_DEVICES", "2"}, {"CUDA_VISIBLE_DEVICES", "1"}});
  InChild(
      [&] {
        const auto driver = Load();
        EXPECT_FALSE(ImportAllocation(*driver, fd).ok());  // Of a GPU that is not seen.
      },
      {{"FAKECUDA_DEVICES", "2"}, {"CUDA_VISIBLE_DEVICES", "GPU-00fafafa"}});
}

TEST(FakeCuda, AddressesStayWhileTheirMemoryIsExchanged) {
  InChild([] {
    const auto driver = Load();
    const UniqueFd old_fd = MakeSegment(*driver, 1);
    const UniqueFd new_fd = MakeSegment(*driver, 2);
    const auto context = Must(PrimaryContext::Retain(*driver, 0));
    Must(context.MakeCurrent());
    const Reservation addresses = Must(ReserveAddresses(*driver, kSegment));
    uint8_t seed = 1;
    for (const UniqueFd* fd : {&old_fd, &new_fd}) {
      const Allocation allocation = Must(ImportAllocation(*driver, *fd));
      const Mapping mapping =
          Must(MapAllocation(*driver, allocation, addresses.get(), 0, Access::kRead));
      uint8_t got = 0;
      ASSERT_EQ(driver->call().cuMemcpyDtoH(&got, addresses.get().at, 1), Rc::kSuccess);
      EXPECT_EQ(got, seed++);
    }
  });
}

}  // namespace
}  // namespace modelhost::cuda
