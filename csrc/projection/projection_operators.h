#pragma once

#include "common/torch/arguments.h"

// Projections of tokens: y = x w.

namespace memcheck::operators {

struct ProjectionArguments {
  Tensor x;  // (B,S,E)
  Tensor w;  // (E,R)

  auto fields() { return std::tie(x, w); }
};

struct ProjectionBackwardArguments {
  Tensor grad_y;                    // that of y
  MaybeTensor x;                    // (B,S,E), for the gradient of w
  MaybeTensor w;                    // (E,R), for the gradient of x
  std::array<bool, 2> output_mask;  // of x and w

  auto fields() { return std::tie(grad_y, x, w, output_mask); }
};

// y (B,S,R)
struct LinearR {
  static constexpr const char* schema = "linear_r(Tensor x, Tensor w) -> Tensor";
  static constexpr bool channel_major = false;
  using Arguments = ProjectionArguments;
  using Results = std::tuple<Tensor>;
};
struct LinearRBackward {
  static constexpr const char* schema =
      "linear_r_backward(Tensor grad_y, Tensor? x, Tensor? w, *, bool[2] output_mask)"
      " -> (Tensor grad_x, Tensor grad_w)";
  static constexpr bool channel_major = false;
  using Arguments = ProjectionBackwardArguments;
  using Results = std::tuple<Tensor, Tensor>;
};

// y (B,R,S)
struct LinearL {
  static constexpr const char* schema = "linear_l(Tensor x, Tensor w) -> Tensor";
  static constexpr bool channel_major = true;
  using Arguments = ProjectionArguments;
  using Results = std::tuple<Tensor>;
};
struct LinearLBackward {
  static constexpr const char* schema =
      "linear_l_backward(Tensor grad_y, Tensor? x, Tensor? w, *, bool[2] output_mask)"
      " -> (Tensor grad_x, Tensor grad_w)";
  static constexpr bool channel_major = true;
  using Arguments = ProjectionBackwardArguments;
  using Results = std::tuple<Tensor, Tensor>;
};

}  // namespace memcheck::operators
