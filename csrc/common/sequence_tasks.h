#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <vector>

#include "common/parallel.h"
#include "common/sequences.h"

namespace memcheck {

// Calls body(task, worker) for every task, with worker < parallel_workers(tasks, threads). Each thread begins with
// neighbouring tasks of about an even share of the work, which lie together in memory, and then helps the others.
// work_of(task): in any unit.
template <typename WorkOf, typename Body>
void parallel_neighbours(int64_t tasks, int64_t threads, const WorkOf& work_of, const Body& body) {
  const int64_t workers = parallel_workers(tasks, threads);
  if (workers == 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  struct Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::vector<Share> shares(workers);
  double all = 0, before = 0;
  for (int64_t task = 0; task < tasks; ++task) all += work_of(task);
  for (int64_t task = 0; task < tasks; ++task) {
    const double work = work_of(task);
    const double share = all > 0 ? (before + work / 2) / all : 0;
    const auto worker = std::min(workers - 1, static_cast<int64_t>(share * workers));
    shares[worker].end = task + 1;
    before += work;
  }
  for (int64_t worker = 1; worker < workers; ++worker) {
    shares[worker].next = shares[worker - 1].end;
    shares[worker].end = std::max(shares[worker].end, shares[worker - 1].end);
  }
  parallel_tasks(workers, workers, [&](int64_t, int64_t, int worker) {
    for (int64_t i = 0; i < workers; ++i) {
      Share& share = shares[(worker + i) % workers];
      for (int64_t task = share.next++; task < share.end; task = share.next++) body(task, worker);
    }
  });
}

// How the sequences of a table share the threads of the CPU: one of more than a thread's share of the work has all
// threads, and the others run side by side on one thread each, the longest first.
class SequenceTasks {
 public:
  // work_of(sequence): in multiplications.
  template <typename WorkOf>
  SequenceTasks(const SequenceTable& table, int64_t threads, const WorkOf& work_of)
      : table_(table), threads_(threads), together_(table.count) {
    std::vector<int64_t> work(table.count);
    for (int64_t i = 0; i < table.count; ++i) work[i] = work_of(table.sequences[i]);
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

  // The scratch of a run: of the sequence that needs most, for each that runs at the same time. bytes_of(sequence,
  // threads): of one.
  template <typename BytesOf>
  int64_t scratch_bytes(const BytesOf& bytes_of) const {
    int64_t most = 0;
    for (const int64_t i : alone_) most = std::max(most, bytes_of(table_.sequences[i], threads_));
    return std::max(most, workers_ * worker_bytes(bytes_of));
  }

  // Calls run(parameters) for every sequence, as for a batch of its own. parameters_of(index, sequence): its threads
  // and its part of the scratch are set here. Calls for sequences of one thread run on several threads.
  template <typename BytesOf, typename ParametersOf, typename Run>
  void each(const BytesOf& bytes_of, void* scratch, const ParametersOf& parameters_of, const Run& run) const {
    const auto run_one = [&](int64_t i, int64_t threads, void* memory) {
      auto one = parameters_of(i, table_.sequences[i]);
      one.threads = threads;
      one.scratch = memory;
      run(one);
    };
    for (const int64_t i : alone_) run_one(i, threads_, scratch);
    const int64_t bytes = worker_bytes(bytes_of);
    std::atomic<size_t> next{0};
    parallel_tasks(workers_, workers_, [&](int64_t, int64_t, int worker) {
      for (size_t i = next++; i < together_.size(); i = next++)
        run_one(together_[i], 1, static_cast<char*>(scratch) + worker * bytes);
    });
  }

 private:
  template <typename BytesOf>
  int64_t worker_bytes(const BytesOf& bytes_of) const {
    int64_t most = 0;
    for (const int64_t i : together_) most = std::max(most, bytes_of(table_.sequences[i], int64_t{1}));
    return ceil_div(most, 64) * 64;
  }

  SequenceTable table_;
  int64_t threads_;
  std::vector<int64_t> alone_;     // indices of sequences, one after another, each with all threads
  std::vector<int64_t> together_;  // side by side, each with one thread
  int64_t workers_ = 1;            // threads that share together_
};

}  // namespace memcheck
