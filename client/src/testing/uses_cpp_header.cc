// Compiled as C++17 by a test: modelhost.hpp leans on nothing that it does not include.
#include "modelhost/modelhost.hpp"

float Sum(const modelhost::ModelHandle& handle) {
  float sum = 0;
  const auto tensor = handle.Tensor("weight");
  if (!tensor.ok()) return sum;
  const auto values = tensor->Values<float>();
  if (values.ok()) {
    for (const float value : *values) sum += value;
  }
  return sum;
}
