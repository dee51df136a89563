#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace memcheck {

// body(begin, end, worker) over [0, tasks), worker < parallel_workers(tasks). Every task writes what no other does, so
// results do not depend on how the tasks are dealt out.
template <typename Body>
void parallel_tasks(int64_t tasks, const Body& body) {
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) { body(begin, end, at::get_thread_num()); });
}

// How many threads will share the tasks: how many scratch areas they need.
inline int64_t parallel_workers(int64_t tasks, int64_t threads) {
  return std::max<int64_t>(1, std::min(tasks, threads));
}

}  // namespace memcheck
