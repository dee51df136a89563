#pragma once

#include <algorithm>
#include <atomic>
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

// Calls body(task, worker) for every task: the next one on the thread that is free first.
template <typename Body>
void parallel_in_turn(int64_t tasks, int64_t threads, const Body& body) {
  const int64_t workers = parallel_workers(tasks, threads);
  std::atomic<int64_t> next{0};
  parallel_tasks(workers, workers, [&](int64_t, int64_t, int worker) {
    for (int64_t task = next++; task < tasks; task = next++) body(task, worker);
  });
}

// To wake a thread takes as long as about this many multiplications.
constexpr int64_t kThreadWork = int64_t{1} << 17;

// The number of threads worth waking for so many multiplications.
inline int64_t useful_threads(int64_t work, int64_t threads) {
  return std::max<int64_t>(1, std::min(threads, work / kThreadWork));
}

// Whether so many equal tasks are cut into segments, each a task of its own: where there are segments, and the threads
// would be busy for too small a share of their time. Causal, segments cost about half of the arithmetic once more. Else
// they cost nothing but memory, and a fifth of the time may be lost.
inline bool cuts(int64_t tasks, int64_t segments, int64_t threads, bool causal) {
  const auto rounds = static_cast<double>(std::max<int64_t>(1, ceil_div(tasks, threads)));
  return segments > 1 &&
         static_cast<double>(tasks) < rounds * static_cast<double>(threads) * (causal ? 2. / 3 : 4. / 5);
}

}  // namespace memcheck
