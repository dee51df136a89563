#pragma once

#include <algorithm>
#include <type_traits>

#include "common/formulas.h"
#include "common/tile.cuh"
#include "linear_attention/linear_attention_plan_cuda.h"

// y and all gradients of linear attention are one scan. Of a row i, over the columns j that it sees,
//
//     out_i = sum of (a_i.b_j - bias) x_j
//
//              rows     a        b              x              bias
//     y        queries  phi(q)   phi(k)         v                        then / den: the same sum with x = 1, + eps
//     grad q   queries  g        v              phi(k)         (g.y)_i   then phi'(q) / den
//     grad k   keys     v        g              phi(q) / den   (g.y)_j   then phi'(k)
//     grad v   keys     phi(k)   phi(q) / den   g
//
// where g is the gradient of y. By fused multiply-adds, a of grad q is g / den and the bias is (g.y) / den, because
// products with g alone may overflow. If a block has all columns of grad q, then it also finds 1 / den and g.y: the sum
// z of phi(k) over the keys that a query sees, and g.y = phi(q).(sum of (a.b) x). Else another scan stores them before.
// A block goes along the sequence in chunks. Rows and columns of the same chunk form a matrix of scores; columns of
// earlier chunks are in a state, the sum of b_j x_j^T (depth,width). If the rows are keys, which see later queries, the
// scan goes backwards. If there are few heads, the sequence is cut into segments: one launch sums the columns of each
// segment, one adds the segments up, and one scans all segments at once. The segments' states lie in the result until
// the last launch writes it: each in rows that only its own segment's blocks write, so every query head of a group has
// a copy, if it has a block of its own. On tensor cores one block can have all query heads of a group: at each chunk
// its rows read the state one head after the other, then the columns join it.
//
// There may be a state before the first key, the state behind the last one may be wanted, and sums may not be
// normalized (no bias, and den is 1). With decays, query i sees key j with the product of the decays from j + 1 to i as
// a weight. From the state before its chunk to row i, and from column j to the state behind it, the weights are
// products of the chunk's decays, up to the position or from the next one on: the first of a query, the second of a
// key. The product of each segment's decays is in scratch.

namespace memcheck {
namespace linear_cuda {

enum class ScanKind {
  Output,
  Denominators,  // as Output, but stores 1 / den and g.y of every query
  GradQ,
  GradK,
  GradV,
};

// The kernel's name in errors.
inline const char* name_of(ScanKind kind, bool on_tensor_cores) {
  switch (kind) {
    case ScanKind::Output:
      return on_tensor_cores ? "linear_attention_forward_tensor" : "linear_attention_forward";
    case ScanKind::Denominators:
      return on_tensor_cores ? "linear_attention_backward_rows_tensor" : "linear_attention_backward_rows";
    case ScanKind::GradQ:
      return on_tensor_cores ? "linear_attention_backward_q_tensor" : "linear_attention_backward_q";
    case ScanKind::GradK:
      return on_tensor_cores ? "linear_attention_backward_k_tensor" : "linear_attention_backward_k";
    case ScanKind::GradV:
      break;
  }
  return on_tensor_cores ? "linear_attention_backward_v_tensor" : "linear_attention_backward_v";
}

// A scan without segments is Whole. Else Sums forms the states of segments, and Pieces the results.
enum class ScanPhase { Whole, Sums, Pieces };

// x (B,heads,length,columns), or phi(x) if mapped; times 1 / den of its query if scaled. Null means zeros.
struct ScanFactor {
  Strided<4> x;
  bool mapped;
  bool scaled;
  bool packed;  // may be read 16 bytes at a time
};

// The memory of the segments' states: scratch (B,Hkv,segments,slot), or rows of a result (B,heads,rows,columns) of
// which nothing is written yet.
struct StateMemory {
  void* scratch;
  Strided<4> result;  // null if they lie in scratch
  int64_t heads, rows, columns;
};

struct Scan {
  LinearAttentionShape shape;
  double eps;
  ScanKind kind;
  ScanPhase phase;
  int64_t depth;  // of a and b
  int64_t width;  // of x and out
  ScanFactor a, b, x;
  Strided<4> out;   // (B,H,S,width) or (B,Hkv,T,width); null when not wanted
  Strided<4> last;  // read at the end. Denominators: g; GradQ: q; GradK: k
  bool out_packed;  // may be written as many bytes at a time as the kernel stores
  bool last_packed;
  void* inverse;   // (B,H,S): 1 / den
  void* products;  // (parts,B,H,S): parts of g.y
  void* deep;      // states of blocks that are too deep for shared memory
  // The state before the scan, and the one behind it; any may be null. GradK's z is minus the sum of its vector.
  Strided<4> m, z;  // (B,Hkv,depth,width), (B,Hkv,1,depth or width)
  Strided<4> new_m, new_z;
  bool steps;  // of decoding: all keys join the state before the query reads it
  LinearAttentionSegments segments;
  StateMemory states;
  int64_t tile;        // the columns of a block, of the width
  Strided<3> decay;    // (B,Hkv,T), null if it does not decay
  void* kept;          // (B,Hkv,segments): products of decays
  void* key_products;  // (parts,B,Hkv,T): GradK writes parts of phi(k).(grad phi(k)); null if they are not wanted

