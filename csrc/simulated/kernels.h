// One kernel for all operators of CUDA: it finds the results of an operator by its kernel for meta tensors, and
// allocates them and its scratch in the order in which the kernel of CUDA does.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <vector>

#include "simulated/below_python.h"

namespace memcheck::simulated {

// What a kernel allocates besides its results.
struct Scratch {
  std::string name;
  int64_t bytes;
  bool is_first;       // before the results
  bool is_kept;        // by a library, for later calls of the thread
  bool empties_cache;  // before it is allocated, as a search for the fastest algorithm does
};

// Answers of Python's rules. Asked once for each operator, layout of its operands and values of its numbers.
struct Rules {
  std::vector<Scratch> (*scratch)(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                  const torch::jit::Stack& results) = nullptr;
  // One of at::SDPBackend.
  int64_t (*attention)(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                       bool grouped) = nullptr;
  int64_t cublas_workspace_bytes = 0;
  bool keeps_cublas_workspace = true;  // for later products of the thread
};
extern Rules rules;

// Allocated once for each thread and stream, and kept until drop_workspaces().
void keep_workspace(const std::string& library, int device, int64_t bytes);
void drop_workspaces();

// Switches torch's choice of attention and its recurrent layers to the simulated GPU's.
void register_stubs();

// Torch warns when a kernel replaces another, as ours replace those of a CUDA build. While this exists, it does not.
class Silence {
  struct Handler final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};
// From the load of the library, which registers kernels, until memcheck_simulated_begin.
inline std::optional<Silence> silence_of_load{std::in_place};

}  // namespace memcheck::simulated
