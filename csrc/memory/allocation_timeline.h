// Every allocation and free of CPU tensor memory, in order, each with the operators in which it happened.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/peak_ledger.h"
#include "memory/python_line.h"

namespace memcheck {

// An allocation. A free has negative bytes.
struct AllocationEvent {
  uintptr_t address;
  int64_t bytes;  // as requested
  int path;       // the operators in which it happened: an index into AllocationTimeline::paths()
  int module;     // as set_module said last
  int64_t node;   // the sequence number of the autograd node that ran; -1 without one
  bool shaped;    // some operator returned the block as a tensor of this shape and dtype
  std::vector<int64_t> shape;
  std::string dtype;  // "float32"
};

// A stack of operators and autograd nodes: the innermost name, and the index of the path around it. Path 0 is empty.
struct OperatorPath {
  int outer;
  std::string name;
};

class TimelineGuard;

// Records from construction to close(), on all threads; one at a time. It sees what the tracking allocator sees, and so
// needs an AllocationTracker that is open. OpenMP's threads allocate on account of the operator that the thread which
// opened the timeline, or one that runs backward, was in last.
//
// With a ledger, no event is kept: each changes the ledger, with its line of Python if it has least_bytes or more, and
// with the module and the phase that it happened in. What an autograd node allocates has the line and the module of the
// forward operator that made the node.
class AllocationTimeline {
 public:
  explicit AllocationTimeline(std::shared_ptr<PeakLedger> ledger = nullptr, int64_t least_bytes = 0);
  ~AllocationTimeline();
  AllocationTimeline(const AllocationTimeline&) = delete;
  AllocationTimeline& operator=(const AllocationTimeline&) = delete;

  int64_t size() const;  // events so far
  void close();
  std::vector<AllocationEvent> events(size_t from = 0) const;
  std::vector<OperatorPath> paths() const;
  std::vector<PeakLedger::Count> counts() const;  // of its ledger; none once the recording is closed
  std::vector<Site> sites() const;                // of counts()

  // What the calling thread is in. Without effect once this timeline is closed, as are the others.
  int set_module(int module);  // returns the one before
  void begin_step();
  void end_step();
  void set_kind(uintptr_t address, Kind kind, std::optional<int> module);
  void set_kind_like(uintptr_t address, Kind kind, uintptr_t other);

  struct Recording;

 private:
  bool is_held_by(const TimelineGuard& guard) const;  // whether this timeline is the one that is open

  std::unique_ptr<Recording> recording_;
};

// Held by the allocator while it changes the total of live bytes, so that events are in the order of the totals. While
// no timeline is open it does nothing, and costs one load.
class TimelineGuard {
 public:
  // of an allocation: its bytes
  explicit TimelineGuard(int64_t bytes = 0);
  ~TimelineGuard();
  TimelineGuard(const TimelineGuard&) = delete;
  TimelineGuard& operator=(const TimelineGuard&) = delete;

  bool is_open() const { return recording_ != nullptr; }
  AllocationTimeline::Recording& recording() const { return *recording_; }
  void note(const void* data, int64_t bytes);
  void note_refusal(int64_t bytes);

 private:
  AllocationTimeline::Recording* recording_;
  PythonLine line_;
};

}  // namespace memcheck
