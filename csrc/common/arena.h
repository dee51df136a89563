#pragma once

#include <cstdint>

#include "common/types.h"

namespace memcheck {

// The scratch of one worker, dealt out piece by piece. With null as its memory it only counts the bytes.
struct Arena {
  char* memory;
  int64_t bytes = 0;

  template <typename acc_t>
  acc_t* take(int64_t elements) {
    acc_t* piece = memory == nullptr ? nullptr : reinterpret_cast<acc_t*>(memory + bytes);
    bytes += ceil_div(elements * static_cast<int64_t>(sizeof(acc_t)), 64) * 64;
    return piece;
  }
};

// The bytes that a Scratch takes of an arena.
template <typename Scratch, typename... Arguments>
int64_t scratch_bytes(const Arguments&... arguments) {
  Arena arena{nullptr};
  [[maybe_unused]] const Scratch counted(arena, arguments...);
  return arena.bytes;
}

// The arena of one worker in the scratch of all.
inline Arena arena_of(void* scratch, int64_t bytes, int worker) {
  return {static_cast<char*>(scratch) + worker * bytes};
}

}  // namespace memcheck
