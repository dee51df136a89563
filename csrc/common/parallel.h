#pragma once

#include <algorithm>
#include <cstdint>

namespace memcheck {

// Calls run(body, begin, end, worker) for ranges [begin, end) that make up [0, tasks), on threads of the framework: its
// glue defines this function, for torch in common/torch/parallel.cpp.
void parallel_ranges(int64_t tasks, void (*run)(const void* body, int64_t begin, int64_t end, int worker),
                     const void* body);

// Calls body(begin, end, worker) on ranges that make up [0, tasks), with worker < parallel_workers(tasks, threads).
// Every task writes what no other task writes, so results do not depend on how the tasks are dealt out.
template <typename Body>
void parallel_tasks(int64_t tasks, const Body& body) {
  const auto run = [](const void* body, int64_t begin, int64_t end, int worker) {
    (*static_cast<const Body*>(body))(begin, end, worker);
  };
  parallel_ranges(tasks, run, &body);
}

// The number of threads that share the tasks, and so of the scratch areas that they need.
inline int64_t parallel_workers(int64_t tasks, int64_t threads) {
  return std::max<int64_t>(1, std::min(tasks, threads));
}

}  // namespace memcheck
