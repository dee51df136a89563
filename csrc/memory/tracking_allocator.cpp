#include "memory/tracking_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "memory/allocation_timeline.h"

namespace memcheck {

std::atomic<const BlockSource*> block_source{nullptr};

namespace {

constexpr int kSlots = 64;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
constexpr size_t kLargestRequest = std::numeric_limits<ptrdiff_t>::max();

struct alignas(64) Slot {
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> baseline{0};
  std::atomic<int64_t> held{0};
  std::atomic<int64_t> ceiling{kUnlimited};  // the largest total that its budget allows
  std::atomic<int64_t> refused_request{-1};
  std::atomic<int64_t> refused_at{0};
};

// Atomics instead of locks: a DataLoader forks while other threads allocate, and a lock that is held then would stay
// locked in the child. None of these has a destructor, so they outlive every tensor.
Slot slots[kSlots];
std::atomic<uint64_t> open_slots{0};        // one bit per slot
alignas(64) std::atomic<int64_t> total{0};  // live bytes of this allocator, also from before the open trackers
std::atomic<int64_t> lowest_ceiling{kUnlimited};
c10::DeleterFnPtr default_deleter = nullptr;  // of torch's default allocator

// Bytes requested of each live block, by address. They are kept apart from the blocks, of which nothing is known: on
// Linux aarch64 torch allocates them by mimalloc, and torch's own allocator frees those of raw_allocate() after
// tracking has ended, by the address that alloc_cpu returned.
struct alignas(64) Shard {
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  ska::flat_hash_map<const void*, int64_t> bytes;

