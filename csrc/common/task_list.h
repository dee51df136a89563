#pragma once

#include <cstdint>
#include <vector>

namespace memcheck {

// The tasks of one pass of a CPU kernel, in their order.
struct TaskList {
  const char* pass;
  std::vector<double> work;  // of each task, in a unit of the pass
  int64_t threads;           // that share them
};

}  // namespace memcheck
