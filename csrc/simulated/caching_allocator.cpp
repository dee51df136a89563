#include "simulated/caching_allocator.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <stdexcept>

namespace memcheck::simulated {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kMinBlockSize = 512;
constexpr int64_t kSmallSize = kMiB;           // The largest request of the small pool.
constexpr int64_t kSmallBuffer = 2 * kMiB;     // The segments of the small pool.
constexpr int64_t kMinLargeAlloc = 10 * kMiB;  // Larger requests get a segment of their own.
constexpr int64_t kRoundLarge = 2 * kMiB;
constexpr int kIntervals = 16;                           // Of roundup_power2_divisions.
constexpr int64_t kUnknownAddresses = int64_t{1} << 44;  // Of an expandable segment on a GPU of unknown memory.

int64_t rounded_up(int64_t size, int64_t unit) {
  return (size + unit - 1) / unit * unit;
}

int log2_of(int64_t size) {
  int bits = 0;
  while (size >>= 1) ++bits;
  return bits;
}

bool is_power_of_two(int64_t number) {
  return number > 0 && (number & (number - 1)) == 0;
}

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& rule) {
  throw std::invalid_argument(name + " must be " + rule + ", got '" + value + "'");
}

// The number, or -1 if it is none.
int64_t parse_integer(const std::string& value) {
  const bool is_integer = value.find_first_not_of("0123456789") == std::string::npos;
  return is_integer && !value.empty() && value.size() < 19 ? std::stoll(value) : -1;
}

bool parse_bool(const std::string& name, const std::string& value) {
  if (value != "True" && value != "False") refuse(name, value, "True or False");
  return value == "True";
}

int64_t parse_mib(const std::string& name, const std::string& value, int64_t least) {
  const int64_t number = parse_integer(value);
  if (number < least) refuse(name, value, "an integer of at least " + std::to_string(least));
  return std::min(number, INT64_MAX / kMiB) * kMiB;
}

double parse_share(const std::string& name, const std::string& value) {
  char* end = nullptr;
  const double share = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || !(share > 0 && share <= 1)) refuse(name, value, "above 0 and at most 1");
  return share;
}

// The parts between commas that are in no brackets.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  bool is_in_brackets = false, is_new = true;
  for (char c : text) {
    if (std::isspace(static_cast<unsigned char>(c))) continue;
    if (is_new) parts.emplace_back();
    is_new = c == ',' && !is_in_brackets;
    if (is_new) continue;
    is_in_brackets = c == '[' || (is_in_brackets && c != ']');
    parts.back() += c;
  }
  return parts;
}

// The name and the value of "name:value". The value is empty if there is no colon.
std::pair<std::string, std::string> pair_of(const std::string& text) {
  const size_t colon = std::min(text.find(':'), text.size());
  return {text.substr(0, colon), text.substr(std::min(colon + 1, text.size()))};
}

// The divisions of the intervals, of "4" or of "[256:1,512:2,>:8]", whose keys are MiB.
std::vector<int64_t> parse_divisions(const std::string& name, const std::string& value) {
  const std::string rule = "a power of two, or a list of them such as [256:1,512:2,>:8]";
  auto power = [&](const std::string& text) {
    if (!is_power_of_two(parse_integer(text))) refuse(name, value, rule);
    return parse_integer(text);
  };
  if (value.empty() || value.front() != '[') return std::vector<int64_t>(kIntervals, power(value));
  if (value.back() != ']') refuse(name, value, rule);
  std::vector<int64_t> divisions(kIntervals, 0);
  auto last = divisions.begin();
  bool is_first = true;
  for (const std::string& pair : split(value.substr(1, value.size() - 2))) {
    const auto [interval, text] = pair_of(pair);
    const int64_t number = text == "0" ? 0 : power(text);
    if (interval == ">") {
      std::fill(last + 1, divisions.end(), number);
      continue;
    }
    last = divisions.begin() + std::min(log2_of(power(interval)), kIntervals - 1);
    // The first interval reaches down to the smallest sizes.
    std::fill(is_first ? divisions.begin() : last, last + 1, number);
    is_first = false;
  }
  return divisions;
}

// The shortest text that parse_share reads as this number.
std::string text_of(double share) {
  char text[32];
  for (int digits = 1; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, share);
    if (std::strtod(text, nullptr) == share) break;
  }
  return text;
}

// The text that parse_divisions reads.
std::string text_of(const std::vector<int64_t>& divisions) {
  const auto last =
      std::find_if(divisions.rbegin(), divisions.rend(), [&](int64_t n) { return n != divisions.back(); });
  if (last == divisions.rend()) return std::to_string(divisions.back());
  std::string text = "[";
  for (auto each = divisions.begin(); each != last.base(); ++each)
    text += std::to_string(int64_t{1} << (each - divisions.begin())) + ":" + std::to_string(*each) + ",";
  return text + ">:" + std::to_string(divisions.back()) + "]";
}

