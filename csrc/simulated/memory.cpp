#include "simulated/memory.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/function.h>

#include <chrono>
#include <deque>
#include <iomanip>
#include <sstream>
#include <unordered_map>

#include "simulated/exports.h"
#include "simulated/log.h"

namespace memcheck::simulated {

Properties properties;

namespace {

using Traceback = std::shared_ptr<torch::CapturedTraceback>;

// What was running when a block was allocated.
struct Note {
  Traceback traceback;
  std::string doers;  // the operator and the autograd node, a line each, as C++ frames name them
};

struct Event {
  Action action;
  int64_t bytes;
  uint64_t address;
  int64_t stream, note, microseconds, metadata;
};

// How torch.cuda.memory._record_memory_history was called.
struct Recording {
  bool is_on = false, has_frames = false, has_operators = false, has_all_frames = false;
  int64_t most_events = INT64_MAX;
};

struct Gpu final : Observer {
  explicit Gpu(int index) : index(index) { allocator.observer = this; }
  void note(Action action, const Block* block, int64_t bytes, uint64_t address, int64_t stream) override;

  int index;
  CachingAllocator allocator;
  std::deque<Event> events;
};

struct Memory {
  std::recursive_mutex lock;
  std::vector<std::unique_ptr<Gpu>> gpus;
  Recording recording;
  std::vector<Note> notes;
  std::vector<std::string> metadata{""};
  Note now;  // of the request that is being served
  int64_t requests = 0;
  std::vector<c10::DataPtr> workspaces;  // of cuBLAS and other libraries, which keep them
  int64_t workspaces_dropped = 0;
};
Memory& memory = *new Memory();  // Tensors outlive static objects.

using Locked = std::lock_guard<std::recursive_mutex>;

thread_local int device_of_thread = 0;
thread_local std::unordered_map<int, int64_t> streams_of_thread;
thread_local int64_t metadata_of_thread = 0;
thread_local const c10::OperatorName* running = nullptr;

using RefusalListener = void (*)(int64_t device, int64_t bytes, int64_t total, int64_t free);
RefusalListener refusal_listener = nullptr;

std::string doers() {
  std::string text;
  if (running != nullptr) {
    const std::string name = running->name.substr(running->name.find("::") + 2);
    const std::string overload = running->overload_name.empty() ? "" : "_" + running->overload_name;
    text = "at::_ops::" + name + overload + "::call";
  }
  if (auto node = torch::autograd::get_current_node()) text += "\ntorch::autograd::" + node->name() + "::apply";
  return text;
}

// Called before the lock is taken, as it may wait for Python's.
Note gather(bool is_wanted) {
  if (!is_wanted || !memory.recording.is_on || !memory.recording.has_frames) return {};
  return {torch::CapturedTraceback::gather(true, true, false), memory.recording.has_operators ? doers() : ""};
}

int64_t microseconds() {
  auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

void Gpu::note(Action action, const Block* block, int64_t bytes, uint64_t address, int64_t stream) {
  if (action == Action::alloc) {
    ++memory.requests;
    log_allocated(*block, index);
  } else if (action == Action::free_requested) {
    log_freed(*block, index);
  }
  if (!memory.recording.is_on) return;
  int64_t note = -1;
  if (memory.now.traceback) {
    if (memory.notes.empty() || memory.notes.back().traceback != memory.now.traceback)
      memory.notes.push_back(memory.now);
    note = static_cast<int64_t>(memory.notes.size()) - 1;
  }
  if (action == Action::alloc) const_cast<Block*>(block)->note = note;
  if (memory.recording.most_events == 0) return;
  events.push_back({action, bytes, address, stream, note, microseconds(), metadata_of_thread});
  if (static_cast<int64_t>(events.size()) > memory.recording.most_events) events.pop_front();
}

// Drops the notes that no block needs.
void forget_history() {
  std::vector<Note> kept;
  for (auto& gpu : memory.gpus) {
    gpu->events.clear();
    for (const auto& [address, head] : gpu->allocator.segments())
      for (Block* block = head; block != nullptr; block = block->after) {
        if (!block->in_use || block->note < 0) continue;
        kept.push_back(memory.notes[block->note]);
        block->note = static_cast<int64_t>(kept.size()) - 1;
      }
  }
  memory.notes = std::move(kept);
}

void give_back(void* context) {
  auto* allocation = static_cast<Allocation*>(context);
  Note note = gather(memory.recording.has_all_frames);
  {
    Locked locked(memory.lock);
    memory.now = std::move(note);
    memory.gpus[allocation->device]->allocator.free(allocation->block);
    memory.now = {};
  }
  delete allocation;
}

// As format_size of c10/core/CachingDeviceAllocator.cpp.
std::string size_text(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  if (bytes <= 1024) {
    text << bytes << " bytes";
  } else if (bytes <= 1 << 20) {
    text << bytes / 1024.0 << " KiB";
  } else if (bytes <= 1 << 30) {
    text << bytes / 1048576.0 << " MiB";
  } else {
    text << bytes / 1073741824.0 << " GiB";
  }
  return text.str();
}

int64_t free_bytes(int device) {
  return std::max<int64_t>(0, properties.usable_bytes - memory.gpus[device]->allocator.reserved());
}

// Throws in the words of torch 2.13: malloc of c10/cuda/CUDACachingAllocator.cpp.
[[noreturn]] void refuse(int device, const OutOfMemory& refused) {
  TORCH_CHECK_WITH(OutOfMemoryError, !refused.rejected,
                   "CUDA out of memory. Allocation was preemptively rejected because it ",
                   "would exceed per_process_memory_fraction limit. Requested size: ", size_text(refused.requested));
  std::string allowed, held, in_private_pools;
  int64_t free = 0;
  {
    Locked locked(memory.lock);
    const auto& a = memory.gpus[device]->allocator;
    const int64_t in_pools = a.cached_in_private_pools();
    const int64_t allocated = a.stats().of[ALLOCATED_BYTES][0].current + in_pools;
    if (a.allowed_bytes != INT64_MAX) allowed = size_text(a.allowed_bytes) + " allowed; ";
    if (in_pools > 0)
      in_private_pools = "with " + size_text(in_pools) + " allocated in private pools (e.g., CUDA Graphs), ";
    held = size_text(allocated) + " is allocated by PyTorch, " + in_private_pools + "and " +
           size_text(a.reserved() - allocated);
    free = free_bytes(device);
  }
  if (refusal_listener != nullptr) refusal_listener(device, refused.segment, properties.total_bytes, free);
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size_text(refused.segment), ". GPU ", device,
      " has a total capacity of ", size_text(properties.total_bytes), " of which ", size_text(free),
      " is free. Including non-PyTorch memory, this process has ", size_text(properties.total_bytes - free),
      " memory in use. ", allowed, "Of the allocated memory ", held,
      " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting ",
      "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory ",
      "Management  "
      "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)");
  std::abort();
}

c10::DispatchKeySet keys() {
  return c10::DispatchKeySet(c10::DispatchKey::CUDA);
}

}  // namespace

c10::Device device_at(int index) {
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)};
}

