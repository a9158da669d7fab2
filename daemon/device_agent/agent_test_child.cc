// A device agent and nothing else, for tests: agent_test_child LIBRARY NUMBER.
#include <cstdlib>

#include "daemon/device_agent/agent_server.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int number = static_cast<int>(std::strtol(argv[2], nullptr, 10));
  return modelhost::RunDeviceAgent(modelhost::UniqueFd(number), argv[1]);
}
