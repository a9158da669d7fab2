// A device agent and nothing else, for tests: agent_test_child LIBRARY KEEP_MS NUMBER.
#include <chrono>
#include <cstdlib>

#include "daemon/device_agent/agent_server.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int number = static_cast<int>(std::strtol(argv[3], nullptr, 10));
  const std::chrono::milliseconds keep(std::strtol(argv[2], nullptr, 10));
  return modelhost::RunDeviceAgent(modelhost::UniqueFd(number), argv[1], keep);
}