// Options that change no byte of the GPU.
bool has_no_effect(const std::string& name) {
  return name.rfind("pinned_", 0) == 0 || name == "graph_capture_record_stream_reuse" ||
         name == "release_lock_on_cudamalloc";
}

void set_option(Settings& settings, const std::string& name, const std::string& value) {
  const int64_t least = settings.large_segment / kMiB;
  if (name == "expandable_segments") {
    settings.expandable = parse_bool(name, value);
  } else if (name == "max_split_size_mb") {
    settings.max_split = parse_mib(name, value, least);
  } else if (name == "max_non_split_rounding_mb") {
    settings.max_non_split_rounding = parse_mib(name, value, least);
  } else if (name == "garbage_collection_threshold") {
    settings.garbage_threshold = parse_share(name, value);
    if (settings.garbage_threshold == 1) refuse(name, value, "above 0 and below 1");
  } else if (name == "per_process_memory_fraction") {
    settings.fraction = parse_share(name, value);
  } else if (name == "roundup_power2_divisions") {
    settings.divisions = parse_divisions(name, value);
  } else if (name == "throw_on_cudamalloc_oom") {
    settings.throws_on_oom = parse_bool(name, value);
  } else if (name == "backend") {
    if (value != "native") refuse(name, value, "native");
  } else if (name != "large_segment_size_mb" && !has_no_effect(name)) {
    throw std::invalid_argument("unknown allocator setting '" + name + "', got '" + value + "'");
  }
}

void link(Block* before, Block* after) {
  if (before != nullptr) before->after = after;
  if (after != nullptr) after->before = before;
}

// Whether the driver gave just this block.
bool is_whole_segment(const Block* block) {
  return block->base == 0 && !block->is_split();
}

template <typename Function>
void for_each_stat(Stats& stats, Function function) {
  for (auto& kind : stats.of) std::for_each(kind.begin(), kind.end(), function);
  for (auto& [id, reserved] : stats.reserved_by_private_pool) std::for_each(reserved.begin(), reserved.end(), function);
  function(stats.oversize_allocations);
  function(stats.oversize_segments);
}

}  // namespace

// [parseArgs]
Settings Settings::changed_by(const std::string& words) const {
  Settings changed = *this;
  changed.text = words;
  changed.max_split = INT64_MAX;
  changed.garbage_threshold = 0;
  changed.divisions = std::vector<int64_t>(kIntervals, 0);
  // Other options depend on the size of large segments.
  for (const std::string& option : split(words))
    if (const auto [name, value] = pair_of(option); name == "large_segment_size_mb")
      changed.large_segment = parse_mib(name, value, 11);
  changed.max_non_split_rounding = changed.large_segment;
  for (const std::string& option : split(words)) {
    const auto [name, value] = pair_of(option);
    set_option(changed, name, value);
  }
  return changed;
}

std::string Settings::words() const {
  const Settings usual;
  std::string found;
  auto add = [&](bool is_set, const char* name, const std::string& value) {
    if (is_set) found += (found.empty() ? "" : ",") + std::string(name) + ":" + value;
  };
  auto mib = [](int64_t bytes) { return std::to_string(bytes / kMiB); };
  add(expandable, "expandable_segments", "True");
  add(max_split != usual.max_split, "max_split_size_mb", mib(max_split));
  add(max_non_split_rounding != large_segment, "max_non_split_rounding_mb", mib(max_non_split_rounding));
  add(garbage_threshold > 0, "garbage_collection_threshold", text_of(garbage_threshold));
  add(divisions != usual.divisions, "roundup_power2_divisions", text_of(divisions));
  add(large_segment != usual.large_segment, "large_segment_size_mb", mib(large_segment));
  add(fraction > 0, "per_process_memory_fraction", text_of(fraction));
  add(throws_on_oom, "throw_on_cudamalloc_oom", "True");
  return found;
}

int64_t Settings::rounded(int64_t size) const {
  if (size < kMinBlockSize) return kMinBlockSize;
  const int64_t parts = divisions[std::clamp(log2_of(size) - log2_of(kMiB), 0, kIntervals - 1)];
  if (parts > 1 && size > kMinBlockSize * parts) return rounded_up(size, (int64_t{1} << log2_of(size)) / parts);
  return rounded_up(size, kMinBlockSize);
}

int64_t Settings::segment_size(int64_t size) const {
  if (size <= kSmallSize) return kSmallBuffer;
  return size < kMinLargeAlloc ? large_segment : rounded_up(size, kRoundLarge);
}

void Pool::add(Block* block) {
  if (block->mapped)
    free.insert(block);
  else
    unmapped.insert(block);
}

