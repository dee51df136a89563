// Runs below autograd, modes and functions of Python, as a kernel that is called by another one does.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace memcheck::simulated {

class BelowPython {
 public:
  BelowPython() : keys_(keys()), functions_(static_cast<int>(at::impl::PythonTorchFunctionTLS::get_disabled_state())) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~BelowPython() {
    const auto before = static_cast<at::impl::TorchFunctionDisabledState>(functions_);
    at::impl::PythonTorchFunctionTLS::set_disabled_state(before);
  }
  BelowPython(const BelowPython&) = delete;
  BelowPython& operator=(const BelowPython&) = delete;

 private:
  static c10::impl::LocalDispatchKeySet keys() {
    c10::impl::PODLocalDispatchKeySet keys{};
    keys.set_included(c10::default_included_set);
    keys.set_excluded(c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::python_ks |
                      c10::DispatchKeySet(c10::DispatchKey::PreDispatch));
    return c10::impl::LocalDispatchKeySet(keys);
  }

  c10::impl::ForceDispatchKeyGuard keys_;
  int functions_;
};

}  // namespace memcheck::simulated
