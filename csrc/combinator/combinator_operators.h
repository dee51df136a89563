#pragma once

#include "common/torch/arguments.h"

namespace memcheck::operators {

struct Combinator {
  static constexpr const char* schema =
      "combinator(Tensor x, Tensor weight, *, bool low_memory=False, bool keep_preactivations=False)"
      " -> (Tensor y, Tensor preactivations)";
  struct Arguments {
    Tensor x;       // (...,E)
    Tensor weight;  // (2,E,E)
    bool low_memory;
    bool keep_preactivations;

    auto fields() { return std::tie(x, weight, low_memory, keep_preactivations); }
  };
  using Results = std::tuple<Tensor, Tensor>;  // (...,E), (...,2E) or without elements
};

struct CombinatorBackward {
  static constexpr const char* schema =
      "combinator_backward(Tensor grad_y, Tensor? x, Tensor? weight, Tensor? preactivations, *, bool[2] output_mask)"
      " -> (Tensor grad_x, Tensor grad_weight)";
  struct Arguments {
    Tensor grad_y;                    // (...,E)
    MaybeTensor x;                    // (...,E), for the gradient of weight, and without preactivations
    MaybeTensor weight;               // (2,E,E), for the gradient of x, and without preactivations
    MaybeTensor preactivations;       // (...,2E)
    std::array<bool, 2> output_mask;  // of x and weight

    auto fields() { return std::tie(grad_y, x, weight, preactivations, output_mask); }
  };
  using Results = std::tuple<Tensor, Tensor>;
};

}  // namespace memcheck::operators
