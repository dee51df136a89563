#include "memory/allocation_timeline.h"

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string_view>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace memcheck {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr char kNode[] = "autograd::engine::evaluate_function: ";
constexpr char kAccumulateGrad[] = "torch::autograd::AccumulateGrad";

// Where the forward operator was called that made an autograd node.
struct Origin {
  int line = 0;
  int module = 0;
};

// The origins of the latest nodes that a thread made, by their sequence numbers.
class Origins {
 public:
  void note(uint64_t sequence, Origin origin) { entries_[sequence % kMost] = {sequence, origin}; }
  Origin find(uint64_t sequence) const {
    const Entry& entry = entries_[sequence % kMost];
    return entry.sequence == sequence ? entry.origin : Origin{};
  }

 private:
  static constexpr size_t kMost = 1 << 18;
  struct Entry {
    uint64_t sequence = std::numeric_limits<uint64_t>::max();
    Origin origin;
  };
  std::vector<Entry> entries_ = std::vector<Entry>(kMost);
};

// What a thread is in.
struct Where {
  int path = 0;
  int module = 0;
  bool in_step = false;
  Origin origin;  // of the autograd node
  int64_t node = -1;
};

struct PathTraits {
  bool is_native = false;  // torch's own operators alone, in a forward: none of them runs Python
  bool in_backward = false;
  bool accumulates = false;  // gradients, into the leaves of the graph
};

struct AllocationTimeline::Recording {
  uint64_t generation = 0;
  std::vector<AllocationEvent> events;
  std::vector<OperatorPath> paths{{0, ""}};
  std::vector<PathTraits> traits{{}};
  std::vector<std::map<std::string, int, std::less<>>> inner_paths{{}};  // of each path, by name
  std::unordered_map<uintptr_t, size_t> alive;                           // address -> the event of its allocation
  Where leading;  // the last place of the thread that opened the timeline, or of one that runs a backward
  std::shared_ptr<PeakLedger> ledger;
  std::unordered_map<uint64_t, Origins> origins;  // by thread
  std::vector<at::CallbackHandle> callbacks;
};

namespace {

using Recording = AllocationTimeline::Recording;

std::atomic<Recording*> open_recording{nullptr};
std::atomic<uint64_t> generations{0};
std::atomic<int64_t> least_bytes_with_line{kNever};

// Guards the recording. It is no mutex, because a child that is forked while a thread records must be able to unlock
// it. Nobody waits for Python's lock while holding this one.
std::atomic_flag busy = ATOMIC_FLAG_INIT;

void lock() {
  while (busy.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
}

void unlock() {
  busy.clear(std::memory_order_release);
}

// The recording belongs to the parent. It may be half written, and the child never reads it.
void forget_in_child() {
  open_recording = nullptr;
  least_bytes_with_line = kNever;
  unlock();
}

// The path that a thread is in, valid for the recording of this generation.
struct Position {
  uint64_t generation = 0;
  Where where;
  uint64_t noted_nodes = 0;  // origins of nodes with lower numbers are known
  bool keeps_line = false;   // no Python runs until the outermost operator ends
  PythonLine line;
  bool leads = false;
};

// Without a destructor, because a thread that ends may free tensors after its destructors have run.
thread_local Position own_position;
static_assert(std::is_trivially_destructible_v<Position>);

Position& position_in(const Recording& recording) {
  if (own_position.generation != recording.generation) {
    own_position = {};
    own_position.generation = recording.generation;
  }
  return own_position;
}

// What a thread is in: for one of OpenMP's, which is in no operator itself, what the thread that leads is in.
const Where& where_is(const Recording& recording, const Position& position) {
  return position.where.path == 0 && at::in_parallel_region() ? recording.leading : position.where;
}

PythonLine line_here() {
  if (own_position.generation != generations.load(std::memory_order_relaxed)) return python_line_here();
  if (own_position.keeps_line && own_position.line.number != 0) return own_position.line;
  return own_position.line = python_line_here();
}

int path_within(Recording& recording, int outer, std::string_view name) {
  const auto& known = recording.inner_paths[outer];
  if (const auto found = known.find(name); found != known.end()) return found->second;
  const int path = recording.paths.size();
  PathTraits traits = recording.traits[outer];
  traits.in_backward |= name.substr(0, std::strlen(kNode)) == kNode;
  traits.accumulates |= name == kAccumulateGrad;
  traits.is_native = (outer == 0 || traits.is_native) && name.substr(0, 6) == "aten::";
  recording.inner_paths[outer].emplace(name, path);
  recording.paths.push_back({outer, std::string(name)});
  recording.traits.push_back(traits);
  recording.inner_paths.emplace_back();
  return path;
}

void lead(Recording& recording, const Position& position) {
  if (position.leads) recording.leading = position.where;
}

// Where Python is deeper than the call of the engine, as in a checkpoint that runs its forward again, its own line
// and module count.
Origin origin_here(const Where& where, PythonLine line) {
  const bool has_own_line = line.number != 0 && !line.in_engine;
  return {has_own_line || where.origin.line == 0 ? line.number : where.origin.line,
          where.module != 0 ? where.module : where.origin.module};
}

Site site_here(const Recording& recording, const Where& where, PythonLine line) {
  const PathTraits traits = recording.traits[where.path];
  const Origin origin = origin_here(where, line);
  const Phase phase = traits.in_backward  ? Phase::Backward
                      : where.module != 0 ? Phase::Forward
                      : where.in_step     ? Phase::OptimizerStep
                                          : Phase::Elsewhere;
  return {where.path, origin.line, origin.module, phase,
          traits.accumulates && !where.in_step ? Kind::Gradient : Kind::Plain};
}

struct Entered : at::ObserverContext {
  uint64_t generation;
  Where outer;
  uint64_t first_node;  // the number of the first autograd node that the operator makes
};

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  const TimelineGuard timeline;
  if (!timeline.is_open()) return nullptr;
  Recording& recording = timeline.recording();
  Position& position = position_in(recording);
  position.leads |= function.scope() == at::RecordScope::BACKWARD_FUNCTION;
  auto entered = std::make_unique<Entered>();
  entered->generation = recording.generation;
  entered->outer = position.where;
  entered->first_node = at::sequence_number::peek();
  if (position.where.path == 0) position.line = {};
  position.where.path = path_within(recording, where_is(recording, position).path, function.name());
  position.keeps_line = recording.traits[position.where.path].is_native;
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION && function.seqNr() >= 0) {
    position.where.node = function.seqNr();
    const auto origins = recording.origins.find(function.forwardThreadId());
    if (origins != recording.origins.end()) position.where.origin = origins->second.find(function.seqNr());
  }
  lead(recording, position);
  return entered;
}

// The memory block of a plain CPU tensor; 0 for a tensor without one, or whose shape is symbolic, nested or in Python.
uintptr_t block_of(const at::Tensor& tensor) {
  const c10::TensorImpl* const implementation = tensor.unsafeGetTensorImpl();
  if (!tensor.defined() || implementation->is_python_dispatch() || implementation->has_symbolic_sizes_strides() ||
      tensor.is_nested() || !tensor.has_storage() || tensor.storage().device_type() != c10::DeviceType::CPU)
    return 0;
  // Without checks, because a storage may refuse access to its data. Only the address is used.
  return reinterpret_cast<uintptr_t>(tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
}

void note_shape(Recording& recording, const at::Tensor& tensor) {
  const uintptr_t address = block_of(tensor);
  const auto block = address == 0 ? recording.alive.end() : recording.alive.find(address);
  if (block == recording.alive.end()) return;
  AllocationEvent& event = recording.events[block->second];
  // The first tensor that fills the block gives its shape. Later ones and those that fill a part of it are views.
  if (event.shaped || static_cast<int64_t>(tensor.nbytes()) != event.bytes) return;
  event.shaped = true;
  event.shape = tensor.sizes().vec();
  event.dtype = c10::getDtypeNames(tensor.scalar_type()).first;
}

void note_shapes(Recording& recording, const c10::IValue& value) {
  if (value.isTensor()) {
    note_shape(recording, value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) note_shape(recording, tensor);
  }
}

// The nodes made by an operator that ends have its line as their origin, unless an operator within it made them.
void note_origins(Recording& recording, Position& position, uint64_t first_node, PythonLine line) {
  const uint64_t end = at::sequence_number::peek();
  const Origin origin = origin_here(position.where, line);
  Origins& origins = recording.origins[at::RecordFunction::currentThreadId()];
  for (uint64_t node = std::max(first_node, position.noted_nodes); node < end; ++node) origins.note(node, origin);
  position.noted_nodes = end;
}

void leave(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto* const entered = static_cast<const Entered*>(context);
  const bool has_nodes = entered != nullptr && least_bytes_with_line.load(std::memory_order_relaxed) != kNever &&
                         at::sequence_number::peek() > std::max(entered->first_node, own_position.noted_nodes);
  const PythonLine line = has_nodes ? line_here() : PythonLine{};
  const TimelineGuard timeline;
  if (entered == nullptr || !timeline.is_open() || timeline.recording().generation != entered->generation) return;
  Recording& recording = timeline.recording();
  if (recording.ledger == nullptr) {
    for (const c10::IValue& output : function.outputs()) note_shapes(recording, output);
  }
  Position& position = position_in(recording);
  if (has_nodes) note_origins(recording, position, entered->first_node, line);
  const Origin origin = position.where.origin;
  position.where = entered->outer;
  position.keeps_line = recording.traits[position.where.path].is_native;
  // The engine goes on with the node's results: it sums gradients to the shape of their tensors, and adds them up.
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) position.where.origin = origin;
  lead(recording, position);
}

// What a gradient's accumulation is given becomes the gradient, or is added to it and freed. A gradient that shares its
// memory, and any under create_graph, is copied: the copy has the line and the module of what was given.
std::unique_ptr<at::ObserverContext> note_gradients(const at::RecordFunction& function) {
  if (std::strcmp(function.name(), kAccumulateGrad) != 0) return nullptr;
  const TimelineGuard timeline;
  if (!timeline.is_open() || timeline.recording().ledger == nullptr) return nullptr;
  PeakLedger& ledger = *timeline.recording().ledger;
  for (const c10::IValue& input : function.inputs()) {
    if (!input.isTensor()) continue;
    const uintptr_t block = block_of(input.toTensor());
    ledger.set_kind(block, Kind::Gradient, {});
    if (const auto site = ledger.site_of(block)) {
      position_in(timeline.recording()).where.origin = {site->line, site->module};
    }
  }
  return nullptr;
}

std::unordered_set<at::RecordScope, std::hash<at::RecordScope>> operator_scopes() {
  return {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::TORCHSCRIPT_FUNCTION};
}

at::RecordFunctionCallback event_callback() {
  auto scopes = operator_scopes();
  scopes.insert(at::RecordScope::USER_SCOPE);
  return at::RecordFunctionCallback(&enter, &leave).needsOutputs(true).scopes(scopes);
}

// Without the user's ranges, whose names may be new in every step.
at::RecordFunctionCallback ledger_callback() {
  return at::RecordFunctionCallback(&enter, &leave).scopes(operator_scopes());
}

at::RecordFunctionCallback gradient_callback() {
  return at::RecordFunctionCallback(&note_gradients).needsInputs(true).scopes({at::RecordScope::BACKWARD_FUNCTION});
}

}  // namespace

