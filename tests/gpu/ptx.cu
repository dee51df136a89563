// Every instruction of common/ptx.cuh on the same numbers, and a chain of blocks that pass numbers on by
// common/exchange.cuh, for test_ptx_cuda.py: compiled by nvcc it runs on the GPU, by a C++ compiler under
// tests/host_cuda/ on the CPU. It prints a line of results each, as 32-bit words: NAME WORD WORD ...

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/exchange.cuh"
#include "common/ptx.cuh"

namespace {

using namespace memcheck;

constexpr int kLanes = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kLanes;
constexpr int kBlocks = 16;

// ---- memory that kernels read and write

#if defined(MEMCHECK_HOST_CUDA)

void* allocate(size_t bytes) {
  return ::operator new(bytes, std::align_val_t(256));
}
void copy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

#else

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}
void* allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes));
  return memory;
}
// Waits for the kernels before it.
void copy(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}

#endif

// The program ends before memory is short: nothing is freed.
template <typename T>
T* on_device(const std::vector<T>& values) {
  T* memory = static_cast<T*>(allocate(values.size() * sizeof(T)));
  copy(memory, values.data(), values.size() * sizeof(T));
  return memory;
}

void print(const std::string& name, const std::vector<uint32_t>& words) {
  std::printf("%s", name.c_str());
  for (const uint32_t word : words) std::printf(" %08x", word);
  std::puts("");
}

// ---- numbers, the same in both programs

uint64_t random_state = 20261121;

// splitmix64
uint32_t random_bits() {
  uint64_t z = random_state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return static_cast<uint32_t>(z >> 32);
}

float random_float(float low, float high) {
  return low + (high - low) * static_cast<float>(random_bits() >> 8) / 16777216.0f;
}

std::vector<uint32_t> random_words(size_t count) {
  std::vector<uint32_t> words(count);
  for (uint32_t& word : words) word = random_bits();
  return words;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// Pairs of 16-bit numbers: small whole ones, whose products and sums are exact, or any between -2 and 2.
template <typename scalar_t>
std::vector<uint32_t> random_pairs(size_t count, bool whole) {
  std::vector<uint32_t> pairs(count);
  const auto number = [&] {
    return from_acc<scalar_t>(whole ? static_cast<float>(random_bits() % 33) - 16.0f : random_float(-2, 2));
  };
  for (uint32_t& pair : pairs) {
    const scalar_t low = number(), high = number();
    pair = pack_pair(low, high);
  }
  return pairs;
}

// ---- one kernel for each group of instructions

template <typename scalar_t>
__global__ void mma_kernel(uint32_t* to, const uint32_t* from) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const uint32_t* mine = from + thread * 10;  // a, b, d
  uint32_t a[4], b[2];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = mine[i];
  for (int i = 0; i < 2; ++i) b[i] = mine[4 + i];
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&d[i], &mine[6 + i], 4);
  mma_m16n8k16<scalar_t>(d, a, b);
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&to[thread * 4 + i], &d[i], 4);
}

struct Matrices {
  uint32_t rows[kWarps][kLanes][4];  // four matrices of eight rows of 16 bytes, for each warp
};

// Lane l names row l, or the row that a shuffle of them puts there.
__global__ void ldmatrix_kernel(uint32_t* to, const uint32_t* from, bool transposed) {
  Matrices& matrices = shared<Matrices>();
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int i = 0; i < 4; ++i) matrices.rows[warp][lane][i] = from[thread * 4 + i];
  __syncthreads();
  const int row = (lane * 5 + static_cast<int>(blockIdx.x)) % kLanes;
  uint32_t r[4];
  if (transposed) {
    ldmatrix_x4_transposed(r, matrices.rows[warp][row]);
  } else {
    ldmatrix_x4(r, matrices.rows[warp][row]);
  }
  for (int i = 0; i < 4; ++i) to[thread * 4 + i] = r[i];
}

struct Stages {
  uint32_t pieces[2][kThreads][4];
};

// Two groups of copies, of which the second is zeros for every third thread; what the neighbour copied is read.
__global__ void cp_async_kernel(uint32_t* to, const uint32_t* from) {
  Stages& stages = shared<Stages>();
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 2 * kThreads;
  cp_async_16(stages.pieces[0][thread], from + (first + thread) * 4);
  cp_async_commit();
  cp_async_16(stages.pieces[1][thread], from + (first + kThreads + thread) * 4, thread % 3 != 0);
  cp_async_commit();
  const int other = (thread + 37) % kThreads;
  cp_async_wait<1>();
  __syncthreads();
  const auto& words = stages.pieces[0][other];
  store_global_16(to + (first + thread) * 4, make_uint4(words[0], words[1], words[2], words[3]));
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) to[(first + kThreads + thread) * 4 + i] = stages.pieces[1][other][i];
}

// One of `from` for each thread.
template <typename Function>
__global__ void each_kernel(uint32_t* to, const uint32_t* from, Function function) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  to[thread] = function(from[thread]);
}

struct PackPair {
  __device__ uint32_t operator()(uint32_t bits) const {
    const uint16_t low = static_cast<uint16_t>(bits), high = static_cast<uint16_t>(bits >> 16);
    __half halves[2];
    __builtin_memcpy(static_cast<void*>(&halves[0]), &low, 2);
    __builtin_memcpy(static_cast<void*>(&halves[1]), &high, 2);
    return pack_pair(halves[1], halves[0]);
  }
};

// A function of a float, as one of its bits.
template <typename Function>
struct OnBits {
  Function function;
  __device__ uint32_t operator()(uint32_t bits) const {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    x = function(x);
    __builtin_memcpy(&bits, &x, 4);
    return bits;
  }
};

