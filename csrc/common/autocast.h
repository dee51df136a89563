#pragma once

#include <ATen/autocast_mode.h>

namespace memcheck {

// Under autocast an operator runs in the autocast dtype, as torch's own attention does. While this lives, autocast is
// off.
template <c10::DeviceType device>
class Autocast {
 public:
  at::Tensor operator()(const at::Tensor& x) const {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x, device);
  }

 private:
  c10::impl::ExcludeDispatchKeyGuard off_{
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device))};
};

}  // namespace memcheck
