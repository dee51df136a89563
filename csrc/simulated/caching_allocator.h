// The CUDA caching allocator of torch, without a GPU: the same blocks, segments, statistics and events for the same
// requests. It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13. Private functions have the names of those that
// they follow; others name them in brackets.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace memcheck::simulated {

using PoolId = std::pair<uint64_t, uint64_t>;  // As torch's MempoolId_t; {0, 0}: the default pool.

// The options of PYTORCH_ALLOC_CONF, in bytes. They follow c10/core/AllocatorConfig.cpp and
// c10/cuda/CUDAAllocatorConfig.cpp.
struct Settings {
  bool expandable = false;
  int64_t max_split = INT64_MAX;  // Blocks of at least this size are not split, and serve requests of about their size.
  int64_t max_non_split_rounding = 20 << 20;  // How much larger than such a request a block must be to be too large.
  int64_t large_segment = 20 << 20;  // Of segments for requests below 10 MiB, and of the pages of expandable ones.
  double garbage_threshold = 0;      // The share of the allowed bytes above which old segments are freed; 0: never.
  double fraction = 0;               // The share of the GPU's memory that the process may reserve; 0: not set.
  bool throws_on_oom = false;        // Beyond that share, requests fail before cached memory is released.
  std::vector<int64_t> divisions = std::vector<int64_t>(16, 0);  // Of powers of two from 1 MiB to 64 GiB.
  std::string text;

  // Throws std::invalid_argument, which names the setting and its value.
  static Settings parse(const std::string& text) { return Settings().changed_by(text); }
  // These settings after torch.cuda.memory._set_allocator_settings(text): some stay if the text does not name them.
  Settings changed_by(const std::string& text) const;
  // A text that parse() reads as these settings; equal settings have the same. Empty: torch's defaults.
  std::string words() const;

  int64_t rounded(int64_t size) const;       // [round_size]
  int64_t segment_size(int64_t size) const;  // [get_allocation_size]
  int64_t page_size(bool small) const { return small ? 2 << 20 : large_segment; }
};

struct Pool;

// A range of a segment, linked with its neighbours.
struct Block {
  // A stream other than its own that uses the block.
  struct Use {
    int64_t stream;
    bool in_capture;  // Recorded while a CUDA graph was captured.
  };

  int64_t bytes;
  uint64_t address;
  Pool* pool;
  int64_t counter;    // Orders it among free blocks of its size, before the address does.
  uint64_t base = 0;  // The address of its expandable segment; 0: its segment has a fixed size.
  int64_t page = 0;   // The unit in which that segment grows.
  int64_t requested = 0;
  bool in_use = false;     // Until its release is complete.
  bool allocated = false;  // Until its release is requested.
  bool mapped = true;      // In an expandable segment: whether there is memory at the addresses.
  int64_t born = 0;        // The age of the large pool when the block became free.
  int64_t note = -1;       // Of the allocator's user.
  std::vector<Use> uses = {};
  Block* before = nullptr;
  Block* after = nullptr;

  bool is_split() const { return before != nullptr || after != nullptr; }
  // Its size and that of the unmapped addresses behind it, into which it can grow.
  int64_t room() const { return bytes + (after != nullptr && !after->mapped ? after->bytes : 0); }
};

// [BlockComparatorSizeCounterAddress]
struct BySize {
  using is_transparent = void;
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->bytes, a->counter, a->address) < std::tie(b->bytes, b->counter, b->address);
  }
  bool operator()(const Block* block, int64_t bytes) const { return block->bytes < bytes; }
};

// [BlockComparatorAddress]
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const { return a->address < b->address; }
};

// The free blocks of a stream. [BlockPool]
struct Pool {
  PoolId id;
  bool small;
  int64_t stream;
  std::set<Block*, BySize> free;
  std::set<Block*, ByAddress> unmapped;

  void add(Block* block);
  void remove(Block* block);
};

enum class Action {
  alloc,
  free_requested,
  free_completed,
  segment_alloc,
  segment_free,
  segment_map,
  segment_unmap,
  oom
};
const char* name_of(Action action);

struct Stat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;

  void add(int64_t amount);
};