c10::DataPtr allocate(int device, int64_t bytes, at::ScalarType dtype) {
  if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device_at(device)};
  Note note = gather(true);
  prepare_log();
  OutOfMemory found{};
  {
    Locked locked(memory.lock);
    memory.now = std::move(note);
    try {
      Block* block = memory.gpus[device]->allocator.malloc(bytes, current_stream(device));
      memory.now = {};
      auto pointer = pointer_to(block, device);
      auto& contents = allocation_of(pointer)->contents;
      // A replay of a CUDA graph writes to its pool again.
      contents.is_small = keeps_contents(bytes, dtype) && block->pool->id == PoolId{0, 0};
      if (contents.is_small) contents.state = Contents::kKnown;
      return pointer;
    } catch (const OutOfMemory& refused) {
      found = refused;
    }
    memory.now = {};
  }
  refuse(device, found);
}

c10::Storage new_storage(int device, int64_t bytes, at::ScalarType dtype) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocate(device, bytes, dtype), &allocator(), true);
}

at::Tensor new_tensor(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const auto bytes = static_cast<int64_t>(
      at::detail::computeStorageNbytes(sizes, strides, c10::scalarTypeToTypeMeta(dtype).itemsize()));
  auto made = at::detail::make_tensor<c10::TensorImpl>(new_storage(device, bytes, dtype), keys(),
                                                       c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

at::Tensor new_tensor(int device, at::IntArrayRef sizes, at::ScalarType dtype) {
  return new_tensor(device, sizes, c10::contiguous_strides(sizes), dtype);
}

Allocation* allocation_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &give_back ? static_cast<Allocation*>(pointer.get_context()) : nullptr;
}

Allocation* allocation_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage()) return nullptr;
  return allocation_of(tensor.storage().data_ptr());
}