void Pool::remove(Block* block) {
  if (block->mapped)
    free.erase(block);
  else
    unmapped.erase(block);
}

const char* name_of(Action action) {
  static constexpr const char* names[] = {"alloc",        "free_requested", "free_completed", "segment_alloc",
                                          "segment_free", "segment_map",    "segment_unmap",  "oom"};
  return names[static_cast<int>(action)];
}

void Stat::add(int64_t amount) {
  current += amount;
  peak = std::max(peak, current);
  (amount > 0 ? allocated : freed) += std::abs(amount);
}

CachingAllocator::~CachingAllocator() {
  for (auto [address, block] : segments_)
    while (block != nullptr) delete std::exchange(block, block->after);
}

Block* CachingAllocator::malloc(int64_t requested, int64_t stream) {
  if (!is_capture_context()) process_events();
  const int64_t size = settings.rounded(requested);
  Request request{&get_pool(size, stream), size, settings.expandable};
  Block* block = get_free_block(request);
  if (block == nullptr) block = from_driver(request);
  return alloc_found_block(block, size, requested, should_split(block, request));
}

void CachingAllocator::free(Block* block, bool waits) {
  block->allocated = false;
  count(ALLOCATION, *block->pool, -1);
  count(ALLOCATED_BYTES, *block->pool, -block->bytes);
  note(Action::free_requested, block, block->requested);
  if (block->bytes >= settings.max_split) stats_.oversize_allocations.add(-1);
  if (!waits && block->uses.empty())
    free_block(block);
  else
    (is_capture_context() ? deferred_ : pending_).push_back(block);
}

void CachingAllocator::record_stream(Block* block, int64_t stream) {
  if (stream == block->pool->stream) return;
  auto use = std::find_if(block->uses.begin(), block->uses.end(), [&](const auto& u) { return u.stream == stream; });
  if (use == block->uses.end()) use = block->uses.insert(use, {stream, false});
  use->in_capture |= is_capture_context();
}

void CachingAllocator::complete(Block* block) {
  auto found = std::find(pending_.begin(), pending_.end(), block);
  if (found == pending_.end()) return;
  pending_.erase(found);
  free_block(block);
}

void CachingAllocator::complete_all() {
  insert_events_deferred_until_no_capture();
  for (Block* block : std::exchange(pending_, {})) free_block(block);
}

// [release_cached_blocks]
void CachingAllocator::empty_cache(PoolId id) {
  const bool is_default = id == PoolId{0, 0};
  if (is_default && !is_capture_context()) {
    synchronize_and_free_events(id);
    for (bool small : {false, true}) release_blocks(id, small);
  }
  for (auto it = private_pools_.begin(); it != private_pools_.end();) {
    const PoolId private_id = it->first;
    const auto pool = (it++)->second;
    if (pool.use_count > 0 || (!is_default && private_id != id)) continue;
    if (!is_default) synchronize_and_free_events(id);
    for (bool small : {true, false}) release_blocks(private_id, small);
    const auto reserved = stats_.reserved_by_private_pool.find(private_id);
    if (reserved != stats_.reserved_by_private_pool.end() && reserved->second[0].current > 0) continue;
    private_pools_.erase(private_id);
    for (auto each = pools_.begin(); each != pools_.end();)
      each = each->second.id == private_id ? pools_.erase(each) : std::next(each);
  }
}

std::vector<Block*> CachingAllocator::adopt(uint64_t address, int64_t bytes, int64_t stream, bool small,
                                            bool expandable, const std::vector<Adopted>& used) {
  uint64_t free = address;
  for (const Adopted& each : used) {
    if (each.address < free || each.bytes <= 0 || each.bytes > bytes - static_cast<int64_t>(each.address - address))
      throw std::invalid_argument("blocks overlap, or lie in no segment");
    free = each.address + each.bytes;
  }
  lowest_address_ = std::min(lowest_address_, address);
  Pool& pool = pool_of({0, 0}, small, stream);
  Block* rest = expandable ? adopt_mapped(pool, address, bytes) : new Block{bytes, address, &pool, counter_of(nullptr)};
  if (!expandable) segments_[address] = rest;
  count_reserved(*rest, bytes);
  auto add_free = [&](Block* block) {
    insert_into_blocks(block);
    if (block->base != 0 || !block->is_split()) return;
    count(INACTIVE_SPLIT, pool, 1);
    count(INACTIVE_SPLIT_BYTES, pool, block->bytes);
  };
  std::vector<Block*> blocks;
  for (const Adopted& each : used) {
    if (each.address > rest->address) add_free(cut_head(rest, static_cast<int64_t>(each.address - rest->address)));
    Block* block = each.bytes == rest->bytes ? rest : cut_head(rest, each.bytes);
    use_block(block, each.requested);
    blocks.push_back(block);
    if (block == rest) return blocks;
  }
  add_free(rest);
  return blocks;
}

