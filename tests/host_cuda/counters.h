#pragma once

#include <cstddef>

#include "host_cuda/block.h"

// What a build with HOST_CUDA_COUNTS counts: the loads and stores of every thread, which the compiler reports
// (-fsanitize=thread, without its library), how often each basic block of the code runs, which it reports too
// (-fsanitize-coverage=trace-pc), barriers, collectives and copies. In other builds these functions are empty.

namespace host_cuda {

#ifdef HOST_CUDA_COUNTS

// A launch begins, whose kernel is the function at this address, and of which `runs` blocks will run. Forgets the
// accesses of the launch before.
void count_launch(const char* kernel, const void* function, const BlockLaunch& launch, uint64_t runs);
// The launch ends. Throws std::runtime_error if two threads of a block or two blocks touched the same memory without an
// order between them, and one of them wrote: a race. Names kernel, block, threads and lines.
void count_launch_end();
void count_block(const Block& block);
void count_block_end();
// The thread that runs from now on, and its stack; null when none runs.
void count_thread(const Thread* thread, const char* stack, size_t stack_bytes);
// All threads have reached a barrier.
void count_barrier();
// Lanes of a warp have met.
void count_collective(int warp, const char* name, unsigned mask);
// The running thread reads 16 bytes of shared memory by an instruction of ptx.cuh.
void count_shared_read(const void* address, const void* caller);
// It asks for a copy of 16 bytes to shared memory. Returns the copy with what the counters need to know of it later.
Copy count_copy(const Copy& copy, const void* caller);
// It waits until all groups of copies but the last `pending` have arrived.
void count_await(const Thread& thread, size_t pending);
// A line for every launch since host_cuda_forget_counts, each followed by a line for every place in its code that
// accesses memory, and one for every basic block that ran: words with tabs between, NAME=NUMBER.
std::string written_counts();

#else

inline void count_launch(const char*, const void*, const BlockLaunch&, uint64_t) {}
inline void count_launch_end() {}
inline void count_block(const Block&) {}
inline void count_block_end() {}
inline void count_thread(const Thread*, const char*, size_t) {}
inline void count_barrier() {}
inline void count_collective(int, const char*, unsigned) {}
inline void count_shared_read(const void*, const void*) {}
inline Copy count_copy(const Copy& copy, const void*) {
  return copy;
}
inline void count_await(const Thread&, size_t) {}

#endif

}  // namespace host_cuda
