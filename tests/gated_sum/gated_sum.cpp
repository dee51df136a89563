#include "gated_sum/gated_sum.h"

#include <array>
#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"

namespace memcheck {
namespace {

constexpr const char* kForward = "gated_sum";
constexpr const char* kBackward = "gated_sum_backward";

at::Tensor forward_meta(const at::Tensor& g, const at::Tensor& x) {
  check_rank(kForward, "g", g, 3, "(B,T,R)");
  check_shape(kForward, "x", x, "(B,T,R)", {g.sym_size(0), g.sym_size(1), g.sym_size(2)}, "g");
  check_floating(kForward, "g", g);
  check_like(kForward, "x", x, g, "g");
  return empty_result({g.sym_size(0), g.sym_size(2)}, g.options());
}

at::Tensor forward(const GatedSumKernels& kernels, const at::Tensor& g, const at::Tensor& x) {
  const at::Tensor y = forward_meta(g, x);
  const DeviceScope device(g);
  kernels.forward({g.size(0), g.size(1), g.size(2), reads<3>(g), reads<3>(x), writes<2>(y)}, dtype_of(g),
                  device.stream);
  return y;
}

using Gradients = std::tuple<at::Tensor, at::Tensor>;

Gradients backward_meta(const at::Tensor& grad_y, const at::Tensor& g, const std::optional<at::Tensor>& x,
                        std::array<bool, 2> output_mask) {
  check_rank(kBackward, "g", g, 3, "(B,T,R)");
  check_shape(kBackward, "grad_y", grad_y, "(B,R)", {g.sym_size(0), g.sym_size(2)}, "g");
  check_like(kBackward, "grad_y", grad_y, g, "g");
  if (x || output_mask[0]) check_rank(kBackward, "x", x.value_or(at::Tensor()), 3, "(B,T,R)");
  return {empty_gradient(output_mask[0], g),
          empty_gradient(output_mask[1], x.value_or(at::Tensor()), g.sym_sizes(), g.options())};
}

Gradients backward(const GatedSumKernels& kernels, const at::Tensor& grad_y, const at::Tensor& g,
                   const std::optional<at::Tensor>& x, std::array<bool, 2> output_mask) {
  const Gradients gradients = backward_meta(grad_y, g, x, output_mask);
  const DeviceScope device(g);
  const GatedSumBackward p{g.size(0),
                           g.size(1),
                           g.size(2),
                           reads<2>(grad_y),
                           reads<3>(g),
                           reads<3>(x.value_or(at::Tensor())),
                           writes<3>(std::get<0>(gradients)),
                           writes<3>(std::get<1>(gradients))};
  kernels.backward(p, dtype_of(g), device.stream);
  return gradients;
}

const Registration registration(MEMCHECK_KERNELS(gated_sum),
                                OperatorRow{"gated_sum(Tensor g, Tensor x) -> Tensor", forward_meta, forward,
                                            /*cast_inputs=*/2},
                                OperatorRow{
                                    "gated_sum_backward(Tensor grad_y, Tensor g, Tensor? x, *, bool[2] output_mask)"
                                    " -> (Tensor grad_g, Tensor grad_x)",
                                    backward_meta, backward});

}  // namespace
}  // namespace memcheck