bool is_simulated(const at::Tensor& tensor) {
  return tensor.is_cuda();
}

Contents* contents_of(const at::Tensor& tensor) {
  Allocation* allocation = allocation_of(tensor);
  return allocation == nullptr ? nullptr : &allocation->contents;
}

char* numbers_of(Contents& contents, const at::Tensor& tensor) {
  if (contents.host == nullptr) {
    const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
    contents.host.reset(new char[bytes]());
  }
  return contents.host.get();
}

void keep_original(const at::Tensor&) {}

c10::DataPtr pointer_to(Block* block, int device) {
  auto* allocation = new Allocation{block, device, block->requested, {}};
  return {reinterpret_cast<void*>(block->address), allocation, &give_back, device_at(device)};
}

LockedAllocator::LockedAllocator(int device) : lock_(memory.lock), allocator_(&memory.gpus.at(device)->allocator) {}

void grow_storage(const at::Tensor& tensor, int64_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (static_cast<int64_t>(storage->nbytes()) >= bytes) return;
  storage->set_data_ptr_noswap(allocate(tensor.get_device(), bytes, tensor.scalar_type()));
  storage->set_nbytes(bytes);
}

c10::DataPtr Allocator::allocate(size_t n) {
  return simulated::allocate(current_device(), static_cast<int64_t>(n));
}

void Allocator::emptyCache(c10::MempoolId_t pool) {
  Locked locked(memory.lock);
  log_emptied_cache();
  for (auto& gpu : memory.gpus) gpu->allocator.empty_cache(pool);
}

void Allocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  Allocation* allocation = allocation_of(pointer);
  if (allocation == nullptr) return;
  Locked locked(memory.lock);
  memory.gpus[allocation->device]->allocator.record_stream(allocation->block, stream.id());
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device) {
  Locked locked(memory.lock);
  const Stats& stats = memory.gpus[device]->allocator.stats();
  c10::CachingDeviceAllocator::DeviceStats found;
  auto copy = [](const Stat& from, auto& to) {
    to.current = from.current;
    to.peak = from.peak;
    to.allocated = from.allocated;
    to.freed = from.freed;
  };
  for (int pool = 0; pool < 3; ++pool) {
    copy(stats.of[ALLOCATION][pool], found.allocation[pool]);
    copy(stats.of[SEGMENT][pool], found.segment[pool]);
    copy(stats.of[ACTIVE][pool], found.active[pool]);
    copy(stats.of[INACTIVE_SPLIT][pool], found.inactive_split[pool]);
    copy(stats.of[ALLOCATED_BYTES][pool], found.allocated_bytes[pool]);
    copy(stats.of[RESERVED_BYTES][pool], found.reserved_bytes[pool]);
    copy(stats.of[ACTIVE_BYTES][pool], found.active_bytes[pool]);
    copy(stats.of[INACTIVE_SPLIT_BYTES][pool], found.inactive_split_bytes[pool]);
    copy(stats.of[REQUESTED_BYTES][pool], found.requested_bytes[pool]);
  }
  found.num_alloc_retries = stats.retries;
  found.num_ooms = stats.ooms;
  return found;
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex device) {
  Locked locked(memory.lock);
  memory.gpus[device]->allocator.reset_accumulated();
}

void Allocator::resetPeakStats(c10::DeviceIndex device) {
  Locked locked(memory.lock);
  memory.gpus[device]->allocator.reset_peaks();
}

std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex device) {
  Locked locked(memory.lock);
  return {free_bytes(device), properties.total_bytes};
}

Allocator& allocator() {
  static Allocator& one = *new Allocator();
  return one;
}

void empty_cache() {
  allocator().emptyCache({0, 0});
}

int current_device() {
  return device_of_thread;
}

void check_device(int device) {
  TORCH_CHECK(device < properties.gpus, "CUDA error: invalid device ordinal\nGPU device may be out of range, do you ",
              "have enough GPUs? This process simulates ", properties.gpus, ": memcheck.simulate(..., gpus=N).");
}

int exchange_device(int device) {
  check_device(device);
  return device < 0 ? device_of_thread : std::exchange(device_of_thread, device);
}

