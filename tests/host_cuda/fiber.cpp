#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <new>

#include "host_cuda/counters.h"

namespace host_cuda {

const std::function<void()>* thread_body = nullptr;
std::exception_ptr failure;
Fiber* running = nullptr;
std::vector<std::unique_ptr<Fiber>> fibers;
Fiber* Fiber::starting = nullptr;

namespace {

constexpr size_t kStackBytes = size_t{256} << 10;

Context scheduler;

// A function of its own, as __builtin_setjmp asks for.
[[noreturn]] __attribute__((noinline)) void jump_to(Context& to) {
  __builtin_longjmp(to.registers, 1);
}

void switch_to(Context& from, Context& to) {
  if (__builtin_setjmp(from.registers) != 0) return;
#ifdef HOST_CUDA_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
  jump_to(to);
}

// Called after a switch, in the context that was switched to. Stores the stack of `from`, for the switch back.
void arrived_in([[maybe_unused]] Context& context, [[maybe_unused]] Context* from = nullptr) {
#ifdef HOST_CUDA_ASAN
  __sanitizer_finish_switch_fiber(context.fake_stack, from ? &from->stack : nullptr,
                                  from ? &from->stack_bytes : nullptr);
#endif
}

}  // namespace

Fiber::Fiber() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory =
      mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, page, PROT_NONE);  // a stack that grows too large ends here
  stack_ = static_cast<char*>(memory) + page;
#ifdef HOST_CUDA_ASAN
  context_.stack = stack_;
  context_.stack_bytes = kStackBytes;
#endif
  start();
}

void Fiber::resume(Thread& thread) {
  thread_ = &thread;
  threadIdx = thread.index;
  count_thread(&thread, stack_, kStackBytes);
  switch_to(scheduler, context_);
  count_thread(nullptr, nullptr, 0);
  arrived_in(scheduler);
}

void Fiber::pause() {
  switch_to(context_, scheduler);
  arrived_in(context_, &scheduler);
}

// Runs the new fiber up to the point where it waits for its first thread.
void Fiber::start() {
  ucontext_t here, there;
  getcontext(&there);
  there.uc_stack.ss_sp = stack_;
  there.uc_stack.ss_size = kStackBytes;
  there.uc_link = nullptr;
  makecontext(&there, &Fiber::enter, 0);
  starting = this;
  if (__builtin_setjmp(scheduler.registers) == 0) {
#ifdef HOST_CUDA_ASAN
    __sanitizer_start_switch_fiber(&scheduler.fake_stack, stack_, kStackBytes);
#endif
    swapcontext(&here, &there);
  }
  arrived_in(scheduler);
}

void Fiber::enter() {
  Fiber* fiber = starting;
  arrived_in(fiber->context_, &scheduler);
  fiber->pause();
  for (;;) fiber->run_thread();
}

void Fiber::run_thread() {
  try {
    (*thread_body)();
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  thread_->state = State::Returned;
  pause();
}

}  // namespace host_cuda
