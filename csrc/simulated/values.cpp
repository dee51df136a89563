#include "simulated/values.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/nonzero.h>

#include <algorithm>
#include <sstream>

#include "simulated/below_python.h"
#include "simulated/contents.h"
#include "simulated/operands.h"

namespace memcheck::simulated {
namespace {

using torch::jit::Stack;

Values::Kind kind_of(const std::string& name) {
  using Kind = Values::Kind;
  if (is_one_of(name, {"isfinite", "isclose"})) return Kind::kFinite;
  if (is_one_of(name, {"isnan", "isinf", "isposinf", "isneginf"})) return Kind::kNotFinite;
  if (is_one_of(name, {"ne", "logical_not", "bitwise_not"})) return Kind::kNegation;
  if (is_one_of(name, {"sum", "count_nonzero", "cumsum", "bincount", "histc", "searchsorted", "bucketize"}))
    return Kind::kCount;
  if (is_one_of(name, {"argmax", "argmin", "topk", "sort", "argsort", "multinomial", "kthvalue", "mode", "nonzero"}))
    return Kind::kPlace;
  if (is_one_of(name, {"any", "all"})) return Kind::kNonzero;
  return Kind::kComparison;
}

// Comparisons of unknown numbers up to these many elements are answered when they are made. Of more elements their sum
// would say that nothing is there.
constexpr int64_t kMostAnswers = 4096;

// Contents for operators that run on the host in place of the device: their random numbers leave those of the CPU
// alone.
at::Generator& generator() {
  static at::Generator& one = *new at::Generator(at::detail::createCPUGenerator());
  return one;
}

// Whether the operator may run on the host, as all that it reads is known and all that it writes is small.
bool can_run(const Finished& call) {
  if (!call.values.has_cpu) return false;
  bool can = true;
  size_t written = 0;
  for (size_t i = 0; i < call.count && can; ++i)
    each_tensor(call.arguments[i], [&](const at::Tensor& t) {
      if (!is_simulated(t)) return;
      const bool is_written = written < call.written.size() && call.written[written].argument == i;
      if (is_written) {
        const Written& its = call.written[written++];
        const Contents* contents = contents_of(t);
        can = can && (contents == nullptr || contents->is_small);
        if (its.overwrites && covers_storage(t)) return;
      }
      const Contents* its = contents_of(t);
      const bool is_constant = its != nullptr && its->state == Contents::kConstant;
      can = can && is_known(t) && t.numel() <= (is_constant ? kMostOfConstant : kMostElements);
    });
  for (const c10::IValue& result : call.results)
    each_tensor(result, [&](const at::Tensor& t) {
      const Contents* contents = contents_of(t);
      can = can && (contents == nullptr || contents->is_small || contents->state == Contents::kConstant);
    });
  return can;
}

bool reads_doubtful(const Finished& call) {
  bool found = false;
  for (size_t i = 0; i < call.count; ++i)
    each_tensor(call.arguments[i], [&](const at::Tensor& t) { found = found || is_doubtful(t); });
  return found;
}

// The results of the operator on the CPU, with f(tensor) for its operands. Empty: it does not run there.
template <typename F>
Stack run_on_cpu(const c10::OperatorHandle& op, const c10::IValue* arguments, size_t count, F f) {
  Stack stack;
  for (size_t i = 0; i < count; ++i) {
    const bool is_generator = op.schema().arguments()[i].type()->kind() == c10::TypeKind::OptionalType &&
                              op.schema().arguments()[i].name() == "generator";
    stack.push_back(is_generator ? c10::IValue(generator()) : map_tensors(arguments[i], c10::DeviceType::CPU, f));
  }
  BelowPython below;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  } catch (const std::exception&) {
    return {};
  }
  return stack;
}

bool is_operand(const Finished& call, const at::Tensor& t) {
  bool found = false;
  for (size_t i = 0; i < call.count; ++i)
    each_tensor(call.arguments[i], [&](const at::Tensor& x) {
      found = found || x.is_same(t) || (x.has_storage() && t.has_storage() && x.storage().is_alias_of(t.storage()));
    });
  return found;
}

// Copies what the host computed to the results, and takes its numbers that are no tensors.
void take_results(const Finished& call, const Stack& host, bool is_doubtful_result) {
  for (size_t i = 0; i < call.results.size() && i < host.size(); ++i) {
    std::vector<at::Tensor> ours, theirs;
    each_tensor(call.results[i], [&](const at::Tensor& t) { ours.push_back(t); });
    each_tensor(host[i], [&](const at::Tensor& t) { theirs.push_back(t); });
    if (ours.empty() && !call.results[i].isTensor() && !call.results[i].isTensorList()) call.results[i] = host[i];
    for (size_t k = 0; k < ours.size(); ++k) {
      if (!is_simulated(ours[k]) || is_operand(call, ours[k])) continue;
      if (k >= theirs.size() || theirs[k].sizes() != ours[k].sizes() ||
          theirs[k].scalar_type() != ours[k].scalar_type()) {
        forget(ours[k]);
        continue;
      }
      if (prepare_write(ours[k], true)) {
        BelowPython below;
        on_host(ours[k]).copy_(theirs[k]);
      }
      if (is_doubtful_result) set_doubtful(ours[k]);
    }
  }
}

bool run_for_real(const Finished& call) {
  const bool doubts = reads_doubtful(call);
  // A sum of answered comparisons would count nothing, and may decide a size.
  if (doubts && call.values.kind == Values::Kind::kCount) return false;
  for (const Written& written : call.written)
    if (!prepare_write(written.tensor, written.overwrites)) return false;
  Stack host = run_on_cpu(call.op, call.arguments, call.count, [](const at::Tensor& t) { return on_host(t); });
  if (host.empty() && !call.results.empty()) return false;
  take_results(call, host, doubts);
  if (doubts)
    for (const Written& written : call.written) set_doubtful(written.tensor);
  return true;
}

// The only value of the tensor; none if it has several or an unknown one.
std::optional<double> only_value(const at::Tensor& t) {
  if (t.is_complex() || !t.has_storage()) return std::nullopt;
  if (!is_simulated(t)) return t.is_cpu() && t.numel() == 1 ? std::optional(t.item().toDouble()) : std::nullopt;
  const Contents* contents = contents_of(t);
  if (contents == nullptr) return std::nullopt;
  if (contents->state == Contents::kConstant) return contents->constant;
  if (contents->state == Contents::kKnown && t.numel() == 1) return on_host(t).item().toDouble();
  return std::nullopt;
}

// An operator on each element of operands that are a single number each: so is its result.
bool run_uniform(const Finished& call) {
  if (!call.values.is_pointwise || !call.values.has_cpu) return false;
  bool can = true;
  for (size_t i = 0; i < call.count; ++i)
    each_tensor(call.arguments[i], [&](const at::Tensor& t) { can = can && only_value(t).has_value(); });
  for (const Written& written : call.written) can = can && covers_storage(written.tensor);
  if (!can) return false;
  auto one = [](const at::Tensor& t) {
    at::Tensor made = at::detail::empty_cpu(std::vector<int64_t>(t.dim(), 1), t.scalar_type());
    made.fill_(*only_value(t));
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  };
  Stack host = run_on_cpu(call.op, call.arguments, call.count, one);
  for (size_t i = 0; i < call.results.size() && i < host.size(); ++i) {
    if (!call.results[i].isTensor() || !host[i].isTensor() || host[i].toTensor().is_complex()) return false;
    set_constant(call.results[i].toTensor(), host[i].toTensor().item().toDouble());
  }
  return !host.empty();
}

// The extent over which a result counts: how many elements were reduced to one of it.
int64_t extent(const Finished& call, const at::Tensor& result) {
  int64_t most = 1;
  for (size_t i = 0; i < call.count; ++i)
    each_tensor(call.arguments[i], [&](const at::Tensor& t) {
      const int64_t elements = result.numel() > 0 ? t.numel() / result.numel() : 0;
      most = std::max({most, elements, call.values.name == "cumsum" && t.dim() > 0 ? t.size(-1) : int64_t{1}});
    });
  return most;
}

// What the largest operand reads as, for integers that come from integers.
std::optional<int64_t> inherited(const Finished& call) {
  std::optional<int64_t> most;
  for (size_t i = 0; i < call.count; ++i)
    each_tensor(call.arguments[i], [&](const at::Tensor& t) {
      if (auto found = stand_in(t)) most = std::max(most.value_or(0), *found);
    });
  return most;
}

// Numbers that are not known read 1, so none of them is zero. Answers to comparisons, and integers, may be.
bool reads_nonzero(const Finished& call) {
  bool found = call.values.kind == Values::Kind::kNonzero;
  for (size_t i = 0; i < call.count; ++i)
    each_tensor(call.arguments[i], [&](const at::Tensor& x) {
      found = found && (at::isFloatingType(x.scalar_type()) || at::isComplexType(x.scalar_type()));
    });
  return found;
}

void stand_in_for(const Finished& call, const at::Tensor& t) {
  using Kind = Values::Kind;
  forget(t);
  const Kind kind = call.values.kind;
  if (kind == Kind::kFinite || kind == Kind::kNotFinite) return set_constant(t, kind == Kind::kFinite);
  if (reads_nonzero(call)) return set_constant(t, 1);
  if (t.scalar_type() == at::kBool && t.numel() <= kMostAnswers) {
    set_constant(t, kind == Kind::kNegation);
    return set_doubtful(t);
  }
  if (!at::isIntegralType(t.scalar_type(), false)) return;
  if (kind == Kind::kCount) return set_stand_in(t, extent(call, t));
  if (kind == Kind::kPlace) return set_stand_in(t, 0);
  if (auto value = inherited(call)) set_stand_in(t, *value);
}

void stand_in_for_all(const Finished& call) {
  for (size_t i = 0; i < call.results.size(); ++i)
    each_tensor(call.results[i], [&](const at::Tensor& t) {
      if (!is_simulated(t) || t.numel() == 0 || is_operand(call, t)) return;
      if (i < call.values.is_status.size() && call.values.is_status[i]) return set_constant(t, 0);
      stand_in_for(call, t);
    });
  for (const Written& written : call.written)
    if (!call.values.keeps[written.argument]) stand_in_for(call, written.tensor);
}

at::Tensor as_on_device(const at::Tensor& t, int device) {
  if (!t.defined()) return t;
  at::Tensor made = new_tensor(device, t.sizes(), t.strides(), t.scalar_type());
  if (t.numel() > 0 && prepare_write(made, true)) on_host(made).copy_(t);
  return made;
}

at::Tensor unknown_tensor(int device, at::IntArrayRef sizes, at::ScalarType dtype) {
  at::Tensor made = new_tensor(device, sizes, dtype);
  forget(made);
  return made;
}

// The largest results that an operator can have whose sizes numbers decide. Empty: they have no bound.
Stack largest_results(const std::string& name, const c10::IValue* arguments, int device) {
  const at::Tensor x = arguments[0].toTensor();
  auto unknown = [&](at::IntArrayRef sizes, at::ScalarType dtype) { return unknown_tensor(device, sizes, dtype); };
  if (name == "nonzero") return {unknown({x.numel(), x.dim()}, at::kLong)};
  if (name == "masked_select") {
    const auto sizes = at::infer_size(x.sizes(), arguments[1].toTensor().sizes());
    return {unknown({c10::multiply_integers(sizes)}, x.scalar_type())};
  }
  if (name == "_unique") return {unknown({x.numel()}, x.scalar_type()), unknown(x.sizes(), at::kLong)};
  if (name == "_unique2")
    return {unknown({x.numel()}, x.scalar_type()), unknown(x.sizes(), at::kLong), unknown({x.numel()}, at::kLong)};
  if (name == "bincount" && arguments[2].toInt() > 0)
    return {unknown({arguments[2].toInt()}, arguments[1].isNone() ? at::kLong : at::kDouble)};
  if (name == "repeat_interleave" && !arguments[1].isNone()) return {unknown({arguments[1].toInt()}, at::kLong)};
  return {};
}

// Masks among indices become the places where they are true, as expandTensors of ATen/native/IndexingUtils.h does.
void expand_masks(c10::IValue& indices) {
  bool has_mask = false;
  c10::List<std::optional<at::Tensor>> expanded;
  for (const c10::IValue& part : indices.toListRef()) {
    if (part.isNone() || !part.toTensor().defined()) {
      expanded.push_back(std::nullopt);
      continue;
    }
    const at::Tensor& t = part.toTensor();
    if (t.scalar_type() != at::kBool && t.scalar_type() != at::kByte) {
      expanded.push_back(t);
      continue;
    }
    has_mask = true;
    const at::Tensor places = at::nonzero(t);
    for (int64_t d = 0; d < t.dim(); ++d) expanded.push_back(places.select(1, d));
  }
  if (has_mask) indices = expanded;
}

// Whether a number of the CPU is filled in where a mask is true, and then does so: canDispatchToMaskedFill of
// ATen/native/TensorAdvancedIndexingUtils.h.
bool fills_mask(const c10::IValue* arguments) {
  const at::Tensor x = arguments[0].toTensor(), value = arguments[2].toTensor();
  if (arguments[3].toBool() || !value.is_cpu() || value.numel() != 1) return false;
  at::Tensor mask;
  int64_t dims = 0;  // up to the mask's last
  for (const c10::IValue& part : arguments[1].toListRef()) {
    if (part.isNone() || !part.toTensor().defined()) {
      dims += !mask.defined();
      continue;
    }
    const at::Tensor& t = part.toTensor();
    const bool is_mask = t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
    if (!is_mask || mask.defined() || t.device() != x.device()) return false;
    mask = t;
    dims += t.dim();
  }
  if (!mask.defined()) return false;
  for (; dims < x.dim(); ++dims) mask = mask.unsqueeze(-1);
  x.masked_fill_(mask, value.item());
  return true;
}

}  // namespace

