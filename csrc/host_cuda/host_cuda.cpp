#include "host_cuda/host_cuda.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace host_cuda {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kFenceBytes = 128;
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating-point type

// ---- fibers: ucontext makes them, setjmp and longjmp switch between them without a system call.

class Fiber;

struct Context {
  jmp_buf registers;
#ifdef HOST_CUDA_ASAN
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
#endif
};

Context scheduler;

void switch_to(Context& from, Context& to) {
  if (_setjmp(from.registers) != 0) return;
#ifdef HOST_CUDA_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
  _longjmp(to.registers, 1);
}

// What follows a switch, in the context that was switched to; `from` is noted, for whoever switches back.
void arrived_in([[maybe_unused]] Context& context, [[maybe_unused]] Context* from = nullptr) {
#ifdef HOST_CUDA_ASAN
  __sanitizer_finish_switch_fiber(context.fake_stack, from ? &from->stack : nullptr,
                                  from ? &from->stack_bytes : nullptr);
#endif
}

enum class State { Runnable, AtBarrier, AtCollective, Returned };

struct Copy {
  void* to;
  const void* from;
  bool there;
};

struct Thread {
  uint3 index = {};
  State state = State::Runnable;
  Where where = {};
  bool yes = false;  // said at a barrier
  int count = 0;     // how many said it
  Collective collective = {};
  unsigned mask = 0;
  void* operand = nullptr;
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> groups;
};

const std::function<void()>* thread_body = nullptr;
std::exception_ptr failure;

// A fiber runs one thread after the other: its stack outlives them.
class Fiber {
 public:
  Fiber() {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory =
        mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, page, PROT_NONE);  // where a stack that grew too large ends
    stack_ = static_cast<char*>(memory) + page;
#ifdef HOST_CUDA_ASAN
    context_.stack = stack_;
    context_.stack_bytes = kStackBytes;
#endif
    start();
  }
  Fiber(const Fiber&) = delete;

  void resume(Thread& thread) {
    thread_ = &thread;
    threadIdx = thread.index;
    switch_to(scheduler, context_);
    arrived_in(scheduler);
  }
  void pause() {
    switch_to(context_, scheduler);
    arrived_in(context_, &scheduler);
  }
  Thread& thread() const { return *thread_; }

 private:
  static Fiber* starting;

  // To the point where it waits for its first thread.
  void start() {
    ucontext_t here, there;
    getcontext(&there);
    there.uc_stack.ss_sp = stack_;
    there.uc_stack.ss_size = kStackBytes;
    there.uc_link = nullptr;
    makecontext(&there, &Fiber::enter, 0);
    starting = this;
    if (_setjmp(scheduler.registers) == 0) {
#ifdef HOST_CUDA_ASAN
      __sanitizer_start_switch_fiber(&scheduler.fake_stack, stack_, kStackBytes);
#endif
      swapcontext(&here, &there);
    }
    arrived_in(scheduler);
  }

  static void enter() {
    Fiber* fiber = starting;
    arrived_in(fiber->context_, &scheduler);
    fiber->pause();
    for (;;) fiber->run_thread();
  }

  void run_thread() {
    try {
      (*thread_body)();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
    thread_->state = State::Returned;
    pause();
  }

  char* stack_ = nullptr;
  Context context_;
  Thread* thread_ = nullptr;
};

Fiber* Fiber::starting = nullptr;

// Kept from launch to launch. After a failure those left in the middle of a thread are of no more use.
std::vector<std::unique_ptr<Fiber>> fibers;
Fiber* running = nullptr;
Order thread_order = Order::Ascending;
std::map<std::string, Launches> launched;

void note_launch(const char* kernel, size_t threads, size_t shared_bytes) {
  Launches& of = launched[kernel];
  of.count += 1;
  of.threads = std::max(of.threads, threads);
  of.shared_bytes = std::max(of.shared_bytes, shared_bytes);
}

