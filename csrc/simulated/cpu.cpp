#include "simulated/cpu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <unordered_map>

#include "simulated/below_python.h"
#include "simulated/cpu_memory.h"
#include "simulated/operands.h"
#include "simulated/values.h"

namespace memcheck::simulated {
namespace {

using torch::jit::Stack;

// Operators with a kernel of the CPU that reads no numbers.
bool reads_nothing(const std::string& name) {
  return is_one_of(name, {"empty", "empty_strided", "set_", "resize_", "_fused_sdp_choice", "is_set_to",
                          "_efficientzerotensor", "record_stream", "_reshape_alias"});
}

// Operators whose kernel serves all devices, and reads numbers itself.
bool reads_on_any_device(const std::string& name) {
  return is_one_of(name, {"copy_", "_convolution", "mkldnn_convolution", "convolution_backward", "_mkldnn_transpose",
                          "_linalg_check_errors"});
}

// The plans of an operator's calls.
struct Plans {
  std::mutex lock;
  std::unordered_map<Key, std::shared_ptr<const CpuPlan>, HashOfKey> known;
};

// By its name, as a table may have plans of an operator that does not exist yet.
Plans& plans_of(const std::string& name) {
  static std::mutex lock;
  static auto& all = *new std::unordered_map<std::string, Plans>();
  std::lock_guard<std::mutex> locked(lock);
  return all[name];
}

// For tables on disk.
std::mutex probed_lock;
auto& probed = *new std::vector<ProbedPlan>();

// What precedes a key: plans of one table, and those by rules, are not those of another.
Key prefix() {
  return {cpu_options.table, cpu_options.probed_first_bytes};
}

struct Operator {
  explicit Operator(const c10::OperatorHandle& op);

  bool is_passed_on;  // to torch's kernel, which reads nothing, or calls other operators
  bool has_sizes_by_contents, depends_on_integers;
  int dtype_argument = -1;               // of an operator that only allocates
  std::vector<char> writes, overwrites;  // by argument
  Values values;
  Plans& plans;
};

Operator::Operator(const c10::OperatorHandle& op) : values(op), plans(plans_of(toString(op.operator_name()))) {
  const std::string& full = op.operator_name().name;
  const bool is_torchs = full.rfind("aten::", 0) == 0;
  is_passed_on =
      is_view_by_schema(op.schema()) || (is_torchs && reads_nothing(values.name)) ||
      !(op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || (is_torchs && reads_on_any_device(values.name)));
  if (is_torchs && is_one_of(values.name, {"empty", "empty_strided"}))
    dtype_argument = op.schema().argumentIndexWithName("dtype").value_or(-1);
  has_sizes_by_contents = values.has_sizes_by_contents || op.hasTag(at::Tag::dynamic_output_shape);
  depends_on_integers = !values.is_pointwise && cpu_facts.of_any_integers.count(values.name) == 0;
  const bool overwrites_all =
      is_one_of(values.name, {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
                              "geometric_", "fill_", "zero_", "copy_"});
  // The schema does not say that these are written.
  const bool has_statistics = values.name == "native_batch_norm";
  for (const auto& argument : op.schema().arguments()) {
    const bool is_written = (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) ||
                            (has_statistics && argument.name().rfind("running_", 0) == 0);
    writes.push_back(is_written);
    overwrites.push_back(is_written && (argument.is_out() || overwrites_all));
  }
}

// Integers that are part of a key, because a kernel may allocate by their values.
constexpr int64_t kMostHashed = 100'000;

class Call {
 public:
  Call(const c10::OperatorHandle& op, Operator& its, c10::DispatchKeySet keys, Stack* stack)
      : op_(op), its_(its), keys_(keys), stack_(stack), count_(op.schema().arguments().size()) {
    first_ = stack_->size() - count_;
    list_operands();
  }
  void run();

