// Kernels of the CPU that run once, alone. What they allocate and return is then known for all calls like it.

#include <ATen/Context.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include <cstring>

#include "simulated/cpu.h"
#include "simulated/cpu_memory.h"
#include "simulated/operands.h"

namespace memcheck::simulated {

CpuFacts cpu_facts;

namespace {

using torch::jit::Stack;

// Elements after which made-up numbers repeat: odd, so that rows of a matrix differ.
constexpr int64_t kPeriod = (1 << 16) + 1;

at::Generator& generator_of_fractions() {
  static at::Generator& one = *new at::Generator(at::detail::createCPUGenerator());
  return one;
}

// The element after the last one.
int64_t end_of(const at::Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return last + 1;
}

at::Tensor flat(c10::Storage storage, int64_t begin, int64_t elements, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(begin);
  made.unsafeGetTensorImpl()->set_sizes_contiguous({elements});
  return made;
}

// Fractions from 0.1 to 0.9, which any logarithm, root and quotient takes.
void fill_with_fractions(const at::Tensor& part) {
  const int64_t elements = part.numel(), first = std::min(elements, kPeriod), size = part.element_size();
  part.narrow(0, 0, first).uniform_(0.1, 0.9, generator_of_fractions());
  auto* data = static_cast<char*>(part.mutable_data_ptr());
  for (int64_t at = first; at < elements; at += first)
    std::memcpy(data + at * size, data, std::min(first, elements - at) * size);
}

// Operands with memory of their own, for a kernel that is to run alone.
class MadeUp {
 public:
  explicit MadeUp(bool has_ones) : has_ones_(has_ones) {}

  at::Tensor of(const at::Tensor& t) {
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
    for (const auto& [ours, theirs] : pairs)
      if (ours.is_same(t)) return theirs;
    at::Tensor made = TensorLayout::of(t).tensor_in(storage_for(t), c10::DispatchKey::CPU);
    pairs.emplace_back(t, made);
    // Batches of square matrices can be inverted and decomposed.
    if (!is_known(t) && t.is_floating_point() && t.dim() > 1 && t.size(-1) == t.size(-2) &&
        t.is_non_overlapping_and_dense())
      made.diagonal(0, -2, -1).add_(t.size(-1));
    return made;
  }
  Pairs pairs;

 private:
  c10::Storage storage_for(const at::Tensor& t) {
    auto [found, is_new] = storages_.try_emplace(t.storage().unsafeGetStorageImpl());
    if (is_new) found->second = new_cpu_storage(static_cast<int64_t>(t.storage().nbytes()));
    fill(found->second, t);
    return found->second;
  }

  void fill(const c10::Storage& storage, const at::Tensor& t) {
    const int64_t begin = t.numel() == 0 ? 0 : t.storage_offset(), elements = end_of(t) - begin;
    if (elements == 0) return;
    at::Tensor part = flat(storage, begin, elements, t);
    const Contents* contents = contents_of(t);
    if (contents != nullptr && contents->state == Contents::kKnown) {
      std::memcpy(part.mutable_data_ptr(), static_cast<const char*>(t.storage().data()) + begin * t.element_size(),
                  elements * t.element_size());
    } else if (contents != nullptr && contents->state == Contents::kConstant) {
      part.fill_(contents->constant);
    } else if (has_ones_) {
      part.fill_(1);
    } else if (t.is_floating_point()) {
      fill_with_fractions(part);
    } else {
      part.fill_(stand_in(t).value_or(0));
    }
  }

  bool has_ones_;
  std::unordered_map<const void*, c10::Storage> storages_;
};

// Draws of random numbers that the program does not make.
class KeptGenerator {
 public:
  explicit KeptGenerator(bool is_random) {
    if (!is_random) return;
    its_ = at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU));
    state_ = its_.get_state();
  }
  ~KeptGenerator() {
    if (its_.defined()) its_.set_state(state_);
  }
  KeptGenerator(const KeptGenerator&) = delete;
  KeptGenerator& operator=(const KeptGenerator&) = delete;

 private:
  at::Generator its_;
  at::Tensor state_;
};

bool is_plain(const at::Tensor& t) {
  return t.layout() == at::kStrided && t.key_set().has(c10::DispatchKey::CPU) && !t.is_quantized();
}

}  // namespace

CpuPlan plan_by_probe(const Probe& probe) {
  ++cpu_facts.probes;
  Uncounted uncounted;
  KeptGenerator kept(probe.is_random);
  MadeUp made_up(probe.has_sizes_by_contents);
  Stack stack;
  for (size_t i = 0; i < probe.count; ++i)
    stack.push_back(
        map_tensors(probe.arguments[i], c10::DeviceType::CPU, [&](const at::Tensor& t) { return made_up.of(t); }));
  Tape tape;
  probe.op.redispatchBoxed(probe.keys, &stack);
  tape.stop();
  CpuPlan plan;
  std::unordered_map<const void*, int> open;  // the steps of blocks that are not freed
  for (const TapeStep& step : tape.steps) {
    if (!step.is_free) {
      open[step.data] = static_cast<int>(plan.steps.size());
      plan.steps.push_back({step.bytes});
    } else if (auto found = open.find(step.data); found != open.end()) {
      plan.steps.push_back({0, found->second});
      open.erase(found);
    }
  }
  for (const c10::IValue& value : stack)
    each_tensor(value, [&](const at::Tensor& t) { plan.runs_as_it_is = plan.runs_as_it_is || !is_plain(t); });
  if (!plan.runs_as_it_is)
    note_outcome(plan, stack, made_up.pairs, probe.operands, [&](const at::Tensor& t) {
      const auto found = open.find(t.storage().data());
      return found == open.end() ? -1 : found->second;
    });
  return plan;
}

}  // namespace memcheck::simulated