// ---- shared memory

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
  // Under AddressSanitizer whoever touches the fence does not get so far.
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

// ---- a block of threads

struct Block {
  const char* kernel;
  uint3 index;
  SharedMemory memory;
  std::vector<Thread> threads;
};

Block* block_running = nullptr;

std::string written(uint3 index) {
  std::ostringstream text;
  text << "(" << index.x << "," << index.y << "," << index.z << ")";
  return text.str();
}

std::string written(Where where) {
  return std::string(where.file) + ":" + std::to_string(where.line);
}

[[noreturn]] void fail(const Block& block, const Thread* thread, const std::string& rule) {
  std::string text = std::string(block.kernel) + ": block " + written(block.index);
  if (thread != nullptr) text += ", thread " + written(thread->index);
  throw std::runtime_error(text + ": " + rule);
}

std::string waits_at(const Thread& thread) {
  const std::string of = "thread " + written(thread.index);
  switch (thread.state) {
    case State::AtBarrier:
      return of + " waits at __syncthreads at " + written(thread.where);
    case State::AtCollective:
      return of + " waits at " + thread.collective.name + " at " + written(thread.where);
    case State::Returned:
      return of + " has returned";
    case State::Runnable:
      break;
  }
  return of + " runs";
}

std::vector<int> order_of(int count, Order order) {
  std::vector<int> numbers(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) numbers[static_cast<size_t>(i)] = order == Order::Descending ? count - 1 - i : i;
  if (order == Order::Shuffled) std::shuffle(numbers.begin(), numbers.end(), std::mt19937(20261121));
  return numbers;
}

class Scheduler {
 public:
  Scheduler(Block& block, Order order)
      : block_(block), threads_(block.threads), order_(order_of(static_cast<int>(threads_.size()), order)) {
    warps_ = (static_cast<int>(threads_.size()) + kLanes - 1) / kLanes;
    warp_order_ = order_of(warps_, order);
    lane_order_ = order_of(kLanes, order);
  }

  void run() {
    for (;;) {
      bool moved = false;
      for (const int warp : warp_order_)
        while (run_warp(warp)) moved = true;
      if (count(State::Returned) == static_cast<int>(threads_.size())) return;
      if (release_barrier()) continue;
      if (!moved) report_standstill();
    }
  }

 private:
  // Lanes until each waits or has returned, then what they wait for as a warp. False where nobody could run.
  bool run_warp(int warp) {
    bool moved = false;
    for (const int lane : lane_order_) {
      const size_t number = static_cast<size_t>(warp * kLanes + lane);
      if (number >= threads_.size() || threads_[number].state != State::Runnable) continue;
      running = fibers[number].get();
      running->resume(threads_[number]);
      if (failure) std::rethrow_exception(failure);
      moved = true;
    }
    return complete_collectives(warp) || moved;
  }

  Thread* lane_of(int warp, int lane) {
    const size_t number = static_cast<size_t>(warp * kLanes + lane);
    return number < threads_.size() ? &threads_[number] : nullptr;
  }

  bool complete_collectives(int warp) {
    bool completed = false;
    for (int lane = 0; lane < kLanes; ++lane) {
      const Thread* first = lane_of(warp, lane);
      if (first != nullptr && first->state == State::AtCollective && all_arrived(warp, *first)) {
        complete(warp, *first);
        completed = true;
      }
    }
    return completed;
  }

