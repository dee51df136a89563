// The Python module memcheck._C. Operators register themselves with the dispatcher, each in its own folder; what is
// bound here is what is not an operator: the build, the plans and the allocator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/cpu_level.h"
#ifdef MEMCHECK_WITH_CUDA
#include "cuda_probe/cuda_probe.h"
#endif

namespace py = pybind11;

// What this build can do on this machine.
static void bind_build(py::module_& m) {
  // A bad MEMCHECK_CPU fails the import, not a training step.
  memcheck::cpu_level();
  m.def("cpu_level", [] { return memcheck::cpu_level_name(memcheck::cpu_level()); });
  m.def("cpu_levels", &memcheck::cpu_levels);
#ifdef MEMCHECK_WITH_CUDA
  // The default stream: there is nothing to order a kernel against that touches no memory.
  m.def("cuda_probe", [] { return launch_cuda_probe(nullptr); });
#endif
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "memcheck's compiled half: operators (torch.ops.memcheck), their memory plans, the tracking allocator";
  bind_build(m);
}
