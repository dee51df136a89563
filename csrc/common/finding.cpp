#include "common/finding.h"

#include <sstream>

namespace memcheck {

std::string message_of(const Finding& x) {
  std::ostringstream text;
  // A kernel has no names of its own: its strings lie where only the GPU can read them.
  text << (x.op == nullptr ? "linear_attention" : x.op) << ": ";
  switch (x.rule) {
    case Rule::BeginsWithZero:
      text << x.argument << " must begin with 0, got " << x.got;
      break;
    case Rule::Ascends:
      text << x.argument << " must ascend, got " << x.got << " at index " << x.index << " after " << x.other;
      break;
    case Rule::EndsWithLength:
      text << x.argument << " must end with the packed length " << x.letter << " = " << x.other << ", got " << x.got;
      break;
    case Rule::CausalQueries:
      text << "causal needs no more queries than keys, got " << x.got << " queries and " << x.other
           << " keys of sequence " << x.index;
      break;
    case Rule::LengthInRange:
      text << "lengths must be from 0 to T = " << x.other << ", got " << x.got << " at index " << x.index;
      break;
    case Rule::DecayInRange:
      text << "decay must be in (0, 1], got " << x.value;
      break;
    case Rule::LogDecayInRange:
      text << "log_decay must be at most 0, got " << x.value;
      break;
    case Rule::None:
      break;
  }
  return text.str();
}

}  // namespace memcheck