  // Whether all lanes that this one waits for wait for the same.
  bool all_arrived(int warp, const Thread& first) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(first.mask >> lane & 1)) continue;
      const Thread* other = lane_of(warp, lane);
      if (other == nullptr)
        fail(block_, &first,
             std::string(first.collective.name) + " names lane " + std::to_string(lane) +
                 ", which the block does not have, at " + written(first.where));
      if (other->state == State::Returned)
        fail(block_, &first,
             std::string(first.collective.name) + " at " + written(first.where) + " names lane " +
                 std::to_string(lane) + ", which has returned");
      if (other->state != State::AtCollective) return false;
      const bool same = std::strcmp(other->collective.name, first.collective.name) == 0 && other->mask == first.mask &&
                        other->where.line == first.where.line;
      if (!same) return false;
    }
    return true;
  }

  void complete(int warp, const Thread& first) {
    void* operands[kLanes] = {};
    const unsigned mask = first.mask;
    const Collective collective = first.collective;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(mask >> lane & 1)) continue;
      operands[lane] = lane_of(warp, lane)->operand;
      lane_of(warp, lane)->state = State::Runnable;
    }
    collective.complete(operands, mask);
  }

  int count(State state) const {
    return static_cast<int>(
        std::count_if(threads_.begin(), threads_.end(), [&](const Thread& thread) { return thread.state == state; }));
  }

  bool release_barrier() {
    const int waiting = count(State::AtBarrier);
    if (waiting == 0 || waiting + count(State::Returned) != static_cast<int>(threads_.size())) return false;
    const Thread& first = *std::find_if(threads_.begin(), threads_.end(),
                                        [](const Thread& thread) { return thread.state == State::AtBarrier; });
    int said = 0;
    for (const Thread& thread : threads_) {
      const bool together = thread.state == State::AtBarrier && thread.where.line == first.where.line &&
                            std::strcmp(thread.where.file, first.where.file) == 0;
      if (!together)
        fail(block_, nullptr, "a barrier that not all reach: " + waits_at(first) + ", " + waits_at(thread));
      said += thread.yes ? 1 : 0;
    }
    for (Thread& thread : threads_) {
      thread.count = said;
      thread.state = State::Runnable;
    }
    return true;
  }

  [[noreturn]] void report_standstill() {
    std::string text = "nobody can go on: ";
    int told = 0;
    const Thread* last = nullptr;
    for (const Thread& thread : threads_) {
      const bool news = last == nullptr || thread.state != last->state || thread.where.line != last->where.line;
      if (news && told++ < 6) text += (last == nullptr ? "" : ", ") + waits_at(thread);
      last = &thread;
    }
    fail(block_, nullptr, text);
  }

  Block& block_;
  std::vector<Thread>& threads_;
  std::vector<int> order_, warp_order_, lane_order_;
  int warps_;
};

uint3 index_in(uint64_t number, dim3 of) {
  const uint64_t plane = uint64_t{of.x} * of.y;
  return {static_cast<unsigned>(number % of.x), static_cast<unsigned>(number / of.x % of.y),
          static_cast<unsigned>(number / plane)};
}

void run_block(const char* kernel, uint64_t number, dim3 grid, dim3 block_size, size_t shared_bytes) {
  const size_t count = size_t{block_size.x} * block_size.y * block_size.z;
  Block block{kernel, index_in(number, grid), SharedMemory(shared_bytes), std::vector<Thread>(count)};
  for (size_t i = 0; i < count; ++i) block.threads[i].index = index_in(i, block_size);
  blockIdx = block.index;
  block_running = &block;
  Scheduler(block, thread_order).run();
  if (!block.memory.fence_stands()) fail(block, nullptr, "wrote beside its shared memory");
}

// The GPU that this stands for.
struct Gpu {
  int major = 8, minor = 0;
  size_t shared_bytes = size_t{163} << 10;
};
Gpu gpu;
cudaError_t last_error = cudaSuccess;

// What the GPU says to a launch.
cudaError_t answer(dim3 grid, dim3 block, size_t shared_bytes) {
  if (gpu.major < 8) return cudaErrorNoKernelImageForDevice;
  if (shared_bytes > gpu.shared_bytes) return cudaErrorInvalidValue;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const bool fits =
      threads >= 1 && threads <= 1024 && block.z <= 64 && grid.x <= 0x7FFFFFFFu && grid.y <= 65535 && grid.z <= 65535;
  return fits ? cudaSuccess : cudaErrorInvalidConfiguration;
}