int64_t CachingAllocator::most_allocated() const {
  return std::max(most_allocated_, stats_.of[ALLOCATED_BYTES][0].peak);
}

void CachingAllocator::reset_peaks() {
  most_allocated_ = most_allocated();
  for_each_stat(stats_, [](Stat& stat) { stat.peak = stat.current; });
}

void CachingAllocator::reset_accumulated() {
  for_each_stat(stats_, [](Stat& stat) { stat.allocated = stat.freed = 0; });
  stats_.retries = stats_.ooms = stats_.oom_rejections = stats_.syncs = 0;
  stats_.device_allocs = stats_.device_frees = 0;
}

Block* CachingAllocator::allocated_at(uint64_t address) const {
  auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  while (block != nullptr && block->address < address) block = block->after;
  return block != nullptr && block->address == address && block->allocated ? block : nullptr;
}

void CachingAllocator::create_or_incref_pool(PoolId id) {
  auto [found, is_new] = private_pools_.try_emplace(id);
  if (!is_new && found->second.use_count == 0) throw std::runtime_error("the memory pool was released");
  ++found->second.use_count;
}

void CachingAllocator::begin_allocate_to_pool(PoolId id, Filter filter) {
  create_or_incref_pool(id);
  for (const auto& route : routes_)
    if (route.first == id) throw std::runtime_error("beginAllocateToPool: already recording to mempool_id");
  routes_.emplace_back(id, std::move(filter));
}

void CachingAllocator::end_allocate_to_pool(PoolId id) {
  auto found = std::find_if(routes_.begin(), routes_.end(), [&](const auto& route) { return route.first == id; });
  if (found == routes_.end()) throw std::runtime_error("endAllocatePool: not currently recording to mempool_id");
  routes_.erase(found);
}

void CachingAllocator::release_pool(PoolId id) {
  PrivatePool& pool = get_private_pool(id);
  if (pool.use_count == 0) throw std::runtime_error("the memory pool was released");
  --pool.use_count;
}

int CachingAllocator::pool_use_count(PoolId id) const {
  return get_private_pool(id).use_count;
}

void CachingAllocator::set_use_on_oom(PoolId id, bool use) {
  get_private_pool(id).use_on_oom = use;
}

void CachingAllocator::set_no_split(PoolId id) {
  get_private_pool(id).no_split = true;
}

std::vector<Block*> CachingAllocator::live_blocks(PoolId id) const {
  get_private_pool(id);
  std::vector<Block*> live;
  for (const auto& [address, head] : segments_)
    for (Block* block = head; block != nullptr && block->pool->id == id; block = block->after)
      if (block->allocated) live.push_back(block);
  return live;
}

int64_t CachingAllocator::cached_in_private_pools() const {
  int64_t bytes = 0;
  for (const auto& [key, pool] : pools_)
    if (pool.id != PoolId{0, 0})
      for (const Block* block : pool.free) bytes += block->bytes;
  return bytes;
}

Checkpoint CachingAllocator::checkpoint(PoolId id) {
  complete_pool(id);
  if (get_private_pool(id).use_count == 0) throw std::runtime_error("Not expected to checkpoint freeable graph");
  Checkpoint made{id, {}};
  for (const auto& [address, head] : segments_) {
    if (head->pool->id != id) continue;
    auto& parts = made.segments.emplace_back();
    // Unmapped addresses end an expandable segment.
    for (Block* block = head; block != nullptr && block->mapped; block = block->after)
      parts.push_back({block->bytes, block->address, block->allocated});
  }
  return made;
}

Restored CachingAllocator::restore(const Checkpoint& state) {
  complete_pool(state.pool);
  if (get_private_pool(state.pool).use_count == 0)
    throw std::runtime_error("Not expected to checkpoint freeable graph");
  Restored restored;
  for (Block* block : live_blocks(state.pool)) {
    restored.freed.push_back(block->address);
    block->uses.clear();
    free(block);
  }
  for (const auto& parts : state.segments)
    if (!parts.empty()) set_segment_state_to_checkpoint(parts, restored);
  return restored;
}

void CachingAllocator::note(Action action, const Block* block, int64_t bytes) {
  if (observer != nullptr) observer->note(action, block, bytes, block->address, block->pool->stream);
}

void CachingAllocator::count(Kind kind, const Pool& pool, int64_t amount) {
  stats_.of[kind][0].add(amount);
  stats_.of[kind][pool.small ? 1 : 2].add(amount);
}

