// What device sharing rests on, checked through our code on whatever driver is found: the real one,
// or the fake with LD_LIBRARY_PATH. Prints `key value` lines and a verdict for each promise.
//
//   gpu_check [MIB]      of the weights (1024)
#include "tests/gpu/gpu_check.h"

#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "daemon/device_agent/agent_frames.h"
#include "daemon/device_agent/device_mode.h"

namespace modelhost::gpu {
namespace {

// What no run of this program shows, and why.
void PrintWhatWasNotRun(const Machine& machine) {
  Print("not_run.mps", std::string("it needs its control daemon"));
  Print("not_run.mig", std::string("it needs a GPU that is divided"));
  Print("not_run.containers", std::string("it needs a container runtime"));
  Print("not_run.suspend_and_reset", std::string("they take the machine from its other users"));
  Print("not_run.per_process_memory_of_nvidia_smi",
        std::string("this program runs no other; used_mib_* are the driver's numbers"));
  if (machine.fake) {
    Print("not_run.speed", std::string("the fake copies with the CPU: its numbers say nothing"));
  }
}

int Check(uint64_t bytes) {
  Machine machine;
  machine.bytes = bytes;
  uint32_t mode = 0;
  {
    Agent agent;
    const auto listed = Must(agent.Ask(agent::Frame::kList, agent::Request{}));
    if (listed.reply.devices == 0) {
      Print("skipped", std::string(agent::TextOf(listed.reply.text)));
      return 77;
    }
    machine.uuid = agent::TextOf(listed.reply.device.uuid);
    machine.fake = agent::TextOf(listed.reply.device.name).starts_with("Fake GPU");
    Print("gpu", machine.uuid + " " + listed.reply.device.name);
    Print("driver", std::to_string(listed.reply.device.driver_version));
    const auto opened = Must(agent.Ask(agent::Frame::kOpen, RequestFor(machine, 0)));
    mode = opened.reply.device.mode;
    Print("mode", std::string(DeviceModeName(static_cast<DeviceMode>(mode))));
    Print("reason", std::string(agent::TextOf(opened.reply.device.reason)));
  }
  CheckFacts(machine);
  CheckOtherWays();
  Verdict("self_test", mode == static_cast<uint32_t>(DeviceMode::kVmmFd));
  if (Failures() > 0) {
    Print("not_run.device_memory_by_descriptor", std::string("this driver does not have it"));
    return 1;
  }
  machine.base = UsedBytes(machine);
  CheckOwner(machine);
  const SealedRegion weights = MakeWeights(bytes, 0);
  CheckUploadSpeed(machine, weights);

  Uploaded uploaded;
  {
    Agent agent;
    (void)Must(agent.Ask(agent::Frame::kOpen, RequestFor(machine, 0)));
    uploaded = Upload(agent, machine, weights);
    Print("upload_and_verify_gb_per_s", GbPerSecond(bytes, uploaded.seconds));
    Verdict("uploaded_bytes_are_read_back", true);
  }
  Verdict("memory_outlives_a_killed_agent", UsedBytes(machine) >= machine.base + bytes / 2);
  CheckImporters(machine, uploaded.fd);
  CheckReadOnly(machine, uploaded.fd);
  // No process of ours uses the device now, but this one has a descriptor.
  (void)::poll(nullptr, 0, 1000);
  {
    Agent agent;
    (void)Must(agent.Ask(agent::Frame::kOpen, RequestFor(machine, 0)));
    agent::Request request = RequestFor(machine, bytes);
    request.expected = uploaded.checksum;
    Verdict("a_second_without_a_process_leaves_the_weights",
            agent.Ask(agent::Frame::kVerify, request, {&uploaded.fd}).ok() &&
                agent.Ask(agent::Frame::kCheck, request, {&uploaded.fd}).ok());
  }
  CheckSwap(machine, std::move(uploaded));
  Verdict("all_is_returned_with_the_last_descriptor",
          UsedBytes(machine) < machine.base + bytes / 2);
  PrintWhatWasNotRun(machine);
  return Failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace modelhost::gpu

int main(int argc, char** argv) {
  ::alarm(160);
  const uint64_t mib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1024;
  const int status = modelhost::gpu::Check((mib < 2 ? 2 : mib / 2 * 2) << 20);
  if (status != 77) std::printf("verdict %s\n", status == 0 ? "PASS" : "FAIL");
  return status;
}