  void lock() {
    while (busy.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }
  void unlock() { busy.clear(std::memory_order_release); }
};
constexpr uintptr_t kShards = 64;

// Never destroyed, so that they outlive every tensor.
Shard* const shards = new Shard[kShards];

// The lowest bits of addresses are 0, and those of mapped blocks differ above the pages.
Shard& shard_of(const void* data) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  return shards[((address >> 6) ^ (address >> 12)) % kShards];
}

void remember(const void* data, int64_t bytes) {
  Shard& shard = shard_of(data);
  const std::lock_guard<Shard> guard(shard);
  shard.bytes[data] = bytes;
}

// Returns the bytes of a block and forgets it; nullopt if the block is another allocator's.
std::optional<int64_t> forget(const void* data) {
  Shard& shard = shard_of(data);
  const std::lock_guard<Shard> guard(shard);
  const auto found = shard.bytes.find(data);
  if (found == shard.bytes.end()) return std::nullopt;
  const int64_t bytes = found->second;
  shard.bytes.erase(found);
  return bytes;
}

// A fork waits until no thread changes a shard, so that a child finds them whole and unlocked.
void lock_shards() {
  std::for_each(shards, shards + kShards, [](Shard& shard) { shard.lock(); });
}

void unlock_shards() {
  std::for_each(shards, shards + kShards, [](Shard& shard) { shard.unlock(); });
}

template <typename Visit>
void for_each_open(Visit visit) {
  for (uint64_t rest = open_slots.load(); rest != 0; rest &= rest - 1) visit(slots[__builtin_ctzll(rest)]);
}

void raise_to(std::atomic<int64_t>& peak, int64_t level) {
  int64_t seen = peak.load();
  while (seen < level && !peak.compare_exchange_weak(seen, level)) {
  }
}

void note_refusal(int64_t bytes, int64_t level) {
  for_each_open([&](Slot& slot) {
    slot.refused_at = level;
    slot.refused_request = bytes;
  });
  c10::reportOutOfMemoryToProfiler(bytes, level, 0, c10::Device(c10::DeviceType::CPU));
}

[[noreturn]] void refuse(int64_t bytes, int64_t level) {
  note_refusal(bytes, level);
  const Slot* tightest = nullptr;
  for_each_open([&](Slot& slot) {
    if (tightest == nullptr || slot.ceiling < tightest->ceiling) tightest = &slot;
  });
  // The tracker that set the ceiling may have closed meanwhile on another thread.
  TORCH_CHECK_WITH(OutOfMemoryError, tightest != nullptr, "memcheck: tried to allocate ", bytes,
                   " bytes over the budget of a tracker that has just closed");
  const int64_t before = tightest->baseline - tightest->held;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "memcheck: tried to allocate ", bytes, " bytes with ", level - before,
                   " bytes in use, over the budget of ", tightest->ceiling - before, " bytes");
}

// Adds the bytes to the total and returns the new total. One compare-and-swap checks and counts, so that a refused
// block is never part of any total.
int64_t reserve(int64_t bytes) {
  int64_t level = total.load();
  do {
    if (bytes > lowest_ceiling.load() - level) refuse(bytes, level);
  } while (!total.compare_exchange_weak(level, level + bytes));
  return level + bytes;
}

[[noreturn]] void fail(size_t bytes, const char* why) {
  const int64_t level = total.fetch_sub(bytes) - bytes;
  note_refusal(bytes, level);
  TORCH_CHECK_WITH(OutOfMemoryError, false, why);
}

void free_block(void* data) {
  const BlockSource* source = block_source.load(std::memory_order_acquire);
  if (source == nullptr || !source->release(data)) c10::free_cpu(data);
}

// source: null if the block is the C library's.
void* allocate_block(size_t bytes, const BlockSource* source) {
  try {
    void* const block = source != nullptr ? source->allocate(bytes) : c10::alloc_cpu(bytes);
    std::unique_ptr<void, decltype(&free_block)> data(block, &free_block);
    remember(data.get(), bytes);
    return data.release();
  } catch (const c10::Error& error) {
    fail(bytes, error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {  // of the table of blocks
    fail(bytes, error.what());
  }
}

// Counts and allocates a block. Returns the total that includes it, and its address.
std::pair<int64_t, void*> take(size_t bytes, const BlockSource* source) {
  TimelineGuard timeline(bytes);
  try {
    const int64_t level = reserve(bytes);
    void* data = allocate_block(bytes, source);
    timeline.note(data, bytes);
    return {level, data};
  } catch (const c10::OutOfMemoryError&) {
    timeline.note_refusal(bytes);
    throw;
  }
}

// Subtracts a block from the total and returns the new total. The caller frees the memory.
int64_t give_back(const void* data, int64_t bytes) {
  TimelineGuard timeline;
  timeline.note(data, -bytes);
  return total.fetch_sub(bytes) - bytes;
}

void release(void* data) {
  if (data == nullptr) return;
  const std::optional<int64_t> bytes = forget(data);
  if (!bytes) {
    const BlockSource* source = block_source.load(std::memory_order_acquire);
    if (source != nullptr && source->release(data)) return;
    default_deleter(data);  // The block came from another allocator, perhaps not the one that is now installed.
    return;
  }
  const int64_t level = give_back(data, *bytes);
  c10::reportMemoryUsageToProfiler(data, -*bytes, level, 0, c10::Device(c10::DeviceType::CPU));
  free_block(data);
}

class TrackingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= kLargestRequest, "memcheck: cannot allocate ", bytes, " bytes");
    const BlockSource* source = block_source.load(std::memory_order_acquire);
    const BlockSource::Kind kind = source != nullptr ? source->kind(bytes) : BlockSource::kUsual;
    if (kind == BlockSource::kUsual) source = nullptr;
    if (kind == BlockSource::kUncounted || open_slots == 0) {  // Without a tracker: installed by keep_installed.
      void* data = source != nullptr ? source->allocate(bytes) : c10::alloc_cpu(bytes);
      return {data, data, &release, cpu};
    }
    const auto [level, data] = take(bytes, source);
    for_each_open([peak = level](Slot& slot) { raise_to(slot.peak, peak); });
    c10::reportMemoryUsageToProfiler(data, bytes, level, 0, cpu);
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Storages keep a pointer to their allocator, so it is never destroyed.
TrackingAllocator& tracking_allocator() {
  static TrackingAllocator* const allocator = new TrackingAllocator;
  return *allocator;
}

// torch.UntypedStorage(n), and with it copy.deepcopy and pickle, ask torch's default allocator whatever is installed.
// So the table of virtual functions of that object is replaced by that of the tracking allocator. Neither has members.
static_assert(sizeof(TrackingAllocator) == sizeof(void*));

void*& table_of(c10::Allocator& allocator) {
  return *reinterpret_cast<void**>(&allocator);
}

void* default_table = nullptr;

void replace_default_allocator() {
  c10::Allocator& its = *c10::GetDefaultCPUAllocator();
  default_deleter = its.raw_deleter();
  default_table = std::exchange(table_of(its), table_of(tracking_allocator()));
}

void restore_default_allocator() {
  table_of(*c10::GetDefaultCPUAllocator()) = default_table;
}

// Opening and closing are rare. They hold Python's lock, and so does a fork from Python: no child inherits this mutex
// locked.
std::mutex trackers_mutex;
c10::Allocator* previous_allocator = nullptr;
int installed_by = 0;  // Trackers, and calls of keep_installed, of which the first installs and the last uninstalls.

void install() {
  if (installed_by > 0) {
    ++installed_by;
    return;
  }
  static const int failure = pthread_atfork(&lock_shards, &unlock_shards, &unlock_shards);
  TORCH_CHECK(failure == 0, "memcheck cannot track CPU memory: pthread_atfork returned ", failure);
  previous_allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&tracking_allocator());
  TORCH_CHECK(c10::GetCPUAllocator() == &tracking_allocator(),
              "memcheck cannot track CPU memory: another allocator was installed with a higher priority");
  replace_default_allocator();
  installed_by = 1;
}

void uninstall() {
  if (--installed_by > 0) return;
  restore_default_allocator();
  // An allocator that replaced this one meanwhile stays installed.
  if (c10::GetCPUAllocator() == &tracking_allocator()) c10::SetCPUAllocator(previous_allocator);
}

void update_ceiling() {
  int64_t lowest = kUnlimited;
  for_each_open([&](Slot& slot) { lowest = std::min(lowest, slot.ceiling.load()); });
  lowest_ceiling = lowest;
}

}  // namespace

