// The Python module memcheck._C. Operators register themselves with the dispatcher, each in its own folder; what is bound
// here is what is not an operator: the plans and the allocator.
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
    m.doc() = "memcheck's compiled half: operators (torch.ops.memcheck), their memory plans, the tracking allocator";
}
