#include "host_cuda/block.h"

#include <random>
#include <sstream>
#include <stdexcept>

#include "host_cuda/counters.h"

namespace host_cuda {

Block* block_running = nullptr;

namespace {

std::string written(uint3 index) {
  std::ostringstream text;
  text << "(" << index.x << "," << index.y << "," << index.z << ")";
  return text.str();
}

}  // namespace

std::string written(Where where) {
  return std::string(where.file) + ":" + std::to_string(where.line);
}

[[noreturn]] void fail(const Block& block, const Thread* thread, const std::string& rule) {
  std::string text = std::string(block.kernel) + ": block " + written(block.index);
  if (thread != nullptr) text += ", thread " + written(thread->index);
  throw std::runtime_error(text + ": " + rule);
}

namespace {

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
  // Runs every lane until it waits or returns, then completes what the warp waits for. False if no lane could run.
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

  // Whether all lanes that this one names wait at the same collective.
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
      const bool same_name = other->collective.name == first.collective.name ||
                             std::strcmp(other->collective.name, first.collective.name) == 0;
      const bool same = same_name && other->mask == first.mask && other->where.line == first.where.line;
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
    count_collective(warp, collective.name, mask);
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
    count_barrier();
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

}  // namespace

void run_block(const BlockLaunch& launch, uint64_t number) {
  const size_t count = size_t{launch.block.x} * launch.block.y * launch.block.z;
  Block block{launch.kernel, index_in(number, launch.grid), SharedMemory(launch.shared_bytes),
              std::vector<Thread>(count)};
  for (size_t i = 0; i < count; ++i) block.threads[i].index = index_in(i, launch.block);
  blockIdx = block.index;
  block_running = &block;
  count_block(block);
  Scheduler(block, launch.order).run();
  count_block_end();
  if (!block.memory.fence_stands()) fail(block, nullptr, "wrote beside its shared memory");
}

}  // namespace host_cuda
