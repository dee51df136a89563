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

// Returns one of at::SDPBackend for a call of F.scaled_dot_product_attention, of which it gets: the sizes and strides
// of q, k and v; the ScalarType; whether there is a mask, causality, groups of heads, and a gradient.
using Choice = int64_t (*)(const int64_t*);
Choice choice = nullptr;

int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double, bool causal, std::optional<double>,
                         bool grouped) {
  if (choice == nullptr || q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return 0;  // The math backend.
  std::vector<int64_t> numbers;
  bool trains = false;
  for (const at::Tensor* x : {&q, &k, &v}) {
    numbers.insert(numbers.end(), x->sizes().begin(), x->sizes().end());
    numbers.insert(numbers.end(), x->strides().begin(), x->strides().end());
    trains |= x->requires_grad();
  }
  numbers.insert(numbers.end(), {static_cast<int64_t>(q.scalar_type()), mask.has_value(), causal, grouped, trains});
  return choice(numbers.data());
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

MEMCHECK_EXPORT void memcheck_choose_attention_by(memcheck::Choice choice) {
  memcheck::choice = choice;
}
