#include <pybind11/pybind11.h>
// Python.h comes first.
#include <frameobject.h>

#include <map>
#include <unordered_map>
#include <utility>

#include "memory/python_line.h"

namespace py = pybind11;

namespace memcheck {
namespace {

// All of this is guarded by Python's lock. Code objects are kept alive, so that their addresses stay theirs.
struct Lines {
  std::vector<std::string> skipped_prefixes;
  const void* engine_code = nullptr;
  std::unordered_map<PyCodeObject*, bool> is_skipped;
  std::vector<std::pair<PyCodeObject*, int>> lines{{nullptr, 0}};  // a code object and an offset in it
  std::map<std::pair<PyCodeObject*, int>, int> numbers;
};

// Never destroyed: another thread may still be here when the process ends.
Lines& lines() {
  static Lines* const all = new Lines;
  return *all;
}

std::string attribute(PyCodeObject* code, const char* name) {
  return py::str(py::handle(reinterpret_cast<PyObject*>(code)).attr(name));
}

bool is_skipped(PyCodeObject* code) {
  const auto known = lines().is_skipped.find(code);
  if (known != lines().is_skipped.end()) return known->second;
  Py_INCREF(code);
  const std::string file = attribute(code, "co_filename");
  bool skipped = false;
  for (const std::string& prefix : lines().skipped_prefixes) skipped |= file.rfind(prefix, 0) == 0;
  lines().is_skipped.emplace(code, skipped);
  return skipped;
}

int offset_in(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti * 2;  // Python 3.10 counts instructions of two bytes
#endif
}

int number_of(PyCodeObject* code, int offset) {
  const auto [found, is_new] = lines().numbers.try_emplace({code, offset}, static_cast<int>(lines().lines.size()));
  if (is_new) lines().lines.emplace_back(code, offset);
  return found->second;
}

}  // namespace

void set_python_lines(std::vector<std::string> skipped_prefixes, const void* engine_code) {
  const py::gil_scoped_acquire lock;
  lines().skipped_prefixes = std::move(skipped_prefixes);
  lines().engine_code = engine_code;
  lines().is_skipped.clear();
}

PythonLine python_line_here() {
  // A thread of C++ alone has no frames, and must not wait for Python's lock: the one that waits for it may hold that.
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) return {};
  const PyGILState_STATE lock = PyGILState_Ensure();
  PythonLine line;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (bool innermost = true; frame != nullptr && line.number == 0; innermost = false) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    if (innermost) line.in_engine = code == lines().engine_code;
    if (!is_skipped(code)) line.number = number_of(code, offset_in(frame));
    Py_DECREF(code);
    PyFrameObject* const outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  PyGILState_Release(lock);
  return line;
}

std::vector<std::tuple<std::string, int, std::string>> python_lines() {
  const py::gil_scoped_acquire lock;
  std::vector<std::tuple<std::string, int, std::string>> all{{"", 0, ""}};
  for (size_t i = 1; i < lines().lines.size(); ++i) {
    const auto [code, offset] = lines().lines[i];
    const bool has_qualified_name = PyObject_HasAttrString(reinterpret_cast<PyObject*>(code), "co_qualname");
    all.emplace_back(attribute(code, "co_filename"), PyCode_Addr2Line(code, offset),
                     attribute(code, has_qualified_name ? "co_qualname" : "co_name"));
  }
  return all;
}

}  // namespace memcheck
