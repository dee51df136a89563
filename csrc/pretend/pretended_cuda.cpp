// Lets a process that has no GPU, or must not touch one, trace programs for CUDA: torch then finds one device,
// "cuda:0", on which nothing can be allocated or run. memcheck/predict/pretended_gpu.py loads this library and calls
// it.
//
// It is no part of memcheck._C: torch chooses its hooks while it is imported, so they are registered before that.
// Without them autograd ends the process when it meets fake tensors on "cuda".

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace memcheck {
namespace {

struct PretendedHooks : at::CUDAHooksInterface {
  using at::CUDAHooksInterface::CUDAHooksInterface;
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

c10::Device device() {
  return {c10::DeviceType::CUDA, 0};
}

c10::Stream stream() {
  return c10::Stream(c10::Stream::DEFAULT, device());
}

struct PretendedGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
};

int64_t attention = 0;  // One of at::SDPBackend, which F.scaled_dot_product_attention runs.

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return attention;
}

void register_guard() {
  new c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new PretendedGuard());
  new at::native::RegisterCUDADispatch<decltype(at::native::_fused_sdp_choice_stub)>(at::native::_fused_sdp_choice_stub,
                                                                                     choose_attention);
}

}  // namespace
}  // namespace memcheck

#define MEMCHECK_EXPORT extern "C" __attribute__((visibility("default")))

// Before torch is imported, when libtorch_cpu is loaded. Returns whether torch takes the hooks. A CUDA build registers
// its own while it is imported; they have the lower priority.
MEMCHECK_EXPORT int memcheck_pretend_cuda() {
  memcheck::register_guard();
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs) { return std::unique_ptr<at::CUDAHooksInterface>(new memcheck::PretendedHooks()); },
      c10::REGISTRY_PREFERRED);
  return at::detail::getCUDAHooks().hasCUDA();
}

// After torch is imported: a CUDA build has registered the real ones meanwhile.
MEMCHECK_EXPORT void memcheck_pretend_again() {
  memcheck::register_guard();
}

MEMCHECK_EXPORT void memcheck_choose_attention(int64_t backend) {
  memcheck::attention = backend;
}
