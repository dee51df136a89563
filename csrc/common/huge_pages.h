#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

// Memory that is fresh from the system is first touched page by page, which costs more than computing what is written
// there; in pages of 2 MiB instead of 4 KiB a fifth of that. Where the system does not offer them nothing changes, and
// the bytes that are asked for are the same.

namespace memcheck {

#if defined(MADV_HUGEPAGE)

inline std::size_t page_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kFewBytes = 2 * kHugePage;
constexpr std::size_t kMappedBytes = 16 * kHugePage;  // from here on glibc maps a tensor anew unless told otherwise

// A mapping begins below its neighbours, wherever that is. What it has of a huge page at either end is in small pages,
// in all as many as one huge page has, and they cost as much as several. While this lives, the room above a 2 MiB
// border is taken, so that malloc's next mapping of so many bytes begins one page below a border: malloc writes to its
// first page before anybody can ask for a huge one, and the tensor fills whole huge pages behind it. Where memory comes
// from elsewhere, or another thread is quicker, nothing is lost.
class RoomAboveBorder {
 public:
  explicit RoomAboveBorder(std::size_t bytes) {
    constexpr std::size_t kOfMalloc = 136;  // what glibc maps beyond the bytes of a tensor, before it fills the page
    if (bytes < kMappedBytes) return;
    const std::size_t page = page_bytes();
    const std::size_t length = (bytes + kOfMalloc + page - 1) / page * page;
    // Where a mapping would begin now, and what of it is above the border. A hole may end before the border: once its
    // upper end is taken the next mapping is elsewhere.
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

// Advised are all pages that the tensor touches, also in part.
inline void advise_huge_pages(const at::Tensor& x) {
  const std::size_t page = page_bytes();
  const auto begin = reinterpret_cast<uintptr_t>(x.mutable_data_ptr());
  const uintptr_t first = begin / page * page;
  const uintptr_t last = (begin + x.nbytes() + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

#endif

// The tensor that allocate() makes, of so many elements, in huge pages if it is large and on the CPU.
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

}  // namespace memcheck