// Counts memory that came from the driver, or went back to it if the number is negative.
void CachingAllocator::count_reserved(const Block& block, int64_t bytes) {
  const Pool& pool = *block.pool;
  const bool is_new = bytes > 0;
  count(RESERVED_BYTES, pool, bytes);
  if (pool.id != PoolId{0, 0}) {
    auto& reserved = stats_.reserved_by_private_pool[pool.id];
    reserved[0].add(bytes);
    reserved[pool.small ? 1 : 2].add(bytes);
  }
  ++(is_new ? stats_.device_allocs : stats_.device_frees);
  if (block.base == 0) {
    count(SEGMENT, pool, is_new ? 1 : -1);
    if (std::abs(bytes) >= settings.max_split) stats_.oversize_segments.add(is_new ? 1 : -1);
    note(is_new ? Action::segment_alloc : Action::segment_free, &block, std::abs(bytes));
  } else {
    note(is_new ? Action::segment_map : Action::segment_unmap, &block, std::abs(bytes));
  }
}

const CachingAllocator::PrivatePool& CachingAllocator::get_private_pool(PoolId id) const {
  auto found = private_pools_.find(id);
  if (found == private_pools_.end()) throw std::runtime_error("Could not find pool of id");
  return found->second;
}

CachingAllocator::PrivatePool& CachingAllocator::get_private_pool(PoolId id) {
  return const_cast<PrivatePool&>(std::as_const(*this).get_private_pool(id));
}

Pool& CachingAllocator::pool_of(PoolId id, bool small, int64_t stream) {
  const PoolKey key{id, small, stream};
  auto found = pools_.find(key);
  if (found == pools_.end()) found = pools_.emplace(key, Pool{id, small, stream, {}, {}}).first;
  return found->second;
}

std::vector<Pool*> CachingAllocator::pools_of(PoolId id, bool small) {
  std::vector<Pool*> found;
  for (auto it = pools_.lower_bound({id, small, INT64_MIN}); it != pools_.end(); ++it) {
    if (it->second.id != id || it->second.small != small) break;
    found.push_back(&it->second);
  }
  return found;
}

Pool& CachingAllocator::get_pool(int64_t size, int64_t stream) {
  const bool small = size <= kSmallSize;
  for (auto route = routes_.rbegin(); route != routes_.rend(); ++route)
    if (route->second(stream)) return pool_of(route->first, small, stream);
  return pool_of({0, 0}, small, stream);
}

int64_t CachingAllocator::counter_of(const Block* parent) {
  if (order == BY_ADDRESS) return 0;
  return order == BY_SEGMENT && parent != nullptr ? parent->counter : ++counter_;
}

uint64_t CachingAllocator::new_address(int64_t bytes) {
  if (addresses.empty()) return lowest_address_ -= bytes;
  const uint64_t address = addresses.front();
  addresses.pop_front();
  return address;
}

// Makes the first bytes a block of their own, and returns it.
Block* CachingAllocator::cut_head(Block* block, int64_t bytes) {
  auto* head = new Block{bytes, block->address, block->pool, counter_of(block), block->base, block->page};
  head->mapped = block->mapped;
  if (block->before == nullptr) segments_[block->address] = head;
  link(block->before, head);
  link(head, block);
  block->address += bytes;
  block->bytes -= bytes;
  return head;
}

// Makes all but the first bytes a block of their own, and returns it.
Block* CachingAllocator::cut_tail(Block* block, int64_t bytes) {
  auto* tail =
      new Block{block->bytes - bytes, block->address + bytes, block->pool, counter_of(block), block->base, block->page};
  tail->mapped = block->mapped;
  link(tail, block->after);
  link(block, tail);
  block->bytes = bytes;
  return tail;
}

// Returns the bytes of the neighbour that the block took in, or 0.
int64_t CachingAllocator::try_merge_blocks(Block* block, Block* other) {
  if (other == nullptr || other->in_use || other->mapped != block->mapped) return 0;
  other->pool->remove(other);
  if (other == block->before) {
    block->address = other->address;
    block->before = nullptr;
    link(other->before, block);
    if (block->before == nullptr) segments_[block->address] = block;
  } else {
    block->after = nullptr;
    link(block, other->after);
  }
  const int64_t bytes = other->bytes;
  block->bytes += bytes;
  delete other;
  return bytes;
}

void CachingAllocator::insert_into_blocks(Block* block) {
  block->born = age_;
  block->pool->add(block);
}

