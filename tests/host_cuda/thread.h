#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "host_cuda/host_cuda.h"

#if defined(__SANITIZE_ADDRESS__)
#define HOST_CUDA_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HOST_CUDA_ASAN 1
#endif
#endif
#ifdef HOST_CUDA_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// A thread of a CUDA block, and the fibers that threads run on.

namespace host_cuda {

enum class State { Runnable, AtBarrier, AtCollective, Returned };

struct Copy {
  void* to;
  const void* from;
  bool exists;
  // For counters: the address of the code that asks, and how much the thread had done.
  uintptr_t code = 0;
  int64_t work = 0;
};

struct Thread {
  uint3 index = {};
  State state = State::Runnable;
  Where where = {};
  bool yes = false;  // its vote at a barrier
  int count = 0;     // of all votes with yes
  Collective collective = {};
  unsigned mask = 0;
  void* operand = nullptr;
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> groups;
};

// ---- fibers: ucontext creates them; the compiler's setjmp and longjmp switch between them, in a few instructions

struct Context {
  void* registers[5];
#ifdef HOST_CUDA_ASAN
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
#endif
};

// Runs one thread after another: its stack outlives them.
class Fiber {
 public:
  Fiber();
  Fiber(const Fiber&) = delete;

  // Runs the thread until it pauses or returns.
  void resume(Thread& thread);
  // Called on the fiber: continues with whoever resumed it.
  void pause();
  Thread& thread() const { return *thread_; }

 private:
  static Fiber* starting;

  void start();
  static void enter();
  void run_thread();

  char* stack_ = nullptr;
  Context context_;
  Thread* thread_ = nullptr;
};

// What threads run, and the first exception that left one of them.
extern const std::function<void()>* thread_body;
extern std::exception_ptr failure;
// The fiber of the thread that runs.
extern Fiber* running;
// Kept from launch to launch.
extern std::vector<std::unique_ptr<Fiber>> fibers;

inline Thread& current() {
  return running->thread();
}

}  // namespace host_cuda
