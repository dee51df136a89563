#include "gated_sum/gated_sum.h"

#include <initializer_list>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"
#include "gated_sum/gated_sum_operators.h"

namespace memcheck {
namespace {

constexpr const char* kForward = "gated_sum";
constexpr const char* kBackward = "gated_sum_backward";

// Kernels check nothing: they read and write what the sizes of g say.
void check_g(const char* op, const at::Tensor& g) {
  check_rank(op, "g", g, 3, "(B,T,R)");
  check_floating(op, "g", g);
}

void check_as_g(const char* op, const char* name, const at::Tensor& x, const char* letters,
                std::initializer_list<c10::SymInt> shape, const at::Tensor& g) {
  check_tensor(op, name, x);
  check_shape(op, name, x, letters, shape, "g");
  check_like(op, name, x, g, "g");
}

operators::GatedSum::Results forward_meta(const operators::GatedSum::Arguments& in) {
  check_g(kForward, in.g);
  check_as_g(kForward, "x", in.x, "(B,T,R)", {in.g.sym_size(0), in.g.sym_size(1), in.g.sym_size(2)}, in.g);
  return {empty_result({in.g.sym_size(0), in.g.sym_size(2)}, in.g.options())};
}

operators::GatedSum::Results forward(const GatedSumKernels& kernels, const operators::GatedSum::Arguments& in) {
  const auto [y] = forward_meta(in);
  const DeviceScope device(in.g);
  const GatedSumForward p{.B = in.g.size(0),
                          .T = in.g.size(1),
                          .R = in.g.size(2),
                          .g = reads<3>(in.g),
                          .x = reads<3>(in.x),
                          .y = writes<2>(y)};
  kernels.forward(p, dtype_of(in.g), device.stream);
  return {y};
}

operators::GatedSumBackward::Results backward_meta(const operators::GatedSumBackward::Arguments& in) {
  const at::Tensor x = in.x.value_or(at::Tensor());
  check_g(kBackward, in.g);
  check_as_g(kBackward, "grad_y", in.grad_y, "(B,R)", {in.g.sym_size(0), in.g.sym_size(2)}, in.g);
  if (in.x || in.output_mask[0])
    check_as_g(kBackward, "x", x, "(B,T,R)", {in.g.sym_size(0), in.g.sym_size(1), in.g.sym_size(2)}, in.g);
  return {empty_gradient(in.output_mask[0], in.g),
          empty_gradient(in.output_mask[1], x, in.g.sym_sizes(), in.g.options())};
}

operators::GatedSumBackward::Results backward(const GatedSumKernels& kernels,
                                              const operators::GatedSumBackward::Arguments& in) {
  const auto gradients = backward_meta(in);
  const auto& [grad_g, grad_x] = gradients;
  const DeviceScope device(in.g);
  const GatedSumBackward p{.B = in.g.size(0),
                           .T = in.g.size(1),
                           .R = in.g.size(2),
                           .grad_y = reads<2>(in.grad_y),
                           .g = reads<3>(in.g),
                           .x = reads<3>(in.x),
                           .grad_g = writes<3>(grad_g),
                           .grad_x = writes<3>(grad_x)};
  kernels.backward(p, dtype_of(in.g), device.stream);
  return gradients;
}

const Registration registration(MEMCHECK_KERNELS(gated_sum),
                                kernels_of<operators::GatedSum>(forward_meta, forward, /*cast_inputs=*/2),
                                kernels_of<operators::GatedSumBackward>(backward_meta, backward));

}  // namespace
}  // namespace memcheck
