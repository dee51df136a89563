// The line of Python that a thread is in.
#pragma once

#include <string>
#include <tuple>
#include <vector>

namespace memcheck {

struct PythonLine {
  int number = 0;          // an index into python_lines(); 0 is no line
  bool in_engine = false;  // the innermost frame is the call of the autograd engine
};

// Lines of files whose path begins so are passed over for the line that called them. engine_code: the code object of
// the function that calls the autograd engine, or nullptr; it is a PyObject*, and must live forever.
void set_python_lines(std::vector<std::string> skipped_prefixes, const void* engine_code);

// The innermost line of this thread that is not passed over. Takes Python's lock. None on a thread without Python.
PythonLine python_line_here();

// (file, line, function) of each number. Takes Python's lock.
std::vector<std::tuple<std::string, int, std::string>> python_lines();

}  // namespace memcheck
