// The Python module memcheck._C. Operators register themselves with the dispatcher, each in its own folder; what is bound
// here is what is not an operator: the build, the plans and the allocator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/cpu_level.h"

namespace py = pybind11;

// What this build can do on this machine.
static void bind_build(py::module_& m) {
    m.def("cpu_level", [] { return memcheck::cpu_level_name(memcheck::cpu_level()); });
    m.def("cpu_levels", &memcheck::cpu_levels);
}

PYBIND11_MODULE(_C, m) {
    m.doc() = "memcheck's compiled half: operators (torch.ops.memcheck), their memory plans, the tracking allocator";
    bind_build(m);
}
