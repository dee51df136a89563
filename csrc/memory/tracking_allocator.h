// Exact counting of CPU tensor memory, by an allocator that is installed in torch while a tracker is open.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace memcheck {

// An allocation that was refused because of a budget, as seen by one tracker.
struct Refusal {
  int64_t requested_bytes;
  int64_t in_use_bytes;  // above the total when the tracker was opened, plus its held_bytes
};

// Counts the allocations of all threads from construction to close(). Up to 64 trackers can be open at once, and they
// close in any order. Bytes are those that were requested. Not counted: blocks from before the first tracker, and
// their release.
class AllocationTracker {
 public:
  // limit_bytes is the budget for held_bytes plus everything that is allocated above the total at construction.
  AllocationTracker(int64_t held_bytes, std::optional<int64_t> limit_bytes);
  ~AllocationTracker();
  AllocationTracker(const AllocationTracker&) = delete;
  AllocationTracker& operator=(const AllocationTracker&) = delete;

  int64_t current_bytes() const;  // above the total at construction; negative if more was freed than allocated
  int64_t peak_bytes() const;     // the highest current_bytes since construction or reset_peak(), at least 0
  void reset_peak();
  std::optional<Refusal> refusal() const;  // the last one since construction
  void close();

 private:
  int slot() const;

  static constexpr int kClosed = -1;
  int slot_ = kClosed;
};

// Serves blocks in place of the C library, in threads for which it wants to: the simulated CPU.
struct BlockSource {
  enum Kind { kUsual, kOwn, kUncounted };
  Kind (*kind)(size_t bytes);       // Of the next block of the calling thread. May throw.
  void* (*allocate)(size_t bytes);  // A block that is not kUsual.
  bool (*release)(void* data);      // Asked for every block. False: it is to be freed by c10::free_cpu.
};
// Null until there is a simulated CPU, and then never null again, as its blocks may outlive it.
extern std::atomic<const BlockSource*> block_source;

// Between the two, the tracking allocator is installed even if no tracker is open.
void keep_installed();
void let_go();

}  // namespace memcheck
