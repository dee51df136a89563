#ifdef HOST_CUDA_COUNTS

#include "host_cuda/counters.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

// Counters of a launch. A warp's accesses are grouped as a GPU executes them: the n-th access of every lane at one
// place in the code, between two points where the warp meets. A group is a request.
//
// Global memory: sectors of 32 bytes that a request touches. Shared memory: 32 banks of 4 bytes; a request of 4 bytes a
// lane is served at once if no bank has two different words; one of 8 bytes in two halves of the warp, one of 16 in
// four quarters. Each further word of a bank costs another turn.

namespace host_cuda {
namespace {

constexpr uintptr_t kSectorBytes = 32;
constexpr uintptr_t kBanks = 32;
constexpr uintptr_t kWordBytes = 4;
constexpr size_t kPackBytes = 16;  // the widest access of a lane

enum class Space { Global, Shared };

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t address) const { return address >= begin && address < end; }
};

// The requests of one place in the code. Units are sectors of global memory, turns of shared memory; `least` counts the
// units that the same bytes would need without gaps or conflicts.
struct Place {
  Space space;
  bool writes;
  size_t bytes;  // of a lane
  int64_t requests = 0, units = 0, least = 0;
  int64_t worst = 0;  // units of one request
};

struct Moved {
  int64_t bytes = 0;     // asked for by all threads
  int64_t requests = 0;  // of warps
  int64_t units = 0, least = 0;
  int64_t distinct = 0;          // bytes of global memory, each counted once
  int64_t distinct_sectors = 0;  // of global memory, each counted once
};

struct LaunchCounts {
  std::string kernel;
  const void* function;
  dim3 grid, block;
  size_t shared_bytes;
  uint64_t runs;                // blocks that ran
  Moved global[2], shared[2];   // reads, writes
  int64_t barriers = 0;         // of blocks
  int64_t copies = 0;           // of 16 bytes, by cp.async
  int64_t awaits = 0;           // at which copies of a thread arrived
  int64_t idle_awaits = 0;      // of them, with no work between request and wait
  int64_t bytes_in_flight = 0;  // of the thread's copies, summed over its awaits
  std::map<std::string, int64_t> collectives;
  std::unordered_map<uintptr_t, Place> places;           // by address of the code
  std::vector<std::pair<uintptr_t, int64_t>> code_runs;  // of its basic blocks: where one begins, and how often it ran
};

std::vector<LaunchCounts> counted;
LaunchCounts* counts = nullptr;

// ---- places of the code, for messages

// The line of a kernel, and the line of a shared function (common/) that it called, if any. Without addr2line and debug
// information the address.
std::string line_of(uintptr_t code) {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(code), &info) == 0) return "?";
  std::ostringstream command, text;
  command << "addr2line -i -e '" << info.dli_fname << "' 0x" << std::hex
          << code - 1 - reinterpret_cast<uintptr_t>(info.dli_fbase) << " 2>/dev/null";
  if (FILE* pipe = popen(command.str().c_str(), "r")) {
    char letters[512];
    std::string within;
    while (std::fgets(letters, sizeof(letters), pipe) != nullptr) {
      std::string line = letters;
      line = line.substr(0, line.find_first_of(" \n"));
      if (line[0] == '?' || line.find("/host_cuda/host_cuda.h:") != std::string::npos) continue;
      const bool is_kernel = line.find("/common/") == std::string::npos;
      if (is_kernel || within.empty()) text.str(is_kernel && !within.empty() ? line + " (" + within + ")" : line);
      if (is_kernel) break;
      if (within.empty()) within = line;
    }
    pclose(pipe);
  }
  if (text.str().empty()) text << "0x" << std::hex << code;
  return text.str();
}

// ---- races

// An access to a granule of memory. `interval` counts blocks and their barriers so far, and `meeting` the __syncwarp of
// the warp; `code` is where the code is in its module.
struct Touch {
  uint32_t interval = 0;
  uint32_t meeting : 22;
  uint32_t thread : 10;
  uint32_t code = 0;
  Touch() : meeting(0), thread(0) {}
};

constexpr size_t kGranuleBytes = 2;  // the smallest number type of the kernels

