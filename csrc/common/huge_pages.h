#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace memcheck {

// Memory that is fresh from the system is first touched page by page, which costs more than computing what is written
// there; in pages of 2 MiB instead of 4 KiB a fifth of that. Where the system does not offer them nothing changes, and
// the bytes that are asked for are the same. Advised are all pages that the tensor touches, also in part: malloc's
// header shifts a tensor by some bytes, and its last 2 MiB would else be small pages.
inline at::Tensor in_huge_pages(at::Tensor x) {
#if defined(MADV_HUGEPAGE)
  constexpr std::size_t kFewBytes = std::size_t{4} << 20;
  if (!x.device().is_cpu() || x.nbytes() < kFewBytes) return x;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(x.mutable_data_ptr());
  const uintptr_t first = begin / page * page;
  const uintptr_t last = (begin + x.nbytes() + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return x;
}

}  // namespace memcheck