int64_t current_stream(int device) {
  auto found = streams_of_thread.find(device);
  return found == streams_of_thread.end() ? 0 : found->second;
}

int64_t exchange_stream(int device, int64_t stream) {
  return std::exchange(streams_of_thread[device], stream);
}

// Streams of torch's pool: 32 a device, taken in turn. Their numbers only have to differ.
int64_t new_stream() {
  static std::atomic<int64_t> made{0};
  return 0x1000 * (1 + made++ % 32);
}

Running::Running(const c10::OperatorName* name) : before_(std::exchange(running, name)) {
  if (is_logging()) log_operator(name->name);
}
Running::~Running() {
  running = before_;
}

void keep_workspace(const std::string& library, int device, int64_t bytes) {
  static std::atomic<int64_t> threads{0};
  thread_local const int64_t thread = threads++;
  thread_local std::unordered_map<std::string, int64_t> kept;
  (void)thread;
  const std::string key = library + ":" + std::to_string(device) + ":" + std::to_string(current_stream(device));
  auto found = kept.find(key);
  if (found != kept.end() && found->second == memory.workspaces_dropped) return;
  kept[key] = memory.workspaces_dropped;
  const Requesting requesting(Purpose::workspace, library);
  auto workspace = allocate(device, bytes);
  Locked locked(memory.lock);
  memory.workspaces.push_back(std::move(workspace));
}

void drop_workspaces() {
  std::vector<c10::DataPtr> dropped;
  Locked locked(memory.lock);
  dropped.swap(memory.workspaces);
  ++memory.workspaces_dropped;
}

namespace {

void quote(std::ostringstream& text, const std::string& words) {
  text << '"';
  for (unsigned char letter : words) {
    if (letter == '"' || letter == '\\') {
      text << '\\' << letter;
    } else if (letter < 32) {
      text << "\\u" << std::hex << std::setw(4) << std::setfill('0') << int{letter} << std::dec;
    } else {
      text << letter;
    }
  }
  text << '"';
}

// Writes [a,b,...].
template <typename Range, typename Write>
void write_list(std::ostringstream& text, const Range& range, Write write) {
  text << '[';
  bool is_first = true;
  for (const auto& each : range) {
    if (!is_first) text << ',';
    is_first = false;
    write(each);
  }
  text << ']';
}

void write_block(std::ostringstream& text, const Block* block) {
  const char* state = block->allocated ? "active_allocated" : block->in_use ? "active_pending_free" : "inactive";
  text << '[' << block->address << ',' << block->bytes << ',' << (block->in_use ? block->requested : 0) << ",\""
       << state << "\"," << (block->in_use ? block->note : -1) << ']';
}

// The mapped parts of each segment, each with its blocks.
std::vector<std::vector<const Block*>> parts_of(const CachingAllocator& allocator) {
  std::vector<std::vector<const Block*>> parts;
  for (const auto& [address, head] : allocator.segments()) {
    bool is_new = true;
    for (const Block* block = head; block != nullptr; block = block->after) {
      if (block->mapped && is_new) parts.emplace_back();
      if (block->mapped) parts.back().push_back(block);
      is_new = !block->mapped;
    }
  }
  return parts;
}

void write_segment(std::ostringstream& text, const std::vector<const Block*>& blocks) {
  int64_t total = 0, allocated = 0, active = 0, requested = 0;
  for (const Block* block : blocks) {
    total += block->bytes;
    allocated += block->allocated ? block->bytes : 0;
    active += block->in_use ? block->bytes : 0;
    requested += block->in_use ? block->requested : 0;
  }
  const Block& first = *blocks.front();
  text << '[' << first.address << ',' << total << ',' << allocated << ',' << active << ',' << requested << ','
       << first.pool->stream << ',' << first.pool->small << ',' << (first.base != 0) << ",[" << first.pool->id.first
       << ',' << first.pool->id.second << "],";
  write_list(text, blocks, [&](const Block* block) { write_block(text, block); });
  text << ']';
}

void write_gpu(std::ostringstream& text, const Gpu& gpu, bool with_events) {
  text << "{\"segments\":";
  write_list(text, parts_of(gpu.allocator), [&](const auto& blocks) { write_segment(text, blocks); });
  text << ",\"events\":";
  write_list(text, with_events ? gpu.events : std::deque<Event>(), [&](const Event& e) {
    text << '[' << static_cast<int>(e.action) << ',' << e.bytes << ',' << e.address << ',' << e.stream << ',' << e.note
         << ',' << e.microseconds << ',' << e.metadata << ']';
  });
  text << '}';
}

// The frames of all notes, and of each note the numbers of its frames.
void write_notes(std::ostringstream& text, const std::vector<Note>& notes) {
  std::vector<torch::CapturedTraceback*> tracebacks;
  for (const Note& note : notes) tracebacks.push_back(note.traceback.get());
  torch::SymbolizedTracebacks found;
  if (!tracebacks.empty()) found = torch::symbolize(tracebacks);
  text << "\"frames\":";
  write_list(text, found.all_frames, [&](const auto& frame) {
    text << '[';
    quote(text, frame.filename);
    text << ',';
    quote(text, frame.funcname);
    text << ',' << frame.lineno << ']';
  });
  text << ",\"stacks\":";
  write_list(text, found.tracebacks,
             [&](const auto& stack) { write_list(text, stack, [&](auto frame) { text << frame; }); });
  text << ",\"doers\":";
  write_list(text, notes, [&](const Note& note) { quote(text, note.doers); });
}

}  // namespace

