#pragma once

// The contract of a kernel that does nothing: where it launches, this build's CUDA kernels run on this machine.

#include "common/stream.h"

// Launches the kernel on `stream`. Returns nullptr, or CUDA's words for why it could not run. A string of the library:
// not the caller's to free.
extern "C" const char* launch_cuda_probe(cudaStream_t stream);