// Of the threads that read since the last write that ordered them, three are kept: the last one, another of its warp,
// and one of another warp.
struct Granule {
  Touch write, reads[3];
};

// Of global memory, where blocks have no order.
struct GlobalGranule : Granule {
  uint32_t first_reader = 0, writer = 0;  // numbers of blocks, from 1
  uint32_t first_read_code = 0;
};

struct Page {
  static constexpr uintptr_t kBytes = 4096;
  uint32_t launch = 0;
  std::array<GlobalGranule, kBytes / kGranuleBytes> granules;
  std::array<bool, kBytes / kSectorBytes> sectors[2];
  void begin(uint32_t number) {
    launch = number;
    granules.fill({});
    for (auto& of : sectors) of.fill(false);
  }
};

struct Race {
  std::string text;
  uint32_t codes[2];
};
constexpr size_t kRacesTold = 8;

// ---- the launch and the block that run

struct Access {
  uintptr_t code, address;
  uint32_t bytes;
  bool writes;
  Space space;
};

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
constexpr size_t kMostPages = 1 << 13;
uintptr_t page_number = 0;  // of the page that was touched last
Page* page = nullptr;
void forget_pages() {
  pages.clear();
  page = nullptr;
}
std::vector<Race> races;
std::vector<Range> host_memory;  // what is not the GPU's: the library itself, and the stack of the launching thread
std::vector<Granule> granules;
uint32_t launches_so_far = 0, interval = 0, block_number = 0;

struct Warp {
  uint32_t meetings = 0;                                         // __syncwarp so far
  uint32_t all_met_at = 0;                                       // the last one of all lanes
  std::array<std::array<uint32_t, kLanes>, kLanes> met_at = {};  // of some lanes
  std::array<std::vector<Access>, kLanes> accesses;
};
std::vector<Warp> warps;
std::vector<int64_t> work;  // of each thread: accesses and products
const Block* block = nullptr;
Range shared_range, stack_range;
const Thread* thread = nullptr;
unsigned thread_number = 0;

// How often each basic block of the code ran in this launch. A number for every byte of the module, of which only
// touched pages take memory, and the places that have one.
Range module;
std::unique_ptr<int64_t, decltype(&std::free)> runs_at(nullptr, &std::free);
std::vector<uintptr_t> ran;

unsigned number_of(const uint3& index) {
  return index.x + blockDim.x * (index.y + blockDim.y * index.z);
}

std::string name_of_thread(unsigned number) {
  std::ostringstream text;
  text << "(" << number % blockDim.x << "," << number / blockDim.x % blockDim.y << ","
       << number / (blockDim.x * blockDim.y) << ")";
  return text.str();
}

std::string name_of_block(uint64_t number) {
  std::ostringstream text;
  text << "(" << number % gridDim.x << "," << number / gridDim.x % gridDim.y << ","
       << number / (uint64_t{gridDim.x} * gridDim.y) << ")";
  return text.str();
}

uint32_t number_of_block(const uint3& index) {
  return static_cast<uint32_t>(index.x + gridDim.x * (index.y + uint64_t{gridDim.y} * index.z));
}

// Keeps one race for each pair of places. To tell a place takes another process.
template <typename Tell>
void note_race(uint32_t one, uint32_t other, const Tell& tell) {
  for (const Race& race : races)
    if ((race.codes[0] == one && race.codes[1] == other) || (race.codes[0] == other && race.codes[1] == one)) return;
  races.push_back({tell(), {one, other}});
}

std::string told(bool writes, uint32_t code) {
  return (writes ? " writes at " : " reads at ") + line_of(module.begin + code);
}

// Whether the second access comes after the first, by a barrier or a __syncwarp of both threads.
bool is_ordered(const Touch& before, const Touch& now) {
  if (before.interval != now.interval || before.thread == now.thread) return true;
  if (before.thread / kLanes != now.thread / kLanes) return false;
  const Warp& warp = warps[now.thread / kLanes];
  const uint32_t met = std::max(warp.all_met_at, warp.met_at[before.thread % kLanes][now.thread % kLanes]);
  return before.meeting < met;
}

