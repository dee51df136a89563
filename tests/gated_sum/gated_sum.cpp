#include "gated_sum/gated_sum.h"

#include <array>
#include <initializer_list>
#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"

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

at::Tensor forward_meta(const at::Tensor& g, const at::Tensor& x) {
  check_g(kForward, g);
  check_as_g(kForward, "x", x, "(B,T,R)", {g.sym_size(0), g.sym_size(1), g.sym_size(2)}, g);
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
  check_g(kBackward, g);
  check_as_g(kBackward, "grad_y", grad_y, "(B,R)", {g.sym_size(0), g.sym_size(2)}, g);
  if (x || output_mask[0])
    check_as_g(kBackward, "x", x.value_or(at::Tensor()), "(B,T,R)", {g.sym_size(0), g.sym_size(1), g.sym_size(2)}, g);
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