enum Kind {
  ALLOCATION,
  SEGMENT,
  ACTIVE,
  INACTIVE_SPLIT,
  ALLOCATED_BYTES,
  RESERVED_BYTES,
  ACTIVE_BYTES,
  INACTIVE_SPLIT_BYTES,
  REQUESTED_BYTES,
  KINDS
};

// What torch.cuda.memory_stats counts.
struct Stats {
  using ByPool = std::array<Stat, 3>;  // All, the small pool, the large pool.

  ByPool of[KINDS];
  std::map<PoolId, ByPool> reserved_by_private_pool;
  Stat oversize_allocations, oversize_segments;
  int64_t retries = 0, ooms = 0, oom_rejections = 0, syncs = 0, device_allocs = 0, device_frees = 0;
};

// Receives each action, as torch's history records it.
struct Observer {
  virtual ~Observer() = default;
  // block: null for oom, whose address is the memory that the driver could still give.
  virtual void note(Action action, const Block* block, int64_t bytes, uint64_t address, int64_t stream) = 0;
};

struct OutOfMemory {
  int64_t requested, segment;
  bool rejected;  // By the option throw_on_cudamalloc_oom, before the driver was asked.
};

// Which of several free blocks of the same size is taken.
enum Order {
  BY_ADDRESS,  // The lowest address, until torch 2.11.
  BY_BLOCK,    // The block that was made first, in torch 2.12.
  BY_SEGMENT   // That of the segment that was made first, then the lowest address.
};

// The blocks of a private pool at a time. [PrivatePoolState]
struct Checkpoint {
  struct Part {
    int64_t bytes;
    uint64_t address;
    bool allocated;
  };
  PoolId pool;
  std::vector<std::vector<Part>> segments;
};

// A block in use of a segment that was made elsewhere.
struct Adopted {
  uint64_t address;
  int64_t bytes, requested;
};

// What the return to a checkpoint changed. [RestoreResult]
struct Restored {
  std::vector<uint64_t> freed;
  std::vector<Block*> allocated;
};

class CachingAllocator {
 public:
  using Filter = std::function<bool(int64_t stream)>;

  CachingAllocator() = default;
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  Settings settings;
  int64_t total_bytes = 0;            // Of the GPU; 0: unknown.
  int64_t driver_bytes = INT64_MAX;   // What the driver can give.
  int64_t allowed_bytes = INT64_MAX;  // What the process may reserve.
  Order order = BY_SEGMENT;
  bool events_complete_at_once = true;  // Other streams finish before the next request; else complete() says when.
  std::deque<uint64_t> addresses;       // Of the next segments; then each lies below all others.
  Observer* observer = nullptr;

  // Throws OutOfMemory.
  Block* malloc(int64_t requested, int64_t stream = 0);
  // waits: the release waits for complete(), as if another stream used the block.
  void free(Block* block, bool waits = false);
  void record_stream(Block* block, int64_t stream);
  void complete(Block* block);
  void complete_all();
  void empty_cache(PoolId id = {0, 0});
  // A segment that was made elsewhere, or a mapped part of an expandable one, with its blocks in use by address.
  // Returns these. Throws std::invalid_argument if they do not lie in it.
  std::vector<Block*> adopt(uint64_t address, int64_t bytes, int64_t stream, bool small, bool expandable,
                            const std::vector<Adopted>& used);

  const Stats& stats() const { return stats_; }
  void reset_peaks();
  int64_t most_allocated() const;  // The peak of allocated bytes, whether it was reset or not.
  void reset_accumulated();
  int64_t reserved() const { return stats_.of[RESERVED_BYTES][0].current; }
  const std::map<uint64_t, Block*>& segments() const { return segments_; }  // The first block of each.
  Block* allocated_at(uint64_t address) const;                              // Null if no block in use begins there.

  // Private pools, of CUDA graphs and of torch.cuda.MemPool. They throw std::runtime_error if there is no such pool.
  void create_or_incref_pool(PoolId id);
  void begin_allocate_to_pool(PoolId id, Filter filter);
  void end_allocate_to_pool(PoolId id);
  void release_pool(PoolId id);
  int pool_use_count(PoolId id) const;
  void set_use_on_oom(PoolId id, bool use);
  void set_no_split(PoolId id);
  std::vector<Block*> live_blocks(PoolId id) const;  // [checkPoolLiveAllocations]
  int64_t cached_in_private_pools() const;           // Free bytes, which the words of an OutOfMemoryError count.
  Checkpoint checkpoint(PoolId id);                  // [getCheckpointState]
  Restored restore(const Checkpoint& state);         // [setCheckpointPoolState]

