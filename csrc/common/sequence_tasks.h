#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "common/parallel.h"
#include "common/sequences.h"

namespace memcheck {

// How the sequences of a batch share the threads of the CPU: one of more than a thread's share of the work has all
// threads, and the others run side by side on one thread each, the longest first. A dense batch is one call.
template <typename Shape>
class SequenceTasks {
 public:
  // work_of(shape): of one sequence, in multiplications.
  template <typename WorkOf>
  SequenceTasks(const Shape& n, int64_t threads, const WorkOf& work_of)
      : n_(n), threads_(threads), together_(n.sequences.count) {
    std::vector<int64_t> work(together_.size());
    for (size_t i = 0; i < work.size(); ++i) work[i] = work_of(shape(i));
    std::iota(together_.begin(), together_.end(), int64_t{0});
    std::stable_sort(together_.begin(), together_.end(),
                     [&](int64_t one, int64_t other) { return work[one] > work[other]; });
    int64_t rest = std::accumulate(work.begin(), work.end(), int64_t{0});
    workers_ = useful_threads(rest, threads);
    auto first = together_.begin();
    for (; first != together_.end() && work[*first] > rest / workers_; ++first) rest -= work[*first];
    alone_.assign(together_.begin(), first);
    together_.erase(together_.begin(), first);
    workers_ = parallel_workers(static_cast<int64_t>(together_.size()), workers_);
  }

  // The scratch of a call: of the sequence that needs most, for each that runs at the same time. bytes_of(shape,
  // threads): of a dense batch.
  template <typename BytesOf>
  int64_t scratch_bytes(const BytesOf& bytes_of) const {
    if (!n_.sequences) return bytes_of(n_, threads_);
    return std::max(most(alone_, threads_, bytes_of), workers_ * worker_bytes(bytes_of));
  }

  // Calls run(p), or for every sequence run(parameters_of(index)) as for a batch of its own, whose threads and part of
  // the scratch are set here. Calls for sequences of one thread run on several threads.
  template <typename Parameters, typename BytesOf, typename ParametersOf, typename Run>
  void each(const Parameters& p, const BytesOf& bytes_of, const ParametersOf& parameters_of, const Run& run) const {
    if (!n_.sequences) return run(p);
    const auto run_one = [&](int64_t i, int64_t threads, int64_t first_byte) {
      Parameters one = parameters_of(i);
      one.shape = shape(i);
      one.threads = threads;
      one.scratch = static_cast<char*>(p.scratch) + first_byte;
      run(one);
    };
    for (const int64_t i : alone_) run_one(i, threads_, 0);
    const int64_t bytes = worker_bytes(bytes_of);
    parallel_in_turn(static_cast<int64_t>(together_.size()), workers_,
                     [&](int64_t i, int worker) { run_one(together_[i], 1, worker * bytes); });
  }

 private:
  Shape shape(int64_t i) const { return shape_of(n_, n_.sequences.sequences[i]); }

  template <typename BytesOf>
  int64_t most(const std::vector<int64_t>& sequences, int64_t threads, const BytesOf& bytes_of) const {
    int64_t bytes = 0;
    for (const int64_t i : sequences) bytes = std::max<int64_t>(bytes, bytes_of(shape(i), threads));
    return bytes;
  }
  template <typename BytesOf>
  int64_t worker_bytes(const BytesOf& bytes_of) const {
    return ceil_div(most(together_, 1, bytes_of), 64) * 64;
  }

  Shape n_;
  int64_t threads_;
  std::vector<int64_t> alone_;     // indices of sequences, one after another, each with all threads
  std::vector<int64_t> together_;  // side by side, each with one thread
  int64_t workers_ = 1;            // threads that share together_
};

}  // namespace memcheck
