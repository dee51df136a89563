// The caching allocator for Python, which calls these functions by ctypes: it replays requests and reads the events.
#include <algorithm>
#include <memory>

#include "simulated/caching_allocator.h"
#include "simulated/exports.h"

using namespace memcheck::simulated;

namespace {

struct Replay final : Observer {
  Replay() { allocator.observer = this; }

  void note(Action action, const Block*, int64_t bytes, uint64_t address, int64_t stream) override {
    events.insert(events.end(), {static_cast<int64_t>(action), bytes, static_cast<int64_t>(address), stream});
  }

  CachingAllocator allocator;
  std::vector<int64_t> events;  // Of each four numbers.
  std::vector<Checkpoint> checkpoints;
};

}  // namespace

// A negative limit is none. completes: whether other streams finish before the next request.
MEMCHECK_EXPORT Replay* memcheck_replay_new(int64_t total, int64_t driver, int64_t allowed, int order, int completes) {
  auto replay = std::make_unique<Replay>();
  CachingAllocator& allocator = replay->allocator;
  allocator.total_bytes = total;
  if (driver >= 0) allocator.driver_bytes = driver;
  if (allowed >= 0) allocator.allowed_bytes = allowed;
  allocator.order = static_cast<Order>(order);
  allocator.events_complete_at_once = completes != 0;
  return replay.release();
}
MEMCHECK_EXPORT void memcheck_replay_delete(Replay* replay) {
  delete replay;
}
MEMCHECK_EXPORT const char* memcheck_replay_configure(Replay* replay, const char* settings) {
  return answer([&] { replay->allocator.settings = replay->allocator.settings.changed_by(settings); });
}
// Null if there is no memory.
MEMCHECK_EXPORT Block* memcheck_replay_malloc(Replay* replay, int64_t bytes, int64_t stream) {
  try {
    return replay->allocator.malloc(bytes, stream);
  } catch (const OutOfMemory&) {
    return nullptr;
  }
}
MEMCHECK_EXPORT void memcheck_replay_free(Replay* replay, Block* block, int waits) {
  replay->allocator.free(block, waits != 0);
}
MEMCHECK_EXPORT void memcheck_replay_record_stream(Replay* replay, Block* block, int64_t stream) {
  replay->allocator.record_stream(block, stream);
}
MEMCHECK_EXPORT void memcheck_replay_complete(Replay* replay, Block* block) {
  replay->allocator.complete(block);
}
MEMCHECK_EXPORT void memcheck_replay_complete_all(Replay* replay) {
  replay->allocator.complete_all();
}
MEMCHECK_EXPORT void memcheck_replay_empty_cache(Replay* replay, uint64_t first, uint64_t second) {
  replay->allocator.empty_cache({first, second});
}
MEMCHECK_EXPORT int64_t memcheck_replay_bytes(const Block* block) {
  return block->bytes;
}
MEMCHECK_EXPORT uint64_t memcheck_replay_address(const Block* block) {
  return block->address;
}
MEMCHECK_EXPORT Block* memcheck_replay_allocated_at(const Replay* replay, uint64_t address) {
  return replay->allocator.allocated_at(address);
}
// The number of events, each of four numbers: action, bytes, address, stream.
MEMCHECK_EXPORT int64_t memcheck_replay_events(const Replay* replay, const int64_t** events) {
  *events = replay->events.data();
  return static_cast<int64_t>(replay->events.size()) / 4;
}
// which: current, peak, allocated, freed. Of the kinds after the last: oversize allocations and segments.
MEMCHECK_EXPORT int64_t memcheck_replay_stat(const Replay* replay, int kind, int pool, int which) {
  const Stats& stats = replay->allocator.stats();
  const Stat& oversize = kind == KINDS ? stats.oversize_allocations : stats.oversize_segments;
  const Stat& stat = kind < KINDS ? stats.of[kind][pool] : oversize;
  const int64_t numbers[] = {stat.current, stat.peak, stat.allocated, stat.freed};
  return numbers[which];
}
MEMCHECK_EXPORT int64_t memcheck_replay_count(const Replay* replay, int which) {
  const Stats& stats = replay->allocator.stats();
  const int64_t numbers[] = {stats.retries,       stats.ooms,         stats.syncs,
                             stats.device_allocs, stats.device_frees, stats.oom_rejections};
  return numbers[which];
}
MEMCHECK_EXPORT void memcheck_replay_reset_peaks(Replay* replay) {
  replay->allocator.reset_peaks();
}
MEMCHECK_EXPORT void memcheck_replay_reset_accumulated(Replay* replay) {
  replay->allocator.reset_accumulated();
}
// The requests of a stream get their memory from the pool; of all streams if it is negative.
MEMCHECK_EXPORT const char* memcheck_replay_begin_pool(Replay* replay, uint64_t first, uint64_t second,
                                                       int64_t stream) {
  return answer([&] {
    replay->allocator.begin_allocate_to_pool({first, second}, [=](int64_t s) { return stream < 0 || s == stream; });
  });
}
MEMCHECK_EXPORT const char* memcheck_replay_end_pool(Replay* replay, uint64_t first, uint64_t second) {
  return answer([&] { replay->allocator.end_allocate_to_pool({first, second}); });
}
MEMCHECK_EXPORT const char* memcheck_replay_release_pool(Replay* replay, uint64_t first, uint64_t second) {
  return answer([&] { replay->allocator.release_pool({first, second}); });
}
MEMCHECK_EXPORT const char* memcheck_replay_use_on_oom(Replay* replay, uint64_t first, uint64_t second, int use) {
  return answer([&] { replay->allocator.set_use_on_oom({first, second}, use != 0); });
}
MEMCHECK_EXPORT const char* memcheck_replay_no_split(Replay* replay, uint64_t first, uint64_t second) {
  return answer([&] { replay->allocator.set_no_split({first, second}); });
}
// Current bytes that a private pool has reserved.
MEMCHECK_EXPORT int64_t memcheck_replay_reserved(const Replay* replay, uint64_t first, uint64_t second) {
  const auto& reserved = replay->allocator.stats().reserved_by_private_pool;
  auto found = reserved.find({first, second});
  return found == reserved.end() ? 0 : found->second[0].current;
}
MEMCHECK_EXPORT void memcheck_replay_capture(Replay* replay, int begins) {
  begins ? replay->allocator.mark_capture_begin() : replay->allocator.mark_capture_end();
}
// Keeps the state of a pool; memcheck_replay_restore takes its number, counted from 0.
MEMCHECK_EXPORT const char* memcheck_replay_checkpoint(Replay* replay, uint64_t first, uint64_t second) {
  return answer([&] { replay->checkpoints.push_back(replay->allocator.checkpoint({first, second})); });
}
MEMCHECK_EXPORT const char* memcheck_replay_restore(Replay* replay, int number) {
  return answer([&] { replay->allocator.restore(replay->checkpoints.at(number)); });
}
// The number of blocks in use of a pool. addresses: room for as many.
MEMCHECK_EXPORT int64_t memcheck_replay_live(const Replay* replay, uint64_t first, uint64_t second,
                                             uint64_t* addresses) {
  const std::vector<Block*> live = replay->allocator.live_blocks({first, second});
  if (addresses != nullptr)
    std::transform(live.begin(), live.end(), addresses, [](const Block* block) { return block->address; });
  return static_cast<int64_t>(live.size());
}
