#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <array>
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

// Huge pages. The system provides fresh memory page by page when it is first touched, which costs more than computing
// what is written there. Pages of 2 MiB instead of 4 KiB reduce this cost to a fifth. The bytes that are allocated stay
// the same, and nothing changes where the system has no huge pages.

namespace memcheck {

#if defined(MADV_HUGEPAGE)

inline std::size_t page_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kFewBytes = 2 * kHugePage;
constexpr std::size_t kMappedBytes = 16 * kHugePage;  // glibc maps each tensor of this size anew, unless told otherwise

// A new mapping ends where a neighbour begins, at any address. Its parts of huge pages at both ends are small pages, in
// all as many as one huge page holds, and cost as much as several huge pages. While an object of this class lives, it
// occupies the addresses above a 2 MiB border, so that malloc's next mapping of so many bytes begins one page below a
// border. malloc writes to its first page before a huge page can be asked for, and the tensor behind it fills whole
// huge pages. If the memory comes from elsewhere, or another thread maps memory meanwhile, nothing is lost.
class RoomAboveBorder {
 public:
  explicit RoomAboveBorder(std::size_t bytes) {
    constexpr std::size_t kOfMalloc = 136;  // bytes that glibc adds to those of a tensor, before it rounds up to a page
    if (bytes < kMappedBytes) return;
    const std::size_t page = page_bytes();
    const std::size_t length = (bytes + kOfMalloc + page - 1) / page * page;
    // Map as malloc would, and keep what is above the border. The hole that was found may end before the border: when
    // its upper end is occupied, the next mapping is elsewhere.
    for (Room& room : taken_) {
      void* const found = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (found == MAP_FAILED) return;
      room.bytes = (reinterpret_cast<uintptr_t>(found) + page) % kHugePage;
      room.first = static_cast<char*>(found) + length - room.bytes;
      munmap(found, length - room.bytes);
      if (room.bytes == 0) return;
    }
  }
  ~RoomAboveBorder() {
    for (const Room& room : taken_)
      if (room.bytes > 0) munmap(room.first, room.bytes);
  }
  RoomAboveBorder(const RoomAboveBorder&) = delete;
  RoomAboveBorder& operator=(const RoomAboveBorder&) = delete;

 private:
  struct Room {
    char* first = nullptr;
    std::size_t bytes = 0;
  };
  std::array<Room, 4> taken_;
};

// Asks for huge pages for all pages of the tensor. A tensor with a mapping of its own has its first and last page
// alone; others share these with their neighbours, and leave them.
inline void advise_huge_pages(const at::Tensor& x) {
  const std::size_t page = page_bytes();
  const uintptr_t left = x.nbytes() >= kMappedBytes ? 0 : page - 1;
  const auto begin = reinterpret_cast<uintptr_t>(x.mutable_data_ptr());
  const uintptr_t first = (begin + left) / page * page;
  const uintptr_t last = (begin + x.nbytes() + (page - 1 - left)) / page * page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

#endif

// Returns allocate(), a tensor of so many elements: in huge pages, if it is large and on the CPU.
template <typename Allocate>
at::Tensor in_huge_pages(const c10::SymInt& elements, const at::TensorOptions& options, const Allocate& allocate) {
#if defined(MADV_HUGEPAGE)
  const std::size_t bytes = options.device().is_cpu() ? elements.expect_int() * options.dtype().itemsize() : 0;
  if (bytes >= kFewBytes) {
    const RoomAboveBorder room(bytes);
    const at::Tensor x = allocate();
    advise_huge_pages(x);
    return x;
  }
#endif
  return allocate();
}

// Memory for a result.
inline at::Tensor empty_result(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return in_huge_pages(c10::multiply_integers(sizes), options, [&] { return at::empty_symint(sizes, options); });
}

// Memory for the gradient of x; undefined if it is not wanted. It has the strides of x if x is dense and does not
// overlap itself, else it is contiguous: AccumulateGrad keeps such a gradient without a copy. Strides of dimensions of
// size 1 do not count: a gradient is the same whether x was saved or, being contiguous, was not.
inline at::Tensor empty_gradient(bool wanted, const at::Tensor& x) {
  if (!wanted) return {};
  return in_huge_pages(x.sym_numel(), x.options(), [&] {
    if (!x.is_contiguous() && x.is_non_overlapping_and_dense())
      return at::empty_strided_symint(x.sym_sizes(), x.sym_strides(), x.options());
    return at::empty_symint(x.sym_sizes(), x.options());
  });
}

// The same for an input of these sizes that is undefined if it was not saved for backward. Only contiguous inputs are
// left out, so its gradient is contiguous.
inline at::Tensor empty_gradient(bool wanted, const at::Tensor& x, c10::SymIntArrayRef sizes,
                                 const at::TensorOptions& options) {
  if (!wanted || x.defined()) return empty_gradient(wanted, x);
  return empty_result(sizes, options);
}

// Scratch of a kernel. To make a tensor takes as long as a small kernel runs, so there is none for 0 bytes.
class Scratch {
 public:
  Scratch() = default;
  // So many bytes, on the device of x.
  Scratch(int64_t bytes, const at::Tensor& x) {
    if (bytes > 0) memory_ = at::empty({bytes}, x.options().dtype(at::kByte));
  }
  void* data() const { return memory_.defined() ? memory_.mutable_data_ptr() : nullptr; }

 private:
  at::Tensor memory_;
};

}  // namespace memcheck
