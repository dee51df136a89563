// The memory of the simulated CPU. Large blocks have addresses and no memory; small ones are real. Blocks come from the
// tracking allocator, which counts them as on a CPU that is not simulated.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <exception>
#include <vector>

#include "simulated/contents.h"

namespace memcheck::simulated {

// Included in a thread while its operators are simulated. Torch uses the key nowhere.
constexpr c10::DispatchKey kSwitch = c10::DispatchKey::Fake;

struct CpuOptions {
  int64_t kept_bytes = 64 << 10;         // Storages up to this size are real; of integers, 16 times it.
  int64_t probed_first_bytes = 1 << 20;  // Up to these bytes of operands, a probe is asked before a rule.
  int64_t most_probed_bytes = int64_t{1} << 30;
  int64_t table = 0;  // The number of the table that has its plans; 0: none.
};
extern thread_local CpuOptions cpu_options;

// How large a real tensor may be.
int64_t most_kept_bytes(at::ScalarType dtype);

// block_source: the address of memcheck::block_source in memcheck._C.
void begin_cpu_memory(uintptr_t block_source);
// In the calling thread. At the last end, what small storages had before the simulation is restored.
void switch_cpu(bool on);
bool is_on();

// Bytes of blocks without memory that were touched all the same, in whole pages.
int64_t touched_bytes();
// Blocks without memory that are alive.
int64_t blocks_without_memory();

// Before a tensor is written to, for real or not: its version is restored at the end if it is from before.
void keep_version(const at::Tensor& tensor);

// A storage with new memory.
c10::Storage new_cpu_storage(int64_t bytes);

// While it lives, operators of the thread run as they do outside of the simulation.
class SwitchedOff {
  c10::impl::ExcludeDispatchKeyGuard keys_{kSwitch};
};

// While it lives, the kernel that runs in the thread gets real blocks, which count. TooLarge: one is too large.
class RunningForReal {
 public:
  RunningForReal();
  ~RunningForReal();
  RunningForReal(const RunningForReal&) = delete;
  RunningForReal& operator=(const RunningForReal&) = delete;

 private:
  SwitchedOff off_;
};
struct TooLarge : std::exception {};

// While it lives, blocks of the thread, and of OpenMP's threads, are real and count nowhere.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;

 private:
  SwitchedOff off_;
};

// While it lives, blocks of the thread count again.
class Counted {
 public:
  Counted();
  ~Counted();
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  int before_;
};

// While it lives, blocks up to the size are real.
class Room {
 public:
  explicit Room(int64_t bytes);
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

 private:
  int64_t before_;
};

// A block that a kernel allocates (freed: null), or frees.
struct TapeStep {
  int64_t bytes;
  void* data;
  bool is_free;
};

// While it lives, uncounted blocks are noted in order.
class Tape {
 public:
  Tape();
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;
  void stop();
  std::vector<TapeStep> steps;
};

}  // namespace memcheck::simulated