 private:
  void list_operands();
  bool is_ours() const;
  bool can_run_for_real() const;
  bool run_for_real();
  bool answer();
  std::shared_ptr<const CpuPlan> plan();
  Key key(bool& has_key) const;
  CpuPlan make_plan() const;
  std::optional<CpuPlan> plan_by_rule() const;
  std::optional<CpuPlan> plan_on_meta(bool asks_rule) const;
  CpuPlan plan_by_probe_or_meta() const;
  bool knows_integers() const;
  // Whether a run of the kernel does not show what it may allocate.
  bool varies() const { return at::get_num_threads() > 1 && cpu_facts.by_threads.count(its_.values.name) > 0; }
  void execute(const CpuPlan& plan);
  void note_fill(const std::vector<Written>& written) const;
  std::vector<Written> writes() const;
  const c10::IValue* arguments() const { return stack_->data() + first_; }
  void pass_on() { op_.redispatchBoxed(keys_, stack_); }

  const c10::OperatorHandle& op_;
  Operator& its_;
  c10::DispatchKeySet keys_;
  Stack* stack_;
  size_t count_, first_;
  std::vector<at::Tensor> operands_;
  std::vector<size_t> argument_;  // of each operand
  int64_t bytes_ = 0;             // of the operands
};

void Call::list_operands() {
  for (size_t i = 0; i < count_; ++i)
    each_tensor(arguments()[i], [&](const at::Tensor& t) {
      operands_.push_back(t);
      argument_.push_back(i);
      // Symbolic sizes are those of the compiler's own tensors.
      bytes_ += t.has_storage() ? t.storage().sym_nbytes().maybe_as_int().value_or(0) : 0;
    });
}

bool Call::is_ours() const {
  return std::all_of(operands_.begin(), operands_.end(), [](const at::Tensor& t) {
    return is_simulated(t) && !t.is_nested() && !t.is_quantized() && t.key_set().has(c10::DispatchKey::CPU);
  });
}

// Whether the operands are small, and known where they are read, so that the kernel itself may run.
bool Call::can_run_for_real() const {
  if (varies()) return false;
  for (size_t i = 0; i < operands_.size(); ++i) {
    const at::Tensor& t = operands_[i];
    const bool is_read = !its_.overwrites[argument_[i]];
    const int64_t most =
        its_.has_sizes_by_contents ? kMostElements : most_kept_bytes(t.scalar_type()) / t.element_size();
    if (t.numel() > most) return false;
    const Contents* contents = contents_of(t);
    if (contents == nullptr) continue;
    if (its_.writes[argument_[i]] && !contents->is_small) return false;
    if (!is_read) continue;
    if (contents->is_doubtful || contents->state == Contents::kUnknown) return false;
    if (contents->state == Contents::kConstant && !contents->is_small) return false;
  }
  return true;
}

bool Call::run_for_real() {
  if (!can_run_for_real()) return false;
  for (size_t i = 0; i < operands_.size(); ++i) {
    const Contents* contents = contents_of(operands_[i]);
    const bool is_written = its_.writes[argument_[i]];
    if (contents == nullptr || (!is_written && contents->state == Contents::kKnown)) continue;
    if (!prepare_write(operands_[i], is_written && its_.overwrites[argument_[i]])) return false;
  }
  const Stack before(stack_->begin() + static_cast<int64_t>(first_), stack_->end());
  std::vector<std::pair<at::Tensor, TensorLayout>> layouts;
  for (size_t i = 0; i < operands_.size(); ++i)
    if (its_.writes[argument_[i]]) layouts.emplace_back(operands_[i], TensorLayout::of(operands_[i]));
  try {
    RunningForReal real;
    op_.redispatchBoxed(keys_, stack_);
  } catch (const TooLarge&) {
    stack_->resize(first_);
    stack_->insert(stack_->end(), before.begin(), before.end());
    for (const auto& [t, layout] : layouts)  // A result that was to grow has its new sizes, and no memory.
      t.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, layout.offset);
    return false;
  }
  return true;
}

// Answers operators that return a number, or nothing.
bool Call::answer() {
  const std::string& name = its_.values.name;
  if (name == "_local_scalar_dense" || name == "equal") {
    const at::Tensor self = operands_[0];
    const c10::IValue found = name == "equal" ? c10::IValue(are_equal(self, operands_[1])) : read_number(self);
    torch::jit::drop(*stack_, count_);
    stack_->push_back(found);
    return true;
  }
  if (name == "_linalg_check_errors") {
    torch::jit::drop(*stack_, count_);
    return true;
  }
  return false;
}

Key Call::key(bool& has_key) const {
  KeyBuilder builder(/*rounds_numbers=*/true);
  builder.key = prefix();
  builder.push(global_switches());
  builder.push(at::get_num_threads() << 1 | static_cast<int64_t>(at::GradMode::is_enabled()));
  has_key = true;
  for (size_t i = 0; i < count_ && has_key; ++i) has_key = builder.add(arguments()[i]);
  if (!its_.depends_on_integers) return std::move(builder.key);
  for (size_t i = 0; i < operands_.size(); ++i) {
    const at::Tensor& t = operands_[i];
    const bool is_read = !its_.overwrites[argument_[i]];
    if (!is_read || !at::isIntegralType(t.scalar_type(), /*includeBool=*/true) || t.numel() > kMostHashed) continue;
    const Contents* contents = contents_of(t);
    if (contents == nullptr) continue;
    if (contents->state == Contents::kConstant) builder.push(static_cast<int64_t>(contents->constant));
    if (contents->has_stand_in) builder.push(contents->stand_in);
    if (contents->state != Contents::kKnown) continue;
    Uncounted uncounted;
    const at::Tensor dense = t.contiguous();
    builder.push(hash_of({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()}));
  }
  return std::move(builder.key);
}

std::shared_ptr<const CpuPlan> Call::plan() {
  bool has_key = false;
  Key its_key = key(has_key);
  if (!has_key) return std::make_shared<const CpuPlan>(make_plan());
  {
    std::lock_guard<std::mutex> locked(its_.plans.lock);
    auto found = its_.plans.known.find(its_key);
    if (found != its_.plans.known.end()) return found->second;
  }
  const auto made = std::make_shared<const CpuPlan>(make_plan());
  if (made->is_probed && cpu_options.table != 0) {
    std::lock_guard<std::mutex> locked(probed_lock);
    probed.push_back({toString(op_.operator_name()), its_key, made});
  }
  std::lock_guard<std::mutex> locked(its_.plans.lock);
  return its_.plans.known.try_emplace(std::move(its_key), made).first->second;
}

CpuPlan Call::make_plan() const {
  if (varies() || bytes_ > cpu_options.probed_first_bytes)
    if (auto found = plan_on_meta(/*asks_rule=*/true)) return *found;
  if (bytes_ <= cpu_options.most_probed_bytes) {
    CpuPlan plan = plan_by_probe_or_meta();
    if (varies() && plan.doubt.empty()) plan.doubt = "what threads of " + its_.values.name + " have at once";
    plan.is_probed = true;
    return plan;
  }
  auto found = plan_on_meta(/*asks_rule=*/false);
  TORCH_CHECK_NOT_IMPLEMENTED(found, op_.operator_name(), " of operands that have ", bytes_,
                              " bytes: the simulated CPU knows no rule for it, and it is too large to run alone");
  return *found;
}

// Sizes by the kernel for meta tensors, and scratch by a rule. Empty: there is no such kernel, or no rule.
std::optional<CpuPlan> Call::plan_on_meta(bool asks_rule) const {
  if (its_.has_sizes_by_contents && its_.values.name.find("index") == std::string::npos) return std::nullopt;
  Uncounted uncounted;
  Twins twins;
  Stack results;
  for (size_t i = 0; i < count_; ++i)
    results.push_back(map_tensors(arguments()[i], c10::DeviceType::Meta,
                                  [&](const at::Tensor& t) { return twins.of(t, /*keeps_host=*/false); }));
  for (c10::IValue& value : results)
    if (value.isDevice() && value.toDevice().is_cpu()) value = c10::Device(c10::DeviceType::Meta);
  const Stack given = results;
  std::optional<std::vector<CpuScratch>> scratch;
  {
    BelowPython below;
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
    } catch (const std::exception& error) {
      if (std::strstr(error.what(), "overflow") != nullptr) throw;  // Of sizes: no device has such a tensor.
      return std::nullopt;
    }
    if (asks_rule) scratch = cpu_facts.scratch(op_, given, results);
  }
  if (asks_rule && !scratch) return std::nullopt;
  CpuPlan plan;
  std::vector<int> taken;
  auto take = [&](bool is_first) {
    for (const CpuScratch& part : scratch.value_or(std::vector<CpuScratch>{}))
      if (part.is_first == is_first && part.bytes > 0) {
        taken.push_back(static_cast<int>(plan.steps.size()));
        plan.steps.push_back({part.bytes});
      }
  };
  take(true);
  std::unordered_map<const void*, int> fresh;
  note_outcome(plan, results, twins.pairs, operands_, [&](const at::Tensor& t) {
    auto [found, is_new] = fresh.try_emplace(t.storage().unsafeGetStorageImpl(), static_cast<int>(plan.steps.size()));
    if (is_new && t.storage().nbytes() == 0) found->second = -1;
    if (is_new && found->second >= 0) plan.steps.push_back({static_cast<int64_t>(t.storage().nbytes())});
    return found->second;
  });
  take(false);
  for (; !taken.empty(); taken.pop_back()) plan.steps.push_back({0, taken.back()});
  for (const CpuScratch& part : scratch.value_or(std::vector<CpuScratch>{}))
    if (!part.doubt.empty()) plan.doubt = part.doubt;
  if (!asks_rule) plan.doubt = "what " + its_.values.name + " takes beside its results is not known";
  return plan;
}

