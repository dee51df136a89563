// Exact counting of CPU tensor memory: an allocator of torch's own kind that is installed while a tracker is open.
#pragma once

#include <cstdint>
#include <optional>

namespace memcheck {

// An allocation over a budget, in the terms of the tracker that is asked.
struct Refusal {
  int64_t requested_bytes;
  int64_t in_use_bytes;  // above the level at entry, plus what the tracker's owner held then
};

// Watches all threads from construction to close(). Up to 64 may be open at once, and they close in any order. Bytes
// are those that were asked for. Blocks from before the first tracker, and storages that resize with the allocator they
// were born with, are not seen.
class AllocationTracker {
 public:
  // limit_bytes bounds held_bytes plus everything allocated above the level at entry.
  AllocationTracker(int64_t held_bytes, std::optional<int64_t> limit_bytes);
  ~AllocationTracker();
  AllocationTracker(const AllocationTracker&) = delete;
  AllocationTracker& operator=(const AllocationTracker&) = delete;

  int64_t current_bytes() const;  // above the level at entry; negative if more was freed than allocated
  int64_t peak_bytes() const;     // the highest current_bytes since entry or reset_peak(), at least 0
  void reset_peak();
  std::optional<Refusal> refusal() const;  // the last one while this tracker was open
  void close();

 private:
  int slot() const;

  static constexpr int kClosed = -1;
  int slot_ = kClosed;
};

}  // namespace memcheck
