// What is known of the numbers in a storage of a simulated device.
//
// Small storages keep their numbers, of a GPU on the host, and operators on them run, too. Of larger ones a single
// number is known if all are equal, and else nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace memcheck::simulated {

struct Contents {
  enum State : uint8_t {
    kUnknown,
    kKnown,    // on the host; zeros until something is written
    kConstant  // every number is `constant`
  };
  State state = kUnknown;
  bool is_small = false;      // whether the host may keep the numbers
  bool is_doubtful = false;   // known only because a comparison of unknown numbers was answered
  bool has_stand_in = false;  // of unknown integers
  double constant = 0;
  int64_t stand_in = 0;  // what an unknown integer reads as
  std::unique_ptr<char[]> host;
};

// Storages up to these many bytes keep their numbers.
constexpr int64_t kMostBytes = 64 << 10;
constexpr int64_t kMostIntegerBytes = 1 << 20;  // of integers and bools: tokens and masks
// An operator on constants and known numbers runs on the host up to so many elements.
constexpr int64_t kMostElements = 1 << 20;
constexpr int64_t kMostOfConstant = 1 << 25;  // of an operand that is one number, as one is read for all

// What a simulated device says of its tensors: memory.cpp for GPUs, cpu_memory.cpp for the CPU.
bool is_simulated(const at::Tensor& tensor);              // Whether it lies on the device.
Contents* contents_of(const at::Tensor& tensor);          // Null: nothing is to be known of it.
char* numbers_of(Contents& contents, const at::Tensor&);  // The memory of its storage, if it is small.
void keep_original(const at::Tensor& tensor);             // Before a write to numbers that are known.
at::Tensor new_tensor(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
at::Tensor new_tensor(int device, at::IntArrayRef sizes, at::ScalarType dtype);

bool keeps_contents(int64_t bytes, at::ScalarType dtype);

bool is_known(const at::Tensor& tensor);
bool is_doubtful(const at::Tensor& tensor);
// Whether the tensor has every element of its storage.
bool covers_storage(const at::Tensor& tensor);

// A tensor of the CPU with the numbers of a known tensor; a small one shares memory with its storage's numbers.
at::Tensor on_host(const at::Tensor& tensor);

// Before numbers that the host knows are written to on_host(tensor). Returns whether they can be kept.
bool prepare_write(const at::Tensor& tensor, bool overwrites);
void forget(const at::Tensor& tensor);
void set_constant(const at::Tensor& tensor, double value);
void set_doubtful(const at::Tensor& tensor);
void set_stand_in(const at::Tensor& tensor, int64_t value);
std::optional<int64_t> stand_in(const at::Tensor& tensor);

// What a number that is not known reads as.
at::Scalar scalar_in_place_of(const at::Tensor& tensor);

// Notes, at the line of Python that runs, that an answer depends on numbers that are not known.
void doubt(const std::string& what);
using DoubtListener = void (*)(const char* what);
void set_doubt_listener(DoubtListener listener);

}  // namespace memcheck::simulated