Thread& current() {
  return running->thread();
}

}  // namespace

void set_order(Order order) {
  thread_order = order;
}

const std::map<std::string, Launches>& launches() {
  return launched;
}

void stand_for(int major, int minor, size_t shared_bytes) {
  gpu = {major, minor, shared_bytes};
}

cudaError_t run(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const cudaError_t refusal = answer(grid, block, shared_bytes);
  if (refusal != cudaSuccess) return last_error = refusal;
  const size_t threads = size_t{block.x} * block.y * block.z;
  note_launch(kernel, threads, shared_bytes);
  while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  gridDim = grid;
  blockDim = block;
  thread_body = &thread;
  failure = nullptr;
  try {
    for (uint64_t i = 0; i < blocks; ++i) {
      const uint64_t number = thread_order == Order::Descending ? blocks - 1 - i : i;
      run_block(kernel, number, grid, block, shared_bytes);
    }
  } catch (...) {
    for (auto& fiber : fibers) fiber.release();
    fibers.clear();
    throw;
  }
  return cudaSuccess;
}

void* shared_memory(size_t bytes, size_t alignment) {
  const Block& block = *block_running;
  if (bytes > block.memory.bytes())
    fail(block, &current(),
         "uses " + std::to_string(bytes) + " bytes of shared memory, launched with " +
             std::to_string(block.memory.bytes()));
  if (alignment > kFenceBytes) fail(block, &current(), "shared memory is aligned to 128 bytes");
  return block.memory.begin();
}

void check_shared(const void* address, size_t bytes, Where where) {
  const Block& block = *block_running;
  if (!block.memory.holds(address, bytes))
    fail(block, &current(), "an address outside of shared memory at " + written(where));
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
    fail(block, &current(),
         "an address that is not aligned to " + std::to_string(bytes) + " bytes at " + written(where));
}

void meet(const Collective& collective, unsigned mask, void* operand, Where where) {
  Thread& thread = current();
  const unsigned linear = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  if (!(mask >> linear % kLanes & 1))
    fail(*block_running, &thread, std::string(collective.name) + " does not name its own lane, at " + written(where));
  thread.collective = collective;
  thread.mask = mask;
  thread.operand = operand;
  thread.where = where;
  thread.state = State::AtCollective;
  running->pause();
}

int sync_threads(bool yes, Where where) {
  Thread& thread = current();
  thread.yes = yes;
  thread.where = where;
  thread.state = State::AtBarrier;
  running->pause();
  return thread.count;
}

void copy_later(void* in_shared, const void* in_global, bool there, Where where) {
  check_shared(in_shared, 16, where);
  if (there && reinterpret_cast<uintptr_t>(in_global) % 16 != 0)
    fail(*block_running, &current(),
         "cp_async_16 from an address that is not aligned to 16 bytes at " + written(where));
  current().open_copies.push_back({in_shared, in_global, there});
}

void commit_copies() {
  Thread& thread = current();
  thread.groups.push_back(std::move(thread.open_copies));
  thread.open_copies.clear();
}

