#pragma once

#include "common/torch/arguments.h"

namespace memcheck::operators {

struct GatedSum {
  static constexpr const char* schema = "gated_sum(Tensor g, Tensor x) -> Tensor";
  struct Arguments {
    Tensor g;  // (B,T,R)
    Tensor x;  // (B,T,R)

    auto fields() { return std::tie(g, x); }
  };
  using Results = std::tuple<Tensor>;  // y (B,R)
};

struct GatedSumBackward {
  static constexpr const char* schema =
      "gated_sum_backward(Tensor grad_y, Tensor g, Tensor? x, *, bool[2] output_mask)"
      " -> (Tensor grad_g, Tensor grad_x)";
  struct Arguments {
    Tensor grad_y;                    // (B,R)
    Tensor g;                         // (B,T,R)
    MaybeTensor x;                    // (B,T,R), for the gradient of g
    std::array<bool, 2> output_mask;  // of g and x

    auto fields() { return std::tie(grad_y, g, x, output_mask); }
  };
  using Results = std::tuple<Tensor, Tensor>;
};

}  // namespace memcheck::operators
