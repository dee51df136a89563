#pragma once

#include <cstdint>

#include "common/types.h"

// Gated sum: y[b,r] = sum over t of sigmoid(g[b,t,r]) x[b,t,r]
//
// B batch, T length, R channels. Sums are in the accumulation type (float32; float64 for float64).

namespace memcheck {

struct GatedSumForward {
  int64_t B, T, R;
  Strided<3> g;  // (B,T,R)
  Strided<3> x;  // (B,T,R)
  Strided<2> y;  // (B,R)
};

struct GatedSumBackward {
  int64_t B, T, R;
  Strided<2> grad_y;  // (B,R)
  Strided<3> g;       // (B,T,R)
  Strided<3> x;       // (B,T,R), null if only grad_x is wanted, which does not depend on x
  Strided<3> grad_g;  // (B,T,R), null if not wanted, as the next
  Strided<3> grad_x;  // (B,T,R)
};

struct GatedSumKernels {
  Kernel<GatedSumForward> forward;
  Kernel<GatedSumBackward> backward;
};
extern const GatedSumKernels gated_sum_cpu;
extern const GatedSumKernels gated_sum_cuda;

}  // namespace memcheck
