// Prints the kernels, for ptxas.
#include <cstdio>

#include "proto/cuda/kernels.h"

int main() { return std::fputs(modelhost::cuda::kKernels, stdout) < 0 ? 1 : 0; }