void check_order(const Touch& before, bool before_writes, const Touch& now, bool writes, const char* space) {
  if (is_ordered(before, now)) return;
  note_race(before.code, now.code, [&] {
    return "block " + name_of_block(block_number - 1) + ": a race in " + space + " memory: thread " +
           name_of_thread(before.thread) + told(before_writes, before.code) + ", thread " + name_of_thread(now.thread) +
           told(writes, now.code);
  });
}

// Checks an access against those of the block before it, and keeps it.
void touch(Granule& granule, const Touch& now, bool writes, const char* space) {
  check_order(granule.write, true, now, writes, space);
  if (writes) {
    for (const Touch& read : granule.reads) check_order(read, false, now, true, space);
    granule.write = now;
    return;
  }
  Touch* reads = granule.reads;
  const bool is_new = reads[0].interval != now.interval || reads[0].thread != now.thread;
  if (is_new && reads[0].interval == now.interval) {
    const bool same_warp = reads[0].thread / kLanes == now.thread / kLanes;
    reads[same_warp ? 1 : 2] = reads[0];
  }
  reads[0] = now;
}

Touch touch_of(uintptr_t code, unsigned by) {
  Touch now;
  now.interval = interval;
  now.meeting = warps[by / kLanes].meetings & 0x3FFFFFu;
  now.thread = by & 0x3FFu;
  now.code = static_cast<uint32_t>(code - module.begin);
  return now;
}

void touch_shared(uintptr_t address, size_t bytes, bool writes, uintptr_t code, unsigned by) {
  const Touch now = touch_of(code, by);
  const uintptr_t first = (address - shared_range.begin) / kGranuleBytes;
  const uintptr_t last = (address - shared_range.begin + bytes - 1) / kGranuleBytes;
  for (uintptr_t i = first; i <= last; ++i) touch(granules[i], now, writes, "shared");
}

// Two blocks have no order.
void check_blocks(const GlobalGranule& granule, const Touch& now, bool writes) {
  const auto check = [&](uint32_t other, uint32_t other_code, bool other_writes) {
    if (other == 0 || other == block_number) return;
    note_race(other_code, now.code, [&] {
      return "a race in global memory: block " + name_of_block(other - 1) + told(other_writes, other_code) +
             ", block " + name_of_block(block_number - 1) + ", thread " + name_of_thread(now.thread) +
             told(writes, now.code);
    });
  };
  check(granule.writer, granule.write.code, true);
  // Blocks run one after the other: if the first reader is this block, so are all.
  if (writes) check(granule.first_reader, granule.first_read_code, false);
}

void touch_global(uintptr_t address, size_t bytes, bool writes, uintptr_t code, unsigned by) {
  const Touch now = touch_of(code, by);
  Moved& moved = counts->global[writes];
  for (uintptr_t at = address; at < address + bytes; at += kGranuleBytes) {
    if (page == nullptr || at / Page::kBytes != page_number || page->launch != launches_so_far) {
      page_number = at / Page::kBytes;
      auto& owner = pages[page_number];
      if (owner == nullptr) owner = std::make_unique<Page>();
      page = owner.get();
      if (page->launch != launches_so_far) page->begin(launches_so_far);
    }
    bool& sector = page->sectors[writes][at % Page::kBytes / kSectorBytes];
    moved.distinct_sectors += sector ? 0 : 1;
    sector = true;
    GlobalGranule& granule = page->granules[at % Page::kBytes / kGranuleBytes];
    check_blocks(granule, now, writes);
    touch(granule, now, writes, "global");
    uint32_t& first = writes ? granule.writer : granule.first_reader;
    moved.distinct += first == 0 ? static_cast<int64_t>(kGranuleBytes) : 0;
    if (!writes && first == 0) granule.first_read_code = now.code;
    if (writes || first == 0) first = block_number;
  }
}

// ---- requests of a warp

struct Request {
  size_t bytes = 0;
  int lanes = 0;
  std::array<int, kLanes> lane;
  std::array<uintptr_t, kLanes> address;
};

struct Units {
  int64_t needed, least;
};

// Counts different values; changes their order.
template <typename It>
int64_t count_distinct(It begin, It end) {
  std::sort(begin, end);
  return std::unique(begin, end) - begin;
}

