#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "common/types.h"

// How operators are made known to torch: Registration registers the schema of each, its kernels of every device, Meta
// and autocast. What autograd registers is in common/torch/autograd.h.

namespace memcheck {

// The tables of an operator, each for tensors of one device; null where this build has none.
template <typename Kernels>
struct KernelTables {
  const Kernels* cpu;
  const Kernels* cuda;
};

// In place of a kernel on a simulated GPU.
struct SimulatedKernel {
  template <typename Parameters>
  constexpr operator Kernel<Parameters>() const {
    return [](const Parameters&, Dtype, cudaStream_t) { launch_on_simulated_gpu(); };
  }
};

// A table has pointers alone, of which those of plans are the first.
template <auto... plans, typename Kernels, size_t... kOthers>
const Kernels* simulated_table(const Kernels& /*cpu*/, std::index_sequence<kOthers...> /*others*/) {
  static constexpr Kernels table{plans..., (static_cast<void>(kOthers), SimulatedKernel())...};
  return &table;
}

// Where GPUs are simulated, their table has the plan of real ones, so that the operator allocates the same, and kernels
// that do nothing.
template <auto... plans, typename Kernels>
KernelTables<Kernels> tables_of(const Kernels& cpu, const Kernels* cuda = nullptr) {
  constexpr size_t others = sizeof(Kernels) / sizeof(void*) - sizeof...(plans);
  return {&cpu, is_simulated() ? simulated_table<plans...>(cpu, std::make_index_sequence<others>()) : cuda};
}

// The tables op##_cpu and op##_cuda, as far as this build has them. After op: the function that plans scratch on a GPU,
// if there is one. In the build for tests/host_cuda the kernels of
// CUDA run on tensors of the CPU.
#if defined(MEMCHECK_HOST_CUDA)
#define MEMCHECK_KERNELS(op, ...)                          \
  KernelTables<std::remove_const_t<decltype(op##_cuda)>> { \
    &op##_cuda, nullptr                                    \
  }
#elif defined(MEMCHECK_WITH_CUDA)
#define MEMCHECK_KERNELS(op, ...) tables_of<__VA_ARGS__>(op##_cpu, &op##_cuda)
#else
#define MEMCHECK_KERNELS(op, ...) tables_of<__VA_ARGS__>(op##_cpu)
#endif

// The tables of an operator without kernels of its own, which every build has.
template <typename Kernels>
KernelTables<Kernels> tables_of_torch([[maybe_unused]] const Kernels& cpu, const Kernels& cuda) {
#if defined(MEMCHECK_HOST_CUDA)
  return {&cuda, nullptr};
#else
  return {&cpu, &cuda};
#endif
}

// An operator that arguments.h describes.
template <typename Op, typename Run>
struct OperatorKernels {
  typename Op::Results (*meta)(const typename Op::Arguments& x);  // checks arguments and allocates results
  Run* run;                // run(kernels, arguments) does the same and fills the results
  size_t cast_inputs = 0;  // under autocast the first so many arguments, all tensors, are cast to its dtype
};
template <typename Op, typename Run>
OperatorKernels<Op, Run> kernels_of(typename Op::Results (*meta)(const typename Op::Arguments&), Run* run,
                                    size_t cast_inputs = 0) {
  return {meta, run, cast_inputs};
}

// The kernel of an operator under autocast: it casts the first so many arguments, all tensors, to autocast's dtype, and
// calls the operator with autocast off, as torch does for its own attention.
class CastInputs : public c10::OperatorKernel {
 public:
  static torch::CppFunction kernel(c10::DeviceType device, size_t inputs) {
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CastInputs>(device, inputs));
  }

  CastInputs(c10::DeviceType device, size_t inputs) : device_(device), inputs_(inputs) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard off(
        c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device_)));
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device_);
    const size_t first = stack->size() - op.schema().arguments().size();
    for (size_t i = first; i < first + inputs_; ++i)
      (*stack)[i] = at::autocast::cached_cast(dtype, (*stack)[i].toTensor(), device_);
    op.callBoxed(stack);
  }

 private:
  c10::DeviceType device_;
  size_t inputs_;
};

// Registers its rows with the dispatcher as long as it lives: for that of the program.
class Registration {
 public:
  template <typename Kernels, typename... Rows>
  explicit Registration(const KernelTables<Kernels>& tables, const Rows&... rows) {
    (add(tables, rows), ...);
  }

 private:
  template <typename Kernels, typename Op, typename Run>
  void add(const KernelTables<Kernels>& tables, const OperatorKernels<Op, Run>& op) {
    using Arguments = typename Op::Arguments;
    const std::string name = operator_name(Op::schema);
#ifndef MEMCHECK_HOST_CUDA
    // The host's CUDA replaces kernels of operators that are registered already.
    schemas_.def(Op::schema, {at::Tag::pt2_compliant_tag});
    meta_.impl(name.c_str(), boxed<Arguments>(op.meta));
    if (op.cast_inputs > 0) {
      autocast_cpu_.impl(name.c_str(), CastInputs::kernel(c10::kCPU, op.cast_inputs));
      autocast_cuda_.impl(name.c_str(), CastInputs::kernel(c10::kCUDA, op.cast_inputs));
    }
#endif
    for (const auto& [kernels, library] : {std::pair{tables.cpu, &cpu_}, std::pair{tables.cuda, &cuda_}}) {
      if (kernels == nullptr) continue;
      library->impl(name.c_str(),
                    boxed<Arguments>([table = kernels, run = op.run](const Arguments& x) { return run(*table, x); }));
    }
  }

  // A kernel that takes its arguments from the dispatcher's stack.
  template <typename Arguments, typename Run>
  static torch::CppFunction boxed(Run run) {
    struct Kernel : c10::OperatorKernel {
      explicit Kernel(Run run) : run(std::move(run)) {}
      void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
        auto results = run(take_arguments<Arguments>(*stack));
        push_results(*stack, std::move(results));
      }
      Run run;
    };
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::move(run)));
  }

  static torch::Library implementations(c10::DispatchKey key) {
    return torch::Library(torch::Library::IMPL, "memcheck", key, __FILE__, __LINE__);
  }

  torch::Library schemas_{torch::Library::FRAGMENT, "memcheck", std::nullopt, __FILE__, __LINE__};
  torch::Library cpu_ = implementations(c10::DispatchKey::CPU);
  torch::Library cuda_ = implementations(c10::DispatchKey::CUDA);
  torch::Library meta_ = implementations(c10::DispatchKey::Meta);
  torch::Library autocast_cpu_ = implementations(c10::DispatchKey::AutocastCPU);
  torch::Library autocast_cuda_ = implementations(c10::DispatchKey::AutocastCUDA);
};

}  // namespace memcheck