AllocationTimeline::AllocationTimeline(std::shared_ptr<PeakLedger> ledger, int64_t least_bytes)
    : recording_(std::make_unique<Recording>()) {
  static const int failure = pthread_atfork(nullptr, nullptr, &forget_in_child);
  TORCH_CHECK(failure == 0, "memcheck cannot record a timeline: pthread_atfork returned ", failure);
  recording_->generation = ++generations;
  recording_->ledger = std::move(ledger);
  const bool has_ledger = recording_->ledger != nullptr;
  Recording* none = nullptr;
  TORCH_CHECK(open_recording.compare_exchange_strong(none, recording_.get()),
              "a timeline of allocations is being recorded already, and there can be only one");
  position_in(*recording_).leads = true;
  if (has_ledger) least_bytes_with_line = least_bytes;
  recording_->callbacks.push_back(at::addGlobalCallback(has_ledger ? ledger_callback() : event_callback()));
  if (has_ledger) recording_->callbacks.push_back(at::addGlobalCallback(gradient_callback()));
}

AllocationTimeline::~AllocationTimeline() {
  close();
}

void AllocationTimeline::close() {
  lock();
  Recording* own = recording_.get();
  const bool was_open = open_recording.compare_exchange_strong(own, nullptr);
  if (was_open) least_bytes_with_line = kNever;
  unlock();
  if (!was_open) return;
  for (const at::CallbackHandle callback : recording_->callbacks) at::removeCallback(callback);
}