bool Call::knows_integers() const {
  return std::all_of(operands_.begin(), operands_.end(),
                     [](const at::Tensor& t) { return t.is_floating_point() || t.is_complex() || is_known(t); });
}

// An error of the kernel is the program's, unless it may come from numbers that are made up.
CpuPlan Call::plan_by_probe_or_meta() const {
  try {
    return plan_by_probe({op_, keys_, arguments(), count_, operands_, its_.values.is_random,
                          its_.has_sizes_by_contents && !its_.values.has_sizes_by_contents});
  } catch (const c10::LinAlgError&) {
    if (auto found = plan_on_meta(/*asks_rule=*/false)) return *found;
    throw;
  } catch (const std::exception&) {
    if (knows_integers()) throw;
    if (auto found = plan_on_meta(/*asks_rule=*/false)) return *found;
    throw;
  }
}

std::vector<Written> Call::writes() const {
  std::vector<Written> found;
  for (size_t i = 0; i < operands_.size(); ++i)
    if (its_.writes[argument_[i]]) found.push_back({operands_[i], its_.overwrites[argument_[i]] != 0, argument_[i]});
  return found;
}

// A tensor that is filled with one number, of which a large one keeps nothing else.
void Call::note_fill(const std::vector<Written>& written) const {
  const std::string& name = its_.values.name;
  if (written.size() != 1 || !covers_storage(written[0].tensor) || written[0].tensor.is_complex()) return;
  if (name == "zero_") set_constant(written[0].tensor, 0);
  if (name == "fill_" && arguments()[1].isScalar() && !arguments()[1].isComplexDouble())
    set_constant(written[0].tensor, arguments()[1].toScalar().toDouble());
  if (name != "copy_" || !arguments()[1].isTensor()) return;
  const Contents* from = contents_of(arguments()[1].toTensor());
  if (from != nullptr && from->state == Contents::kConstant) set_constant(written[0].tensor, from->constant);
}

