#include "common/torch/device.h"

#include <cstdlib>
#include <string_view>

#include "common/finding.h"

namespace memcheck {

#if defined(MEMCHECK_WITH_CUDA) || defined(MEMCHECK_HOST_CUDA)

void raise_findings(c10::Device device) {
  if (!has_cuda_kernels(device)) return;
  const Finding finding = take_finding();
  TORCH_CHECK_VALUE(
      finding.rule == Rule::None, message_of(finding),
      "; a kernel found it in an earlier call, whose results are wrong. MEMCHECK_CHECK=1 raises it in the "
      "call itself");
}

void raise_findings_at_once(c10::Device device, cudaStream_t stream) {
  const char* const check = std::getenv("MEMCHECK_CHECK");
  if (!has_cuda_kernels(device) || check == nullptr || std::string_view(check) != "1") return;
  wait_for_kernels(stream);
  const Finding finding = take_finding();
  TORCH_CHECK_VALUE(finding.rule == Rule::None, message_of(finding));
}

#else

void raise_findings(c10::Device) {}
void raise_findings_at_once(c10::Device, cudaStream_t) {}

#endif

}  // namespace memcheck
