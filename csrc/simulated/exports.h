// How Python calls the library: by functions of C, which ctypes finds by their names.
#pragma once

#include <exception>
#include <string>

#define MEMCHECK_EXPORT extern "C" __attribute__((visibility("default")))

namespace memcheck::simulated {

// Calls the function. Returns "" or the words of its error; Python raises it.
template <typename Function>
const char* answer(Function function) {
  thread_local std::string words;
  words.clear();
  try {
    function();
  } catch (const std::exception& error) {
    words = error.what();
    if (words.empty()) words = "unknown error";
  }
  return words.c_str();
}

}  // namespace memcheck::simulated
