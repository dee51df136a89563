// Kernels with mistakes, which a GPU may or may not report. On the host each ends in an error, some only under a
// sanitizer.
//     mistakes NAME [ascending | descending | shuffled]
// runs one and prints its results.

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "common/ptx.cuh"

namespace {

using namespace memcheck;

constexpr int kThreads = 64;

struct Row {
  float values[kThreads];
};

// Every thread reads what its neighbour wrote.
__global__ void neighbour_kernel(float* to, bool waits) {
  Row& row = shared<Row>();
  const int i = static_cast<int>(threadIdx.x);
  row.values[i] = static_cast<float>(i);
  if (waits) __syncthreads();
  to[i] = row.values[(i + 1) % kThreads];
}

__global__ void beyond_the_end_kernel(float* to) {
  Row& row = shared<Row>();
  const int i = static_cast<int>(threadIdx.x);
  float* values = row.values;
  values[i + 1] = 1;
  to[i] = values[i];
}

__global__ void misaligned_kernel(float* to, const float* from) {
  const int i = static_cast<int>(threadIdx.x);
  const float4 four = *reinterpret_cast<const float4*>(from + 4 * i + 1);
  to[i] = four.x + four.w;
}

__global__ void unset_kernel(float* to) {
  to[threadIdx.x] = shared<Row>().values[threadIdx.x];
}

__global__ void two_barriers_kernel(float* to) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  to[threadIdx.x] = 0;
}

__global__ void early_return_kernel(float* to) {
  to[threadIdx.x] = 0;
  if (threadIdx.x == 7) return;
  __syncthreads();
}

__global__ void absent_lane_kernel(float* to) {
  to[threadIdx.x] = 0;
  if (threadIdx.x % 32 < 16) to[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
}

__global__ void deadlock_kernel(float* to) {
  to[threadIdx.x] = 0;
  if (threadIdx.x % 32 == 0) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

__global__ void too_much_shared_kernel(float* to) {
  struct Large {
    float values[2 * kThreads];
  };
  to[threadIdx.x] = shared<Large>().values[0];
}

__global__ void copied_kernel(float* to, const float* from, bool waits) {
  Row& row = shared<Row>();
  const int i = static_cast<int>(threadIdx.x);
  if (i < kThreads / 4) cp_async_16(&row.values[4 * i], from + 4 * i);
  cp_async_commit();
  if (waits) cp_async_wait<0>();
  __syncthreads();
  to[i] = row.values[i];
}

// On the GPU that allows least shared memory. If the launch is refused, CUDA's error must not stay behind.
void ask_for(size_t shared_bytes, float* to) {
  host_cuda::stand_for(8, 6, kSharedBytesEverywhere);
  try {
    launch({"too much asked for", 1, dim3(kThreads), shared_bytes, nullptr}, neighbour_kernel, &to[0], true);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::fprintf(stderr, "left behind: %d\n", static_cast<int>(cudaPeekAtLastError()));
}

template <typename... Params, typename... Args>
void launch_one(const char* name, void (*kernel)(Params...), Args... args) {
  launch({name, 1, dim3(kThreads), sizeof(Row), nullptr}, kernel, args...);
}

}  // namespace

int main(int count, char** words) {
  alignas(16) static float from[5 * kThreads];
  static float to[kThreads];
  for (int i = 0; i < 5 * kThreads; ++i) from[i] = static_cast<float>(i);
  const std::string name = count > 1 ? words[1] : "";
  const std::string order = count > 2 ? words[2] : "ascending";
  host_cuda::set_order(order == "descending" ? host_cuda::Order::Descending
                       : order == "shuffled" ? host_cuda::Order::Shuffled
                                             : host_cuda::Order::Ascending);
  try {
    if (name == "neighbour") launch_one("neighbour", neighbour_kernel, to, true);
    if (name == "no barrier") launch_one("no barrier", neighbour_kernel, to, false);
    if (name == "beyond the end") launch_one("beyond the end", beyond_the_end_kernel, to);
    if (name == "misaligned") launch_one("misaligned", misaligned_kernel, to, static_cast<const float*>(from));
    if (name == "unset") launch_one("unset", unset_kernel, to);
    if (name == "two barriers") launch_one("two barriers", two_barriers_kernel, to);
    if (name == "early return") launch_one("early return", early_return_kernel, to);
    if (name == "absent lane") launch_one("absent lane", absent_lane_kernel, to);
    if (name == "deadlock") launch_one("deadlock", deadlock_kernel, to);
    if (name == "too much shared") launch_one("too much shared", too_much_shared_kernel, to);
    if (name == "copied") launch_one("copied", copied_kernel, to, static_cast<const float*>(from), true);
    if (name == "copied without waiting")
      launch_one("copied without waiting", copied_kernel, to, static_cast<const float*>(from), false);
    if (name == "all that is allowed") ask_for(kSharedBytesEverywhere, to);
    if (name == "too much asked for") ask_for(kSharedBytesEverywhere + 1, to);
    if (name == "an old GPU") {
      host_cuda::stand_for(7, 5, size_t{64} << 10);
      launch_one("an old GPU", neighbour_kernel, to, true);
    }
    if (name == "too many threads") launch({name.c_str(), 6, dim3(2048), 0, nullptr}, unset_kernel, &to[0]);
    if (name == "too many blocks")
      launch({name.c_str(), (int64_t{1} << 32) + 1, dim3(kThreads), sizeof(Row), nullptr}, neighbour_kernel, &to[0],
             true);
    if (name == "misaligned copy")
      launch_one("misaligned copy", copied_kernel, to, static_cast<const float*>(from + 1), true);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  for (const float value : to) std::printf("%g ", static_cast<double>(value));
  std::puts("");
}
