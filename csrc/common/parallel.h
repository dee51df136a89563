#pragma once

#include <algorithm>
#include <cstdint>

#include "common/types.h"

namespace memcheck {

// Calls run(body, begin, end, worker) for ranges [begin, end) that make up [0, tasks), each of parallel_range(tasks,
// threads) tasks but for the last, on threads of the framework: its glue defines this function, for torch in
// common/torch/parallel.cpp.
void parallel_ranges(int64_t tasks, int64_t threads,
                     void (*run)(const void* body, int64_t begin, int64_t end, int worker), const void* body);

// The number of threads that share the tasks, and so of the scratch areas that they need.
inline int64_t parallel_workers(int64_t tasks, int64_t threads) {
  return std::max<int64_t>(1, std::min(tasks, threads));
}

// The tasks of one thread, which follow each other.
inline int64_t parallel_range(int64_t tasks, int64_t threads) {
  return std::max<int64_t>(1, ceil_div(tasks, parallel_workers(tasks, threads)));
}

// Calls body(begin, end, worker) on ranges that make up [0, tasks), with worker < parallel_workers(tasks, threads).
// Every task writes what no other task writes, so results do not depend on how the tasks are dealt out.
template <typename Body>
void parallel_tasks(int64_t tasks, int64_t threads, const Body& body) {
  const auto run = [](const void* body, int64_t begin, int64_t end, int worker) {
    (*static_cast<const Body*>(body))(begin, end, worker);
  };
  parallel_ranges(tasks, threads, run, &body);
}

// To wake a thread takes as long as about this many multiplications.
constexpr int64_t kThreadWork = int64_t{1} << 17;

// The number of threads worth waking for so many multiplications.
inline int64_t useful_threads(int64_t work, int64_t threads) {
  return std::max<int64_t>(1, std::min(threads, work / kThreadWork));
}

// The share of the threads' time in which they are busy, if they deal out so many equal tasks.
inline double busy_share(int64_t tasks, int64_t threads) {
  return static_cast<double>(tasks) / static_cast<double>(std::max<int64_t>(1, ceil_div(tasks, threads)) * threads);
}

}  // namespace memcheck
