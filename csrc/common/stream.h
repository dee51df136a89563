#pragma once

// What a CUDA kernel is queued on, by the name that CUDA gives it, for contracts that include no header of CUDA's.
typedef struct CUstream_st* cudaStream_t;