Units sectors_of(const Request& request) {
  std::array<uintptr_t, 2 * kLanes> sectors;
  std::array<uintptr_t, kLanes> addresses = request.address;
  size_t count = 0;
  for (int i = 0; i < request.lanes; ++i) {
    const uintptr_t address = request.address[static_cast<size_t>(i)];
    const uintptr_t first = address / kSectorBytes, last = (address + request.bytes - 1) / kSectorBytes;
    sectors[count++] = first;
    if (last != first) sectors[count++] = last;
  }
  const int64_t bytes =
      count_distinct(addresses.begin(), addresses.begin() + request.lanes) * static_cast<int64_t>(request.bytes);
  const auto sector = static_cast<int64_t>(kSectorBytes);
  return {count_distinct(sectors.begin(), sectors.begin() + static_cast<int64_t>(count)),
          (bytes + sector - 1) / sector};
}

Units turns_of(const Request& request) {
  const int together = request.bytes <= 4 ? 32 : request.bytes <= 8 ? 16 : 8;
  Units units{0, 0};
  for (int from = 0; from < kLanes; from += together) {
    std::array<uintptr_t, 2 * kLanes> words;
    size_t count = 0;
    for (int i = 0; i < request.lanes; ++i) {
      const int lane = request.lane[static_cast<size_t>(i)];
      if (lane < from || lane >= from + together) continue;
      const uintptr_t address = request.address[static_cast<size_t>(i)];
      for (uintptr_t at = address / kWordBytes; at <= (address + request.bytes - 1) / kWordBytes; ++at)
        words[count++] = at;
    }
    if (count == 0) continue;
    const auto distinct =
        static_cast<size_t>(count_distinct(words.begin(), words.begin() + static_cast<int64_t>(count)));
    std::array<int, kBanks> of_bank = {};
    for (size_t i = 0; i < distinct; ++i) of_bank[words[i] % kBanks] += 1;
    units.needed += *std::max_element(of_bank.begin(), of_bank.end());
    units.least += 1;
  }
  return units;
}

void add_request(const Request& request, Place& place) {
  const Units units = place.space == Space::Global ? sectors_of(request) : turns_of(request);
  place.requests += 1;
  place.units += units.needed;
  place.least += units.least;
  place.worst = std::max(place.worst, units.needed);
  Moved& moved = (place.space == Space::Global ? counts->global : counts->shared)[place.writes];
  moved.requests += 1;
  moved.units += units.needed;
  moved.least += units.least;
}

// The requests of one place, in order, as they are collected.
struct Collected {
  std::vector<Request> requests;
  size_t seen = 0;  // of the lane that is being added
};

// Groups the warp's accesses since it met last into requests.
void collect(Warp& warp) {
  static std::unordered_map<uintptr_t, size_t> index_of;
  static std::vector<Collected> collected;
  static std::vector<Access> samples;
  index_of.clear();
  samples.clear();
  for (size_t lane = 0; lane < kLanes; ++lane) {
    for (size_t i = 0; i < samples.size(); ++i) collected[i].seen = 0;
    uintptr_t last_key = 0;
    size_t index = 0;
    for (const Access& access : warp.accesses[lane]) {
      // cp.async reads global and writes shared memory at one place.
      const uintptr_t key = access.code << 2 | (access.space == Space::Shared ? 2u : 0u) | (access.writes ? 1u : 0u);
      if (key != last_key) {
        const auto [found, is_new] = index_of.emplace(key, samples.size());
        index = found->second;
        last_key = key;
        if (is_new) {
          samples.push_back(access);
          if (collected.size() < samples.size()) collected.emplace_back();
          collected[index].requests.clear();
          collected[index].seen = 0;
        }
      }
      Collected& of = collected[index];
      if (of.seen == of.requests.size()) of.requests.emplace_back();
      Request& request = of.requests[of.seen++];
      request.bytes = access.bytes;
      request.lane[static_cast<size_t>(request.lanes)] = static_cast<int>(lane);
      request.address[static_cast<size_t>(request.lanes++)] = access.address;
    }
    warp.accesses[lane].clear();
  }
  for (const auto& [key, index] : index_of) {
    const Access& sample = samples[index];
    Place& place = counts->places.emplace(key, Place{sample.space, sample.writes, sample.bytes}).first->second;
    for (const Request& request : collected[index].requests) add_request(request, place);
  }
}

