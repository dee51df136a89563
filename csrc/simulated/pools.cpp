// Private pools of memory: what torch.cuda.CUDAGraph, torch.cuda.MemPool and torch/_inductor/cudagraph_trees.py ask of
// the allocator. It follows ATen/cuda/CUDAGraph.cpp and torch/csrc/cuda/Module.cpp.
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "simulated/exports.h"
#include "simulated/memory.h"

namespace memcheck::simulated {
namespace {

// A CUDA graph that is being captured.
struct Capture {
  int device;
  int64_t stream;
  std::thread::id thread;
  PoolId pool;

  // Streams join a capture when they wait for it. Here those that the capturing thread uses belong to it.
  bool takes(int64_t other) const { return other == stream || (other != 0 && std::this_thread::get_id() == thread); }
};

struct Captures {
  std::mutex lock;
  std::vector<Capture> all;

  bool take(int device) {
    std::lock_guard<std::mutex> locked(lock);
    return std::any_of(all.begin(), all.end(), [&](const Capture& capture) {
      return capture.device == device && capture.takes(current_stream(device));
    });
  }
};
Captures& captures = *new Captures();

void begin_capture(int device, PoolId pool) {
  const Capture capture{device, current_stream(device), std::this_thread::get_id(), pool};
  if (capture.stream == 0)
    throw std::runtime_error(
        "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the "
        "default stream.)");
  LockedAllocator allocator(device);
  allocator->begin_allocate_to_pool(pool, [capture](int64_t stream) { return capture.takes(stream); });
  allocator->is_capturing = [device] { return captures.take(device); };
  allocator->mark_capture_begin();
  std::lock_guard<std::mutex> locked(captures.lock);
  captures.all.push_back(capture);
}

void end_capture(int device, PoolId pool) {
  LockedAllocator allocator(device);
  std::lock_guard<std::mutex> locked(captures.lock);
  auto& all = captures.all;
  auto found = std::find_if(all.begin(), all.end(),
                            [&](const Capture& capture) { return capture.device == device && capture.pool == pool; });
  if (found == all.end()) throw std::runtime_error("capture_end() called before capture_begin().");
  if (found->stream != current_stream(device))
    throw std::runtime_error("Capture must end on the same stream it began on.");
  all.erase(found);
  allocator->mark_capture_end();
  allocator->end_allocate_to_pool(pool);
}

void begin_pool(int device, PoolId pool, bool of_thread) {
  const auto thread = std::this_thread::get_id();
  LockedAllocator allocator(device);
  allocator->begin_allocate_to_pool(
      pool, [of_thread, thread](int64_t) { return !of_thread || std::this_thread::get_id() == thread; });
}

// Makes the storage a reference to memory that others own.
c10::DataPtr disown(c10::StorageImpl* storage) {
  void* address = storage->data_ptr().get();
  return storage->set_data_ptr(c10::DataPtr(address, storage->device()));
}

// Forgets who owns the memory, which stays allocated.
void release_owner(c10::DataPtr& pointer) {
  delete static_cast<Allocation*>(pointer.release_context());
}

void require(bool holds, const char* words) {
  if (!holds) throw std::runtime_error(words);
}

// [removeStorageDeleterFns]
void disown_freed(const std::vector<c10::StorageImpl*>& stale, const std::vector<uint64_t>& freed) {
  const std::unordered_set<uint64_t> gone(freed.begin(), freed.end());
  for (auto* storage : std::unordered_set<c10::StorageImpl*>(stale.begin(), stale.end())) {
    const auto address = reinterpret_cast<uint64_t>(storage->data_ptr().get());
    require(allocation_of(storage->data_ptr()) != nullptr, "Unexpected deleter function on storage, could not swap");
    require(gone.count(address) > 0, "stale storage must have been freed by the return to the checkpoint");
    auto before = disown(storage);
    release_owner(before);
  }
}

// [addStorageDeleterFns]
void own_again(const std::vector<c10::StorageImpl*>& live, const std::vector<Block*>& allocated, int device) {
  std::unordered_map<uint64_t, c10::StorageImpl*> storages;
  for (auto* storage : live) storages[reinterpret_cast<uint64_t>(storage->data_ptr().get())] = storage;
  for (Block* block : allocated) {
    auto found = storages.find(block->address);
    if (found == storages.end()) continue;
    require(found->second->data_ptr().get_context() == nullptr, " Not expecting deleter function");
    found->second->set_data_ptr_noswap(pointer_to(block, device));
  }
}

using Storages = c10::StorageImpl* const*;

// [_cuda_setCheckpointPoolState]
void restore(int device, const Checkpoint& checkpoint, const std::vector<c10::StorageImpl*>& stale,
             const std::vector<c10::StorageImpl*>& live) {
  LockedAllocator allocator(device);
  const Restored restored = allocator->restore(checkpoint);
  disown_freed(stale, restored.freed);
  own_again(live, restored.allocated, device);
}

bool lives(int device, PoolId pool, const std::unordered_set<uint64_t>& expected) {
  LockedAllocator allocator(device);
  const auto blocks = allocator->live_blocks(pool);
  return blocks.size() == expected.size() &&
         std::all_of(blocks.begin(), blocks.end(), [&](const Block* block) { return expected.count(block->address); });
}

void free_at(uint64_t address) {
  c10::DataPtr freed;
  for (int device = 0; device < properties.gpus && !freed; ++device) {
    LockedAllocator allocator(device);
    if (Block* block = allocator->allocated_at(address)) freed = pointer_to(block, device);
  }
  require(static_cast<bool>(freed), "invalid device pointer");
}

uint64_t allocate_for(int device, int64_t bytes, int64_t stream) {
  const int64_t before = exchange_stream(device, stream);
  c10::DataPtr pointer;
  try {
    pointer = allocate(device, bytes);
  } catch (...) {
    exchange_stream(device, before);
    throw;
  }
  exchange_stream(device, before);
  const auto address = reinterpret_cast<uint64_t>(pointer.get());
  release_owner(pointer);
  return address;
}

}  // namespace
}  // namespace memcheck::simulated