AllocationTracker::AllocationTracker(int64_t held_bytes, std::optional<int64_t> limit_bytes) {
  std::lock_guard<std::mutex> guard(trackers_mutex);
  const uint64_t open = open_slots.load();
  TORCH_CHECK(~open != 0, "at most ", kSlots, " memory trackers can be open at once");
  install();
  slot_ = __builtin_ctzll(~open);
  Slot& slot = slots[slot_];
  const int64_t level = total.load();
  slot.baseline = level;
  slot.peak = level;
  slot.held = held_bytes;
  slot.ceiling = limit_bytes ? level - held_bytes + std::min(*limit_bytes, kUnlimited / 2) : kUnlimited;
  slot.refused_request = -1;
  open_slots |= uint64_t{1} << slot_;
  update_ceiling();
}

AllocationTracker::~AllocationTracker() {
  close();
}

void AllocationTracker::close() {
  if (slot_ == kClosed) return;
  std::lock_guard<std::mutex> guard(trackers_mutex);
  open_slots &= ~(uint64_t{1} << slot_);
  slot_ = kClosed;
  update_ceiling();
  uninstall();
}

void keep_installed() {
  std::lock_guard<std::mutex> guard(trackers_mutex);
  install();
}

void let_go() {
  std::lock_guard<std::mutex> guard(trackers_mutex);
  uninstall();
}

int AllocationTracker::slot() const {
  TORCH_CHECK(slot_ != kClosed, "this memory tracker is closed");
  return slot_;
}

int64_t AllocationTracker::current_bytes() const {
  return total - slots[slot()].baseline;
}

int64_t AllocationTracker::peak_bytes() const {
  return slots[slot()].peak - slots[slot_].baseline;
}

void AllocationTracker::reset_peak() {
  slots[slot()].peak = total.load();
}

std::optional<Refusal> AllocationTracker::refusal() const {
  const Slot& slot = slots[this->slot()];
  if (slot.refused_request < 0) return std::nullopt;
  return Refusal{slot.refused_request, slot.refused_at - slot.baseline + slot.held};
}

}  // namespace memcheck
