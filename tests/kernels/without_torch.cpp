// A program without torch that calls a CPU kernel by way of its table, as the glue of another framework would. It
// prints the combinator's y (rows,E) for pre-activations 0, 1, 2, ... tenths.

#include <cstdint>
#include <cstdio>
#include <vector>

#include "combinator/combinator.h"
#include "common/parallel.h"

namespace memcheck {

// This program has one thread.
void parallel_ranges(int64_t tasks, int64_t /*threads*/,
                     void (*run)(const void* body, int64_t begin, int64_t end, int worker), const void* body) {
  if (tasks > 0) run(body, 0, tasks, 0);
}

}  // namespace memcheck

int main() {
  constexpr int64_t kRows = 3, kE = 5;
  std::vector<float> preactivations(kRows * 2 * kE), y(kRows * kE);
  for (size_t i = 0; i < preactivations.size(); ++i) preactivations[i] = 0.1f * static_cast<float>(i);
  const memcheck::CombinatorKernels& kernels = memcheck::combinator_cpu;
  kernels.forward({kRows, kE, preactivations.data(), y.data()}, memcheck::Dtype::Float32, nullptr);
  for (const float value : y) std::printf("%.9g\n", static_cast<double>(value));
}
