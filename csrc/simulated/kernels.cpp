#include "simulated/kernels.h"

#include <ATen/core/op_registration/adaption.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>

#include "simulated/exports.h"
#include "simulated/log.h"
#include "simulated/memory.h"
#include "simulated/operands.h"
#include "simulated/plans.h"
#include "simulated/values.h"

namespace memcheck::simulated {

Rules rules;

namespace {

using torch::jit::Stack;

// What a call does to memory, which depends on the layouts of its operands and on its numbers.
struct Plan {
  bool is_doubtful = false;            // a rule does not know all that the kernel takes
  mutable bool empties_cache = false;  // when it runs first
  std::vector<Resize> resizes;
  std::vector<Output> outputs;
  std::vector<Scratch> scratch;
};

// An operator, and the plans of its calls.
struct Operator {
  explicit Operator(const c10::OperatorHandle& op, bool checks_devices);

  bool checks_devices;  // as torch's generated code does, before the kernel
  bool is_view, keeps_host_operands;
  bool uses_cublas = false;
  int64_t results_on_host = 0;           // a bit for each
  std::vector<char> writes, overwrites;  // by argument
  Values values;
  std::mutex lock;
  std::unordered_map<Key, std::shared_ptr<const Plan>, HashOfKey> plans;
};

auto& all_operators = *new std::vector<Operator*>();

Operator::Operator(const c10::OperatorHandle& op, bool checks) : checks_devices(checks), values(op) {
  const std::string name = op.operator_name().name;
  is_view = is_view_by_schema(op.schema());
  keeps_host_operands = is_one_of(
      name, {"aten::_pack_padded_sequence", "aten::_cudnn_rnn", "aten::_ctc_loss", "aten::_ctc_loss_backward"});
  const bool overwrites_all =
      is_one_of(name, {"aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_", "aten::exponential_",
                       "aten::log_normal_", "aten::cauchy_", "aten::geometric_", "aten::fill_", "aten::zero_"});
  for (const auto& argument : op.schema().arguments()) {
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    writes.push_back(is_written);
    overwrites.push_back(is_written && (argument.is_out() || overwrites_all));
  }
  all_operators.push_back(this);
}

const std::string kCublas = "cuBLAS workspace";

class Call {
 public:
  Call(const c10::OperatorHandle& op, Operator& its, Stack* stack)
      : op_(op), its_(its), stack_(stack), count_(op.schema().arguments().size()), first_(stack->size() - count_) {
    for (size_t i = 0; i < count_; ++i)
      each_tensor((*stack_)[first_ + i], [&](const at::Tensor& t) {
        operands_.push_back(t);
        argument_.push_back(i);
      });
    find_device();
  }

  void run();

 private:
  void find_device();
  void check_devices() const;
  void refuse_device(size_t operand) const;
  std::shared_ptr<const Plan> plan();
  std::shared_ptr<const Plan> make_plan();
  void note_resizes(Plan& plan, const Twins& twins) const;
  std::vector<Scratch> scratch_of(const Stack& arguments, const Stack& results) const;
  Output output_of(const c10::IValue& value, bool is_on_host, const Twins& twins, std::vector<at::Tensor>& fresh) const;
  Result result_of(const at::Tensor& t, bool is_on_host, const Twins& twins, std::vector<at::Tensor>& fresh) const;
  void execute(const Plan& plan);
  at::Tensor make(const Result& result, std::vector<c10::Storage>& fresh) const;
  std::vector<Written> writes() const;

