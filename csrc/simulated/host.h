// Tensors of the host that take no memory: large ones have addresses, and what only fills them is left out.
#pragma once

#include <ATen/core/Tensor.h>

namespace memcheck::simulated {

bool is_lazy(const at::Tensor& tensor);

}  // namespace memcheck::simulated
