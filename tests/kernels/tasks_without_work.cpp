#include "common/sequence_tasks.h"

// Two threads share five tasks without work. Returns 0 if each ran once.

namespace memcheck {

void parallel_ranges(int64_t tasks, int64_t, void (*run)(const void*, int64_t, int64_t, int), const void* body) {
  for (int64_t i = 0; i < tasks; ++i) run(body, i, i + 1, static_cast<int>(i));
}

}  // namespace memcheck

int main() {
  int ran[5] = {};
  memcheck::parallel_neighbours(5, 2, [](int64_t) { return 0; }, [&](int64_t task, int) { ++ran[task]; });
  for (const int times : ran)
    if (times != 1) return 1;
  return 0;
}