using namespace memcheck::simulated;

MEMCHECK_EXPORT const char* memcheck_simulated_begin_capture(int device, uint64_t first, uint64_t second) {
  return answer([&] { begin_capture(device, {first, second}); });
}
MEMCHECK_EXPORT const char* memcheck_simulated_end_capture(int device, uint64_t first, uint64_t second) {
  return answer([&] { end_capture(device, {first, second}); });
}
MEMCHECK_EXPORT int memcheck_simulated_is_capturing(int device) {
  return captures.take(device);
}
MEMCHECK_EXPORT const char* memcheck_simulated_begin_pool(int device, uint64_t first, uint64_t second, int of_thread) {
  return answer([&] { begin_pool(device, {first, second}, of_thread != 0); });
}
MEMCHECK_EXPORT const char* memcheck_simulated_end_pool(int device, uint64_t first, uint64_t second) {
  return answer([&] { LockedAllocator(device)->end_allocate_to_pool({first, second}); });
}
MEMCHECK_EXPORT const char* memcheck_simulated_make_pool(int device, uint64_t first, uint64_t second, int use_on_oom,
                                                         int no_split) {
  return answer([&] {
    LockedAllocator allocator(device);
    allocator->create_or_incref_pool({first, second});
    allocator->set_use_on_oom({first, second}, use_on_oom != 0);
    if (no_split) allocator->set_no_split({first, second});
  });
}
MEMCHECK_EXPORT const char* memcheck_simulated_retain_pool(int device, uint64_t first, uint64_t second) {
  return answer([&] { LockedAllocator(device)->create_or_incref_pool({first, second}); });
}
MEMCHECK_EXPORT const char* memcheck_simulated_release_pool(int device, uint64_t first, uint64_t second) {
  return answer([&] { LockedAllocator(device)->release_pool({first, second}); });
}
MEMCHECK_EXPORT const char* memcheck_simulated_keep_pool_from_others(int device, uint64_t first, uint64_t second) {
  return answer([&] { LockedAllocator(device)->set_use_on_oom({first, second}, false); });
}
MEMCHECK_EXPORT const char* memcheck_simulated_pool_uses(int device, uint64_t first, uint64_t second, int64_t* out) {
  return answer([&] { *out = LockedAllocator(device)->pool_use_count({first, second}); });
}
MEMCHECK_EXPORT const char* memcheck_simulated_pool_lives(int device, uint64_t first, uint64_t second,
                                                          const uint64_t* addresses, int64_t count, int64_t* out) {
  return answer([&] { *out = lives(device, {first, second}, {addresses, addresses + count}); });
}
// The caller gives the checkpoint back to memcheck_simulated_forget_checkpoint.
MEMCHECK_EXPORT const char* memcheck_simulated_checkpoint(int device, uint64_t first, uint64_t second,
                                                          Checkpoint** out) {
  return answer([&] { *out = new Checkpoint(LockedAllocator(device)->checkpoint({first, second})); });
}
MEMCHECK_EXPORT void memcheck_simulated_forget_checkpoint(Checkpoint* checkpoint) {
  delete checkpoint;
}
MEMCHECK_EXPORT const char* memcheck_simulated_restore(int device, const Checkpoint* checkpoint, Storages stale,
                                                       int64_t stale_count, Storages live, int64_t live_count) {
  return answer([&] { restore(device, *checkpoint, {stale, stale + stale_count}, {live, live + live_count}); });
}
MEMCHECK_EXPORT const char* memcheck_simulated_allocate_for(int device, int64_t bytes, int64_t stream, int64_t* out) {
  return answer([&] { *out = static_cast<int64_t>(allocate_for(device, bytes, stream)); });
}
MEMCHECK_EXPORT const char* memcheck_simulated_free_at(uint64_t address) {
  return answer([&] { free_at(address); });
}
MEMCHECK_EXPORT int memcheck_simulated_owns(const c10::StorageImpl* storage) {
  return allocation_of(storage->data_ptr()) != nullptr;
}
MEMCHECK_EXPORT const char* memcheck_simulated_free_storage(c10::StorageImpl* storage) {
  return answer([&] {
    require(allocation_of(storage->data_ptr()) != nullptr, "Expected standard deleter");
    disown(storage);
  });
}
// From now on, access to the tensor's memory is an error in these words.
MEMCHECK_EXPORT void memcheck_simulated_refuse_tensor(c10::TensorImpl* tensor, const char* words) {
  tensor->release_storage_and_set_meta_custom_data_ptr_error_msg_(words);
}
MEMCHECK_EXPORT void memcheck_simulated_refuse_storage(c10::StorageImpl* storage, const char* words) {
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(words);
}
// A kernel that is no operator has written to the storage.
MEMCHECK_EXPORT void memcheck_simulated_written(const c10::StorageImpl* storage) {
  if (Allocation* allocation = allocation_of(storage->data_ptr())) {
    Contents unknown;
    unknown.is_small = allocation->contents.is_small;
    allocation->contents = std::move(unknown);
  }
}
