#include "simulated/cpu_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/strides.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "memory/tracking_allocator.h"

namespace memcheck::simulated {

thread_local CpuOptions cpu_options;

namespace {

constexpr uint64_t kSpan = uint64_t{1} << 45;         // 32 TiB of addresses, used again when no block is left.
constexpr int64_t kMostAddresses = int64_t{1} << 38;  // Of a block: nothing reads or writes the rest of a larger one.
constexpr int64_t kMostReal = 16 << 20;               // Of a block of a kernel that runs for real.
constexpr int64_t kMostRestored = 1 << 20;  // Of a storage from before the simulation that is written for real.

struct Block {
  Contents contents;
  bool is_given = false;  // from before the simulation
  bool is_saved = false, has_version = false;
  int64_t bytes = 0;
};

// The bytes of a storage from before the simulation, which are restored at its end.
struct Original {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::string bytes;
};

// How often autograd had seen a write to a tensor from before the simulation.
struct Version {
  c10::VariableVersion counter;
  uint32_t number;
};

struct Memory {
  std::mutex lock;
  std::unordered_map<const void*, Block> blocks;  // by address
  std::vector<Original> originals;
  std::vector<Version> versions;
  int switched_on = 0;  // threads
  char* base = nullptr;
  uint64_t next = 0;
  int64_t without_memory = 0;  // blocks
  std::atomic<int64_t> touched_pages{0};
};
Memory& memory = *new Memory();  // Tensors outlive static objects.

using Locked = std::lock_guard<std::mutex>;

thread_local int real_runs = 0, uncounted = 0, counted = 0;
thread_local int64_t room = 0;
thread_local Tape* tape = nullptr;
// For OpenMP's threads, which work for a thread of the simulation.
std::atomic<int> uncounted_threads{0};
std::atomic<Tape*> shared_tape{nullptr};
std::mutex tape_lock;

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

bool is_virtual(const void* data) {
  return memory.base != nullptr && data >= memory.base && data < memory.base + kSpan;
}

// Pages that exist because they were read or written.
int64_t resident_pages(const void* data, int64_t bytes) {
  std::array<unsigned char, 1 << 14> states;
  const uint64_t chunk = states.size() * page_bytes();
  int64_t found = 0;
  for (uint64_t at = 0; at < static_cast<uint64_t>(bytes); at += chunk) {
    const uint64_t size = std::min(chunk, static_cast<uint64_t>(bytes) - at);
    if (mincore(static_cast<char*>(const_cast<void*>(data)) + at, size, states.data()) != 0) return found;
    const uint64_t pages = (size + page_bytes() - 1) / page_bytes();
    for (uint64_t i = 0; i < pages; ++i) found += states[i] & 1;
  }
  return found;
}

void* new_address(int64_t bytes) {
  const uint64_t size = (static_cast<uint64_t>(std::min(bytes, kMostAddresses)) / page_bytes() + 2) * page_bytes();
  Locked locked(memory.lock);
  TORCH_CHECK(memory.next + size <= kSpan, "the simulated CPU has no addresses left");
  void* data = memory.base + memory.next;
  memory.next += size;
  ++memory.without_memory;
  return data;
}

void note_step(void* data, int64_t bytes, bool is_free) {
  Tape* its = tape != nullptr ? tape : at::in_parallel_region() ? shared_tape.load() : nullptr;
  if (its == nullptr) return;
  std::lock_guard<std::mutex> locked(tape_lock);
  its->steps.push_back({bytes, data, is_free});
}

// Whether blocks of the thread are those of the simulation.
bool is_served() {
  return counted > 0 || is_on();
}

BlockSource::Kind kind_of(size_t bytes) {
  if (uncounted > 0) return BlockSource::kUncounted;
  if (is_served()) return BlockSource::kOwn;
  if (real_runs > 0) {
    if (static_cast<int64_t>(bytes) > kMostReal) throw TooLarge();
    return BlockSource::kOwn;
  }
  if (uncounted_threads > 0 && at::in_parallel_region()) return BlockSource::kUncounted;
  return BlockSource::kUsual;
}

void* allocate(size_t size) {
  const auto bytes = static_cast<int64_t>(size);
  const bool counts = uncounted == 0 && (is_served() || real_runs > 0);
  const bool has_memory = !counts || !is_served() || bytes <= std::max(room, cpu_options.kept_bytes);
  void* data = has_memory ? c10::alloc_cpu(size) : new_address(bytes);
  if (!counts) {
    note_step(data, bytes, false);
    return data;
  }
  Block block;
  block.bytes = bytes;
  block.contents.is_small = has_memory;
  block.contents.state = has_memory ? Contents::kKnown : Contents::kUnknown;
  Locked locked(memory.lock);
  memory.blocks[data] = std::move(block);
  return data;
}

bool release(void* data) {
  note_step(data, 0, true);
  int64_t bytes = 0;
  {
    Locked locked(memory.lock);
    const auto found = memory.blocks.find(data);
    if (found != memory.blocks.end()) {
      bytes = found->second.bytes;
      memory.blocks.erase(found);
    }
  }
  if (!is_virtual(data)) return false;
  bytes = std::min(bytes, kMostAddresses);
  if (const int64_t pages = resident_pages(data, bytes)) {
    memory.touched_pages += pages;
    madvise(data, bytes, MADV_DONTNEED);
  }
  Locked locked(memory.lock);
  if (--memory.without_memory == 0) memory.next = 0;
  return true;
}

// A fork waits for the locks, so that a child finds them open.
void lock_all() {
  memory.lock.lock();
  tape_lock.lock();
}

void unlock_all() {
  tape_lock.unlock();
  memory.lock.unlock();
}

const BlockSource source{kind_of, allocate, release};

// Outside of the lock, as the last owner of a storage gives it back.
void restore(const std::vector<Original>& originals) {
  for (const Original& original : originals)
    if (auto storage = original.storage.lock(); storage && storage->nbytes() == original.bytes.size())
      std::memcpy(storage->mutable_data(), original.bytes.data(), original.bytes.size());
}

Block* block_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_simulated(tensor)) return nullptr;
  const void* data = tensor.storage().data();
  if (data == nullptr) return nullptr;
  Locked locked(memory.lock);
  auto [found, is_new] = memory.blocks.try_emplace(data);
  Block& block = found->second;
  if (is_new) {
    block.bytes = static_cast<int64_t>(tensor.storage().nbytes());
    block.is_given = true;
    block.contents.state = is_virtual(data) ? Contents::kUnknown : Contents::kKnown;
    block.contents.is_small = !is_virtual(data) && block.bytes <= kMostRestored;
  }
  return &block;
}

}  // namespace

