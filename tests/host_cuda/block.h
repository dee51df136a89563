#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "host_cuda/thread.h"

// A block of CUDA threads with its shared memory, and the scheduler that runs it.

namespace host_cuda {

constexpr size_t kFenceBytes = 512;
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating-point type

// A block of the heap with a fence on both sides.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes) : bytes_(bytes) {
    if (posix_memalign(&memory_, kFenceBytes, 2 * kFenceBytes + bytes) != 0) throw std::bad_alloc();
    std::memset(memory_, kPoison, 2 * kFenceBytes + bytes);
#ifdef HOST_CUDA_ASAN
    __asan_poison_memory_region(memory_, kFenceBytes);
    __asan_poison_memory_region(begin() + bytes, kFenceBytes);
#endif
  }
  ~SharedMemory() {
#ifdef HOST_CUDA_ASAN
    __asan_unpoison_memory_region(memory_, 2 * kFenceBytes + bytes_);
#endif
    free(memory_);
  }
  SharedMemory(const SharedMemory&) = delete;

  char* begin() const { return static_cast<char*>(memory_) + kFenceBytes; }
  size_t bytes() const { return bytes_; }
  bool holds(const void* address, size_t bytes) const {
    const char* at = static_cast<const char*>(address);
    return at >= begin() && at + bytes <= begin() + bytes_;
  }
  // Whether nobody wrote to the fence. AddressSanitizer reports that itself.
  bool fence_stands() const {
#ifdef HOST_CUDA_ASAN
    return true;
#endif
    const auto untouched = [](const char* from) {
      return std::all_of(from, from + kFenceBytes, [](char c) { return static_cast<unsigned char>(c) == kPoison; });
    };
    return untouched(static_cast<const char*>(memory_)) && untouched(begin() + bytes_);
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_;
};

struct Block {
  const char* kernel;
  uint3 index;
  SharedMemory memory;
  std::vector<Thread> threads;
};

// The block that runs.
extern Block* block_running;

// Throws an error that names the kernel, the block, the thread if there is one, and the rule that was broken.
[[noreturn]] void fail(const Block& block, const Thread* thread, const std::string& rule);
std::string written(Where where);

// Runs block `number` of the grid with all of its threads. Throws if it breaks a rule.
struct BlockLaunch {
  const char* kernel;
  dim3 grid, block;
  size_t shared_bytes;
  Order order;
};
void run_block(const BlockLaunch& launch, uint64_t number);

}  // namespace host_cuda
