#include "common/parallel.h"

// CPU kernels share their tasks among torch's threads, by at::parallel_for, which is a template and needs OpenMP where
// it is compiled. clang compiles `#pragma omp parallel` into calls of LLVM's OpenMP runtime, and torch has loaded
// GNU's: not linked, such an extension does not load; linked, one process has two pools of threads. So under clang the
// build leaves -fopenmp out, and what at::parallel_for calls is defined here. It uses the entry of GNU's runtime that
// code compiled by gcc calls. macOS has no GNU runtime: without OpenMP kernels run on one thread there.
#if !defined(_OPENMP) && !defined(__APPLE__)

#define INTRA_OP_PARALLEL

#include <cstdint>

namespace at::internal {
template <typename F>
void invoke_parallel(int64_t begin, int64_t end, int64_t grain_size, const F& f);
}

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
extern "C" int omp_get_num_threads();
extern "C" int omp_get_thread_num();

// As in ATen/ParallelOpenMP.h.
template <typename F>
void at::internal::invoke_parallel(int64_t begin, int64_t end, int64_t grain_size, const F& f) {
  struct Loop {
    int64_t begin, end, grain_size;
    const F& f;
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr error = nullptr;
  } loop{begin, end, grain_size, f};
  const auto body = [](void* data) {
    Loop& loop = *static_cast<Loop*>(data);
    int64_t threads = omp_get_num_threads();
    if (loop.grain_size > 0) threads = std::min(threads, at::divup(loop.end - loop.begin, loop.grain_size));
    const int64_t thread = omp_get_thread_num();
    const int64_t chunk = at::divup(loop.end - loop.begin, threads);
    const int64_t first = loop.begin + thread * chunk;
    if (first >= loop.end) return;
    try {
      const at::internal::ThreadIdGuard guard(static_cast<int>(thread));
      loop.f(first, std::min(loop.end, first + chunk));
    } catch (...) {
      if (!loop.failed.test_and_set()) loop.error = std::current_exception();
    }
  };
  GOMP_parallel(body, &loop, 0, 0);
  if (loop.error) std::rethrow_exception(loop.error);
}

#else
#include <ATen/Parallel.h>
#endif

namespace memcheck {

void parallel_ranges(int64_t tasks, int64_t threads,
                     void (*run)(const void* body, int64_t begin, int64_t end, int worker), const void* body) {
  at::parallel_for(0, tasks, parallel_range(tasks, threads),
                   [&](int64_t begin, int64_t end) { run(body, begin, end, at::get_thread_num()); });
}

}  // namespace memcheck
