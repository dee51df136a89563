// Tensors of the host that take no memory: nobody has written to their pages, as what only fills them is left out.
#pragma once

#include <ATen/core/Tensor.h>

namespace memcheck::simulated {

// Whether the numbers of a large tensor of the CPU were never written.
bool is_lazy(const at::Tensor& tensor);

}  // namespace memcheck::simulated