  MEMCHECK_INLINE bool rows_are_queries() const { return kind != ScanKind::GradK && kind != ScanKind::GradV; }
  MEMCHECK_INLINE bool forms_output() const { return kind == ScanKind::Output || kind == ScanKind::Denominators; }
  MEMCHECK_INLINE bool has_denominator() const { return forms_output() && shape.normalize; }
  MEMCHECK_INLINE bool has_bias() const {
    return (kind == ScanKind::GradQ || kind == ScanKind::GradK) && shape.normalize;
  }
  MEMCHECK_INLINE bool backwards() const { return shape.causal && !rows_are_queries(); }
  MEMCHECK_INLINE int64_t rows() const { return rows_are_queries() ? shape.S : shape.T; }
  MEMCHECK_INLINE int64_t columns() const { return rows_are_queries() ? shape.T : shape.S; }
  // Causal: a key's time is its position, a query's that of the last key it sees.
  MEMCHECK_INLINE int64_t delay_of_queries() const { return shape.causal ? shape.T - shape.S : 0; }
  MEMCHECK_INLINE int64_t row_delay() const { return rows_are_queries() ? delay_of_queries() : 0; }
  MEMCHECK_INLINE int64_t column_delay() const { return rows_are_queries() ? 0 : delay_of_queries(); }
  MEMCHECK_INLINE int64_t parts() const { return linear_attention_parts(width, tile); }
  // Segments whose sums are wanted: if causal, all but the last in the direction of the scan.
  MEMCHECK_INLINE int64_t summed_segments() const { return segments.count - (shape.causal ? 1 : 0); }
  // Whether a block's part of the state lies in the columns that it writes. Else parts share a slot.
  MEMCHECK_INLINE bool parts_have_slots() const { return states.result && out; }
  // The segment that is scanned last.
  MEMCHECK_INLINE int64_t last_segment() const { return backwards() ? 0 : segments.count - 1; }
};

// The part of the scan that a block computes.
struct ScanWork {
  int64_t b;
  int64_t row_head;   // of sums and of grouped rows: the first of the key head's
  int64_t row_heads;  // from row_head on, of grouped rows
  int64_t key_head;
  int64_t first_column_head, column_heads;
  int64_t part;  // of the width
  int64_t piece;
};

MEMCHECK_INLINE ScanWork scan_work(const Scan& scan, int64_t index, int64_t parts) {
  const LinearAttentionShape& n = scan.shape;
  const bool sums = scan.phase == ScanPhase::Sums;
  const int64_t pieces = scan.phase == ScanPhase::Whole ? 1 : sums ? scan.summed_segments() : scan.segments.count;
  const int64_t group = n.group();
  const bool by_key_head = sums || !scan.rows_are_queries() || scan.segments.grouped;
  const int64_t heads = by_key_head ? n.Hkv : n.H;
  const int64_t rows_a_key_head = by_key_head ? 1 : group;
  ScanWork work;
  work.part = index % parts;
  work.piece = index / parts % pieces;
  work.row_head = index / parts / pieces % heads;
  work.b = index / parts / pieces / heads;
  work.key_head = work.row_head / rows_a_key_head;
  if (sums && scan.backwards()) work.piece += 1;
  if (by_key_head && scan.rows_are_queries()) work.row_head = work.key_head * group;
  work.row_heads = scan.segments.grouped ? group : 1;
  work.first_column_head = scan.rows_are_queries() ? work.key_head : work.key_head * group;
  work.column_heads = scan.rows_are_queries() ? 1 : group;
  return work;
}

// The lines of a chunk that exist: line i, for i in [begin, end), is at position first + i.
struct Lines {
  int64_t first;
  int begin, end;

  MEMCHECK_INLINE bool has(int i) const { return i >= begin && i < end; }
};

MEMCHECK_INLINE Lines lines_at(int64_t time, int64_t end_time, int64_t delay, int64_t length, int chunk) {
  const int64_t first = time - delay;
  const int64_t begin = first < 0 ? (-first < chunk ? -first : chunk) : 0;
  int64_t end = end_time - time < length - first ? end_time - time : length - first;
  end = end < chunk ? end : chunk;
  return {first, static_cast<int>(begin), static_cast<int>(end > begin ? end : begin)};
}

// Rows and columns of one chunk. If the scan is not causal, a time is a position of either.
struct Chunk {
  int64_t time;  // of the first line
  Lines rows, columns;
  bool has_rows, has_columns;
};

// The times that a block goes through: first columns alone, then rows, with their columns if the scan is causal.
struct ScanRanges {
  Range columns;
  Range rows;

