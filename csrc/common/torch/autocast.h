#pragma once

#include <c10/core/DeviceType.h>
#include <torch/library.h>

#include <cstddef>

namespace memcheck {

// The kernel of an operator under autocast: it casts the first so many arguments, all tensors, to autocast's dtype, and
// calls the operator with autocast off, as torch does for its own attention.
torch::CppFunction autocast_kernel(c10::DeviceType device, size_t cast_inputs);

}  // namespace memcheck