struct Exp2Approximate {
  __device__ float operator()(float x) const { return exp2_approximate(x); }
};

struct Exp2Flushed {
  __device__ float operator()(float x) const { return exp2_flushed(x); }
};

struct ReciprocalFlushed {
  __device__ float operator()(float x) const { return reciprocal_flushed(x); }
};

// kernel(to, from, args...) for `count` words of results, and prints them after what it was given.
template <typename... Params, typename... Args>
void run(const std::string& name, size_t shared_bytes, void (*kernel)(Params...), const std::vector<uint32_t>& given,
         size_t count, const Args&... args) {
  std::vector<uint32_t> results(count);
  uint32_t* to = on_device(results);
  const uint32_t* from = on_device(given);
  launch({name.c_str(), kBlocks, dim3(kThreads), shared_bytes, nullptr}, kernel, to, from, args...);
  copy(results.data(), to, count * sizeof(uint32_t));
  print(name + ".given", given);
  print(name, results);
}

template <typename Function>
void run_each(const std::string& name, const std::vector<uint32_t>& given) {
  run(name, 0, each_kernel<Function>, given, given.size(), Function());
}

template <typename scalar_t>
void run_mma(const std::string& name, bool whole) {
  std::vector<uint32_t> given;
  for (int thread = 0; thread < kBlocks * kThreads; ++thread) {
    for (const uint32_t pair : random_pairs<scalar_t>(6, whole)) given.push_back(pair);
    for (int i = 0; i < 4; ++i)
      given.push_back(bits_of(whole ? static_cast<float>(random_bits() % 2001) - 1000.0f : random_float(-9, 9)));
  }
  run(name, 0, mma_kernel<scalar_t>, given, static_cast<size_t>(kBlocks * kThreads * 4));
}

// ---- numbers from block to block

// More blocks than a GPU holds at once. Of every kShownEvery-th the numbers are printed.
constexpr int kLinks = 4096;
constexpr int kShownEvery = 256;

// A link passes on two numbers of each thread: the sums over the links so far of link % 1000 + thread, and of
// -(link % 1000) / 2. In place of the second, odd threads pass a NaN with every bit set.
template <typename acc_t>
__global__ void exchange_kernel(acc_t* passed, uint32_t* ticket) {
  auto& link = shared<uint32_t>();
  if (threadIdx.x == 0) link = take_ticket(ticket);
  __syncthreads();
  acc_t* const to = passed + size_t{2} * kThreads * link + threadIdx.x;
  acc_t x[2] = {};
  if (link > 0) {
    const acc_t* const from[2] = {to - 2 * kThreads, to - kThreads};
    await_numbers(from, x);
  }
  const WordOf<acc_t> every_bit = ~WordOf<acc_t>(0);
  acc_t nan;
  __builtin_memcpy(&nan, &every_bit, sizeof(nan));
  pass_number(x[0] + static_cast<acc_t>(link % 1000 + threadIdx.x), to);
  pass_number(threadIdx.x % 2 == 1 ? nan : x[1] - static_cast<acc_t>(link % 1000) / 2, to + kThreads);
}

template <typename acc_t>
void run_exchange(const std::string& name) {
  constexpr size_t kWordsOfLink = 2 * kThreads * sizeof(acc_t) / sizeof(uint32_t);
  std::vector<uint32_t> words(kLinks * kWordsOfLink, ~0u);
  uint32_t* passed = on_device(words);
  uint32_t* ticket = on_device(std::vector<uint32_t>{0});
  launch({name.c_str(), kLinks, dim3(kThreads), sizeof(uint32_t), nullptr}, exchange_kernel<acc_t>,
         reinterpret_cast<acc_t*>(passed), ticket);
  copy(words.data(), passed, words.size() * sizeof(uint32_t));
  std::vector<uint32_t> shown;
  for (size_t link = kShownEvery - 1; link < kLinks; link += kShownEvery)
    for (size_t i = 0; i < kWordsOfLink; ++i) shown.push_back(words[link * kWordsOfLink + i]);
  print(name, shown);
}

void run_all() {
  constexpr size_t kAll = static_cast<size_t>(kBlocks) * kThreads;
  run_mma<__nv_bfloat16>("mma_m16n8k16.bfloat16.whole", true);
  run_mma<__nv_bfloat16>("mma_m16n8k16.bfloat16", false);
  run_mma<__half>("mma_m16n8k16.float16.whole", true);
  run_mma<__half>("mma_m16n8k16.float16", false);
  run("ldmatrix_x4", sizeof(Matrices), ldmatrix_kernel, random_words(4 * kAll), 4 * kAll, false);
  run("ldmatrix_x4_transposed", sizeof(Matrices), ldmatrix_kernel, random_words(4 * kAll), 4 * kAll, true);
  run("cp_async_16", sizeof(Stages), cp_async_kernel, random_words(8 * kAll), 8 * kAll);
  run_each<PackPair>("pack_pair", random_words(kAll));
  std::vector<uint32_t> exponents =
      random_words(kAll);  // the first half are random bits, NaN and infinities among them
  for (size_t i = kAll / 2; i < kAll; ++i) exponents[i] = bits_of(random_float(-150, 130));
  run_each<OnBits<Exp2Approximate>>("exp2_approximate", exponents);
  run_each<OnBits<Exp2Flushed>>("exp2_flushed", exponents);
  run_each<OnBits<ReciprocalFlushed>>("reciprocal_flushed", random_words(kAll));
  run_exchange<float>("exchange.float32");
  run_exchange<double>("exchange.float64");
}

}  // namespace

int main() {
  try {
    run_all();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