  MEMCHECK_INLINE int column_chunks(int size) const {
    return static_cast<int>(ceil_div(columns.end - columns.begin, size));
  }
  MEMCHECK_INLINE int row_chunks(int size) const { return static_cast<int>(ceil_div(rows.end - rows.begin, size)); }
};

MEMCHECK_INLINE ScanRanges ranges_of(const Scan& scan, const ScanWork& work) {
  const bool causal = scan.shape.causal;
  const Range none = {0, 0};
  if (scan.phase == ScanPhase::Sums)
    return {linear_attention_segment(scan.segments.count, work.piece, causal ? scan.shape.T : scan.columns()), none};
  if (scan.phase == ScanPhase::Pieces)
    return {none, linear_attention_segment(scan.segments.count, work.piece, causal ? scan.shape.T : scan.rows())};
  return {causal ? none : Range{0, scan.columns()}, Range{0, causal ? scan.shape.T : scan.rows()}};
}

MEMCHECK_INLINE Chunk chunk_of(const Scan& scan, const Range& range, int64_t number, bool sums, int size) {
  const int64_t last = ceil_div(range.end - range.begin, size) - 1;
  const int64_t time = range.begin + (scan.backwards() ? last - number : number) * size;
  Chunk chunk = {};
  chunk.time = time;
  if (!sums) chunk.rows = lines_at(time, range.end, scan.row_delay(), scan.rows(), size);
  if (sums || scan.shape.causal) chunk.columns = lines_at(time, range.end, scan.column_delay(), scan.columns(), size);
  chunk.has_rows = chunk.rows.begin < chunk.rows.end;
  chunk.has_columns = chunk.columns.begin < chunk.columns.end;
  return chunk;
}

// Index of 1 / den and g.y of the first query of a head.
MEMCHECK_INLINE int64_t query_row(const LinearAttentionShape& n, int64_t b, int64_t head) {
  return (b * n.H + head) * n.S;
}

// The state of a segment in memory, or a block's part of it: numbers in the accumulation type, a matrix (depth,columns)
// and then the sum of a vector. In a result of 16 bits a number takes two elements.
template <typename scalar_t>
struct StateSlot {
  using acc_t = acc_type<scalar_t>;
  using bits_t = std::conditional_t<sizeof(scalar_t) == sizeof(uint16_t), uint16_t, acc_t>;
  static constexpr int kBits = sizeof(acc_t) / sizeof(bits_t);

  int64_t matrix, count;  // numbers of the matrix, and of all
  int64_t columns;
  int64_t first_column;  // of the matrix, in the width
  int64_t first_sum;     // of the vector
  acc_t* whole;          // null if the numbers are not contiguous
  bits_t* bits;          // then they are in a result's rows, so many elements in each
  int64_t row_stride, column_stride;
  uint32_t row_length;

