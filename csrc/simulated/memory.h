// The memory of the simulated GPUs: addresses, blocks and their history, and no bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "simulated/caching_allocator.h"
#include "simulated/contents.h"

namespace memcheck::simulated {

// The target of a simulation. Each of its GPUs is such a device.
struct Properties {
  int gpus = 0;
  int major = 8, minor = 0, multiprocessors = 108;
  int64_t total_bytes = 0;
  int64_t usable_bytes = 0;  // what torch's allocator can reserve
  int64_t shared_bytes = 0;  // of a block, opted in
};
extern Properties properties;

// What a storage's pointer owns.
struct Allocation {
  Block* block;
  int device;
  int64_t bytes;  // as requested
  Contents contents;
};

c10::Device device_at(int index);

// May throw c10::OutOfMemoryError, in torch's words.
c10::DataPtr allocate(int device, int64_t bytes, at::ScalarType dtype = at::kByte);
c10::Storage new_storage(int device, int64_t bytes, at::ScalarType dtype);

// The allocation of a storage on a simulated GPU; null for others and for empty ones.
Allocation* allocation_of(const c10::DataPtr& pointer);
Allocation* allocation_of(const at::Tensor& tensor);

// A pointer that owns a block in use; nothing is known of its numbers.
c10::DataPtr pointer_to(Block* block, int device);

// The caching allocator of a GPU, which is locked as long as this lives.
class LockedAllocator {
 public:
  explicit LockedAllocator(int device);
  CachingAllocator* operator->() const { return allocator_; }

 private:
  std::lock_guard<std::recursive_mutex> lock_;
  CachingAllocator* allocator_;
};

// Grows the tensor's storage, as resize_bytes_cuda does.
void grow_storage(const at::Tensor& tensor, int64_t bytes);

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t n) override;
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
};
Allocator& allocator();

void empty_cache();

// The device and the streams of the calling thread.
int current_device();
int exchange_device(int device);
void check_device(int device);  // Throws CUDA's error where there is no such device.
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t stream);
int64_t new_stream();

// The operator that runs in this thread, for the frames of the history.
class Running {
 public:
  explicit Running(const c10::OperatorName* name);
  ~Running();
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  const c10::OperatorName* before_;
};

}  // namespace memcheck::simulated