// That of a table may be wrong.
void check_room(const TensorLayout& layout, size_t bytes) {
  const size_t needed =
      at::detail::computeStorageNbytes(layout.sizes, layout.strides, c10::elementSize(layout.dtype), layout.offset);
  TORCH_CHECK(needed <= bytes, "a plan has ", bytes, " bytes for a tensor of ", needed);
}

void Call::execute(const CpuPlan& plan) {
  TORCH_CHECK(plan.outputs.size() == op_.schema().returns().size(), "a plan of ", op_.operator_name(),
              " has the wrong number of results");
  if (!plan.doubt.empty()) doubt(plan.doubt);
  c10::Allocator* allocator = c10::GetCPUAllocator();
  std::vector<c10::DataPtr> blocks(plan.steps.size());
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    if (plan.steps[i].frees < 0) {
      blocks[i] = allocator->allocate(plan.steps[i].bytes);
    } else {
      blocks.at(plan.steps[i].frees).clear();
    }
  }
  for (const auto& [resize, step] : plan.resizes) {
    const at::Tensor& t = operands_.at(resize.operand);
    check_room(resize.layout, step < 0 ? t.storage().nbytes() : plan.steps.at(step).bytes);
    t.unsafeGetTensorImpl()->set_sizes_and_strides(resize.layout.sizes, resize.layout.strides, resize.layout.offset);
    if (step < 0) continue;
    auto* storage = t.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(std::move(blocks[step]));
    storage->set_nbytes(plan.steps[step].bytes);
  }
  std::unordered_map<int, c10::Storage> storages;
  auto make = [&](const Result& result) -> at::Tensor {
    if (result.kind == Result::kUndefined) return {};
    if (result.kind == Result::kOperand) return operands_.at(result.source);
    if (result.kind == Result::kView) {
      const c10::Storage& storage = operands_.at(result.source).storage();
      check_room(result.layout, storage.nbytes());
      return result.layout.tensor_in(storage, c10::DispatchKey::CPU);
    }
    const int64_t bytes = result.source < 0 ? 0 : std::min(result.bytes, plan.steps.at(result.source).bytes);
    check_room(result.layout, bytes);
    c10::Storage& storage = storages[result.source];
    if (!storage || result.source < 0)
      storage =
          c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                       result.source < 0 ? allocator->allocate(0) : std::move(blocks[result.source]), allocator, true);
    return result.layout.tensor_in(storage, c10::DispatchKey::CPU);
  };
  Stack results;
  for (const Output& output : plan.outputs) {
    if (output.is_list) {
      c10::List<at::Tensor> list;
      for (const Result& part : output.parts) list.push_back(make(part));
      results.emplace_back(std::move(list));
    } else if (output.parts[0].kind == Result::kValue) {
      results.push_back(output.parts[0].value);
    } else {
      results.emplace_back(make(output.parts[0]));
    }
  }
  blocks.clear();
  const auto written = writes();
  {
    Uncounted uncounted;
    update_values({op_, its_.values, arguments(), count_, written, results});
    note_fill(written);
  }
  torch::jit::drop(*stack_, count_);
  for (c10::IValue& result : results) stack_->push_back(std::move(result));
}