  // While a graph is captured, releases of blocks that other streams use wait, and no memory returns to the driver.
  void mark_capture_begin() { ++captures_; }
  void mark_capture_end() { --captures_; }
  // Whether the calling thread's stream is captured; asked only between the two. Default: it is.
  std::function<bool()> is_capturing;

 private:
  struct PrivatePool {
    int use_count = 0;
    bool use_on_oom = false, no_split = false;
  };
  // [AllocParams]
  struct Request {
    Pool* pool;
    int64_t size;
    bool expandable;
  };
  using PoolKey = std::tuple<PoolId, bool, int64_t>;  // Small and the stream.

  void note(Action action, const Block* block, int64_t bytes);
  void count(Kind kind, const Pool& pool, int64_t amount);
  void count_reserved(const Block& block, int64_t bytes);

  PrivatePool& get_private_pool(PoolId id);
  const PrivatePool& get_private_pool(PoolId id) const;
  Pool& pool_of(PoolId id, bool small, int64_t stream);
  std::vector<Pool*> pools_of(PoolId id, bool small);
  Pool& get_pool(int64_t size, int64_t stream);

  int64_t counter_of(const Block* parent);
  uint64_t new_address(int64_t bytes);
  Block* cut_head(Block* block, int64_t bytes);
  Block* cut_tail(Block* block, int64_t bytes);
  int64_t try_merge_blocks(Block* block, Block* other);
  void insert_into_blocks(Block* block);

  Block* get_free_block(const Request& request);
  bool should_split(const Block* block, const Request& request) const;
  Block* alloc_found_block(Block* block, int64_t size, int64_t requested, bool split);
  void use_block(Block* block, int64_t requested);
  void free_block(Block* block);
  Block* from_driver(Request& request);
  Block* alloc_block(const Request& request);
  Block* try_mempool_fallback(Request& request);
  bool has_memory(int64_t bytes) const;

  int64_t range_of(const Pool& pool) const;
  Block* new_range(Pool& pool, uint64_t address, int64_t bytes);
  Block* adopt_mapped(Pool& pool, uint64_t address, int64_t bytes);
  Block* find_expandable_block(Pool& pool, int64_t size);
  Block* try_allocate_expandable_block(Pool& pool, int64_t size);
  bool map_block(Block* block, int64_t bytes);
  void unmap_block(Block* block);

  bool collects_garbage() const { return allowed_bytes != INT64_MAX && settings.garbage_threshold > 0; }
  void release_block(Block* block);
  void release_blocks(PoolId id, bool small);
  bool release_available_cached_blocks(const Request& request);
  void garbage_collect_cached_blocks();

  bool is_capture_context() const { return captures_ > 0 && (!is_capturing || is_capturing()); }
  void process_events();
  void insert_events_deferred_until_no_capture();
  void synchronize_and_free_events(PoolId id);
  void complete_pool(PoolId id);

  void set_segment_state_to_checkpoint(const std::vector<Checkpoint::Part>& parts, Restored& restored);

  Stats stats_;
  int64_t most_allocated_ = 0;  // Before peaks were reset.
  std::map<PoolKey, Pool> pools_;
  std::map<PoolId, PrivatePool> private_pools_;
  std::vector<std::pair<PoolId, Filter>> routes_;  // [captures_underway]
  int captures_ = 0;                               // [num_active_captures_]
  std::map<uint64_t, Block*> segments_;
  std::vector<Block*> pending_;                  // Their releases wait for other streams.
  std::vector<Block*> deferred_;                 // Their releases were requested during a capture. [deferred_blocks]
  uint64_t lowest_address_ = uint64_t{1} << 48;  // Drivers hand out descending addresses.
  int64_t counter_ = 0;
  int64_t age_ = 0;  // Requests of the large pool. [get_free_blocks_call_count]
};

}  // namespace memcheck::simulated
