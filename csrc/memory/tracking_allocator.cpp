#include "memory/tracking_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#if defined(__APPLE__)
#include <malloc/malloc.h>
#else
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#include "memory/allocation_timeline.h"

namespace memcheck {
namespace {

constexpr int kSlots = 64;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
constexpr uint64_t kTag = 0x6d656d636865636b;  // "memcheck"

// Written at the end of the block that malloc gave, behind the data. In front, the data would lose its alignment to
// pages, and small blocks would not fit malloc's fast bins: torch.empty(16) would take 6 % longer. The start of the
// block stays the address that free takes.
struct Footer {
  int64_t bytes;  // as requested
  uint64_t tag;
};
constexpr size_t kLargestRequest = std::numeric_limits<ptrdiff_t>::max() - sizeof(Footer);

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

// The size of a block of malloc, which is at least what was requested.
size_t block_bytes(void* data) {
#if defined(__APPLE__)
  return malloc_size(data);
#else
  return malloc_usable_size(data);
#endif
}

// The footer is copied, because malloc does not align the end of a block.
char* footer_place(void* data) {
  return static_cast<char*>(data) + block_bytes(data) - sizeof(Footer);
}

void write_footer(void* data, Footer footer) {
  std::memcpy(footer_place(data), &footer, sizeof(footer));
}

Footer read_footer(void* data) {
  Footer footer{0, 0};
  if (block_bytes(data) >= sizeof(footer)) std::memcpy(&footer, footer_place(data), sizeof(footer));
  return footer;
}

// The tag includes the address, so that one that was copied with a block is not taken for a tag.
uint64_t tag_of(const void* data) {
  return kTag ^ reinterpret_cast<uintptr_t>(data);
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

void* allocate_block(size_t bytes) {
  try {
    return c10::alloc_cpu(bytes + sizeof(Footer));
  } catch (const c10::Error& error) {
    const int64_t level = total.fetch_sub(bytes) - bytes;
    note_refusal(bytes, level);
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what_without_backtrace());
  }
}

// Counts and allocates a block. Returns the total that includes it, and its address.
std::pair<int64_t, void*> take(size_t bytes) {
  TimelineGuard timeline(bytes);
  try {
    const int64_t level = reserve(bytes);
    void* data = allocate_block(bytes);
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
  const Footer footer = read_footer(data);
  if (footer.tag != tag_of(data)) {
    // The block came from another allocator, perhaps not the one that is now installed; raw_deallocate asks that one.
    c10::GetDefaultCPUAllocator()->raw_deallocate(data);
    return;
  }
  const int64_t level = give_back(data, footer.bytes);
  c10::reportMemoryUsageToProfiler(data, -footer.bytes, level, 0, c10::Device(c10::DeviceType::CPU));
  write_footer(data, {0, 0});
  c10::free_cpu(data);
}

class TrackingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= kLargestRequest, "memcheck: cannot allocate ", bytes, " bytes");
    const auto [level, data] = take(bytes);
    write_footer(data, {static_cast<int64_t>(bytes), tag_of(data)});
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

// Opening and closing are rare. They hold Python's lock, and so does a fork from Python: no child inherits this mutex
// locked.
std::mutex trackers_mutex;
c10::Allocator* previous_allocator = nullptr;

void install() {
  previous_allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&tracking_allocator());
  TORCH_CHECK(c10::GetCPUAllocator() == &tracking_allocator(),
              "memcheck cannot track CPU memory: another allocator was installed with a higher priority");
}

void uninstall() {
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
  if (open == 0) install();
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
  if (open_slots == 0) uninstall();
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
