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
    auto [bytes, is_first] = part.cast<std::tuple<int64_t, bool>>();
    found.push_back({bytes, is_first});
  }
  return found;
}

void note(const char* what) {
  py::gil_scoped_acquire locked;
  Uncounted uncounted;
  doubt_function(what);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "begin",
      [](uintptr_t block_source, py::object scratch, py::object listener,
         std::unordered_set<std::string> of_any_integers) {
        scratch_rule = std::move(scratch);
        doubt_function = std::move(listener);
        cpu_facts.scratch = scratch_of;
        cpu_facts.of_any_integers = std::move(of_any_integers);
        set_doubt_listener(note);
        begin_cpu_memory(block_source);
        register_cpu_kernel();
      },
      "once in a process");
  m.def("is_on", &is_on);
  m.def("switch", &switch_cpu);
  m.def("touched_bytes", &touched_bytes);
  m.def("probes", [] { return cpu_facts.probes; });
  m.def("configure", [](int64_t kept_bytes, int64_t probed_first_bytes, int64_t most_probed_bytes) {
    cpu_options = {kept_bytes, probed_first_bytes, most_probed_bytes};
  });
}
