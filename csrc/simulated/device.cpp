// The simulated GPUs as torch sees them: hooks, guard, generators, streams and events.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <cstring>

#include "simulated/exports.h"
#include "simulated/kernels.h"
#include "simulated/memory.h"

namespace memcheck::simulated {

void begin_memory(int order);

namespace {

constexpr long kCudnn = 91002, kCudart = 13000;

// Philox's state: a seed and an offset, 8 bytes each, as CUDAGeneratorImpl keeps them.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device) : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.unsafeReleaseIntrusivePtr();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    seed_ = state->current_seed();
    offset_ = state->get_offset();
  }
  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }

 private:
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

int index_or_current(c10::DeviceIndex index) {
  return index < 0 ? current_device() : index;
}

// Memory of the host that torch takes for pinned.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::DataPtr pages = c10::GetCPUAllocator()->allocate(n);
    void* address = pages.get();
    std::lock_guard<std::mutex> locked(lock);
    if (address != nullptr) blocks[address] = n;
    auto* owned = new c10::DataPtr(std::move(pages));
    return {address, owned, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  static void give_back(void* context);
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
  bool has(const void* address) {
    std::lock_guard<std::mutex> locked(lock);
    auto next = blocks.upper_bound(address);
    if (next == blocks.begin()) return false;
    auto found = std::prev(next);
    return static_cast<const char*>(address) < static_cast<const char*>(found->first) + found->second;
  }
  std::mutex lock;
  std::map<const void*, size_t> blocks;
};
PinnedAllocator& pinned = *new PinnedAllocator();

void PinnedAllocator::give_back(void* context) {
  auto* owned = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> locked(pinned.lock);
    pinned.blocks.erase(owned->get());
  }
  delete owned;
}

// Methods that torch's other versions lack are plain ones there, so none says `override`.
C10_DIAGNOSTIC_PUSH_AND_IGNORED_IF_DEFINED("-Wsuggest-override")
struct Hooks : at::CUDAHooksInterface {
  using at::CUDAHooksInterface::CUDAHooksInterface;
  void init() const {}
  bool hasCUDA() const { return true; }
  bool hasCUDART() const { return true; }
  bool hasMAGMA() const { return true; }
  bool hasCuDNN() const { return true; }
  bool hasCuSOLVER() const { return true; }
  bool hasCuBLASLt() const { return true; }
  bool compiledWithCuDNN() const { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const { return true; }
  bool supportsBFloat16RNNWithCuDNN() const { return true; }
  long versionCuDNN() const { return kCudnn; }
  long versionRuntimeCuDNN() const { return kCudnn; }
  long versionCuDNNFrontend() const { return 11200; }
  long versionCUDART() const { return kCudart; }
  std::string showConfig() const { return "a simulated GPU"; }
  double batchnormMinEpsilonCuDNN() const { return 0; }
  bool isAvailable() const { return true; }
  bool isBuilt() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const { return true; }
  int getNumGPUs() const { return properties.gpus; }
  c10::DeviceIndex deviceCount() const { return static_cast<c10::DeviceIndex>(properties.gpus); }
  c10::DeviceIndex current_device() const { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const { return static_cast<c10::DeviceIndex>(simulated::current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const { return pinned.has(address); }
  c10::Allocator* getPinnedMemoryAllocator() const { return &pinned; }
  c10::Allocator* getCUDADeviceAllocator() const { return &allocator(); }
  c10::Device getDeviceFromPtr(void*) const { return device_at(simulated::current_device()); }
  void deviceSynchronize(c10::DeviceIndex) const {}
  int64_t cuFFTGetPlanCacheMaxSize(c10::DeviceIndex) const { return 4096; }
  void cuFFTSetPlanCacheMaxSize(c10::DeviceIndex, int64_t) const {}
  int64_t cuFFTGetPlanCacheSize(c10::DeviceIndex) const { return 0; }
  void cuFFTClearPlanCache(c10::DeviceIndex) const {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const {
    static std::vector<at::Generator>& all = *new std::vector<at::Generator>();
    static std::once_flag once;
    std::call_once(once, [] {
      for (int i = 0; i < properties.gpus; ++i) all.push_back(at::make_generator<Generator>(i));
    });
    return all.at(index_or_current(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const {
    return at::make_generator<Generator>(index_or_current(device));
  }
};
C10_DIAGNOSTIC_POP()

c10::Stream stream_at(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

// Streams and events do nothing, as kernels take no time. What other streams use is free at the next request.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return device_at(exchange_device(device.index())); }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < properties.gpus) exchange_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = index_or_current(device.index());
    return stream_at(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_at(index_or_current(device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_at(index_or_current(device.index()), new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = stream.device_index();
    return stream_at(device, exchange_stream(device, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(properties.gpus); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1; }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }
};

// For torch's profiler, which records events around operators.
struct Profiler final : torch::profiler::impl::ProfilerStubs {
  using Event = torch::profiler::impl::ProfilerVoidEventStub;
  void record(c10::DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    if (device != nullptr) *device = static_cast<c10::DeviceIndex>(current_device());
    *event = std::make_shared<int>();
    if (cpu_ns != nullptr) *cpu_ns = c10::getTime();
  }
  float elapsed(const Event*, const Event*) const override { return 1; }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> call) const override {
    for (int device = 0; device < properties.gpus; ++device) call(device);
  }
  void synchronize() const override {}
};

void register_device() {
  static Guard& guard = *new Guard();
  c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator(), 1);
  register_stubs();
  static Profiler& profiler = *new Profiler();
  torch::profiler::impl::registerCUDAMethods(&profiler);
}

}  // namespace
}  // namespace memcheck::simulated

using namespace memcheck::simulated;

// Before torch is imported, when its libraries are loaded. Returns whether torch takes the hooks: it keeps those of the
// first question. A CUDA build of torch registers hooks of its own, of a lower priority.
MEMCHECK_EXPORT int memcheck_simulated_begin(const Properties* target, int order) {
  properties = *target;
  silence_of_load.reset();
  begin_memory(order);
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs) { return std::unique_ptr<at::CUDAHooksInterface>(new Hooks()); },
      c10::REGISTRY_PREFERRED);
  register_device();
  return at::detail::getCUDAHooks().hasCUDA();
}

// After torch is imported: a CUDA build has registered its own meanwhile.
MEMCHECK_EXPORT void memcheck_simulated_begin_again() {
  register_device();
}

// For memcheck's own operators.
MEMCHECK_EXPORT int memcheck_is_simulated() {
  return properties.gpus;
}

MEMCHECK_EXPORT void memcheck_simulated_properties(int, int* major, int* minor, int* multiprocessors, int64_t* shared) {
  *major = properties.major;
  *minor = properties.minor;
  *multiprocessors = properties.multiprocessors;
  *shared = properties.shared_bytes;
}
