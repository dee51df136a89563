#include "common/torch/autocast.h"

#include <ATen/autocast_mode.h>

#include <memory>

namespace memcheck {
namespace {

class CastInputs : public c10::OperatorKernel {
 public:
  CastInputs(c10::DeviceType device, size_t inputs) : device_(device), inputs_(inputs) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard off(
        c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device_)));
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device_);
    const size_t first = stack->size() - op.schema().arguments().size();
    for (size_t i = first; i < first + inputs_; ++i)
      (*stack)[i] = at::autocast::cached_cast(dtype, (*stack)[i].toTensor(), device_);
    op.callBoxed(stack);
  }

 private:
  c10::DeviceType device_;
  size_t inputs_;
};

}  // namespace

torch::CppFunction autocast_kernel(c10::DeviceType device, size_t cast_inputs) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CastInputs>(device, cast_inputs));
}

}  // namespace memcheck