  MEMCHECK_INLINE int64_t at(int64_t k, int64_t column) const { return k * columns + column - first_column; }
  MEMCHECK_INLINE int64_t sum_at(int64_t i) const { return matrix + i - first_sum; }
  MEMCHECK_INLINE bits_t* bits_of(int64_t number, int i) const {
    const uint32_t element = static_cast<uint32_t>(number) * kBits + i;
    return bits + element / row_length * row_stride + element % row_length * column_stride;
  }
  MEMCHECK_INLINE acc_t read(int64_t number) const {
    if (whole != nullptr) return whole[number];
    bits_t parts[kBits];
#pragma unroll
    for (int i = 0; i < kBits; ++i) parts[i] = *bits_of(number, i);
    acc_t x;
    __builtin_memcpy(&x, parts, sizeof(x));
    return x;
  }
  MEMCHECK_INLINE void write(int64_t number, acc_t x) const {
    if (whole != nullptr) {
      whole[number] = x;
      return;
    }
    bits_t parts[kBits];
    __builtin_memcpy(parts, &x, sizeof(x));
#pragma unroll
    for (int i = 0; i < kBits; ++i) *bits_of(number, i) = parts[i];
  }
};

template <typename scalar_t>
__device__ __forceinline__ StateSlot<scalar_t> slot_of(const Scan& scan, const ScanWork& work, int64_t segment) {
  using Slot = StateSlot<scalar_t>;
  using acc_t = typename Slot::acc_t;
  const StateMemory& memory = scan.states;
  const bool is_part = scan.parts_have_slots();
  Slot slot = {};
  slot.first_column = is_part ? work.part * scan.tile : 0;
  slot.columns = is_part ? min(scan.tile, scan.width - slot.first_column) : scan.width;
  slot.first_sum = scan.forms_output() ? 0 : slot.first_column;
  slot.matrix = scan.depth * slot.columns;
  slot.count = slot.matrix + (scan.forms_output() ? scan.depth : slot.columns);
  if (!memory.result) {
    const int64_t head = work.b * scan.shape.Hkv + work.key_head;
    slot.whole = static_cast<acc_t*>(memory.scratch) +
                 (head * scan.segments.count + segment) * linear_attention_slot(scan.depth, scan.width);
    return slot;
  }
  const int64_t head = memory.heads == scan.shape.Hkv ? work.key_head : work.row_head;
  const int64_t row = linear_attention_segment(scan.segments.count, segment, memory.rows).begin;
  slot.row_length = static_cast<uint32_t>(is_part ? slot.columns : memory.columns);
  slot.row_stride = memory.result.stride[2];
  slot.column_stride = memory.result.stride[3];
  slot.bits = memory.result.at<typename Slot::bits_t>(work.b, head, row, slot.first_column);
  if (slot.column_stride == 1 && slot.row_stride == slot.row_length &&
      reinterpret_cast<uintptr_t>(slot.bits) % sizeof(acc_t) == 0)
    slot.whole = reinterpret_cast<acc_t*>(slot.bits);
  return slot;
}

// The state before the scan of a head: an element of the matrix, and of the vector.
template <typename acc_t>
__device__ __forceinline__ acc_t initial_element(const Scan& scan, const ScanWork& work, int64_t k, int64_t column) {
  return scan.m ? *scan.m.at<acc_t>(work.b, work.key_head, k, column) : acc_t(0);
}
template <typename acc_t>
__device__ __forceinline__ acc_t initial_sum(const Scan& scan, const ScanWork& work, int64_t i) {
  const acc_t z = scan.z ? *scan.z.at<acc_t>(work.b, work.key_head, 0, i) : acc_t(0);
  return scan.kind == ScanKind::GradK ? -z : z;
}

// The product of the decays of a block's segment.
template <typename acc_t>
__device__ __forceinline__ acc_t& kept_of(const Scan& scan, const ScanWork& work, int64_t segment) {
  const int64_t head = work.b * scan.shape.Hkv + work.key_head;
  return static_cast<acc_t*>(scan.kept)[head * scan.segments.count + segment];
}

// On tensor cores, a block has all columns of the width if depth and width are at most this.
constexpr int64_t kWidestWhole = 128;

inline bool is_whole_on_tensor_cores(const LinearAttentionShape& n, Dtype dtype) {
  return linear_attention_suits_tensor_cores(n, dtype) && std::max(n.D, n.Dv) <= kWidestWhole;
}

// Whether GradQ also stores what Denominators would: if a block has all columns of its result. By fused multiply-adds
// only in the plain form.
inline bool stores_denominators(const LinearAttentionShape& n, Dtype dtype) {
  if (linear_attention_suits_tensor_cores(n, dtype)) return is_whole_on_tensor_cores(n, dtype);
  return n.is_plain() && n.D <= linear_attention_tile(dtype);
}

// Queues a scan on tensor cores.
void scan_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream);

// Queues a scan by fused multiply-adds.
void scan_by_fma(const Scan& scan, Dtype dtype, cudaStream_t stream);

// Replaces the state of each segment by the sum of the segments before it in the direction of the scan; not causal: by
// the sum of all.
void add_up_segments(const Scan& scan, Dtype dtype, cudaStream_t stream);

// What the scans have stored for the gradient of a decay: parts of g.y for each query, and of phi(k).(grad phi(k)) for
// each key.
struct DecayProducts {
  int64_t query_parts, key_parts;
  void* of_keys;  // (parts,B,Hkv,T)
};

// Queues the gradient of a decay for each position, when all scans have run.
void finish_grad_decay(const LinearAttentionBackward& p, const DecayProducts& products, Dtype dtype,
                       cudaStream_t stream);

// Calls run(scan, blocks) for each phase of a scan, and adds up the segments in between.
template <typename Run>
void run_phases(Scan scan, Dtype dtype, cudaStream_t stream, const Run& run) {
  const LinearAttentionShape& n = scan.shape;
  const int64_t row_heads = n.B * (scan.rows_are_queries() && !scan.segments.grouped ? n.H : n.Hkv);
  if (scan.segments.count == 1) {
    scan.phase = ScanPhase::Whole;
    return run(scan, row_heads);
  }
  scan.phase = ScanPhase::Sums;
  run(scan, n.B * n.Hkv * scan.summed_segments());
  add_up_segments(scan, dtype, stream);
  scan.phase = ScanPhase::Pieces;
  run(scan, row_heads * scan.segments.count);
}

}  // namespace linear_cuda

void linear_attention_sum_decays_cuda(const LinearAttentionDecaySum& p, Dtype dtype, cudaStream_t stream);

}  // namespace memcheck
