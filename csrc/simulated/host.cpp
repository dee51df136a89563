#include "simulated/host.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <sstream>

#include "simulated/exports.h"

namespace memcheck::simulated {
namespace {

using torch::jit::Stack;

// Large blocks are pages of their own, which the operating system gives at the first write.
int64_t least_lazy_bytes = INT64_MAX;

// Whether no page of the block was written or read, of some that lie evenly in it.
bool is_untouched(const void* data, size_t bytes) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  constexpr size_t kSamples = 16;
  for (size_t i = 1; i <= kSamples; ++i) {
    const uintptr_t address = (reinterpret_cast<uintptr_t>(data) + bytes / (kSamples + 1) * i) / page * page;
    unsigned char state = 0;
    if (mincore(reinterpret_cast<void*>(address), page, &state) != 0 || (state & 1) != 0) return false;
  }
  return true;
}

bool all_lazy(const c10::IValue* arguments, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (arguments[i].isTensor() && arguments[i].toTensor().defined() && arguments[i].toTensor().dim() > 0 &&
        !is_lazy(arguments[i].toTensor()))
      return false;
  return true;
}

// The kernel of the CPU of an operator in place, left out where it would write to a lazy tensor what is not known.
struct FillUnlessLazy final : c10::OperatorKernel {
  explicit FillUnlessLazy(c10::SafeKernelFunction kernel) : usual(std::move(kernel)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const c10::IValue* arguments = stack->data() + stack->size() - count;
    if (!all_lazy(arguments, count) || arguments[0].toTensor().dim() == 0) return usual.callBoxed(op, keys, stack);
    const at::Tensor self = arguments[0].toTensor();
    torch::jit::drop(*stack, count);
    stack->push_back(self);
  }
  c10::SafeKernelFunction usual;
};

auto& kernels_left_out = *new std::vector<c10::RegistrationHandleRAII>();

void leave_out(const std::string& name, const std::string& overload) {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto op = dispatcher.findSchema({name, overload});
  if (!op) return;
  auto kernel = std::make_unique<FillUnlessLazy>(op->getComputedKernelForDispatchKey(c10::DispatchKey::CPU));
  kernels_left_out.push_back(dispatcher.registerImpl({name, overload}, c10::DispatchKey::CPU,
                                                     c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
                                                     std::nullopt, nullptr, "memcheck's simulated GPU"));
}

}  // namespace

bool is_lazy(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.has_storage() &&
         static_cast<int64_t>(tensor.storage().nbytes()) >= least_lazy_bytes &&
         is_untouched(tensor.storage().data(), tensor.storage().nbytes());
}

}  // namespace memcheck::simulated

using namespace memcheck::simulated;

// After torch is imported. names: of operators that write to their first operand, a line each.
MEMCHECK_EXPORT void memcheck_simulated_host(int64_t least_bytes, const char* names) {
  least_lazy_bytes = least_bytes;
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(least_bytes));  // Else malloc raises it, and gives out pages again.
  std::istringstream lines(names);
  for (std::string line; std::getline(lines, line);) {
    const size_t dot = line.find('.');
    leave_out("aten::" + line.substr(0, dot), dot == std::string::npos ? "" : line.substr(dot + 1));
  }
}