int64_t AllocationTimeline::size() const {
  const TimelineGuard guard;
  return recording_->ledger != nullptr ? recording_->ledger->events() : recording_->events.size();
}

std::vector<AllocationEvent> AllocationTimeline::events(size_t from) const {
  const TimelineGuard guard;
  const auto& events = recording_->events;
  return {events.begin() + std::min(from, events.size()), events.end()};
}

std::vector<OperatorPath> AllocationTimeline::paths() const {
  const TimelineGuard guard;
  return recording_->paths;
}

std::vector<PeakLedger::Count> AllocationTimeline::counts() const {
  const TimelineGuard guard;
  if (!guard.is_open() || recording_->ledger == nullptr) return {};
  return recording_->ledger->counts();
}

std::vector<Site> AllocationTimeline::sites() const {
  const TimelineGuard guard;
  if (!guard.is_open() || recording_->ledger == nullptr) return {};
  return recording_->ledger->sites();
}

bool AllocationTimeline::is_held_by(const TimelineGuard& guard) const {
  return guard.is_open() && &guard.recording() == recording_.get();
}

int AllocationTimeline::set_module(int module) {
  const TimelineGuard guard;
  if (!is_held_by(guard)) return 0;
  return std::exchange(position_in(*recording_).where.module, module);
}

