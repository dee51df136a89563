// The caching allocator for Python, which calls these functions by ctypes: it replays requests and reads the events.
// With caching_allocator.cpp it is a library of its own, which needs no torch: see memcheck/simulated/flags.py.
#include <algorithm>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <unordered_map>

#include "simulated/caching_allocator.h"
#include "simulated/exports.h"

using namespace memcheck::simulated;

namespace {

// A row of a history. Actions that are none of the allocator's are ignored.
struct Event {
  int64_t action, bytes, address, stream;
};

// What became of the events of a history.
struct Played {
  int64_t refused = -1;  // The first request without room; -1: all had room.
  int64_t allocations = 0;
  int64_t equal_addresses = 0;  // Allocations that got the recorded address.
};

struct Replay final : Observer {
  Replay() { allocator.observer = this; }

  void note(Action action, const Block* block, int64_t bytes, uint64_t address, int64_t stream) override {
    events.push_back({static_cast<int64_t>(action), bytes, static_cast<int64_t>(address), stream});
    if (action != Action::free_completed || alive.empty()) return;
    if (auto found = alive.find(block->note); found != alive.end() && found->second == block) alive.erase(found);
  }

  // Null: there is no memory.
  Block* malloc(int64_t bytes, int64_t stream) {
    try {
      return allocator.malloc(bytes, stream);
    } catch (const OutOfMemory& error) {
      refused_bytes = error.segment;
      return nullptr;
    }
  }

  // A block that was recorded at the address.
  void keep(Block* block, int64_t address) {
    block->note = address;
    alive[address] = block;
  }

  // Whether the replay goes on: a request that had room when it was recorded has none otherwise.
  bool play(const Event& event, int64_t index, Played& played, int64_t* sizes) {
    constexpr int64_t kMost = int64_t{1} << 56;
    if (event.bytes < 0 || event.bytes > kMost) throw std::invalid_argument("an event has an impossible size");
    auto found = alive.find(event.address);
    Block* block = found == alive.end() ? nullptr : found->second;
    switch (static_cast<Action>(event.action)) {
      case Action::alloc:
        ++played.allocations;
        if (event.bytes > 0) {
          block = malloc(event.bytes, event.stream);
          if (block == nullptr) {
            if (played.refused < 0) played.refused = index;
            return false;
          }
          keep(block, event.address);
          played.equal_addresses += static_cast<int64_t>(block->address) == event.address;
          *sizes = block->bytes;
        }
        allocator.addresses.clear();
        break;
      case Action::free_requested:
        if (block != nullptr && block->allocated) allocator.free(block, true);
        break;
      case Action::free_completed:
        if (block == nullptr) break;  // It was completed when memory ran out, or is unknown.
        if (block->allocated) allocator.free(block, true);
        allocator.complete(block);
        break;
      case Action::segment_alloc:
      case Action::segment_map:
        if (follows_addresses) allocator.addresses.push_back(static_cast<uint64_t>(event.address));
        break;
      case Action::oom:
        block = malloc(event.bytes, event.stream);
        if (block != nullptr) {
          block->note = -1;
          allocator.free(block);
        } else if (played.refused < 0) {
          played.refused = index;
        }
        break;
      default:
        break;
    }
    return true;
  }

  CachingAllocator allocator;
  std::vector<Event> events;
  std::vector<Checkpoint> checkpoints;
  std::unordered_map<int64_t, Block*> alive;  // By the address that was recorded, until its release is complete.
  bool follows_addresses = false;             // New segments get the addresses of recorded ones.
  int64_t refused_bytes = 0;
};

}  // namespace

// Reads a text of settings. words: a text that equal settings have, too.
MEMCHECK_EXPORT const char* memcheck_replay_settings(const char* text, const char** words) {
  static thread_local std::string found;
  return answer([&] {
    found = Settings::parse(text).words();
    *words = found.c_str();
  });
}
// The bytes of the smallest block for a request. The settings are no error.
MEMCHECK_EXPORT int64_t memcheck_replay_rounded(const char* settings, int64_t bytes) {
  return Settings::parse(settings).rounded(bytes);
}

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
MEMCHECK_EXPORT void memcheck_replay_allow(Replay* replay, int64_t bytes) {
  replay->allocator.allowed_bytes = bytes < 0 ? INT64_MAX : bytes;
}
// Null if there is no memory.
MEMCHECK_EXPORT Block* memcheck_replay_malloc(Replay* replay, int64_t bytes, int64_t stream) {
  return replay->malloc(bytes, stream);
}
// The bytes of the segment for which there was no memory last.
MEMCHECK_EXPORT int64_t memcheck_replay_refused(const Replay* replay) {
  return replay->refused_bytes;
}
// A segment that was made before the first event of a history. used: address, bytes and requested bytes of its blocks.
MEMCHECK_EXPORT const char* memcheck_replay_adopt(Replay* replay, uint64_t address, int64_t bytes, int64_t stream,
                                                  int small, int expandable, const Adopted* used, int64_t count) {
  return answer([&] {
    const std::vector<Adopted> blocks(used, used + count);
    for (Block* block : replay->allocator.adopt(address, bytes, stream, small != 0, expandable != 0, blocks))
      replay->keep(block, static_cast<int64_t>(block->address));
  });
}
// Plays the events of a history until one has no room, and forgets what was noted before. emptied: the events, in
// order, before which the cache is emptied. follows: new segments get the addresses of recorded ones. sizes: room for a
// number per allocation.
MEMCHECK_EXPORT const char* memcheck_replay_play(Replay* replay, const Event* events, int64_t count,
                                                 const int64_t* emptied, int64_t number_emptied, int follows,
                                                 int64_t* sizes, Played* played) {
  return answer([&] {
    *played = {};
    replay->events.clear();
    replay->follows_addresses = follows != 0;
    const int64_t* end = emptied + number_emptied;
    for (int64_t index = 0; index < count; ++index) {
      for (; emptied != end && *emptied == index; ++emptied) replay->allocator.empty_cache();
      if (!replay->play(events[index], index, *played, sizes + played->allocations)) break;
    }
  });
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
MEMCHECK_EXPORT int64_t memcheck_replay_events(const Replay* replay, const Event** events) {
  *events = replay->events.data();
  return static_cast<int64_t>(replay->events.size());
}
// The number of blocks that have memory. rows: null, or room for that many rows of the segment's first address, the
// block's address, bytes, requested bytes, whether it is in use, small and expandable.
MEMCHECK_EXPORT int64_t memcheck_replay_blocks(const Replay* replay, int64_t (*rows)[7]) {
  int64_t count = 0;
  for (const auto& [address, head] : replay->allocator.segments())
    for (const Block* block = head; block != nullptr; block = block->after) {
      if (!block->mapped) continue;
      ++count;
      if (rows == nullptr) continue;
      const int64_t row[] = {static_cast<int64_t>(address),
                             static_cast<int64_t>(block->address),
                             block->bytes,
                             block->in_use ? block->requested : 0,
                             block->in_use,
                             block->pool->small,
                             block->base != 0};
      std::copy(std::begin(row), std::end(row), *rows++);
    }
  return count;
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