Values::Values(const c10::OperatorHandle& op) : name(op.operator_name().name) {
  name = name.substr(name.find("::") + 2);
  mixes_devices =
      is_one_of(name, {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put",
                       "_pack_padded_sequence", "_ctc_loss", "_ctc_loss_backward", "_use_cudnn_ctc_loss",
                       "_use_miopen_ctc_loss", "_cudnn_rnn", "set_", "_foreach_copy_", "_foreach_copy"});
  has_sizes_by_contents = is_one_of(
      name, {"nonzero", "masked_select", "_unique", "_unique2", "unique_consecutive", "unique_dim", "bincount",
             "repeat_interleave", "index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"});
  is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  has_cpu = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  is_pointwise = op.hasTag(at::Tag::pointwise);
  kind = kind_of(name);
  for (const auto& result : op.schema().returns()) is_status.push_back(result.name().rfind("info", 0) == 0);
  for (const auto& argument : op.schema().arguments()) keeps.push_back(argument.name() == "found_inf");
}

void update_values(const Finished& call) {
  if (can_run(call) && run_for_real(call)) return;
  if (run_uniform(call)) return;
  stand_in_for_all(call);
}

bool run_sizes_by_contents(const c10::OperatorHandle& op, const Values& values, Stack* stack, int device) {
  const size_t count = op.schema().arguments().size();
  c10::IValue* arguments = stack->data() + stack->size() - count;
  if (values.name.find("index") != std::string::npos) {
    if (values.name == "_index_put_impl_" && fills_mask(arguments)) {
      const at::Tensor x = arguments[0].toTensor();
      torch::jit::drop(*stack, count);
      stack->emplace_back(x);
      return true;
    }
    expand_masks(arguments[1]);
    return false;
  }
  const bool is_counted = values.name == "repeat_interleave" && op.operator_name().overload_name != "Tensor";
  if (is_counted || op.schema().is_mutable()) return false;
  bool all_known = true;
  for (size_t i = 0; i < count; ++i)
    each_tensor(arguments[i], [&](const at::Tensor& t) {
      all_known = all_known && is_known(t) && !is_doubtful(t) && t.numel() <= kMostElements;
    });
  Stack results;
  if (all_known) {
    for (const c10::IValue& value : run_on_cpu(op, arguments, count, [](const at::Tensor& t) { return on_host(t); })) {
      BelowPython below;
      results.push_back(
          map_tensors(value, c10::DeviceType::CUDA, [&](const at::Tensor& t) { return as_on_device(t, device); }));
    }
  }
  if (results.empty()) {
    results = largest_results(values.name, arguments, device);
    TORCH_CHECK_NOT_IMPLEMENTED(!results.empty(), op.operator_name(),
                                ": the numbers of its operands decide the sizes of its ",
                                "results, and they are not computed");
    doubt(values.name + " of numbers that are not known: its result is as large as it can be");
  }
  torch::jit::drop(*stack, count);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
  return true;
}

std::string name_of(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

at::Scalar read_number(const at::Tensor& self) {
  std::ostringstream words;
  words << "a number (" << name_of(self.scalar_type()) << ") that a simulated " << (self.is_cuda() ? "GPU" : "CPU")
        << " does not compute reads ";
  if (!is_known(self)) {
    const at::Scalar value = scalar_in_place_of(self);
    words << value;
    doubt(words.str());
    return value;
  }
  BelowPython below;
  const at::Scalar value = on_host(self).item();
  if (is_doubtful(self)) {
    words << value;
    doubt(words.str());
  }
  return value;
}

bool are_equal(const at::Tensor& self, const at::Tensor& other) {
  if (self.sizes() != other.sizes()) return false;
  if (!is_known(self) || !is_known(other)) {
    doubt("tensors whose numbers are not computed were compared: they are equal");
    return true;
  }
  BelowPython below;
  return at::equal(on_host(self), on_host(other));
}

at::Tensor zeros_on_host(at::IntArrayRef sizes, at::ScalarType dtype) {
  at::Tensor made = at::detail::empty_cpu(sizes, dtype);
  BelowPython below;
  return made.fill_(0);
}

}  // namespace memcheck::simulated
