#include "simulated/kernels.h"

#include <ATen/Context.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <unordered_map>

#include "simulated/exports.h"
#include "simulated/log.h"
#include "simulated/memory.h"
#include "simulated/operands.h"
#include "simulated/values.h"

namespace memcheck::simulated {

Rules rules;

namespace {

c10::impl::LocalDispatchKeySet keys_below_python() {
  c10::impl::PODLocalDispatchKeySet keys{};
  keys.set_included(c10::default_included_set);
  keys.set_excluded(c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::python_ks |
                    c10::DispatchKeySet(c10::DispatchKey::PreDispatch));
  return c10::impl::LocalDispatchKeySet(keys);
}

}  // namespace

BelowPython::BelowPython()
    : keys_(keys_below_python()), functions_(static_cast<int>(at::impl::PythonTorchFunctionTLS::get_disabled_state())) {
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
}
BelowPython::~BelowPython() {
  at::impl::PythonTorchFunctionTLS::set_disabled_state(static_cast<at::impl::TorchFunctionDisabledState>(functions_));
}

namespace {

using torch::jit::Stack;

struct TensorLayout {
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset;
  at::ScalarType dtype;
  bool is_conj, is_neg;

  static TensorLayout of(const at::Tensor& t) {
    return {{t.sizes().begin(), t.sizes().end()},
            {t.strides().begin(), t.strides().end()},
            t.storage_offset(),
            t.scalar_type(),
            t.is_conj(),
            t.is_neg()};
  }
  at::Tensor tensor_in(c10::Storage storage) const {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::scalarTypeToTypeMeta(dtype));
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    if (is_conj) made._set_conj(true);
    if (is_neg) made._set_neg(true);
    return made;
  }
};

// A result of an operator, or one of a list of results.
struct Result {
  enum Kind {
    kUndefined,
    kValue,    // no tensor
    kOperand,  // an operand itself
    kView,     // of an operand
    kFresh,    // with memory of its own
    kShared,   // in the memory of an earlier fresh result
    kHost      // on the CPU
  };
  Kind kind;
  int source = 0;  // the operand, or the number of the fresh result
  int64_t bytes = 0;
  TensorLayout layout{};
  c10::IValue value;
};

struct Output {
  bool is_list;
  std::vector<Result> parts;
};

struct Resize {
  int operand;
  int64_t bytes;
  TensorLayout layout;
};

// What a call does to memory, which depends on the layouts of its operands and on its numbers.
struct Plan {
  bool is_doubtful = false;            // a rule does not know all that the kernel takes
  mutable bool empties_cache = false;  // when it runs first
  std::vector<Resize> resizes;
  std::vector<Output> outputs;
  std::vector<Scratch> scratch;
};

using Key = std::vector<int64_t>;
struct HashOfKey {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 0x9E3779B97F4A7C15ull + (hash >> 29);
    return hash;
  }
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

bool is_view_by_schema(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() &&
         std::all_of(schema.returns().begin(), schema.returns().end(),
                     [](const auto& each) { return each.alias_info() != nullptr && !each.alias_info()->isWrite(); });
}

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

// What decides a plan, as numbers. False: something in it has no number.
class KeyBuilder {
 public:
  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isNone()) return push(-1);
    if (value.isInt()) return push(1) && push(value.toInt());
    if (value.isBool()) return push(2) && push(value.toBool());
    if (value.isDouble()) return push(3) && push_double(value.toDouble());
    if (value.isDevice()) return push(4) && push(static_cast<int>(value.toDevice().type()));
    if (value.isString()) return add_text(value.toStringRef());
    if (value.isComplexDouble())
      return push(6) && push_double(value.toComplexDouble().real()) && push_double(value.toComplexDouble().imag());
    if (value.isGenerator()) return push(7);
    if (!value.isList()) return false;
    push(8);
    const auto list = value.toListRef();
    push(static_cast<int64_t>(list.size()));
    return std::all_of(list.begin(), list.end(), [&](const c10::IValue& part) { return add(part); });
  }
  bool push(int64_t number) {
    key.push_back(number);
    return true;
  }
  Key key;

 private:
  bool push_double(double number) {
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return push(bits);
  }
  bool add_text(const std::string& text) {
    push(5);
    return push(static_cast<int64_t>(std::hash<std::string>()(text)));
  }
  bool add_tensor(const at::Tensor& t) {
    if (!t.defined()) return push(-2);
    if (!t.has_storage() || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
    const auto* storage = t.storage().unsafeGetStorageImpl();
    const auto found = storages_.try_emplace(storage, static_cast<int64_t>(storages_.size())).first;
    const auto same = tensors_.try_emplace(t.unsafeGetTensorImpl(), static_cast<int64_t>(tensors_.size())).first;
    const int64_t bits = t.is_cuda() | t.is_cpu() << 1 | t.is_conj() << 2 | t.is_neg() << 3 |
                         t.unsafeGetTensorImpl()->is_wrapped_number() << 4;
    push(9);
    push(static_cast<int64_t>(t.scalar_type()) << 8 | bits);
    push(found->second << 32 | same->second);
    push(static_cast<int64_t>(storage->nbytes()));
    push(t.storage_offset());
    push(t.dim());
    key.insert(key.end(), t.sizes().begin(), t.sizes().end());
    key.insert(key.end(), t.strides().begin(), t.strides().end());
    return true;
  }
  std::unordered_map<const void*, int64_t> storages_, tensors_;
};

int64_t global_switches() {
  const auto& context = at::globalContext();
  return context.userEnabledCuDNN() | context.benchmarkCuDNN() << 1 | context.deterministicCuDNN() << 2 |
         context.deterministicAlgorithms() << 3 | static_cast<int64_t>(c10::get_default_dtype_as_scalartype()) << 8;
}

// The operands of a call, and their twins on meta.
class Twins {
 public:
  at::Tensor of(const at::Tensor& t, bool keeps_host) {
    // Kernels in Python read the value of a wrapped number.
    if (t.is_meta() || (t.is_cpu() && (keeps_host || t.unsafeGetTensorImpl()->is_wrapped_number()))) return t;
    for (const auto& [ours, twin] : pairs)
      if (ours.is_same(t)) return twin;
    auto twin =
        at::detail::make_tensor<c10::TensorImpl>(storage_of(t), c10::DispatchKeySet(c10::DispatchKey::Meta), t.dtype());
    auto* impl = twin.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj()) twin._set_conj(true);
    if (t.is_neg()) twin._set_neg(true);
    pairs.emplace_back(t, twin);
    return twin;
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // ours, and the twin

 private:
  // Storages that are the same in the operands are so in their twins.
  c10::Storage storage_of(const at::Tensor& t) {
    auto& storage = storages_[t.storage().unsafeGetStorageImpl()];
    if (!storage)
      storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                             c10::DataPtr(nullptr, c10::Device(c10::DeviceType::Meta)),
                             c10::GetAllocator(c10::DeviceType::Meta), true);
    return storage;
  }
  std::unordered_map<const void*, c10::Storage> storages_;
};

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
    if (!its_.checks_devices && (its_.values.mixes_devices || (t.is_cpu() && t.dim() == 0))) continue;
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
      return result.layout.tensor_in(operands_[result.source].storage());
    case Result::kFresh:
      fresh.push_back(new_storage(device_, result.bytes, result.layout.dtype));
      return result.layout.tensor_in(fresh.back());
    case Result::kShared:
      return result.layout.tensor_in(fresh[result.source]);
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