  const c10::OperatorHandle& op_;
  Operator& its_;
  Stack* stack_;
  size_t count_, first_;
  std::vector<at::Tensor> operands_;
  std::vector<size_t> argument_;  // of each operand
  int device_ = 0;
};

void Call::find_device() {
  for (const at::Tensor& t : operands_)
    if (t.is_cuda()) {
      device_ = t.get_device();
      return;
    }
  device_ = current_device();
  for (size_t i = 0; i < count_; ++i) {
    const c10::IValue& value = (*stack_)[first_ + i];
    if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index())
      device_ = value.toDevice().index();
  }
}

// Operands of other devices are refused in torch's words. Numbers may lie on the CPU where torch takes them from there.
void Call::check_devices() const {
  for (size_t i = 0; i < operands_.size(); ++i) {
    const at::Tensor& t = operands_[i];
    if (t.is_cuda() && t.get_device() == device_) continue;
    const bool is_number = t.is_cpu() && t.dim() == 0;
    // index_put takes indices from the CPU, and no values.
    const bool may_mix = its_.values.mixes_devices && op_.schema().arguments()[argument_[i]].name() != "values";
    if (!its_.checks_devices && (may_mix || is_number)) continue;
    refuse_device(i);
  }
}

void Call::refuse_device(size_t operand) const {
  const at::Tensor& t = operands_[operand];
  if (its_.checks_devices) {
    const std::string overload = op_.operator_name().overload_name;
    const std::string method = "wrapper_CUDA_" + (overload.empty() ? "" : overload + "_") + its_.values.name;
    c10::impl::common_device_check_failure(device_at(device_), t, method.c_str(),
                                           op_.schema().arguments()[argument_[operand]].name().c_str());
  }
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
              device_at(device_), " and ", t.device(), "!");
}

std::shared_ptr<const Plan> Call::plan() {
  KeyBuilder builder;
  builder.push(global_switches());
  bool has_key = true;
  for (size_t i = 0; i < count_ && has_key; ++i) has_key = builder.add((*stack_)[first_ + i]);
  if (!has_key) return make_plan();
  {
    std::lock_guard<std::mutex> locked(its_.lock);
    auto found = its_.plans.find(builder.key);
    if (found != its_.plans.end()) return found->second;
  }
  auto made = make_plan();
  std::lock_guard<std::mutex> locked(its_.lock);
  return its_.plans.try_emplace(std::move(builder.key), std::move(made)).first->second;
}

std::shared_ptr<const Plan> Call::make_plan() {
  Twins twins;
  Stack meta;
  for (size_t i = 0; i < count_; ++i)
    meta.push_back(map_tensors((*stack_)[first_ + i], c10::DeviceType::Meta,
                               [&](const at::Tensor& t) { return twins.of(t, its_.keeps_host_operands); }));
  const Stack arguments = meta;
  {
    BelowPython below;
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
    } catch (const c10::NotImplementedError& error) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, op_.operator_name(),
                                  ": the simulated GPU cannot tell the sizes of its results, ",
                                  "because torch has no kernel of it for meta tensors that takes this call: ",
                                  std::string(error.what_without_backtrace()).substr(0, 200));
    }
  }
  auto plan = std::make_shared<Plan>();
  plan->scratch = scratch_of(arguments, meta);
  auto unknown =
      std::remove_if(plan->scratch.begin(), plan->scratch.end(), [](const Scratch& s) { return s.bytes < 0; });
  plan->is_doubtful = unknown != plan->scratch.end();
  plan->scratch.erase(unknown, plan->scratch.end());
  for (const Scratch& part : plan->scratch) plan->empties_cache |= part.empties_cache;
  note_resizes(*plan, twins);
  std::vector<at::Tensor> fresh;
  for (size_t i = 0; i < meta.size(); ++i)
    plan->outputs.push_back(output_of(meta[i], (its_.results_on_host >> i & 1) != 0, twins, fresh));
  return plan;
}

std::vector<Scratch> Call::scratch_of(const Stack& arguments, const Stack& results) const {
  if (rules.scratch == nullptr || its_.is_view) return {};
  return rules.scratch(op_, arguments, results);
}

void Call::note_resizes(Plan& plan, const Twins& twins) const {
  for (const auto& [ours, twin] : twins.pairs) {
    if (!ours.is_cuda() || (ours.sizes() == twin.sizes() && ours.strides() == twin.strides())) continue;
    for (size_t i = 0; i < operands_.size(); ++i)
      if (operands_[i].is_same(ours)) {
        plan.resizes.push_back(
            {static_cast<int>(i), static_cast<int64_t>(twin.storage().nbytes()), TensorLayout::of(twin)});
        break;
      }
  }
}

