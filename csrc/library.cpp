// The Python module memcheck._C. Operators register themselves with the dispatcher, each in its own folder; what is
// bound here is what is not an operator: the plans and the allocator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "memory/tracking_allocator.h"

namespace py = pybind11;

static std::optional<std::pair<int64_t, int64_t>> refusal(const memcheck::AllocationTracker& tracker) {
  const auto last = tracker.refusal();
  if (!last) return std::nullopt;
  return std::pair(last->requested_bytes, last->in_use_bytes);
}

static void bind_memory(py::module_& m) {
  using memcheck::AllocationTracker;
  py::class_<AllocationTracker>(m, "AllocationTracker")
      .def(py::init<int64_t, std::optional<int64_t>>(), py::arg("held_bytes") = 0, py::arg("limit_bytes") = py::none())
      .def("current_bytes", &AllocationTracker::current_bytes)
      .def("peak_bytes", &AllocationTracker::peak_bytes)
      .def("reset_peak", &AllocationTracker::reset_peak)
      .def("refusal", &refusal, "(requested bytes, bytes in use) of the last allocation refused, or None")
      .def("close", &AllocationTracker::close);
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "memcheck's compiled half: operators (torch.ops.memcheck), their memory plans, the tracking allocator";
  bind_memory(m);
}
