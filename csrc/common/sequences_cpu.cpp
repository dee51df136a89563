#include <stdexcept>

#include "common/finding.h"
#include "common/parallel.h"
#include "common/sequences.h"

namespace memcheck {
namespace {

void build(const SequenceTableBuild& p, Dtype, cudaStream_t) {
  const Finding ends = check_ends(p.op, p.source);
  if (ends.rule != Rule::None) throw std::invalid_argument(message_of(ends));
  for (int64_t i = 0; i < p.source.count; ++i) {
    const Finding finding = check_sequence(p.op, p.source, i);
    if (finding.rule != Rule::None) throw std::invalid_argument(message_of(finding));
    p.table[i] = sequence_at(p.source, i);
  }
}

}  // namespace

const SequenceKernels sequences_cpu{build};

}  // namespace memcheck