void await_copies(int pending) {
  Thread& thread = current();
  while (thread.groups.size() > static_cast<size_t>(pending)) {
    for (const Copy& copy : thread.groups.front()) {
      if (copy.there) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
    thread.groups.pop_front();
  }
}

unsigned ballot(const char* name, unsigned mask, bool yes, Where where) {
  struct Vote {
    bool yes;
    unsigned result;
  } operand{yes, 0};
  const auto complete = [](void* const(&operands)[kLanes], unsigned named) {
    unsigned result = 0;
    for (int lane = 0; lane < kLanes; ++lane)
      if (named >> lane & 1 && static_cast<Vote*>(operands[lane])->yes) result |= 1u << lane;
    for (int lane = 0; lane < kLanes; ++lane)
      if (named >> lane & 1) static_cast<Vote*>(operands[lane])->result = result;
  };
  meet({name, complete}, mask, &operand, where);
  return operand.result;
}

namespace {

uint16_t half_of(uint32_t pair, int which) {
  return static_cast<uint16_t>(pair >> (16 * which));
}

}  // namespace

void multiply(void* const (&operands)[kLanes], Convert convert) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Mma& mine = *static_cast<const Mma*>(operands[lane]);
    const int row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < 4; ++part)
        a[row + part % 2 * 8][column + part / 2 * 8 + i] = convert(half_of(mine.a[part], i));
      for (int part = 0; part < 2; ++part) b[column + part * 8 + i][row] = convert(half_of(mine.b[part], i));
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    float* d = static_cast<const Mma*>(operands[lane])->d;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = 0;
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
      d[i] = static_cast<float>(static_cast<double>(d[i]) + sum);
    }
  }
}

void ldmatrix_x4(uint32_t (&r)[4], const void* row, bool transposed, Where where) {
  check_shared(row, 16, where);
  struct Load {
    uint32_t* r;
    const void* row;
    bool transposed;
  } operand{r, row, transposed};
  const auto complete = [](void* const(&operands)[kLanes], unsigned) {
    uint16_t matrices[4][8][8];
    for (int lane = 0; lane < kLanes; ++lane)
      std::memcpy(matrices[lane / 8][lane % 8], static_cast<const Load*>(operands[lane])->row, 16);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Load& mine = *static_cast<const Load*>(operands[lane]);
      const int fixed = lane / 4, first = lane % 4 * 2;
      for (int i = 0; i < 4; ++i) {
        const auto& m = matrices[i];
        const uint32_t low = mine.transposed ? m[first][fixed] : m[fixed][first];
        const uint32_t high = mine.transposed ? m[first + 1][fixed] : m[fixed][first + 1];
        mine.r[i] = low | high << 16;
      }
    }
  };
  meet({transposed ? "ldmatrix_x4_transposed" : "ldmatrix_x4", complete}, ~0u, &operand, where);
}

}  // namespace host_cuda

extern "C" {

// ---- of CUDA's library, what kernel.cuh asks

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(host_cuda::gpu.shared_bytes);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = host_cuda::gpu.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = host_cuda::gpu.minor;
      return cudaSuccess;
    default:
      return host_cuda::last_error = cudaErrorInvalidValue;
  }
}

cudaError_t cudaPeekAtLastError() {
  return host_cuda::last_error;
}

cudaError_t cudaGetLastError() {
  return std::exchange(host_cuda::last_error, cudaSuccess);
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    default:
      return "unknown error";
  }
}

// ---- for tests, which load this as a library

__attribute__((visibility("default"))) void host_cuda_stand_for(int major, int minor, int64_t shared_bytes) {
  host_cuda::stand_for(major, minor, static_cast<size_t>(shared_bytes));
}

// The last error that nobody has asked for yet, 0 where there is none.
__attribute__((visibility("default"))) int host_cuda_peek_at_last_error() {
  return cudaPeekAtLastError();
}

// 0 ascending, 1 descending, 2 shuffled.
__attribute__((visibility("default"))) void host_cuda_set_order(int order) {
  host_cuda::set_order(static_cast<host_cuda::Order>(order));
}

__attribute__((visibility("default"))) void host_cuda_forget_launches() {
  host_cuda::launched.clear();
}

// A line for every kernel launched so far: its name, how often, threads of a block and bytes of shared memory at most,
// between tabs. Valid until the next call.
__attribute__((visibility("default"))) const char* host_cuda_launches() {
  static std::string text;
  text.clear();
  for (const auto& [kernel, of] : host_cuda::launches())
    text += kernel + "\t" + std::to_string(of.count) + "\t" + std::to_string(of.threads) + "\t" +
            std::to_string(of.shared_bytes) + "\n";
  return text.c_str();
}
}