void Call::run() {
  if (its_.is_passed_on) {
    const bool has_dtype = its_.dtype_argument >= 0 && arguments()[its_.dtype_argument].isInt();
    Room room(has_dtype ? most_kept_bytes(arguments()[its_.dtype_argument].toScalarType()) : 0);
    return pass_on();
  }
  if (!is_ours()) return pass_on();
  for (size_t i = 0; i < operands_.size(); ++i)
    if (its_.writes[argument_[i]]) keep_version(operands_[i]);
  if (run_for_real() || answer()) return;
  if (its_.values.has_sizes_by_contents) {
    const bool is_index = its_.values.name.find("index") != std::string::npos;
    std::optional<Uncounted> uncounted;
    if (!is_index) uncounted.emplace();
    if (run_sizes_by_contents(op_, its_.values, stack_, 0)) return;
    operands_.clear();
    argument_.clear();
    bytes_ = 0;
    list_operands();
  }
  const auto its_plan = plan();
  if (its_plan->runs_as_it_is) return pass_on();
  execute(*its_plan);
}

// The operators, by their schemas.
Operator& operator_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const void*, Operator*> known;
  Operator*& its = known[&op.schema()];
  if (its != nullptr) return *its;
  static std::mutex lock;
  static auto& all = *new std::unordered_map<const void*, std::unique_ptr<Operator>>();
  std::lock_guard<std::mutex> locked(lock);
  auto& entry = all[&op.schema()];
  if (entry == nullptr) entry = std::make_unique<Operator>(op);
  its = entry.get();
  return *its;
}