Block* CachingAllocator::get_free_block(const Request& request) {
  auto& free = request.pool->free;
  if (collects_garbage() && !request.pool->small && request.pool->id == PoolId{0, 0}) ++age_;
  auto it = free.lower_bound(request.size);
  if (it == free.end()) return nullptr;
  if ((*it)->base != 0 && request.expandable) {
    // The size of a block before unmapped addresses is the size to which it can grow.
    for (auto next = std::next(it); (*it)->base != 0 && next != free.end(); it = next++)
      if ((*next)->room() >= (*it)->room()) break;
  } else if ((*it)->base != 0) {
    // Expandable segments were switched off.
    it = std::find_if(it, free.end(), [](const Block* block) { return block->base == 0; });
    if (it == free.end()) return nullptr;
  }
  Block* block = *it;
  if (request.size < settings.max_split ? block->bytes >= settings.max_split
                                        : block->bytes >= request.size + settings.max_non_split_rounding)
    return nullptr;
  free.erase(it);
  return block;
}

bool CachingAllocator::should_split(const Block* block, const Request& request) const {
  const Pool& pool = *block->pool;
  if (pool.id != PoolId{0, 0} && get_private_pool(pool.id).no_split) return false;
  const int64_t rest = block->bytes - request.size;
  if (pool.small || request.expandable) return rest >= kMinBlockSize;
  return request.size < settings.max_split && rest > kSmallSize;
}

Block* CachingAllocator::alloc_found_block(Block* block, int64_t size, int64_t requested, bool split) {
  const Pool& pool = *block->pool;
  const bool already_split = block->is_split();
  if (split) {
    Block* rest = block;
    block = cut_head(rest, size);
    insert_into_blocks(rest);
    if (block->base == 0 && already_split) {
      count(INACTIVE_SPLIT_BYTES, pool, -block->bytes);
    } else if (block->base == 0) {
      count(INACTIVE_SPLIT_BYTES, pool, rest->bytes);
      count(INACTIVE_SPLIT, pool, 1);
    }
  } else if (already_split && block->base == 0) {
    count(INACTIVE_SPLIT_BYTES, pool, -block->bytes);
    count(INACTIVE_SPLIT, pool, -1);
  }
  use_block(block, requested);
  note(Action::alloc, block, requested);
  return block;
}

void CachingAllocator::use_block(Block* block, int64_t requested) {
  const Pool& pool = *block->pool;
  block->in_use = block->allocated = true;
  block->requested = requested;
  count(ALLOCATION, pool, 1);
  count(ALLOCATED_BYTES, pool, block->bytes);
  count(ACTIVE, pool, 1);
  count(ACTIVE_BYTES, pool, block->bytes);
  count(REQUESTED_BYTES, pool, requested);
  if (block->bytes >= settings.max_split) stats_.oversize_allocations.add(1);
}

void CachingAllocator::free_block(Block* block) {
  const Pool& pool = *block->pool;
  const int64_t bytes = block->bytes, requested = block->requested;
  note(Action::free_completed, block, requested);
  block->in_use = false;
  block->uses.clear();
  int64_t split_blocks = 0, split_bytes = 0;
  for (Block* other : {block->before, block->after}) {
    const int64_t subsumed = try_merge_blocks(block, other);
    split_blocks -= subsumed > 0;
    split_bytes -= subsumed;
  }
  insert_into_blocks(block);
  if (block->is_split()) {
    split_blocks += 1;
    split_bytes += block->bytes;
  }
  if (block->base == 0) {
    count(INACTIVE_SPLIT, pool, split_blocks);
    count(INACTIVE_SPLIT_BYTES, pool, split_bytes);
  }
  count(ACTIVE, pool, -1);
  count(ACTIVE_BYTES, pool, -bytes);
  count(REQUESTED_BYTES, pool, -requested);
}

// The block for a request that no free block can serve. [malloc]
Block* CachingAllocator::from_driver(Request& request) {
  if (collects_garbage()) garbage_collect_cached_blocks();
  Block* block = alloc_block(request);
  if (block == nullptr) block = try_mempool_fallback(request);
  if (block == nullptr && release_available_cached_blocks(request)) block = alloc_block(request);
  if (block == nullptr && !is_capture_context()) {
    empty_cache();
    ++stats_.retries;
    block = alloc_block(request);
  }
  if (block != nullptr) return block;
  ++stats_.ooms;
  const int64_t free = driver_bytes == INT64_MAX ? INT64_MAX : driver_bytes - reserved();
  if (observer != nullptr) observer->note(Action::oom, nullptr, request.size, free, request.pool->stream);
  throw OutOfMemory{request.size, settings.segment_size(request.size), false};
}

Block* CachingAllocator::alloc_block(const Request& request) {
  const int64_t bytes = settings.segment_size(request.size);
  if (allowed_bytes != INT64_MAX && reserved() + bytes > allowed_bytes) return nullptr;
  const double share = settings.fraction > 0 ? settings.fraction : 1;
  if (settings.throws_on_oom && reserved() + bytes > static_cast<int64_t>(share * static_cast<double>(total_bytes))) {
    ++stats_.oom_rejections;
    throw OutOfMemory{request.size, bytes, true};
  }
  if (request.expandable) return try_allocate_expandable_block(*request.pool, request.size);
  if (!has_memory(bytes)) return nullptr;
  auto* block = new Block{bytes, new_address(bytes), request.pool, counter_of(nullptr)};
  segments_[block->address] = block;
  count_reserved(*block, bytes);
  return block;
}