// ---- accesses

void note(uintptr_t address, size_t bytes, bool writes, Space space, uintptr_t code) {
  Access access{code, address, static_cast<uint32_t>(bytes), writes, space};
  (space == Space::Global ? counts->global : counts->shared)[writes].bytes += static_cast<int64_t>(bytes);
  warps[thread_number / kLanes].accesses[thread_number % kLanes].push_back(access);
  if (space == Space::Global) {
    touch_global(address, bytes, writes, code, thread_number);
  } else {
    touch_shared(address, bytes, writes, code, thread_number);
  }
}

// An access that the compiler reports.
void access(const void* pointer, size_t bytes, bool writes, const void* caller) {
  if (thread == nullptr) return;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (stack_range.holds(address)) return;
  const bool is_shared = shared_range.holds(address);
  if (!is_shared)
    for (const Range& range : host_memory)
      if (range.holds(address)) return;
  work[thread_number] += 1;
  const auto code = reinterpret_cast<uintptr_t>(caller);
  for (size_t done = 0; done < bytes; done += kPackBytes)
    note(address + done, std::min(bytes - done, kPackBytes), writes, is_shared ? Space::Shared : Space::Global, code);
}

Range stack_of_this_thread() {
  pthread_attr_t attributes;
  void* begin = nullptr;
  size_t bytes = 0;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) throw std::runtime_error("the stack's range is not known");
  pthread_attr_getstack(&attributes, &begin, &bytes);
  pthread_attr_destroy(&attributes);
  const auto from = reinterpret_cast<uintptr_t>(begin);
  return {from, from + bytes};
}

// The module that this code is in, with its variables.
Range own_module() {
  Range found;
  const auto look = [](dl_phdr_info* info, size_t, void* result) {
    Range range{~uintptr_t{0}, 0};
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& header = info->dlpi_phdr[i];
      if (header.p_type != PT_LOAD) continue;
      range.begin = std::min<uintptr_t>(range.begin, info->dlpi_addr + header.p_vaddr);
      range.end = std::max<uintptr_t>(range.end, info->dlpi_addr + header.p_vaddr + header.p_memsz);
    }
    if (!range.holds(reinterpret_cast<uintptr_t>(&own_module))) return 0;
    *static_cast<Range*>(result) = range;
    return 1;
  };
  dl_iterate_phdr(look, &found);
  return found;
}

}  // namespace

void count_launch(const char* kernel, const void* function, const BlockLaunch& launch, uint64_t runs) {
  counted.push_back(
      {kernel, function, launch.grid, launch.block, launch.shared_bytes, runs, {}, {}, 0, 0, 0, 0, 0, {}, {}, {}});
  counts = &counted.back();
  module = own_module();
  host_memory = {module, stack_of_this_thread()};
  if (runs_at == nullptr) runs_at.reset(static_cast<int64_t*>(std::calloc(module.end - module.begin, sizeof(int64_t))));
  if (runs_at == nullptr) throw std::bad_alloc();
  for (const uintptr_t at : ran) runs_at.get()[at] = 0;
  ran.clear();
  races.clear();
  if (pages.size() > kMostPages) forget_pages();
  ++launches_so_far;
}

void count_launch_end() {
  for (const uintptr_t at : ran) counts->code_runs.emplace_back(at, runs_at.get()[at]);
  if (races.empty()) return;
  std::string text = counts->kernel + ": ";
  for (size_t i = 0; i < races.size() && i < kRacesTold; ++i) text += (i > 0 ? "\n" : "") + races[i].text;
  if (races.size() > kRacesTold) text += "\nand " + std::to_string(races.size() - kRacesTold) + " others";
  throw std::runtime_error(text);
}

void count_block(const Block& begun) {
  block = &begun;
  block_number = number_of_block(begun.index) + 1;
  const auto from = reinterpret_cast<uintptr_t>(begun.memory.begin());
  shared_range = {from, from + begun.memory.bytes()};
  granules.resize(std::max(granules.size(), (begun.memory.bytes() + kGranuleBytes - 1) / kGranuleBytes));
  warps.resize((begun.threads.size() + kLanes - 1) / kLanes);
  for (Warp& warp : warps) {
    warp.meetings = warp.all_met_at = 0;
    warp.met_at = {};
    for (auto& accesses : warp.accesses) accesses.clear();
  }
  work.assign(begun.threads.size(), 0);
  ++interval;
}

