#include "client/src/cuda_device.h"

#include <utility>

#include "client/src/process.h"

namespace modelhost {

Result<std::shared_ptr<const cuda::Driver>> CudaLibrary::Load(uint64_t forks) {
  uint64_t used_in = 0;
  if (!used_in_.compare_exchange_strong(used_in, forks + 1) && used_in != forks + 1) {
    return Error{Code::kFailedPrecondition,
                 "device memory: this process was forked from one that used the CUDA driver, which "
                 "does not survive that (start a new program with exec)",
                 0};
  }
  if (const auto* loaded = driver_.load(std::memory_order_acquire)) return *loaded;
  cuda::DriverLoad load = cuda::Driver::Load();
  if (load.driver == nullptr) {
    return Error{Code::kFailedPrecondition, "device memory: " + load.text, 0};
  }
  auto made = std::make_unique<const std::shared_ptr<const cuda::Driver>>(std::move(load.driver));
  const std::shared_ptr<const cuda::Driver>* first = nullptr;
  // Of several threads that load it at once, one tells all.
  if (driver_.compare_exchange_strong(first, made.get(), std::memory_order_acq_rel)) {
    return *made.release();
  }
  return *first;
}

Error AsCudaError(Error error, const std::string& what, bool foreign) {
  switch (error.code) {
    case Code::kResourceExhausted:
    case Code::kDataLoss:
      break;
    case Code::kInternal:
    case Code::kNotFound:
      error.code = foreign ? Code::kDataLoss : Code::kFailedPrecondition;
      break;
    default:
      error.code = Code::kFailedPrecondition;
  }
  error.text = what + ": " + error.text;
  return error;
}

namespace {

Result<cuda::Device> ChooseDevice(const cuda::Driver& driver, const char* gpu) {
  if (gpu != nullptr) return driver.FindDevice(gpu);
  cuda::ContextHandle current = nullptr;
  cuda::Device device = 0;
  if (driver.call().cuCtxGetCurrent(&current) == cuda::Rc::kSuccess && current != nullptr) {
    if (const auto rc = driver.call().cuCtxGetDevice(&device); rc != cuda::Rc::kSuccess) {
      return driver.ToError(rc, "the GPU of the current context");
    }
    return device;
  }
  if (const auto rc = driver.call().cuDeviceGet(&device, 0); rc != cuda::Rc::kSuccess) {
    return driver.ToError(rc, "the first GPU");
  }
  return device;
}

}  // namespace

CudaDevice::CudaDevice(std::shared_ptr<const cuda::Driver> driver, cuda::Device device,
                       std::string uuid, cuda::PrimaryContext context, uint64_t forks)
    : driver_(std::move(driver)),
      device_(device),
      uuid_(std::move(uuid)),
      context_(std::make_unique<cuda::PrimaryContext>(std::move(context))),
      forks_(forks) {}

CudaDevice::~CudaDevice() {
  if (forked()) (void)context_.release();
}

bool CudaDevice::forked() const { return Process::Get().forks() != forks_; }

Result<std::shared_ptr<const CudaDevice>> CudaDevice::Open(const char* gpu) {
  Process& process = Process::Get();
  const uint64_t forks = process.forks();
  auto driver = process.cuda().Load(forks);
  if (!driver.ok()) return std::move(driver).error();
  const std::string what =
      gpu == nullptr ? std::string("device memory") : "device memory on " + std::string(gpu);
  const auto device = ChooseDevice(**driver, gpu);
  if (!device.ok()) return AsCudaError(device.error(), "device memory", /*foreign=*/false);
  auto uuid = (*driver)->UuidText(*device);
  if (!uuid.ok()) return AsCudaError(std::move(uuid).error(), what, /*foreign=*/false);
  auto context = cuda::PrimaryContext::Retain(**driver, *device);
  if (!context.ok()) return AsCudaError(std::move(context).error(), what, /*foreign=*/false);
  // lint: allow(naked-new) private constructor
  return std::shared_ptr<const CudaDevice>(
      new CudaDevice(*std::move(driver), *device, *std::move(uuid), *std::move(context), forks));
}

Result<cuda::ScopedContext> CudaDevice::Enter() const {
  auto entered = cuda::ScopedContext::Enter(*driver_, *context_);
  if (!entered.ok()) return AsCudaError(std::move(entered).error(), uuid_, /*foreign=*/false);
  return entered;
}

}  // namespace modelhost
