#include "simulated/host.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <sstream>

#include "simulated/exports.h"

namespace memcheck::simulated {
namespace {

using torch::jit::Stack;

// Pages that nobody writes take no memory, as the operating system gives them at the first write.
struct LazyAllocator final : c10::Allocator {
  c10::Allocator* usual = c10::GetCPUAllocator();
  int64_t least_bytes = 0;
  std::shared_mutex lock;
  std::map<const void*, size_t> blocks;

  c10::DataPtr allocate(size_t n) override;
  c10::DeleterFnPtr raw_deleter() const override { return usual->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t n) const override { usual->copy_data(to, from, n); }
  // The tracker of the CPU keeps a header before the data, so the address may be inside of a block.
  bool has(const void* address) {
    std::shared_lock<std::shared_mutex> locked(lock);
    auto next = blocks.upper_bound(address);
    if (next == blocks.begin()) return false;
    auto found = std::prev(next);
    return static_cast<const char*>(address) < static_cast<const char*>(found->first) + found->second;
  }
};
LazyAllocator* lazy = nullptr;

void unmap(void* address) {
  size_t bytes;
  {
    std::unique_lock<std::shared_mutex> locked(lazy->lock);
    auto found = lazy->blocks.find(address);
    bytes = found->second;
    lazy->blocks.erase(found);
  }
  munmap(address, bytes);
}

c10::DataPtr LazyAllocator::allocate(size_t n) {
  if (static_cast<int64_t>(n) < least_bytes) return usual->allocate(n);
  void* address = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return usual->allocate(n);
  std::unique_lock<std::shared_mutex> locked(lock);
  blocks[address] = n;
  return {address, address, &unmap, c10::Device(c10::DeviceType::CPU)};
}

bool all_lazy(const c10::IValue* arguments, size_t count) {
  bool found = true;
  for (size_t i = 0; i < count; ++i)
    if (arguments[i].isTensor() && arguments[i].toTensor().defined() && arguments[i].toTensor().dim() > 0)
      found = found && is_lazy(arguments[i].toTensor());
  return found;
}

// The kernel of the CPU of an operator in place, left out where it would write to a lazy tensor what is not known.
struct FillUnlessLazy final : c10::OperatorKernel {
  explicit FillUnlessLazy(c10::SafeKernelFunction kernel) : usual(std::move(kernel)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const c10::IValue* arguments = stack->data() + stack->size() - count;
    if (!is_lazy(arguments[0].toTensor()) || !all_lazy(arguments, count)) return usual.callBoxed(op, keys, stack);
    const at::Tensor self = arguments[0].toTensor();
    torch::jit::drop(*stack, count);
    stack->push_back(self);
  }
  c10::SafeKernelFunction usual;
};

auto& left_out = *new std::vector<c10::RegistrationHandleRAII>();

void leave_out(const std::string& name, const std::string& overload) {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto op = dispatcher.findSchema({name, overload});
  if (!op) return;
  auto kernel = std::make_unique<FillUnlessLazy>(op->getComputedKernelForDispatchKey(c10::DispatchKey::CPU));
  left_out.push_back(dispatcher.registerImpl({name, overload}, c10::DispatchKey::CPU,
                                                  c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
                                                  std::nullopt, nullptr, "memcheck's simulated GPU"));
}

}  // namespace

bool is_lazy(const at::Tensor& tensor) {
  return lazy != nullptr && tensor.defined() && tensor.is_cpu() && tensor.has_storage() &&
         tensor.storage().nbytes() >= static_cast<size_t>(lazy->least_bytes) && lazy->has(tensor.storage().data());
}

}  // namespace memcheck::simulated

using namespace memcheck::simulated;

// After torch is imported. names: of operators that write to their first operand, a line each.
MEMCHECK_EXPORT void memcheck_simulated_host(int64_t least_bytes, const char* names) {
  lazy = new LazyAllocator();
  lazy->least_bytes = least_bytes;
  c10::SetCPUAllocator(lazy, 0);
  std::istringstream lines(names);
  for (std::string line; std::getline(lines, line);) {
    const size_t dot = line.find('.');
    leave_out("aten::" + line.substr(0, dot), dot == std::string::npos ? "" : line.substr(dot + 1));
  }
}