void count_block_end() {
  for (Warp& warp : warps) collect(warp);
}

void count_thread(const Thread* running_thread, const char* stack, size_t stack_bytes) {
  thread = running_thread;
  if (thread == nullptr) return;
  thread_number = number_of(thread->index);
  const auto from = reinterpret_cast<uintptr_t>(stack);
  stack_range = {from, from + stack_bytes};
}

void count_barrier() {
  counts->barriers += 1;
  for (Warp& warp : warps) collect(warp);
  ++interval;
  // Copies that have not arrived may read and write at any time.
  for (const Thread& of : block->threads) {
    const auto touch_both = [&](const Copy& copy) {
      const auto from = reinterpret_cast<uintptr_t>(copy.from), to = reinterpret_cast<uintptr_t>(copy.to);
      if (copy.exists) touch_global(from, kPackBytes, false, copy.code, number_of(of.index));
      touch_shared(to, kPackBytes, true, copy.code, number_of(of.index));
    };
    for (const auto& group : of.groups)
      for (const Copy& copy : group) touch_both(copy);
    for (const Copy& copy : of.open_copies) touch_both(copy);
  }
}

void count_collective(int number, const char* name, unsigned mask) {
  counts->collectives[name] += 1;
  const auto first = static_cast<size_t>(number) * kLanes;
  const size_t lanes = std::min<size_t>(kLanes, block->threads.size() - first);
  const unsigned all = lanes == kLanes ? ~0u : (1u << lanes) - 1;
  Warp& warp = warps[static_cast<size_t>(number)];
  if ((mask & all) == all) collect(warp);
  const std::string which = name;
  if (which == "mma_m16n8k16")
    for (size_t lane = 0; lane < lanes; ++lane) work[first + lane] += 1;
  if (which != "__syncwarp") return;
  // Only __syncwarp orders accesses to memory.
  const uint32_t now = ++warp.meetings;
  if ((mask & all) == all) {
    warp.all_met_at = now;
    return;
  }
  for (size_t i = 0; i < lanes; ++i)
    for (size_t j = 0; j < lanes; ++j)
      if (mask >> i & mask >> j & 1) warp.met_at[i][j] = now;
}

void count_shared_read(const void* address, const void* caller) {
  work[thread_number] += 1;
  note(reinterpret_cast<uintptr_t>(address), kPackBytes, false, Space::Shared, reinterpret_cast<uintptr_t>(caller));
}

Copy count_copy(const Copy& copy, const void* caller) {
  const auto code = reinterpret_cast<uintptr_t>(caller);
  counts->copies += 1;
  if (copy.exists) note(reinterpret_cast<uintptr_t>(copy.from), kPackBytes, false, Space::Global, code);
  note(reinterpret_cast<uintptr_t>(copy.to), kPackBytes, true, Space::Shared, code);
  return {copy.to, copy.from, copy.exists, code, work[thread_number]};
}

void count_await(const Thread& waiting, size_t pending) {
  if (waiting.groups.size() <= pending) return;
  bool awaits = false, is_idle = false;
  int64_t bytes = 0;
  for (size_t i = 0; i < waiting.groups.size(); ++i) {
    for (const Copy& copy : waiting.groups[i]) {
      bytes += copy.exists ? static_cast<int64_t>(kPackBytes) : 0;
      if (i + pending >= waiting.groups.size()) continue;
      awaits = true;
      is_idle = copy.work == work[thread_number];
    }
  }
  if (!awaits) return;
  counts->bytes_in_flight += bytes;
  counts->awaits += 1;
  counts->idle_awaits += is_idle ? 1 : 0;
}

namespace {

uintptr_t offset_of(const void* code) {
  return reinterpret_cast<uintptr_t>(code) - module.begin;
}

void write(const char* name, const Moved& moved, std::ostringstream& to) {
  to << '\t' << name << "_bytes=" << moved.bytes << '\t' << name << "_requests=" << moved.requests << '\t' << name
     << "_units=" << moved.units << '\t' << name << "_least=" << moved.least << '\t' << name
     << "_distinct=" << moved.distinct << '\t' << name << "_distinct_sectors=" << moved.distinct_sectors;
}

}  // namespace

