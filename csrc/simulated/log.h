// The log of what is allocated and freed, with who did it: what a prediction is made of.
#pragma once

#include <c10/core/DispatchKey.h>

#include <cstdint>
#include <string>

#include "simulated/caching_allocator.h"

namespace memcheck::simulated {

// What a request of memory is for.
enum class Purpose : int64_t { tensor, scratch, workspace };

// The requests of this thread, as long as this lives, are for what has the name.
class Requesting {
 public:
  Requesting(Purpose purpose, const std::string& name);
  ~Requesting();
  Requesting(const Requesting&) = delete;
  Requesting& operator=(const Requesting&) = delete;
};

bool is_logging();
// Called with the allocator locked.
void log_allocated(const Block& block, int device);
void log_freed(const Block& block, int device);
void log_emptied_cache();

// An operator runs on the GPU.
void log_operator(const std::string& name);
// Called before the allocator is locked, by the thread that asks for memory.
void prepare_log();

}  // namespace memcheck::simulated