void AllocationTimeline::begin_step() {
  const TimelineGuard guard;
  if (is_held_by(guard)) position_in(*recording_).where.in_step = true;
}

void AllocationTimeline::end_step() {
  const TimelineGuard guard;
  if (!is_held_by(guard)) return;
  position_in(*recording_).where.in_step = false;
  if (recording_->ledger != nullptr) recording_->ledger->end_step();
}

void AllocationTimeline::set_kind(uintptr_t address, Kind kind, std::optional<int> module) {
  const TimelineGuard guard;
  if (is_held_by(guard) && recording_->ledger != nullptr) recording_->ledger->set_kind(address, kind, module);
}

void AllocationTimeline::set_kind_like(uintptr_t address, Kind kind, uintptr_t other) {
  const TimelineGuard guard;
  if (is_held_by(guard) && recording_->ledger != nullptr) recording_->ledger->set_kind_like(address, kind, other);
}

TimelineGuard::TimelineGuard(int64_t bytes) : recording_(nullptr) {
  if (open_recording.load(std::memory_order_acquire) == nullptr) return;
  // Before the lock, as it may have to wait for Python's.
  if (bytes > 0 && bytes >= least_bytes_with_line.load(std::memory_order_relaxed)) line_ = line_here();
  lock();
  recording_ = open_recording.load();
  if (recording_ == nullptr) unlock();  // the timeline has closed meanwhile
}

TimelineGuard::~TimelineGuard() {
  if (recording_ != nullptr) unlock();
}

void TimelineGuard::note(const void* data, int64_t bytes) {
  if (recording_ == nullptr) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const Where& where = where_is(*recording_, position_in(*recording_));
  if (PeakLedger* const ledger = recording_->ledger.get()) {
    if (bytes < 0) return ledger->release(address, -bytes);
    return ledger->allocate(address, bytes, site_here(*recording_, where, line_));
  }
  if (bytes > 0) {
    recording_->alive[address] = recording_->events.size();
  } else {
    recording_->alive.erase(address);
  }
  recording_->events.push_back({address, bytes, where.path, where.module, where.node, false, {}, {}});
}

void TimelineGuard::note_refusal(int64_t bytes) {
  if (recording_ == nullptr || recording_->ledger == nullptr) return;
  const Where& where = where_is(*recording_, position_in(*recording_));
  recording_->ledger->refuse(bytes, site_here(*recording_, where, line_));
}

}  // namespace memcheck