std::string written_counts() {
  std::ostringstream to;
  for (const LaunchCounts& of : counted) {
    to << "launch\tkernel=" << of.kernel << "\tfunction=" << offset_of(of.function)
       << "\tblocks=" << uint64_t{of.grid.x} * of.grid.y * of.grid.z << "\truns=" << of.runs
       << "\tthreads=" << of.block.x * of.block.y * of.block.z << "\tshared=" << of.shared_bytes;
    write("global_read", of.global[0], to);
    write("global_write", of.global[1], to);
    write("shared_read", of.shared[0], to);
    write("shared_write", of.shared[1], to);
    to << "\tbarriers=" << of.barriers << "\tcopies=" << of.copies << "\tawaits=" << of.awaits
       << "\tidle_awaits=" << of.idle_awaits << "\tbytes_in_flight=" << of.bytes_in_flight;
    for (const auto& [name, count] : of.collectives) to << "\t" << name << "=" << count;
    to << '\n';
    for (const auto& [key, place] : of.places)
      to << "place\tcode=" << offset_of(reinterpret_cast<const void*>(key >> 2))
         << "\tshared=" << (place.space == Space::Shared) << "\twrites=" << place.writes << "\tbytes=" << place.bytes
         << "\trequests=" << place.requests << "\tunits=" << place.units << "\tleast=" << place.least
         << "\tworst=" << place.worst << '\n';
    for (const auto& [code, runs] : of.code_runs) to << "code\tat=" << code << "\truns=" << runs << '\n';
  }
  return to.str();
}

}  // namespace host_cuda

// ---- what the compiler calls for every access

#define HOST_CUDA_CALLER __builtin_return_address(0)
#define HOST_CUDA_ACCESS(bytes)                            \
  void __tsan_read##bytes(void* at) {                      \
    host_cuda::access(at, bytes, false, HOST_CUDA_CALLER); \
  }                                                        \
  void __tsan_write##bytes(void* at) {                     \
    host_cuda::access(at, bytes, true, HOST_CUDA_CALLER);  \
  }                                                        \
  void __tsan_unaligned_read##bytes(void* at) {            \
    host_cuda::access(at, bytes, false, HOST_CUDA_CALLER); \
  }                                                        \
  void __tsan_unaligned_write##bytes(void* at) {           \
    host_cuda::access(at, bytes, true, HOST_CUDA_CALLER);  \
  }                                                        \
  static_assert(true)

extern "C" {

HOST_CUDA_ACCESS(1);
HOST_CUDA_ACCESS(2);
HOST_CUDA_ACCESS(4);
HOST_CUDA_ACCESS(8);
HOST_CUDA_ACCESS(16);
void __tsan_read_range(void* at, size_t bytes) {
  host_cuda::access(at, bytes, false, HOST_CUDA_CALLER);
}
void __tsan_write_range(void* at, size_t bytes) {
  host_cuda::access(at, bytes, true, HOST_CUDA_CALLER);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
// Called at the begin of every basic block (-fsanitize-coverage=trace-pc).
void __sanitizer_cov_trace_pc() {
  using namespace host_cuda;
  if (thread == nullptr) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(HOST_CUDA_CALLER) - module.begin;
  if (runs_at.get()[at]++ == 0) ran.push_back(at);
}
// The guard of a variable in a function.
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
// A pointer of the code that launches.
uint64_t __tsan_atomic64_load(const volatile uint64_t* at, int) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
void __tsan_atomic64_store(volatile uint64_t* at, uint64_t x, int) {
  __atomic_store_n(at, x, __ATOMIC_RELEASE);
}

// ---- for tests, which load this as a library

// The text of written_counts. Valid until the next call.
__attribute__((visibility("default"))) const char* host_cuda_counts() {
  static std::string text;
  text = host_cuda::written_counts();
  return text.c_str();
}

__attribute__((visibility("default"))) void host_cuda_forget_counts() {
  host_cuda::counted.clear();
  host_cuda::forget_pages();
}
}

#endif