int64_t most_kept_bytes(at::ScalarType dtype) {
  return at::isIntegralType(dtype, /*includeBool=*/true) ? 16 * cpu_options.kept_bytes : cpu_options.kept_bytes;
}

void begin_cpu_memory(uintptr_t block_source) {
  if (memory.base == nullptr) {
    pthread_atfork(&lock_all, &unlock_all, &unlock_all);
    void* base = mmap(nullptr, kSpan, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(base != MAP_FAILED, "the simulated CPU cannot reserve 32 TiB of addresses: ", std::strerror(errno),
                " (a limit on virtual memory, or vm.overcommit_memory=2)");
#ifdef __linux__
    madvise(base, kSpan, MADV_NOHUGEPAGE);
    madvise(base, kSpan, MADV_DONTDUMP);
#endif
    memory.base = static_cast<char*>(base);
  }
  *reinterpret_cast<std::atomic<const BlockSource*>*>(block_source) = &source;
}

void switch_cpu(bool on) {
  c10::impl::tls_set_dispatch_key_included(kSwitch, on);
  std::vector<Original> originals;
  {
    Locked locked(memory.lock);
    memory.switched_on += on ? 1 : -1;
    if (memory.switched_on > 0) return;
    originals.swap(memory.originals);
    for (Version& version : memory.versions) version.counter.set_version(version.number);
    memory.versions.clear();
    for (auto each = memory.blocks.begin(); each != memory.blocks.end();)
      each = each->second.is_given ? memory.blocks.erase(each) : std::next(each);
  }
  restore(originals);
}

bool is_on() {
  return c10::impl::tls_is_dispatch_key_included(kSwitch) && !c10::impl::tls_is_dispatch_key_excluded(kSwitch);
}

int64_t touched_bytes() {
  Locked locked(memory.lock);
  int64_t pages = memory.touched_pages;
  for (const auto& [data, block] : memory.blocks)
    if (is_virtual(data)) pages += resident_pages(data, block.bytes);
  return pages * static_cast<int64_t>(page_bytes());
}

int64_t blocks_without_memory() {
  Locked locked(memory.lock);
  return memory.without_memory;
}

c10::Storage new_cpu_storage(int64_t bytes) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, true);
}

RunningForReal::RunningForReal() {
  ++real_runs;
}
RunningForReal::~RunningForReal() {
  --real_runs;
}

Uncounted::Uncounted() {
  ++uncounted;
  ++uncounted_threads;
}
Uncounted::~Uncounted() {
  --uncounted;
  --uncounted_threads;
}

Counted::Counted() : before_(uncounted) {
  uncounted = 0;
  ++counted;
}
Counted::~Counted() {
  --counted;
  uncounted = before_;
}

Room::Room(int64_t bytes) : before_(room) {
  room = bytes;
}
Room::~Room() {
  room = before_;
}

Tape::Tape() {
  tape = this;
  shared_tape = this;
}
Tape::~Tape() {
  stop();
}
void Tape::stop() {
  if (tape == this) tape = nullptr;
  Tape* its = this;
  shared_tape.compare_exchange_strong(its, nullptr);
}

// What contents.h asks of a device.

bool is_simulated(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage();
}

Contents* contents_of(const at::Tensor& tensor) {
  Block* block = block_of(tensor);
  return block == nullptr ? nullptr : &block->contents;
}

char* numbers_of(Contents&, const at::Tensor& tensor) {
  return static_cast<char*>(tensor.storage().mutable_data());
}

void keep_original(const at::Tensor& tensor) {
  Block* block = block_of(tensor);
  if (block == nullptr || !block->is_given || block->is_saved) return;
  const c10::Storage& storage = tensor.storage();
  Locked locked(memory.lock);
  block->is_saved = true;
  memory.originals.push_back(
      {storage.getWeakStorageImpl(), std::string(static_cast<const char*>(storage.data()), storage.nbytes())});
}

void keep_version(const at::Tensor& tensor) {
  Block* block = block_of(tensor);
  if (block == nullptr || !block->is_given || block->has_version || tensor.is_inference()) return;
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  Locked locked(memory.lock);
  block->has_version = true;
  memory.versions.push_back({counter, counter.current_version()});
}

at::Tensor new_tensor(int, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  Counted counted;
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  const auto bytes = static_cast<int64_t>(at::detail::computeStorageNbytes(sizes, strides, type.itemsize()));
  Room its_room(most_kept_bytes(dtype));
  auto made = at::detail::make_tensor<c10::TensorImpl>(new_cpu_storage(bytes),
                                                       c10::DispatchKeySet(c10::DispatchKey::CPU), type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

at::Tensor new_tensor(int device, at::IntArrayRef sizes, at::ScalarType dtype) {
  return new_tensor(device, sizes, c10::contiguous_strides(sizes), dtype);
}

}  // namespace memcheck::simulated
