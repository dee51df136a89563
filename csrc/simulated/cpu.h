// The kernel of all operators on the simulated CPU, which computes sizes, results and scratch where it would compute
// numbers that nobody has.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "simulated/plans.h"

namespace memcheck::simulated {

// An allocation of a kernel; or the release of one, by its number.
struct Step {
  int64_t bytes;
  int frees = -1;
};

// What a kernel allocates and frees, in its order, and what it returns. Sources of kFresh are numbers of steps; -1: the
// result has no memory.
struct CpuPlan {
  std::vector<Step> steps;
  std::vector<std::pair<Resize, int>> resizes;  // each with the step of its new memory; -1: it keeps its own
  std::vector<Output> outputs;
  std::string doubt;
  bool runs_as_it_is = false;  // Its results are no dense tensors.
  bool is_probed = false;
};

using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;  // an operand, and what stands for it

// Writes results and resized operands into a plan. step_of: the step that allocated a tensor's memory, or -1.
void note_outcome(CpuPlan& plan, const torch::jit::Stack& results, const Pairs& pairs,
                  const std::vector<at::Tensor>& operands, const std::function<int(const at::Tensor&)>& step_of);

// Runs the kernel once, alone, on numbers that are made up where they are not known.
struct Probe {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  const c10::IValue* arguments;
  size_t count;
  const std::vector<at::Tensor>& operands;
  bool is_random, has_sizes_by_contents;
};
CpuPlan plan_by_probe(const Probe& probe);

// Scratch by the rules in Python. Empty: no rule knows it.
struct CpuScratch {
  int64_t bytes;
  bool is_first;      // before the results
  std::string doubt;  // what differs from run to run, in place of bytes
};
using CpuRule = std::optional<std::vector<CpuScratch>> (*)(const c10::OperatorHandle& op,
                                                           const torch::jit::Stack& arguments,
                                                           const torch::jit::Stack& results);

// A plan that a probe has found, for a table on disk. name: "aten::add.Tensor".
struct ProbedPlan {
  std::string name;
  Key key;
  std::shared_ptr<const CpuPlan> plan;
};
// Of the thread's table, each once.
std::vector<ProbedPlan> take_probed();
// Adds a plan to those of the thread's table.
void know(ProbedPlan probed);

struct CpuFacts {
  CpuRule scratch = nullptr;
  std::unordered_set<std::string> of_any_integers;  // Operators whose allocations depend on no integer's value.
  std::unordered_set<std::string> by_threads;       // Operators of which one run does not show all: a rule comes first.
  int64_t probes = 0;                               // so far
};
extern CpuFacts cpu_facts;

// Once in a process: torch then asks for the kernel wherever the switch is on.
void register_cpu_kernel();

}  // namespace memcheck::simulated
