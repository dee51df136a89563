#include <cmath>
#include <cstring>
#include <utility>

#include "host_cuda/block.h"
#include "host_cuda/counters.h"

// What the running thread calls: shared memory, barriers, collectives of a warp, and the instructions of ptx.cuh.

namespace host_cuda {

void* shared_memory(size_t bytes, size_t alignment) {
  const Block& block = *block_running;
  if (bytes > block.memory.bytes())
    fail(block, &current(),
         "uses " + std::to_string(bytes) + " bytes of shared memory, launched with " +
             std::to_string(block.memory.bytes()));
  if (alignment > kFenceBytes) fail(block, &current(), "shared memory is aligned to 512 bytes");
  return block.memory.begin();
}

void check_shared(const void* address, size_t bytes, Where where) {
  const Block& block = *block_running;
  if (!block.memory.holds(address, bytes))
    fail(block, &current(), "an address outside of shared memory at " + written(where));
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
    fail(block, &current(),
         "an address that is not aligned to " + std::to_string(bytes) + " bytes at " + written(where));
}

void meet(const Collective& collective, unsigned mask, void* operand, Where where) {
  Thread& thread = current();
  const unsigned linear = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  if (!(mask >> linear % kLanes & 1))
    fail(*block_running, &thread, std::string(collective.name) + " does not name its own lane, at " + written(where));
  thread.collective = collective;
  thread.mask = mask;
  thread.operand = operand;
  thread.where = where;
  thread.state = State::AtCollective;
  running->pause();
}

int sync_threads(bool yes, Where where) {
  Thread& thread = current();
  thread.yes = yes;
  thread.where = where;
  thread.state = State::AtBarrier;
  running->pause();
  return thread.count;
}

void copy_later(void* in_shared, const void* in_global, bool exists, Where where) {
  check_shared(in_shared, 16, where);
  if (exists && reinterpret_cast<uintptr_t>(in_global) % 16 != 0)
    fail(*block_running, &current(),
         "cp_async_16 from an address that is not aligned to 16 bytes at " + written(where));
  current().open_copies.push_back(count_copy({in_shared, in_global, exists}, __builtin_return_address(0)));
}

void commit_copies() {
  Thread& thread = current();
  thread.groups.push_back(std::move(thread.open_copies));
  thread.open_copies.clear();
}

void await_copies(int pending) {
  Thread& thread = current();
  count_await(thread, static_cast<size_t>(pending));
  while (thread.groups.size() > static_cast<size_t>(pending)) {
    for (const Copy& copy : thread.groups.front()) {
      if (copy.exists) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
    thread.groups.pop_front();
  }
}

unsigned ballot(const char* name, unsigned mask, bool yes, Where where) {
  struct Vote {
    bool yes;
    unsigned result;
  } operand{yes, 0};
  const auto complete = [](void* const(&operands)[kLanes], unsigned named) {
    unsigned result = 0;
    for (int lane = 0; lane < kLanes; ++lane)
      if (named >> lane & 1 && static_cast<Vote*>(operands[lane])->yes) result |= 1u << lane;
    for (int lane = 0; lane < kLanes; ++lane)
      if (named >> lane & 1) static_cast<Vote*>(operands[lane])->result = result;
  };
  meet({name, complete}, mask, &operand, where);
  return operand.result;
}

namespace {

uint16_t half_of(uint32_t pair, int which) {
  return static_cast<uint16_t>(pair >> (16 * which));
}

template <typename To, typename From>
To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

// 2^exponent, for the exponents of normal numbers.
double power_of_two(int64_t exponent) {
  return bits_of<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// The exponent of a normal number.
int64_t exponent_of(double x) {
  return static_cast<int64_t>(bits_of<uint64_t>(x) >> 52 & 0x7FF) - 1023;
}

float towards_zero(double x) {
  const auto nearest = static_cast<float>(x);
  const bool is_too_large = std::fabs(static_cast<double>(nearest)) > std::fabs(x);
  return bits_of<float>(bits_of<uint32_t>(nearest) - (is_too_large ? 1u : 0u));
}

constexpr int kTogether = 8;
constexpr int kRows = 16, kColumns = 8, kResults = kRows * kColumns;

// d plus the products of kTogether pairs, as tensor cores add them: products are exact, all addends are cut to the bits
// of a float32 with the largest exponent among them, and so is their sum. Tensor cores of compute capability 8.0 and
// later keep some bits more (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021), and later ones add more
// products at once: their errors are smaller. Inner loops are over all results of a warp, so that the compiler makes
// vectors of them.
void add_products(float (&d)[kResults], const double (&products)[kTogether][kResults]) {
  constexpr int kFractionBits = 23;
  double plain[kResults], largest[kResults];
  for (int i = 0; i < kResults; ++i) {
    plain[i] = static_cast<double>(d[i]);
    largest[i] = std::fabs(plain[i]);
  }
  for (const auto& product : products) {
    for (int i = 0; i < kResults; ++i) {
      const double size = std::fabs(product[i]);
      largest[i] = size > largest[i] ? size : largest[i];
      plain[i] += product[i];
    }
  }
  // Each addend is less than 2^24 units. Unsigned, because sums of what is not finite overflow, and are not used.
  uint32_t sums[kResults];
  double unit[kResults], scale[kResults];
  for (int i = 0; i < kResults; ++i) {
    const int64_t exponent = exponent_of(largest[i]) - kFractionBits;
    unit[i] = power_of_two(exponent);
    scale[i] = power_of_two(-exponent);
    sums[i] = static_cast<uint32_t>(static_cast<int32_t>(static_cast<double>(d[i]) * scale[i]));
  }
  for (const auto& product : products)
    for (int i = 0; i < kResults; ++i) sums[i] += static_cast<uint32_t>(static_cast<int32_t>(product[i] * scale[i]));
  for (int i = 0; i < kResults; ++i) {
    const bool is_sum = std::isfinite(plain[i]) && largest[i] > 0;
    const double sum = static_cast<int32_t>(sums[i]) * unit[i];
    d[i] = is_sum ? towards_zero(sum) : static_cast<float>(plain[i]);
  }
}

}  // namespace

void multiply(void* const (&operands)[kLanes], Convert convert) {
  if (sampled_blocks() > 0) return;
  double a[kRows][16], b[16][kColumns];
  float d[kResults];
  // Where in d a lane has its numbers.
  const auto place = [](int lane, int i) { return (lane / 4 + i / 2 * 8) * kColumns + lane % 4 * 2 + i % 2; };
  for (int lane = 0; lane < kLanes; ++lane) {
    const Mma& mine = *static_cast<const Mma*>(operands[lane]);
    const int row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < 4; ++part)
        a[row + part % 2 * 8][column + part / 2 * 8 + i] = static_cast<double>(convert(half_of(mine.a[part], i)));
      for (int part = 0; part < 2; ++part)
        b[column + part * 8 + i][row] = static_cast<double>(convert(half_of(mine.b[part], i)));
    }
    for (int i = 0; i < 4; ++i) d[place(lane, i)] = mine.d[i];
  }
  for (int k = 0; k < 16; k += kTogether) {
    double products[kTogether][kResults];
    for (int j = 0; j < kTogether; ++j)
      for (int row = 0; row < kRows; ++row)
        for (int column = 0; column < kColumns; ++column)
          products[j][row * kColumns + column] = a[row][k + j] * b[k + j][column];
    add_products(d, products);
  }
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 4; ++i) static_cast<const Mma*>(operands[lane])->d[i] = d[place(lane, i)];
}

void ldmatrix_x4(uint32_t (&r)[4], const void* row, bool transposed, Where where) {
  check_shared(row, 16, where);
  count_shared_read(row, __builtin_return_address(0));
  struct Load {
    uint32_t* r;
    const void* row;
    bool transposed;
  } operand{r, row, transposed};
  const auto complete = [](void* const(&operands)[kLanes], unsigned) {
    uint16_t matrices[4][8][8];
    for (int lane = 0; lane < kLanes; ++lane)
      std::memcpy(matrices[lane / 8][lane % 8], static_cast<const Load*>(operands[lane])->row, 16);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Load& mine = *static_cast<const Load*>(operands[lane]);
      const int fixed = lane / 4, first = lane % 4 * 2;
      for (int i = 0; i < 4; ++i) {
        const auto& m = matrices[i];
        const uint32_t low = mine.transposed ? m[first][fixed] : m[fixed][first];
        const uint32_t high = mine.transposed ? m[first + 1][fixed] : m[fixed][first + 1];
        mine.r[i] = low | high << 16;
      }
    }
  };
  meet({transposed ? "ldmatrix_x4_transposed" : "ldmatrix_x4", complete}, ~0u, &operand, where);
}

}  // namespace host_cuda
