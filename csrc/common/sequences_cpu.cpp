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

template <typename bits_t>
void fill_range(const PaddingFill& p, int64_t row, int64_t begin, int64_t end) {
  for (int64_t outer = 0; outer < p.outer; ++outer)
    for (int64_t i = begin; i < end; ++i)
      for (int64_t inner = 0; inner < p.inner; ++inner)
        *p.x.at<bits_t>(row, outer, i, inner) = static_cast<bits_t>(p.bits);
}

template <typename bits_t>
void fill_padding(const PaddingFill& p) {
  parallel_tasks(p.sequences.count, p.sequences.count, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const Span inside = p.inside(i);
      fill_range<bits_t>(p, i, 0, inside.begin);
      fill_range<bits_t>(p, i, inside.end, p.length);
    }
  });
}

void fill_padding(const PaddingFill& p, Dtype dtype, cudaStream_t) {
  switch (element_bytes(dtype)) {
    case 8:
      return fill_padding<uint64_t>(p);
    case 4:
      return fill_padding<uint32_t>(p);
    default:
      return fill_padding<uint16_t>(p);
  }
}

}  // namespace

const SequenceKernels sequences_cpu{build, fill_padding};

}  // namespace memcheck
