#include "common/torch/sequence_runs.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "common/integer.h"
#include "common/parallel.h"
#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"

namespace memcheck {
namespace {

std::vector<int64_t> values_of(const at::Tensor& x) {
  const at::Tensor host = x.to(at::kCPU).contiguous();
  const int64_t count = host.numel();
  if (host.scalar_type() == at::kLong) return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + count};
  return {host.const_data_ptr<int32_t>(), host.const_data_ptr<int32_t>() + count};
}

// Where each sequence begins, and the end, which is that of `length` positions.
std::vector<int64_t> read_cu_seqlens(const char* op, const char* name, const at::Tensor& x, const char* letter,
                                     int64_t length) {
  const std::vector<int64_t> values = values_of(x);
  TORCH_CHECK_VALUE(values.front() == 0, op, ": ", name, " must begin with 0, got ", values.front());
  for (size_t i = 1; i < values.size(); ++i)
    TORCH_CHECK_VALUE(values[i - 1] <= values[i], op, ": ", name, " must ascend, got ", values[i], " at index ", i,
                      " after ", values[i - 1]);
  TORCH_CHECK_VALUE(values.back() == length, op, ": ", name, " must end with the packed length ", letter, " = ", length,
                    ", got ", values.back());
  return values;
}

std::vector<SequenceView> read_packed(const char* op, const SequenceArguments& arguments, int64_t S, int64_t T,
                                      bool causal) {
  const auto queries = read_cu_seqlens(op, "cu_seqlens_q", arguments.cu_seqlens_q, "S", S);
  const auto keys = read_cu_seqlens(op, "cu_seqlens_k", arguments.cu_seqlens_k, "T", T);
  std::vector<SequenceView> sequences;
  for (size_t i = 0; i + 1 < queries.size(); ++i) {
    const SequenceView x{static_cast<int64_t>(i), 0, 1, queries[i], queries[i + 1] - queries[i], keys[i],
                         keys[i + 1] - keys[i]};
    TORCH_CHECK_VALUE(!causal || x.queries <= x.keys, op, ": causal needs no more queries than keys, got ", x.queries,
                      " queries and ", x.keys, " keys of sequence ", i);
    sequences.push_back(x);
  }
  return sequences;
}

// Causal, query s is at position s + T - S, so padding ends or begins for queries where it does for keys. Else queries
// are padded as keys are if there are as many, and not at all if not.
std::vector<SequenceView> read_padded(const char* op, const SequenceArguments& arguments, int64_t S, int64_t T,
                                      bool causal) {
  const std::vector<int64_t> lengths = values_of(arguments.lengths);
  std::vector<SequenceView> sequences;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t keys = lengths[i], row = static_cast<int64_t>(i);
    TORCH_CHECK_VALUE(0 <= keys && keys <= T, op, ": lengths must be from 0 to T = ", T, ", got ", keys, " at index ",
                      i);
    int64_t queries = S;
    if (causal || S == T) queries = arguments.left_padded ? std::min(S, keys) : std::max<int64_t>(0, keys - (T - S));
    const int64_t first_query = arguments.left_padded ? S - queries : 0;
    const int64_t first_key = arguments.left_padded ? T - keys : 0;
    sequences.push_back({row, row, 1, first_query, queries, first_key, keys});
  }
  return sequences;
}

// Writes zeros to all positions of a row but `count` from `first` on.
void zero_outside(const at::Tensor& x, int64_t row, int64_t dimension, int64_t first, int64_t count) {
  const at::Tensor positions = x.select(0, row);
  const int64_t end = first + count, length = x.size(dimension);
  if (first > 0) positions.narrow(dimension - 1, 0, first).zero_();
  if (end < length) positions.narrow(dimension - 1, end, length - end).zero_();
}

}  // namespace

std::vector<SequenceView> read_sequences(const char* op, const SequenceArguments& arguments, int64_t B, int64_t S,
                                         int64_t T, bool causal) {
  if (arguments.packed()) return read_packed(op, arguments, S, T, causal);
  if (arguments.padded()) return read_padded(op, arguments, S, T, causal);
  return {{0, 0, B, 0, S, 0, T}};
}

void zero_padded_queries(const SequenceArguments& arguments, const std::vector<SequenceView>& sequences,
                         const at::Tensor& x, int64_t dimension) {
  if (!arguments.padded() || !x.defined()) return;
  for (const SequenceView& one : sequences) zero_outside(x, one.row, dimension, one.first_query, one.queries);
}

void zero_padded_keys(const SequenceArguments& arguments, const std::vector<SequenceView>& sequences,
                      const at::Tensor& x, int64_t dimension) {
  if (!arguments.padded() || !x.defined()) return;
  for (const SequenceView& one : sequences) zero_outside(x, one.row, dimension, one.first_key, one.keys);
}

SequenceRun::SequenceRun(const std::vector<SequenceView>& sequences, c10::Device device,
                         const std::function<int64_t(const SequenceView&)>& work)
    : threads_(at::get_num_threads()) {
  if (has_cuda_kernels(device)) {
    alone_ = sequences;
    return;
  }
  together_ = sequences;
  std::stable_sort(together_.begin(), together_.end(),
                   [&](const SequenceView& one, const SequenceView& other) { return work(one) > work(other); });
  int64_t rest = std::accumulate(together_.begin(), together_.end(), int64_t{0},
                                 [&](int64_t sum, const SequenceView& one) { return sum + work(one); });
  workers_ = useful_threads(rest, threads_);
  auto first = together_.begin();
  for (; first != together_.end() && work(*first) > rest / workers_; ++first) rest -= work(*first);
  alone_.assign(together_.begin(), first);
  together_.erase(together_.begin(), first);
  workers_ = parallel_workers(static_cast<int64_t>(together_.size()), workers_);
}

void SequenceRun::allocate_scratch(const at::Tensor& x,
                                   const std::function<int64_t(const SequenceView&, int64_t threads)>& bytes) {
  int64_t most = 0;
  for (const SequenceView& one : alone_) most = std::max(most, bytes(one, threads_));
  for (const SequenceView& one : together_) worker_bytes_ = std::max(worker_bytes_, ceil_div(bytes(one, 1), 64) * 64);
  scratch_ = Scratch(std::max(most, workers_ * worker_bytes_), x);
}

void SequenceRun::each(const std::function<void(const SequenceView&, int64_t threads, void* scratch)>& body) const {
  auto* const scratch = static_cast<char*>(scratch_.data());
  for (const SequenceView& one : alone_) body(one, threads_, scratch);
  std::atomic<size_t> next{0};
  parallel_tasks(workers_, workers_, [&](int64_t, int64_t, int worker) {
    for (size_t i = next++; i < together_.size(); i = next++) body(together_[i], 1, scratch + worker * worker_bytes_);
  });
}

}  // namespace memcheck