// A free block of a private pool that serves requests for which there is no memory.
Block* CachingAllocator::try_mempool_fallback(Request& request) {
  if (request.pool->id != PoolId{0, 0}) return nullptr;
  for (const auto& [id, pool] : private_pools_) {
    if (!pool.use_on_oom) continue;
    const Request in_pool{&pool_of(id, request.pool->small, request.pool->stream), request.size, false};
    if (Block* block = get_free_block(in_pool)) {
      request = in_pool;
      return block;
    }
  }
  return nullptr;
}

bool CachingAllocator::has_memory(int64_t bytes) const {
  return driver_bytes == INT64_MAX || reserved() + bytes <= driver_bytes;
}

// The first of neighbours, free or unmapped, that together have room.
Block* CachingAllocator::find_expandable_block(Pool& pool, int64_t size) {
  auto has_room = [&](const Block* block) {
    int64_t room = 0;
    for (; room < size && block != nullptr && !block->in_use; block = block->after) room += block->bytes;
    return room >= size;
  };
  for (Block* gap : pool.unmapped) {
    Block* first = gap->before != nullptr && !gap->before->in_use ? gap->before : gap;
    if (has_room(first)) return first;
  }
  const int64_t range = range_of(pool);
  return new_range(pool, new_address(range), range);
}

// Addresses for 1 1/8 of the GPU's memory, so that pages can move to the end.
int64_t CachingAllocator::range_of(const Pool& pool) const {
  const int64_t page = settings.page_size(pool.small);
  return total_bytes > 0 ? rounded_up(total_bytes + total_bytes / 8, page) : kUnknownAddresses / page * page;
}

// An expandable segment, of which nothing is mapped.
Block* CachingAllocator::new_range(Pool& pool, uint64_t address, int64_t bytes) {
  auto* block = new Block{bytes, address, &pool, counter_of(nullptr), address, settings.page_size(pool.small)};
  block->mapped = false;
  segments_[address] = block;
  pool.add(block);
  return block;
}

// A part of an expandable segment, mapped and in no pool: behind what is mapped already, or of a new segment.
Block* CachingAllocator::adopt_mapped(Pool& pool, uint64_t address, int64_t bytes) {
  Block* gap = pool.unmapped.empty() ? nullptr : *pool.unmapped.rbegin();
  if (gap == nullptr || address < gap->address || address + bytes > gap->address + gap->bytes)
    gap = new_range(pool, address, std::max(range_of(pool), bytes));
  pool.remove(gap);
  if (address > gap->address) pool.add(cut_head(gap, static_cast<int64_t>(address - gap->address)));
  if (bytes < gap->bytes) pool.add(cut_tail(gap, bytes));
  gap->mapped = true;
  return gap;
}

Block* CachingAllocator::try_allocate_expandable_block(Pool& pool, int64_t size) {
  Block* block = find_expandable_block(pool, size);
  if (!block->mapped && !map_block(block, std::min(block->bytes, size))) return nullptr;
  while (block->bytes < size) {
    Block* gap = block->after;
    if (gap == nullptr || !map_block(gap, std::min(size - block->bytes, gap->bytes))) return nullptr;
    block = gap;
  }
  pool.remove(block);
  return block;
}

bool CachingAllocator::map_block(Block* block, int64_t bytes) {
  Pool& pool = *block->pool;
  bytes = rounded_up(bytes, block->page);
  if (!has_memory(bytes)) return false;
  pool.remove(block);
  if (bytes < block->bytes) pool.add(cut_tail(block, bytes));
  block->mapped = true;
  count_reserved(*block, bytes);
  try_merge_blocks(block, block->before);
  try_merge_blocks(block, block->after);
  insert_into_blocks(block);
  return true;
}

// Returns the whole pages of a free block to the driver.
void CachingAllocator::unmap_block(Block* block) {
  Pool& pool = *block->pool;
  const int64_t offset = static_cast<int64_t>(block->address - block->base);
  const int64_t begin = rounded_up(offset, block->page), end = (offset + block->bytes) / block->page * block->page;
  if (begin >= end) return;
  pool.remove(block);
  if (begin > offset) insert_into_blocks(cut_head(block, begin - offset));
  if (end - begin < block->bytes) insert_into_blocks(cut_tail(block, end - begin));
  block->mapped = false;
  count_reserved(*block, -block->bytes);
  try_merge_blocks(block, block->before);
  try_merge_blocks(block, block->after);
  if (block->is_split()) {
    pool.add(block);
  } else {  // [release_expandable_segment]
    segments_.erase(block->address);
    delete block;
  }
}