void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet all, Stack* stack) {
  const auto keys = all & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kSwitch);
  // Modes and subclasses of Python come first. What they call comes here again.
  if (keys.has_any(c10::python_ks)) return op.redispatchBoxed(keys, stack);
  Call(op, operator_of(op), keys, stack).run();
}

}  // namespace

void note_outcome(CpuPlan& plan, const Stack& results, const Pairs& pairs, const std::vector<at::Tensor>& operands,
                  const std::function<int(const at::Tensor&)>& step_of) {
  auto place_of = [&](const at::Tensor& ours) {
    const auto found = std::find_if(operands.begin(), operands.end(), [&](const auto& t) { return t.is_same(ours); });
    return static_cast<int>(found - operands.begin());
  };
  for (const auto& [ours, theirs] : pairs) {
    if (ours.sizes() == theirs.sizes() && ours.strides() == theirs.strides()) continue;
    const auto bytes = static_cast<int64_t>(theirs.storage().nbytes());
    const bool has_grown = bytes > static_cast<int64_t>(ours.storage().nbytes());
    plan.resizes.push_back({{place_of(ours), bytes, TensorLayout::of(theirs)}, has_grown ? step_of(theirs) : -1});
  }
  auto result_of = [&](const at::Tensor& t) -> Result {
    if (!t.defined()) return {Result::kUndefined};
    for (const auto& [ours, theirs] : pairs)
      if (theirs.is_same(t)) return {Result::kOperand, place_of(ours)};
    for (const auto& [ours, theirs] : pairs)
      if (theirs.storage().is_alias_of(t.storage())) return {Result::kView, place_of(ours), 0, TensorLayout::of(t)};
    return {Result::kFresh, step_of(t), static_cast<int64_t>(t.storage().nbytes()), TensorLayout::of(t)};
  };
  for (const c10::IValue& value : results) {
    if (value.isTensor()) {
      plan.outputs.push_back({false, {result_of(value.toTensor())}});
    } else if (value.isTensorList()) {
      Output output{true, {}};
      for (const at::Tensor& t : value.toTensorVector()) output.parts.push_back(result_of(t));
      plan.outputs.push_back(std::move(output));
    } else {
      Result result{Result::kValue};
      result.value = value;
      plan.outputs.push_back({false, {result}});
    }
  }
}

std::vector<ProbedPlan> take_probed() {
  std::vector<ProbedPlan> found;
  std::lock_guard<std::mutex> locked(probed_lock);
  const auto rest = std::stable_partition(probed.begin(), probed.end(),
                                          [](const ProbedPlan& each) { return each.key.front() != cpu_options.table; });
  found.assign(std::make_move_iterator(rest), std::make_move_iterator(probed.end()));
  probed.erase(rest, probed.end());
  for (ProbedPlan& each : found) each.key.erase(each.key.begin(), each.key.begin() + prefix().size());
  return found;
}

void know(ProbedPlan its) {
  Key key = prefix();
  key.insert(key.end(), its.key.begin(), its.key.end());
  Plans& plans = plans_of(its.name);
  std::lock_guard<std::mutex> locked(plans.lock);
  plans.known.try_emplace(std::move(key), std::move(its.plan));
}

void register_cpu_kernel() {
  static auto& registered = *new std::vector<c10::RegistrationHandleRAII>();
  if (!registered.empty()) return;
  registered.push_back(c10::Dispatcher::singleton().registerFallback(
      kSwitch, c10::KernelFunction::makeFromBoxedFunction<&run_operator>(), "memcheck's simulated CPU"));
}

}  // namespace memcheck::simulated
