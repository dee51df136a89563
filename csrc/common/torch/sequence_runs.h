#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "common/torch/sequences.h"

// Packed and padded batches: which positions belong to which sequence, and how a kernel runs once for each of them.
//
// A kernel gets a sequence as a view (starting_at) with a batch of 1. So nothing is copied or masked,
// and a sequence gives the same bits packed, padded and alone.

namespace memcheck {

// One sequence. Where a batch is neither packed nor padded, one of these stands for all of it.
struct SequenceView {
  int64_t index;      // its place in cu_seqlens or lengths
  int64_t row, rows;  // of the batch: the first, and how many
  int64_t first_query, queries;
  int64_t first_key, keys;
};

// The sequences of a batch of B rows with S queries and T keys each. Checks the values, for which it waits for the
// device where they lie there.
std::vector<SequenceView> read_sequences(const char* op, const SequenceArguments& arguments, int64_t B, int64_t S,
                                         int64_t T, bool causal);

// Writes zeros to the positions of padding of a result, which no kernel writes. Dimension 0 of x is the batch, and
// `dimension` that of its positions. Nothing happens if x is undefined, or if there is no padding.
void zero_padded_queries(const SequenceArguments& arguments, const std::vector<SequenceView>& sequences,
                         const at::Tensor& x, int64_t dimension);
void zero_padded_keys(const SequenceArguments& arguments, const std::vector<SequenceView>& sequences,
                      const at::Tensor& x, int64_t dimension);

// Runs a kernel once for each sequence. On the CPU, a sequence of more than a thread's share of the work has all
// threads, and the others run side by side on one thread each, the longest first. On CUDA they follow each other on the
// stream.
class SequenceRun {
 public:
  // work(sequence): in multiplications.
  SequenceRun(const std::vector<SequenceView>& sequences, c10::Device device,
              const std::function<int64_t(const SequenceView&)>& work);

  // Allocates scratch on the device of x, once: of the sequence that needs most, for each that runs at the same time.
  void allocate_scratch(const at::Tensor& x, const std::function<int64_t(const SequenceView&, int64_t threads)>& bytes);

  // Calls body for each sequence, with the threads and the scratch that it may use. Bodies run on several threads.
  void each(const std::function<void(const SequenceView&, int64_t threads, void* scratch)>& body) const;

 private:
  std::vector<SequenceView> alone_;     // one after another, each with all threads
  std::vector<SequenceView> together_;  // side by side, each with one thread
  int64_t threads_;
  int64_t workers_ = 1;  // threads that share together_
  int64_t worker_bytes_ = 0;
  Scratch scratch_;
};

}  // namespace memcheck
