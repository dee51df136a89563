// Every allocation and free of CPU tensor memory in their order, each with the operators it happened in.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace memcheck {

// An allocation, or a free where bytes are negative.
struct AllocationEvent {
  uintptr_t address;
  int64_t bytes;  // as requested
  int path;       // the operators it happened in: an index into AllocationTimeline::paths()
  bool shaped;    // some operator returned the block as a tensor of this shape and dtype
  std::vector<int64_t> shape;
  std::string dtype;  // "float32"
};

// A stack of operators and autograd nodes: the innermost name, and the path around it. Path 0 is outside of all.
struct OperatorPath {
  int outer;
  std::string name;
};

// Records from construction to close(), on all threads; one at a time. It sees what the tracking allocator sees, and so
// needs an AllocationTracker that is open. OpenMP's threads allocate on account of the operator that the thread which
// opened the timeline, or one that runs backward, was in last.
class AllocationTimeline {
 public:
  AllocationTimeline();
  ~AllocationTimeline();
  AllocationTimeline(const AllocationTimeline&) = delete;
  AllocationTimeline& operator=(const AllocationTimeline&) = delete;

  int64_t size() const;  // events so far
  void close();
  std::vector<AllocationEvent> events() const;
  std::vector<OperatorPath> paths() const;

  struct Recording;

 private:
  std::unique_ptr<Recording> recording_;
};

// Held by the allocator while it changes the sum of what is alive, so that events lie in the order of the sums. Does
// nothing, at the cost of one load, while no timeline is open.
class TimelineGuard {
 public:
  TimelineGuard();
  ~TimelineGuard();
  TimelineGuard(const TimelineGuard&) = delete;
  TimelineGuard& operator=(const TimelineGuard&) = delete;

  bool is_open() const { return recording_ != nullptr; }
  AllocationTimeline::Recording& recording() const { return *recording_; }
  void note(const void* data, int64_t bytes);

 private:
  AllocationTimeline::Recording* recording_;
};

}  // namespace memcheck
