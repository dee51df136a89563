// torch's allocation functions for a process whose blocks are not malloc's, as on Linux aarch64. Each block is a
// mapping of its own between pages that nobody may touch. free() of a block ends the process, and so does reading
// behind it.
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace c10 {

constexpr size_t kPage = 4096, kAlignment = 64;

// A page with the size of the mapping, a closed page, the block's pages, and a closed page. The block ends at the end
// of its pages.
void* alloc_cpu(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t block = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t pages = (block + kPage - 1) / kPage * kPage;
  const size_t mapped = pages + 3 * kPage;
  void* const start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  char* const first = static_cast<char*>(start);
  *static_cast<size_t*>(start) = mapped;
  mprotect(first + kPage, kPage, PROT_NONE);
  mprotect(first + mapped - kPage, kPage, PROT_NONE);
  return first + 2 * kPage + pages - block;
}

void free_cpu(void* data) {
  if (data == nullptr) return;
  void* const start = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(data) / kPage - 2) * kPage);
  if (munmap(start, *static_cast<size_t*>(start)) != 0) abort();
}

}  // namespace c10