// Returns a segment to the driver.
void CachingAllocator::release_block(Block* block) {
  block->pool->remove(block);
  count_reserved(*block, -block->bytes);
  segments_.erase(block->address);
  delete block;
}

// Returns the whole free segments of a pool, and the whole free pages of its expandable ones, to the driver.
void CachingAllocator::release_blocks(PoolId id, bool small) {
  std::vector<Block*> expandable;
  for (Pool* pool : pools_of(id, small))
    for (Block* block : std::vector<Block*>(pool->free.begin(), pool->free.end()))
      if (block->base != 0)
        expandable.push_back(block);
      else if (is_whole_segment(block))
        release_block(block);
  for (Block* block : expandable) unmap_block(block);
}

// Releases blocks that are too large to be split, and returns whether that makes room for the request.
bool CachingAllocator::release_available_cached_blocks(const Request& request) {
  if (settings.max_split == INT64_MAX) return false;
  auto& free = request.pool->free;
  const int64_t size = std::max(request.size, settings.max_split);
  auto it = free.lower_bound(size);
  if (it != free.end() && is_whole_segment(*it)) {
    release_block(*it);
    return true;
  }
  // No single block is large enough: several, the largest first.
  int64_t released = 0;
  while (released < size && it != free.begin() && (*std::prev(it))->bytes >= settings.max_split) {
    Block* block = *--it;
    if (!is_whole_segment(block)) continue;
    ++it;
    released += block->bytes;
    release_block(block);
  }
  return released >= size;
}

// Releases whole segments of the large pool whose blocks were free for longer than the mean, until enough is free.
void CachingAllocator::garbage_collect_cached_blocks() {
  int64_t target = reserved() - static_cast<int64_t>(settings.garbage_threshold * static_cast<double>(allowed_bytes));
  if (target <= 0) return;
  std::vector<Block*> blocks;
  for (Pool* pool : pools_of({0, 0}, false))
    std::copy_if(pool->free.begin(), pool->free.end(), std::back_inserter(blocks), is_whole_segment);
  while (target > 0 && !blocks.empty()) {
    int64_t ages = 0;
    for (const Block* block : blocks) ages += age_ - block->born;
    const double mean = static_cast<double>(ages) / static_cast<double>(blocks.size());
    auto old = [&](Block* block) {
      if (static_cast<double>(age_ - block->born) < mean) return false;
      target -= block->bytes;
      release_block(block);
      return true;
    };
    blocks.erase(std::remove_if(blocks.begin(), blocks.end(), old), blocks.end());
  }
}

void CachingAllocator::process_events() {
  if (!deferred_.empty()) insert_events_deferred_until_no_capture();
  if (events_complete_at_once && !pending_.empty()) complete_all();
}

void CachingAllocator::insert_events_deferred_until_no_capture() {
  for (Block* block : std::exchange(deferred_, {})) {
    // Streams that were recorded during a capture have finished with it.
    for (auto use = block->uses.begin(); use != block->uses.end();)
      use = use->in_capture ? block->uses.erase(use) : std::next(use);
    if (block->uses.empty())
      free_block(block);
    else
      pending_.push_back(block);
  }
}

void CachingAllocator::synchronize_and_free_events(PoolId id) {
  ++stats_.syncs;
  if (id == PoolId{0, 0})
    complete_all();
  else
    complete_pool(id);
}

void CachingAllocator::complete_pool(PoolId id) {
  insert_events_deferred_until_no_capture();
  for (Block* block : std::exchange(pending_, {}))
    if (block->pool->id == id)
      free_block(block);
    else
      pending_.push_back(block);
}

// Divides a segment, all of which is free, as it was at the checkpoint. [setSegmentStateToCheckpoint]
void CachingAllocator::set_segment_state_to_checkpoint(const std::vector<Checkpoint::Part>& parts, Restored& restored) {
  auto found = segments_.find(parts.front().address);
  Block* block = found == segments_.end() ? nullptr : found->second;
  std::vector<Block*> made;
  for (const auto& part : parts) {
    if (block == nullptr || block->in_use || !block->mapped || block->bytes < part.bytes)
      throw std::runtime_error("the memory pool lacks a segment of its checkpoint");
    block->pool->remove(block);
    made.push_back(alloc_found_block(block, part.bytes, part.bytes, block->bytes > part.bytes));
    block = made.back()->after;
  }
  for (size_t i = 0; i < parts.size(); ++i)
    if (parts[i].allocated)
      restored.allocated.push_back(made[i]);
    else
      free(made[i]);
}

}  // namespace memcheck::simulated
