#pragma once

#include "common/dtype.h"

// A CUDA stream, declared as CUDA declares it, for contracts that include no CUDA header.
typedef struct CUstream_st* cudaStream_t;

namespace memcheck {

// A kernel, as the table of an operator names it. On the CPU the stream is null.
template <typename Parameters>
using Kernel = void (*)(const Parameters& p, Dtype dtype, cudaStream_t stream);

}  // namespace memcheck