// What torch.cuda.memory._snapshot() needs, as JSON. Python makes torch's format of it.
std::string snapshot(bool with_events) {
  std::vector<Note> notes;
  {
    Locked locked(memory.lock);
    notes = memory.notes;
  }
  std::ostringstream text;
  text << '{';
  write_notes(text, notes);
  Locked locked(memory.lock);
  text << ",\"gpus\":";
  write_list(text, memory.gpus, [&](const auto& gpu) { write_gpu(text, *gpu, with_events); });
  text << ",\"metadata\":";
  write_list(text, memory.metadata, [&](const std::string& words) { quote(text, words); });
  text << '}';
  return text.str();
}

namespace {

// The settings of the environment, at the start; later those that torch.cuda.memory._set_allocator_settings changes.
void configure(const std::string& settings, bool is_start) {
  Locked locked(memory.lock);
  for (auto& gpu : memory.gpus) {
    auto& a = gpu->allocator;
    a.settings = is_start ? Settings::parse(settings) : a.settings.changed_by(settings);
    const double fraction = a.settings.fraction;
    if (is_start && fraction > 0 && fraction < 1)
      a.allowed_bytes = static_cast<int64_t>(fraction * static_cast<double>(properties.total_bytes));
  }
}

CachingAllocator& allocator_of(int device) {
  return memory.gpus.at(device)->allocator;
}

}  // namespace

void begin_memory(int order) {
  Locked locked(memory.lock);
  for (int i = 0; i < properties.gpus; ++i) {
    memory.gpus.push_back(std::make_unique<Gpu>(i));
    auto& a = memory.gpus.back()->allocator;
    a.total_bytes = properties.total_bytes;
    a.driver_bytes = properties.usable_bytes;
    a.order = static_cast<Order>(order);
  }
}

}  // namespace memcheck::simulated

using namespace memcheck::simulated;

