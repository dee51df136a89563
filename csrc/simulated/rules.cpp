// Asks Python's rules about kernels. A module of Python, imported after torch.

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include "simulated/kernels.h"

namespace {

using memcheck::simulated::Rules;
using memcheck::simulated::Scratch;

py::object& scratch_rule = *new py::object();
py::object& attention_rule = *new py::object();

py::list listed(const torch::jit::Stack& values) {
  py::list found;
  for (const c10::IValue& value : values) found.append(torch::jit::toPyObject(value));
  return found;
}

std::vector<Scratch> scratch_of(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                const torch::jit::Stack& results) {
  py::gil_scoped_acquire locked;
  const auto& name = op.operator_name();
  std::vector<Scratch> found;
  for (auto part : scratch_rule(name.name, name.overload_name, listed(arguments), listed(results))) {
    auto [words, bytes, is_first, is_kept, empties] = part.cast<std::tuple<std::string, int64_t, bool, bool, bool>>();
    found.push_back({words, bytes, is_first, is_kept, empties});
  }
  return found;
}

int64_t attention_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool grouped) {
  py::gil_scoped_acquire locked;
  return attention_rule(q, k, v, mask, dropout, causal, scale, grouped).cast<int64_t>();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // A forked process initialises CUDA again, which torch refuses there.
  m.def("refuse_forks", [] { torch::utils::register_fork_handler_for_device_init(at::kCUDA); });
  // rules: the address that memcheck_simulated_rules() of the library returns.
  m.def("connect",
        [](int64_t rules, py::object scratch, py::object attention, int64_t cublas_workspace_bytes, bool keeps) {
          scratch_rule = std::move(scratch);
          attention_rule = std::move(attention);
          *reinterpret_cast<Rules*>(rules) = {scratch_of, attention_of, cublas_workspace_bytes, keeps};
        });
}