Output Call::output_of(const c10::IValue& value, bool is_on_host, const Twins& twins,
                       std::vector<at::Tensor>& fresh) const {
  if (value.isTensor()) return {false, {result_of(value.toTensor(), is_on_host, twins, fresh)}};
  if (value.isTensorList()) {
    Output output{true, {}};
    for (const at::Tensor& t : value.toTensorVector()) output.parts.push_back(result_of(t, is_on_host, twins, fresh));
    return output;
  }
  Result result{Result::kValue};
  result.value = value;
  return {false, {result}};
}

Result Call::result_of(const at::Tensor& t, bool is_on_host, const Twins& twins, std::vector<at::Tensor>& fresh) const {
  if (!t.defined()) return {Result::kUndefined};
  if (is_on_host || !t.is_meta()) return {Result::kHost, 0, 0, TensorLayout::of(t)};
  auto place_of = [&](const at::Tensor& ours) {
    for (size_t i = 0; i < operands_.size(); ++i)
      if (operands_[i].is_same(ours)) return static_cast<int>(i);
    return 0;
  };
  for (const auto& [ours, twin] : twins.pairs)
    if (twin.is_same(t)) return {Result::kOperand, place_of(ours)};
  for (const auto& [ours, twin] : twins.pairs)
    if (ours.is_cuda() && twin.storage().is_alias_of(t.storage()))
      return {Result::kView, place_of(ours), 0, TensorLayout::of(t)};
  for (size_t i = 0; i < fresh.size(); ++i)
    if (fresh[i].storage().is_alias_of(t.storage()))
      return {Result::kShared, static_cast<int>(i), 0, TensorLayout::of(t)};
  fresh.push_back(t);
  return {Result::kFresh, 0, static_cast<int64_t>(t.storage().nbytes()), TensorLayout::of(t)};
}

at::Tensor Call::make(const Result& result, std::vector<c10::Storage>& fresh) const {
  switch (result.kind) {
    case Result::kOperand:
      return operands_[result.source];
    case Result::kView:
      return result.layout.tensor_in(operands_[result.source].storage(), c10::DispatchKey::CUDA);
    case Result::kFresh:
      fresh.push_back(new_storage(device_, result.bytes, result.layout.dtype));
      return result.layout.tensor_in(fresh.back(), c10::DispatchKey::CUDA);
    case Result::kShared:
      return result.layout.tensor_in(fresh[result.source], c10::DispatchKey::CUDA);
    case Result::kHost:
      return zeros_on_host(result.layout.sizes, result.layout.dtype);
    default:
      return {};
  }
}

void Call::execute(const Plan& plan) {
  std::vector<c10::DataPtr> scratch;
  auto take = [&](bool is_first) {
    for (const Scratch& part : plan.scratch) {
      if (part.is_first != is_first || part.is_kept) continue;
      if (part.empties_cache && plan.empties_cache) empty_cache();
      const Requesting requesting(Purpose::scratch, part.name);
      if (part.bytes > 0) scratch.push_back(allocate(device_, part.bytes));
    }
  };
  take(true);
  for (const Resize& resize : plan.resizes) {
    const at::Tensor& t = operands_[resize.operand];
    t.unsafeGetTensorImpl()->set_sizes_and_strides(resize.layout.sizes, resize.layout.strides, resize.layout.offset);
    grow_storage(t, resize.bytes);
  }
  Stack results;
  std::vector<c10::Storage> fresh;
  for (const Output& output : plan.outputs) {
    if (!output.is_list && output.parts[0].kind == Result::kValue) {
      results.push_back(output.parts[0].value);
    } else if (!output.is_list) {
      results.emplace_back(make(output.parts[0], fresh));
    } else {
      c10::List<at::Tensor> list;
      for (const Result& part : output.parts) list.push_back(make(part, fresh));
      results.emplace_back(std::move(list));
    }
  }
  take(false);
  plan.empties_cache = false;
  for (const Scratch& part : plan.scratch)
    if (part.is_kept) keep_workspace(part.name, device_, part.bytes);
  if (its_.uses_cublas && rules.cublas_workspace_bytes > 0) {
    if (rules.keeps_cublas_workspace) {
      keep_workspace(kCublas, device_, rules.cublas_workspace_bytes);
    } else {
      const Requesting requesting(Purpose::workspace, kCublas);
      scratch.push_back(allocate(device_, rules.cublas_workspace_bytes));
    }
  }
  while (!scratch.empty()) scratch.pop_back();
  update_values({op_, its_.values, stack_->data() + first_, count_, writes(), results});
  torch::jit::drop(*stack_, count_);
  for (c10::IValue& result : results) stack_->push_back(std::move(result));
}

