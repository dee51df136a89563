#include "memory/allocation_timeline.h"

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <map>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>

namespace memcheck {

struct AllocationTimeline::Recording {
  uint64_t generation = 0;
  std::vector<AllocationEvent> events;
  std::vector<OperatorPath> paths{{0, ""}};
  std::map<std::pair<int, std::string>, int> known_paths;  // (outer, name)
  std::unordered_map<uintptr_t, size_t> alive;             // address -> the event of its allocation
  int leading_path = 0;  // of the thread that opened the timeline, or of one that runs backward: what was last
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
};

namespace {

using Recording = AllocationTimeline::Recording;

std::atomic<Recording*> open_recording{nullptr};
std::atomic<uint64_t> generations{0};

// Guards the recording. No mutex, because a child forked while a thread records has to be able to let it go.
std::atomic_flag busy = ATOMIC_FLAG_INIT;

void lock() {
  while (busy.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
}

void unlock() {
  busy.clear(std::memory_order_release);
}

// The recording is the parent's: it is half written, perhaps, and never looked at in the child.
void forget_in_child() {
  open_recording = nullptr;
  unlock();
}

// Where a thread is, in the recording of that generation.
struct Position {
  uint64_t generation = 0;
  int path = 0;
  bool leads = false;
};

Position& position_in(const Recording& recording) {
  static thread_local Position position;
  if (position.generation != recording.generation) position = {recording.generation, 0, false};
  return position;
}

// The operators that a thread is in: of one of OpenMP's, which is in none itself, those of the thread that leads.
int path_of(const Recording& recording, const Position& position) {
  return position.path == 0 && at::in_parallel_region() ? recording.leading_path : position.path;
}

int path_within(Recording& recording, int outer, const char* name) {
  const auto [found, is_new] = recording.known_paths.try_emplace({outer, name}, recording.paths.size());
  if (is_new) recording.paths.push_back({outer, name});
  return found->second;
}

void move_to(Recording& recording, Position& position, int path) {
  position.path = path;
  if (position.leads) recording.leading_path = path;
}

struct Entered : at::ObserverContext {
  uint64_t generation;
  int outer;
};

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  const TimelineGuard timeline;
  if (!timeline.is_open()) return nullptr;
  Recording& recording = timeline.recording();
  Position& position = position_in(recording);
  position.leads |= function.scope() == at::RecordScope::BACKWARD_FUNCTION;
  auto entered = std::make_unique<Entered>();
  entered->generation = recording.generation;
  entered->outer = position.path;
  move_to(recording, position, path_within(recording, path_of(recording, position), function.name()));
  return entered;
}

// The block under a plain CPU tensor; 0 for all that has a shape of another kind, or asks Python for it.
uintptr_t block_of(const at::Tensor& tensor) {
  const c10::TensorImpl* const implementation = tensor.unsafeGetTensorImpl();
  if (!tensor.defined() || implementation->is_python_dispatch() || implementation->has_symbolic_sizes_strides() ||
      tensor.is_nested() || !tensor.has_storage() || tensor.storage().device_type() != c10::DeviceType::CPU)
    return 0;
  // Without checks, because a storage may refuse to show its data; it is not looked at.
  return reinterpret_cast<uintptr_t>(tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
}

void note_shape(Recording& recording, const at::Tensor& tensor) {
  const uintptr_t address = block_of(tensor);
  const auto block = address == 0 ? recording.alive.end() : recording.alive.find(address);
  if (block == recording.alive.end()) return;
  AllocationEvent& event = recording.events[block->second];
  // As it was first returned; later ones, and those that fill but a part of it, are views.
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

void leave(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto* const entered = static_cast<const Entered*>(context);
  const TimelineGuard timeline;
  if (entered == nullptr || !timeline.is_open() || timeline.recording().generation != entered->generation) return;
  Recording& recording = timeline.recording();
  for (const c10::IValue& output : function.outputs()) note_shapes(recording, output);
  move_to(recording, position_in(recording), entered->outer);
}

at::RecordFunctionCallback callback() {
  return at::RecordFunctionCallback(&enter, &leave)
      .needsOutputs(true)
      .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::TORCHSCRIPT_FUNCTION,
               at::RecordScope::USER_SCOPE});
}

}  // namespace

AllocationTimeline::AllocationTimeline() : recording_(std::make_unique<Recording>()) {
  static const int failure = pthread_atfork(nullptr, nullptr, &forget_in_child);
  TORCH_CHECK(failure == 0, "memcheck cannot record a timeline: pthread_atfork returned ", failure);
  recording_->generation = ++generations;
  Recording* none = nullptr;
  TORCH_CHECK(open_recording.compare_exchange_strong(none, recording_.get()),
              "a timeline of allocations is being recorded already, and there can be only one");
  position_in(*recording_).leads = true;
  recording_->callback = at::addGlobalCallback(callback());
}

AllocationTimeline::~AllocationTimeline() {
  close();
}

void AllocationTimeline::close() {
  lock();
  Recording* own = recording_.get();
  const bool was_open = open_recording.compare_exchange_strong(own, nullptr);
  unlock();
  if (was_open) at::removeCallback(recording_->callback);
}

int64_t AllocationTimeline::size() const {
  const TimelineGuard guard;
  return recording_->events.size();
}

std::vector<AllocationEvent> AllocationTimeline::events() const {
  const TimelineGuard guard;
  return recording_->events;
}

std::vector<OperatorPath> AllocationTimeline::paths() const {
  const TimelineGuard guard;
  return recording_->paths;
}

TimelineGuard::TimelineGuard() : recording_(nullptr) {
  if (open_recording.load(std::memory_order_acquire) == nullptr) return;
  lock();
  recording_ = open_recording.load();
  if (recording_ == nullptr) unlock();  // it has closed meanwhile
}

TimelineGuard::~TimelineGuard() {
  if (recording_ != nullptr) unlock();
}

void TimelineGuard::note(const void* data, int64_t bytes) {
  if (recording_ == nullptr) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const int path = path_of(*recording_, position_in(*recording_));
  if (bytes > 0) {
    recording_->alive[address] = recording_->events.size();
  } else {
    recording_->alive.erase(address);
  }
  recording_->events.push_back({address, bytes, path, false, {}, {}});
}

}  // namespace memcheck
