// The module memcheck._simulated_cpu, imported after torch: switches the simulated CPU, and asks Python's rules.

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "simulated/cpu.h"
#include "simulated/cpu_memory.h"

namespace {

using namespace memcheck::simulated;

py::object& scratch_rule = *new py::object();
py::object& doubt_function = *new py::object();

py::list listed(const torch::jit::Stack& values) {
  py::list found;
  for (const c10::IValue& value : values) found.append(torch::jit::toPyObject(value));
  return found;
}

std::optional<std::vector<CpuScratch>> scratch_of(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                                  const torch::jit::Stack& results) {
  py::gil_scoped_acquire locked;
  const auto& name = op.operator_name();
  const py::object parts = scratch_rule(name.name, name.overload_name, listed(arguments), listed(results));
  if (parts.is_none()) return std::nullopt;
  std::vector<CpuScratch> found;
  for (auto part : parts) {
    auto [bytes, is_first, doubt] = part.cast<std::tuple<int64_t, bool, std::string>>();
    found.push_back({bytes, is_first, doubt});
  }
  return found;
}

void note(const char* what) {
  py::gil_scoped_acquire locked;
  Uncounted uncounted;
  doubt_function(what);
}

// Plans as Python writes and reads them, in its numbers, texts and lists.
using LayoutRow = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t, int, bool, bool>;
using ResultRow = std::tuple<int, int, int64_t, LayoutRow, py::object>;
using PlanRow = std::tuple<std::vector<std::pair<int64_t, int>>,                   // steps
                           std::vector<std::tuple<int, int64_t, LayoutRow, int>>,  // resizes
                           std::vector<std::pair<bool, std::vector<ResultRow>>>,   // outputs
                           std::string, bool>;

LayoutRow row_of(const TensorLayout& its) {
  return {{its.sizes.begin(), its.sizes.end()},
          {its.strides.begin(), its.strides.end()},
          its.offset,
          static_cast<int>(its.dtype),
          its.is_conj,
          its.is_neg};
}

TensorLayout layout_of(const LayoutRow& row) {
  const auto& [sizes, strides, offset, dtype, is_conj, is_neg] = row;
  if (sizes.size() != strides.size() || dtype < 0 || dtype >= static_cast<int>(at::ScalarType::Undefined))
    throw py::value_error("no layout");
  return {{sizes.begin(), sizes.end()},
          {strides.begin(), strides.end()},
          offset,
          static_cast<at::ScalarType>(dtype),
          is_conj,
          is_neg};
}

// Empty: a result is neither a tensor nor a number.
std::optional<PlanRow> row_of(const CpuPlan& plan) {
  PlanRow row;
  auto& [steps, resizes, outputs, doubt, runs_as_it_is] = row;
  for (const Step& step : plan.steps) steps.emplace_back(step.bytes, step.frees);
  for (const auto& [its, step] : plan.resizes) resizes.emplace_back(its.operand, its.bytes, row_of(its.layout), step);
  for (const Output& output : plan.outputs) {
    outputs.emplace_back(output.is_list, std::vector<ResultRow>());
    for (const Result& its : output.parts) {
      if (!(its.value.isNone() || its.value.isBool() || its.value.isInt() || its.value.isDouble())) return std::nullopt;
      outputs.back().second.emplace_back(its.kind, its.source, its.bytes, row_of(its.layout),
                                         torch::jit::toPyObject(its.value));
    }
  }
  doubt = plan.doubt;
  runs_as_it_is = plan.runs_as_it_is;
  return row;
}

c10::IValue value_of(const py::object& value) {
  if (value.is_none()) return {};
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  return value.cast<double>();
}

CpuPlan plan_of(const PlanRow& row) {
  const auto& [steps, resizes, outputs, doubt, runs_as_it_is] = row;
  CpuPlan plan;
  for (const auto& [bytes, frees] : steps) plan.steps.push_back({bytes, frees});
  for (const auto& [operand, bytes, layout, step] : resizes)
    plan.resizes.push_back({{operand, bytes, layout_of(layout)}, step});
  for (const auto& [is_list, parts] : outputs) {
    if (!is_list && parts.size() != 1) throw py::value_error("no result");
    plan.outputs.push_back({is_list, {}});
    for (const auto& [kind, source, bytes, layout, value] : parts) {
      if (kind < 0 || kind > Result::kFresh) throw py::value_error("no kind of result");
      plan.outputs.back().parts.push_back(
          {static_cast<Result::Kind>(kind), source, bytes, layout_of(layout), value_of(value)});
    }
  }
  plan.doubt = doubt;
  plan.runs_as_it_is = runs_as_it_is;
  return plan;
}

py::list taken() {
  py::list found;
  for (const ProbedPlan& its : take_probed())
    if (auto row = row_of(*its.plan)) found.append(py::make_tuple(its.name, its.key, *row));
  return found;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "begin",
      [](uintptr_t block_source, py::object scratch, py::object listener,
         std::unordered_set<std::string> of_any_integers, std::unordered_set<std::string> by_threads) {
        scratch_rule = std::move(scratch);
        doubt_function = std::move(listener);
        cpu_facts.scratch = scratch_of;
        cpu_facts.of_any_integers = std::move(of_any_integers);
        cpu_facts.by_threads = std::move(by_threads);
        set_doubt_listener(note);
        begin_cpu_memory(block_source);
        register_cpu_kernel();
      },
      "once in a process");
  m.def("is_on", &is_on);
  m.def("switch", &switch_cpu);
  m.def("touched_bytes", &touched_bytes);
  m.def("blocks_without_memory", &blocks_without_memory);
  m.def("probes", [] { return cpu_facts.probes; });
  m.def("configure", [](int64_t kept_bytes, int64_t probed_first_bytes, int64_t most_probed_bytes, int64_t table) {
    cpu_options = {kept_bytes, probed_first_bytes, most_probed_bytes, table};
  });
  m.def("take_probed", &taken, "(name, key, plan) of each plan that a probe has found for the thread's table");
  m.def("know", [](std::string name, Key key, const PlanRow& plan) {
    know({std::move(name), std::move(key), std::make_shared<const CpuPlan>(plan_of(plan))});
  });
}