std::vector<Written> Call::writes() const {
  std::vector<Written> found;
  for (size_t i = 0; i < operands_.size(); ++i)
    if (its_.writes[argument_[i]] && operands_[i].is_cuda())
      found.push_back({operands_[i], its_.overwrites[argument_[i]] != 0, argument_[i]});
  return found;
}

void Call::run() {
  Running running(&op_.operator_name());
  check_devices();
  if (its_.values.has_sizes_by_contents && run_sizes_by_contents(op_, its_.values, stack_, device_)) return;
  execute(*plan());
}

struct KernelOfOperator final : c10::OperatorKernel {
  KernelOfOperator(const c10::OperatorHandle& op, bool checks_devices)
      : its(std::make_shared<Operator>(op, checks_devices)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { Call(op, *its, stack).run(); }
  std::shared_ptr<Operator> its;
};

// The operators of aten that are registered, by their names without overloads.
auto& operators = *new std::unordered_multimap<std::string, std::shared_ptr<Operator>>();
auto& registrations = *new std::vector<c10::RegistrationHandleRAII>();

// Operators that are not registered, such as users' own.
void run_any(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  static std::mutex lock;
  static auto& found = *new std::unordered_map<const void*, std::unique_ptr<Operator>>();
  Operator* its;
  {
    std::lock_guard<std::mutex> locked(lock);
    auto& entry = found[&op.schema()];
    if (entry == nullptr) {
      entry = std::make_unique<Operator>(op, false);
      auto known = operators.find(op.operator_name().name);
      if (known != operators.end()) entry->uses_cublas = known->second->uses_cublas;
    }
    its = entry.get();
  }
  Call(op, *its, stack).run();
}

void register_operator(const std::string& name, const std::string& overload, bool checks_devices) {
  auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op) return;
  auto kernel = std::make_unique<KernelOfOperator>(*op, checks_devices);
  operators.emplace(name, kernel->its);
  registrations.push_back(c10::Dispatcher::singleton().registerImpl(
      {name, overload}, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
      std::nullopt, nullptr, "memcheck's simulated GPU"));
}

}  // namespace
}  // namespace memcheck::simulated

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&memcheck::simulated::run_any>());
}

using namespace memcheck::simulated;

// Names of operators with kernels of CUDA, a line each, of aten if they say no other namespace; a "!" before it:
// devices are not checked before the kernel.
MEMCHECK_EXPORT void memcheck_simulated_register(const char* names) {
  Silence silence;
  std::istringstream lines(names);
  for (std::string line; std::getline(lines, line);) {
    const bool checks_devices = line[0] != '!';
    const std::string full = line.substr(checks_devices ? 0 : 1);
    const size_t dot = full.find('.');
    const std::string name = full.substr(0, dot);
    register_operator(name.find("::") == std::string::npos ? "aten::" + name : name,
                      dot == std::string::npos ? "" : full.substr(dot + 1), checks_devices);
  }
}
// Facts about an operator and all its overloads.
MEMCHECK_EXPORT void memcheck_simulated_fact(const char* name, int uses_cublas, int64_t results_on_host) {
  auto [begin, end] = operators.equal_range(name);
  for (auto each = begin; each != end; ++each) {
    each->second->uses_cublas = uses_cublas != 0;
    each->second->results_on_host = results_on_host;
  }
}
MEMCHECK_EXPORT Rules* memcheck_simulated_rules() {
  return &rules;
}
// Rules are asked again: of all calls, or of those about which they did not know everything.
MEMCHECK_EXPORT void memcheck_simulated_forget_plans(int all) {
  for (Operator* each : all_operators) {
    std::lock_guard<std::mutex> locked(each->lock);
    for (auto plan = each->plans.begin(); plan != each->plans.end();)
      plan = all != 0 || plan->second->is_doubtful ? each->plans.erase(plan) : std::next(plan);
  }
}
