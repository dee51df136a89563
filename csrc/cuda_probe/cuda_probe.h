#pragma once

// The contract of a kernel that does nothing. If its launch succeeds, this build's CUDA kernels run on this machine.

#include "common/types.h"

// Launches the kernel on `stream`. Returns nullptr, or CUDA's description of the error, a static string.
extern "C" const char* launch_cuda_probe(cudaStream_t stream);