MEMCHECK_EXPORT const char* memcheck_simulated_configure(const char* settings, int is_start) {
  return answer([&] { configure(settings, is_start != 0); });
}
MEMCHECK_EXPORT void memcheck_simulated_set_allowed(int device, int64_t bytes) {
  Locked locked(memory.lock);
  allocator_of(device).allowed_bytes = bytes;
}
// What the driver gives each GPU from now on. Below 0: whatever is asked for, as for a prediction of what does not fit.
MEMCHECK_EXPORT void memcheck_simulated_limit(int64_t bytes) {
  Locked locked(memory.lock);
  for (auto& gpu : memory.gpus) {
    gpu->allocator.driver_bytes = bytes < 0 ? INT64_MAX : bytes;
    gpu->allocator.allowed_bytes = INT64_MAX;
  }
}
MEMCHECK_EXPORT int64_t memcheck_simulated_allowed(int device) {
  return allocator_of(device).allowed_bytes;
}
MEMCHECK_EXPORT int64_t memcheck_simulated_free_bytes(int device) {
  Locked locked(memory.lock);
  return free_bytes(device);
}
MEMCHECK_EXPORT void memcheck_simulated_empty_cache(uint64_t first, uint64_t second) {
  allocator().emptyCache({first, second});
}
MEMCHECK_EXPORT void memcheck_simulated_reset_peaks(int device) {
  allocator().resetPeakStats(static_cast<c10::DeviceIndex>(device));
}
MEMCHECK_EXPORT int64_t memcheck_simulated_most_allocated(int device) {
  Locked locked(memory.lock);
  return allocator_of(device).most_allocated();
}
MEMCHECK_EXPORT void memcheck_simulated_reset_accumulated(int device) {
  allocator().resetAccumulatedStats(static_cast<c10::DeviceIndex>(device));
}
MEMCHECK_EXPORT int64_t memcheck_simulated_requests() {
  return memory.requests;
}
MEMCHECK_EXPORT void memcheck_simulated_listen_to_refusals(RefusalListener listener) {
  refusal_listener = listener;
}
MEMCHECK_EXPORT int64_t memcheck_simulated_note(const char* metadata) {
  Locked locked(memory.lock);
  for (size_t i = memory.metadata.size(); i > 0 && i + 64 > memory.metadata.size(); --i)
    if (memory.metadata[i - 1] == metadata) return metadata_of_thread = static_cast<int64_t>(i) - 1;
  memory.metadata.emplace_back(metadata);
  return metadata_of_thread = static_cast<int64_t>(memory.metadata.size()) - 1;
}
MEMCHECK_EXPORT const char* memcheck_simulated_noted() {
  Locked locked(memory.lock);
  return memory.metadata[metadata_of_thread].c_str();
}
MEMCHECK_EXPORT void memcheck_simulated_record(int is_on, int frames, int operators, int all_frames,
                                               int64_t most_events, int clears) {
  Locked locked(memory.lock);
  memory.recording = {is_on != 0, frames != 0, operators != 0, all_frames != 0,
                      most_events < 0 ? INT64_MAX : most_events};
  if (clears || !is_on) forget_history();
}
MEMCHECK_EXPORT int memcheck_simulated_is_recording() {
  return memory.recording.is_on;
}
// 9 kinds of 3 pools of 4 numbers, 2 of oversize of 4, 6 counts.
MEMCHECK_EXPORT void memcheck_simulated_stats(int device, int64_t* out) {
  Locked locked(memory.lock);
  const CachingAllocator& a = allocator_of(device);
  const Stats& stats = a.stats();
  auto put = [&](const Stat& s) {
    for (int64_t n : {s.current, s.peak, s.allocated, s.freed}) *out++ = n;
  };
  for (const auto& kind : stats.of)
    for (const Stat& stat : kind) put(stat);
  put(stats.oversize_allocations);
  put(stats.oversize_segments);
  const int64_t split = a.settings.max_split == INT64_MAX ? -1 : a.settings.max_split;
  for (int64_t n : {stats.retries, stats.ooms, stats.syncs, stats.device_allocs, stats.device_frees, split}) *out++ = n;
}
MEMCHECK_EXPORT const char* memcheck_simulated_snapshot(int with_events) {
  static std::string text;
  text = snapshot(with_events != 0);
  return text.c_str();
}
MEMCHECK_EXPORT void memcheck_simulated_drop_workspaces() {
  drop_workspaces();
}
MEMCHECK_EXPORT int64_t memcheck_simulated_current_stream(int device) {
  return current_stream(device);
}
MEMCHECK_EXPORT int64_t memcheck_simulated_exchange_stream(int device, int64_t stream) {
  return exchange_stream(device, stream);
}
MEMCHECK_EXPORT int64_t memcheck_simulated_new_stream() {
  return new_stream();
}
MEMCHECK_EXPORT int memcheck_simulated_current_device() {
  return current_device();
}
MEMCHECK_EXPORT int memcheck_simulated_exchange_device(int device) {
  return device < properties.gpus ? exchange_device(device) : -2;
}
MEMCHECK_EXPORT void memcheck_simulated_record_stream(const c10::StorageImpl* storage, int64_t stream) {
  allocator().recordStream(storage->data_ptr(), c10::Stream(c10::Stream::UNSAFE, storage->device(), stream));
}
// A change of the bytes of a storage, as of UntypedStorage.resize_ on CUDA.
MEMCHECK_EXPORT const char* memcheck_simulated_resize(c10::StorageImpl* storage, int64_t bytes) {
  return answer([&] {
    if (static_cast<int64_t>(storage->nbytes()) == bytes) return;
    storage->set_data_ptr_noswap(allocate(storage->device().index(), bytes));
    storage->set_nbytes(bytes);
  });
}
