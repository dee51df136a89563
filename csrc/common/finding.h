#pragma once

#include <cstdint>
#include <string>

#include "common/sequences.h"
#include "common/types.h"

// Values of arguments that break a rule. The CPU's kernels throw at once. A kernel on a GPU writes a finding to pinned
// memory of its GPU, and the host raises it when it next calls an operator of memcheck on that GPU, without waiting for
// it, or calls memcheck.check_findings().

namespace memcheck {

enum class Rule : int32_t {
  None,
  BeginsWithZero,
  Ascends,
  EndsWithLength,
  CausalQueries,
  LengthInRange,
  DecayInRange,
  LogDecayInRange
};

struct Finding {
  Rule rule = Rule::None;
  const char* op = nullptr;        // names are addresses of the host, which a GPU only copies
  const char* argument = nullptr;  // its name
  char letter = ' ';               // of the length that `other` is
  int64_t index = 0;
  int64_t got = 0;
  int64_t other = 0;  // what the value is compared with
  double value = 0;   // of a decay
};

// What is wrong with one sequence of a table.
MEMCHECK_INLINE Finding check_sequence(const char* op, const SequenceSource& x, int64_t i) {
  const int64_t keys = x.packed ? x.key_value(i + 1) - x.key_value(i) : x.key_value(i);
  if (!x.packed)
    return keys < 0 || keys > x.T ? Finding{Rule::LengthInRange, op, x.names[1], 'T', i, keys, x.T} : Finding{};
  const int64_t queries = x.query_value(i + 1) - x.query_value(i);
  if (queries < 0) return {Rule::Ascends, op, x.names[0], 'S', i + 1, x.query_value(i + 1), x.query_value(i)};
  if (keys < 0) return {Rule::Ascends, op, x.names[1], 'T', i + 1, x.key_value(i + 1), x.key_value(i)};
  if (x.causal && queries > keys) return {Rule::CausalQueries, op, x.names[0], 'S', i, queries, keys};
  return {};
}

// What is wrong with the first and the last value of cu_seqlens.
MEMCHECK_INLINE Finding check_ends(const char* op, const SequenceSource& x) {
  if (!x.packed) return {};
  if (x.query_value(0) != 0) return {Rule::BeginsWithZero, op, x.names[0], 'S', 0, x.query_value(0), 0};
  if (x.key_value(0) != 0) return {Rule::BeginsWithZero, op, x.names[1], 'T', 0, x.key_value(0), 0};
  if (x.query_value(x.count) != x.S)
    return {Rule::EndsWithLength, op, x.names[0], 'S', x.count, x.query_value(x.count), x.S};
  if (x.key_value(x.count) != x.T)
    return {Rule::EndsWithLength, op, x.names[1], 'T', x.count, x.key_value(x.count), x.T};
  return {};
}

// Of a value that is no decay, or no logarithm of one.
MEMCHECK_INLINE Finding decay_finding(bool logarithms, int64_t index, double value) {
  return {logarithms ? Rule::LogDecayInRange : Rule::DecayInRange, nullptr, nullptr, ' ', index, 0, 0, value};
}

// The sentence of an error.
std::string message_of(const Finding& finding);

// ---- CUDA

// The last finding of kernels on the current GPU that was not taken yet.
Finding take_finding();
// Where kernels on the current GPU write findings about sequences and about decays; the GPU's addresses.
struct FindingSlots {
  Finding* sequences;
  Finding* decay;
};
FindingSlots finding_slots();
// Waits until the stream's kernels are done. Throws if they are captured for a CUDA graph, and do not run.
void wait_for_kernels(cudaStream_t stream);

}  // namespace memcheck
