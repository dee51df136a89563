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
// scan goes backwards. On tensor cores grad k and grad v are one scan, because their states differ by z alone. If there
// are few heads, the sequence is cut into segments: one launch sums the columns of each segment, one adds the segments
// up, and one scans all segments at once. With a table of sequences, a launch has a block for every place that a
// segment may have; a block finds the sequence and the segment of its place, and does nothing if there is none. On
// tensor cores one block can have all query heads of a group: at each chunk its rows read the state one head after the
// other, then the columns join it.
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
  constexpr const char* kNames[][2] = {{"linear_attention_forward", "linear_attention_forward_tensor"},
                                       {"linear_attention_backward_rows", ""},
                                       {"linear_attention_backward_q", "linear_attention_backward_q_tensor"},
                                       {"linear_attention_backward_k", "linear_attention_backward_kv_tensor"},
                                       {"linear_attention_backward_v", ""}};
  return kNames[static_cast<int>(kind)][on_tensor_cores];
}

// If any sequence may have several segments, Sums forms their states before Results.
enum class ScanPhase { Sums, Results };

// A factor, or rows that are read or written at the end; null means zeros, or that they are not wanted.
struct ScanTensor {
  Strided<4> x;     // (B,heads,length,columns)
  bool mapped;      // of a factor: phi(x) is read
  bool scaled;      // times 1 / den of its query
  bool in_packs;    // may be read, or written, as many bytes at a time as its kernel takes
  int64_t columns;  // the depth or the width of the scan
};

struct Scan {
  LinearAttentionShape shape;
  double eps;
  ScanKind kind;
  ScanPhase phase;
  int64_t depth;  // of a and b
  int64_t width;  // of x and out
  ScanTensor a, b, x;
  bool on_tensor_cores;
  ScanTensor out;            // of the width
  ScanTensor out_of_values;  // GradK on tensor cores: grad_v, of the depth
  ScanTensor last;           // of the width, read at the end. Denominators: g; GradQ: q; GradK: k
  void* inverse;             // (B,H,S): 1 / den
  void* products;            // (parts,B,H,S): parts of g.y
  void* deep;                // states of blocks that are too deep for shared memory
  // The state before the scan, and the one behind it; any may be null. GradK's z is minus the sum of its vector.
  Strided<4> m, z;  // (N,Hkv,depth,width), (N,Hkv,1,depth or width)
  Strided<4> new_m, new_z;
  LinearAttentionSegments segments;
  void* states;  // of segments (segments,Hkv,slot)
  int64_t tile;  // the columns of a block, of the width
  LinearAttentionDecay decay;
  void* kept;           // (segments,Hkv): products of decays
  void* key_products;   // (parts,B,Hkv,T): GradK writes parts of phi(k).(grad phi(k)); null if they are not wanted
  int64_t query_parts;  // of g.y
  bool finds_rows;      // GradQ: it finds 1 / den and g.y of its queries

  MEMCHECK_INLINE bool rows_are_queries() const { return kind != ScanKind::GradK && kind != ScanKind::GradV; }
  MEMCHECK_INLINE bool forms_output() const { return kind == ScanKind::Output || kind == ScanKind::Denominators; }
  MEMCHECK_INLINE bool has_denominator() const { return forms_output() && shape.normalize; }
  MEMCHECK_INLINE bool has_bias() const {
    return (kind == ScanKind::GradQ || kind == ScanKind::GradK) && shape.normalize;
  }
  MEMCHECK_INLINE bool backwards() const { return shape.causal && !rows_are_queries(); }
  // Times are positions of keys if the scan is causal, else of columns.
  MEMCHECK_INLINE bool times_are_keys() const { return shape.causal || rows_are_queries(); }
  MEMCHECK_INLINE int64_t times() const { return times_are_keys() ? shape.T : shape.S; }
  MEMCHECK_INLINE int64_t places() const { return linear_attention_places(shape, segments, times()); }
  MEMCHECK_INLINE int64_t parts() const { return linear_attention_parts(width, tile); }
  // Of so many segments, those whose sums are wanted: if causal, all but the last in the direction of the scan.
  MEMCHECK_INLINE int64_t summed(int64_t count) const { return count - (shape.causal ? 1 : 0); }
  // 1 / den and a part of g.y of a query, and a part of phi(k).(grad phi(k)) of a key; rows are those of query_row and
  // key_row.
  template <typename acc_t>
  MEMCHECK_INLINE acc_t& inverse_at(int64_t row) const {
    return static_cast<acc_t*>(inverse)[row];
  }
  template <typename acc_t>
  MEMCHECK_INLINE acc_t& product_at(int64_t part, int64_t row) const {
    return static_cast<acc_t*>(products)[part * shape.B * shape.H * shape.S + row];
  }
  template <typename acc_t>
  MEMCHECK_INLINE acc_t& key_product_at(int64_t part, int64_t row) const {
    return static_cast<acc_t*>(key_products)[part * shape.B * shape.Hkv * shape.T + row];
  }
};

// A sequence of the batch, and its segments.
struct ScanSequence {
  int64_t index;  // of states
  int64_t row;    // of the batch
  Span queries, keys;
  int64_t segments;
  int64_t first_slot;

  MEMCHECK_INLINE int64_t query_count() const { return queries.end - queries.begin; }
  MEMCHECK_INLINE int64_t key_count() const { return keys.end - keys.begin; }
};

MEMCHECK_INLINE int64_t first_time(const Scan& scan, const Sequence& x) {
  return scan.times_are_keys() ? x.first_key : x.first_query;
}

MEMCHECK_INLINE ScanSequence scan_sequence(const Scan& scan, int64_t index) {
  const Sequence x = sequence_of(scan.shape, index);
  const int64_t times = scan.times_are_keys() ? x.keys : x.queries;
  const int64_t slot_of_packed = scan.segments.shortest == 0 ? 0 : first_time(scan, x) / scan.segments.shortest;
  return {index,
          x.row,
          {x.first_query, x.first_query + x.queries},
          {x.first_key, x.first_key + x.keys},
          scan.segments.count_of(times),
          scan.shape.sequences.packed ? slot_of_packed : index * scan.segments.count};
}

// The part of the scan that a block computes.
struct ScanWork {
  ScanSequence sequence;
  bool exists;        // whether the block's place has a segment
  int64_t row_head;   // of sums and of grouped rows: the first of the key head's
  int64_t row_heads;  // from row_head on, of grouped rows
  int64_t key_head;
  int64_t first_column_head, column_heads;
  int64_t part;     // of the width
  int64_t segment;  // causal: of rows and columns

  MEMCHECK_INLINE int64_t b() const { return sequence.row; }
  MEMCHECK_INLINE bool is_whole() const { return sequence.segments == 1; }
  // Whether the block stores its state: sums of a segment, or the state behind the scan, if that is wanted.
  MEMCHECK_INLINE bool stores_state(const Scan& scan) const {
    if (scan.phase == ScanPhase::Sums) return true;
    if (!scan.new_m && !scan.new_z) return false;
    const bool is_first_head = !scan.rows_are_queries() || row_head % scan.shape.group() == 0;
    return is_first_head && segment == (scan.backwards() ? 0 : sequence.segments - 1);
  }
};

// The sequence and the segment at a place, of as many segments as are launched for the longest sequence.
MEMCHECK_INLINE SequenceTile segment_at(const Scan& scan, int64_t place, int64_t launched) {
  if (scan.segments.count == 1 || !scan.shape.sequences.packed) return {place / launched, place % launched};
  return tile_at(scan.shape, place, scan.times(), scan.segments.shortest,
                 [&](const Sequence& x) { return first_time(scan, x); });
}

MEMCHECK_INLINE ScanWork scan_work(const Scan& scan, int64_t index) {
  const LinearAttentionShape& n = scan.shape;
  const int64_t parts = scan.parts();
  const bool sums = scan.phase == ScanPhase::Sums;
  const int64_t launched = sums ? scan.summed(scan.segments.count) : scan.segments.count;
  const int64_t group = n.group();
  const bool by_key_head = sums || !scan.rows_are_queries() || scan.segments.grouped;
  const int64_t heads = by_key_head ? n.Hkv : n.H;
  const int64_t rows_a_key_head = by_key_head ? 1 : group;
  const SequenceTile at = segment_at(scan, index / parts / heads, launched);
  ScanWork work;
  work.sequence = scan_sequence(scan, at.sequence);
  work.exists = at.tile < (sums ? work.is_whole() ? 0 : scan.summed(work.sequence.segments) : work.sequence.segments);
  work.part = index % parts;
  work.row_head = index / parts % heads;
  work.key_head = work.row_head / rows_a_key_head;
  work.segment = at.tile + (sums && scan.backwards() ? 1 : 0);
  if (by_key_head && scan.rows_are_queries()) work.row_head = work.key_head * group;
  work.row_heads = scan.segments.grouped ? group : 1;
  work.first_column_head = scan.rows_are_queries() ? work.key_head : work.key_head * group;
  work.column_heads = scan.rows_are_queries() ? 1 : group;
  return work;
}

// The lines of a chunk that exist: line i, for i in [begin, end), is at position first + i of the batch.
struct Lines {
  int64_t first;
  int begin, end;

  MEMCHECK_INLINE bool has(int i) const { return i >= begin && i < end; }
};

// The lines from a time on, of positions whose first has the time `delay`.
MEMCHECK_INLINE Lines lines_at(int64_t time, int64_t end_time, int64_t delay, const Span& positions, int chunk) {
  const int64_t first = time - delay;
  const int64_t begin = first < 0 ? (-first < chunk ? -first : chunk) : 0;
  const int64_t left = positions.end - positions.begin - first;
  int64_t end = end_time - time < left ? end_time - time : left;
  end = end < chunk ? end : chunk;
  return {positions.begin + first, static_cast<int>(begin), static_cast<int>(end > begin ? end : begin)};
}

// Rows and columns of one chunk. If the scan is not causal, a time is a position of either.
struct Chunk {
  int64_t time;  // of the first line
  Lines rows, columns;
  bool has_rows, has_columns;
};

// The times that a block goes through: first columns alone, then rows, with their columns if the scan is causal.
struct ScanRanges {
  Span columns;
  Span rows;

  MEMCHECK_INLINE int column_chunks(int size) const {
    return static_cast<int>(ceil_div(columns.end - columns.begin, size));
  }
  MEMCHECK_INLINE int row_chunks(int size) const { return static_cast<int>(ceil_div(rows.end - rows.begin, size)); }
};

MEMCHECK_INLINE ScanRanges ranges_of(const Scan& scan, const ScanWork& work) {
  const ScanSequence& x = work.sequence;
  const bool causal = scan.shape.causal;
  const int64_t columns = scan.times_are_keys() ? x.key_count() : x.query_count();
  const int64_t rows = causal || !scan.rows_are_queries() ? x.key_count() : x.query_count();
  const Span none = {0, 0};
  if (scan.phase == ScanPhase::Sums) return {linear_attention_segment(x.segments, work.segment, columns), none};
  const bool sums_too = work.is_whole() && !causal;
  return {sums_too ? Span{0, columns} : none, linear_attention_segment(x.segments, work.segment, rows)};
}

MEMCHECK_INLINE Chunk chunk_of(const Scan& scan, const ScanSequence& x, const Span& range, int64_t number, bool sums,
                               int size) {
  const int64_t last = ceil_div(range.end - range.begin, size) - 1;
  const int64_t time = range.begin + (scan.backwards() ? last - number : number) * size;
  Chunk chunk = {};
  chunk.time = time;
  // Causal: a key's time is its position, a query's that of the last key it sees.
  const int64_t delay = scan.shape.causal ? x.key_count() - x.query_count() : 0;
  const Lines queries = lines_at(time, range.end, delay, x.queries, size);
  const Lines keys = lines_at(time, range.end, 0, x.keys, size);
  if (!sums) chunk.rows = scan.rows_are_queries() ? queries : keys;
  if (sums || scan.shape.causal) chunk.columns = scan.rows_are_queries() ? keys : queries;
  chunk.has_rows = chunk.rows.begin < chunk.rows.end;
  chunk.has_columns = chunk.columns.begin < chunk.columns.end;
  return chunk;
}

// The rows of the first query and of the first key of a head.
MEMCHECK_INLINE int64_t query_row(const LinearAttentionShape& n, int64_t b, int64_t head) {
  return (b * n.H + head) * n.S;
}
MEMCHECK_INLINE int64_t key_row(const LinearAttentionShape& n, int64_t b, int64_t head) {
  return (b * n.Hkv + head) * n.T;
}

// Of a segment and key head.
MEMCHECK_INLINE int64_t slot_number(const Scan& scan, const ScanWork& work, int64_t segment) {
  return (work.sequence.first_slot + segment) * scan.shape.Hkv + work.key_head;
}

// The state of a segment: a matrix (depth,width), and then the sum of a vector.
template <typename acc_t>
struct StateSlot {
  acc_t* numbers;
  int64_t width, matrix, count;  // numbers of a row, of the matrix, and of all

  __device__ __forceinline__ StateSlot(const Scan& scan, const ScanWork& work, int64_t segment)
      : numbers(static_cast<acc_t*>(scan.states) +
                slot_number(scan, work, segment) * linear_attention_slot(scan.depth, scan.width)),
        width(scan.width),
        matrix(scan.depth * scan.width),
        count(matrix + (scan.forms_output() ? scan.depth : scan.width)) {}
  MEMCHECK_INLINE acc_t& at(int64_t k, int64_t column) const { return numbers[k * width + column]; }
  MEMCHECK_INLINE acc_t& sum_at(int64_t i) const { return numbers[matrix + i]; }
};

// The state before the scan of a head: an element of the matrix, and of the vector.
template <typename acc_t>
__device__ __forceinline__ acc_t initial_element(const Scan& scan, const ScanWork& work, int64_t k, int64_t column) {
  return scan.m ? *scan.m.at<acc_t>(work.sequence.index, work.key_head, k, column) : acc_t(0);
}
template <typename acc_t>
__device__ __forceinline__ acc_t initial_sum(const Scan& scan, const ScanWork& work, int64_t i) {
  const acc_t z = scan.z ? *scan.z.at<acc_t>(work.sequence.index, work.key_head, 0, i) : acc_t(0);
  return scan.kind == ScanKind::GradK ? -z : z;
}

// The product of the decays of a block's segment.
template <typename acc_t>
__device__ __forceinline__ acc_t& kept_of(const Scan& scan, const ScanWork& work, int64_t segment) {
  return static_cast<acc_t*>(scan.kept)[slot_number(scan, work, segment)];
}

// Gives a block's part of the state the numbers with which the block begins, where these are not zeros by rule.
// each(move, move_sum) calls move(k, column, number) for the numbers of the part's matrix, and move_sum(i, number) for
// those of its vector.
template <typename scalar_t, typename Each>
__device__ __forceinline__ void load_state(const Scan& scan, const ScanWork& work, const Each& each) {
  using acc_t = acc_type<scalar_t>;
  if (work.is_whole()) {
    each([&](int64_t k, int64_t column, acc_t& to) { to = initial_element<acc_t>(scan, work, k, column); },
         [&](int64_t i, acc_t& to) { to = initial_sum<acc_t>(scan, work, i); });
  } else {
    const StateSlot<acc_t> slot(scan, work, work.segment);
    each([&](int64_t k, int64_t column, acc_t& to) { to = slot.at(k, column); },
         [&](int64_t i, acc_t& to) { to = slot.sum_at(i); });
  }
}

// Stores it at the end of the scan: as the sums of a segment, or as the state behind the last key. Where all parts have
// the same vector, the first one stores it.
template <typename scalar_t, typename Each>
__device__ __forceinline__ void store_state(const Scan& scan, const ScanWork& work, const Each& each) {
  using acc_t = acc_type<scalar_t>;
  const bool has_vector = !scan.forms_output() || work.part == 0;
  if (scan.phase == ScanPhase::Sums) {
    const StateSlot<acc_t> slot(scan, work, work.segment);
    each([&](int64_t k, int64_t column, acc_t& from) { slot.at(k, column) = from; },
         [&](int64_t i, acc_t& from) {
           if (has_vector) slot.sum_at(i) = from;
         });
  } else {
    each(
        [&](int64_t k, int64_t column, acc_t& from) {
          if (scan.new_m) *scan.new_m.at<acc_t>(work.sequence.index, work.key_head, k, column) = from;
        },
        [&](int64_t i, acc_t& from) {
          if (scan.new_z && has_vector)
            *scan.new_z.at<acc_t>(work.sequence.index, work.key_head, 0, i) =
                scan.kind == ScanKind::GradK ? -from : from;
        });
  }
}

// phi(x)
template <typename acc_t>
__device__ __forceinline__ acc_t feature(FeatureMap map, acc_t x) {
  return map == FeatureMap::Identity ? x : elu_plus_one(x, exp_minus_abs(x));
}

// Whether GradQ stores what Denominators would: if a block has all columns of its result. By fused multiply-adds only
// in the plain form.
inline bool grad_q_finds_rows(const LinearAttentionShape& n, Dtype dtype, bool on_tensor_cores) {
  return on_tensor_cores || (n.is_plain() && n.D <= linear_attention_tile(dtype));
}

// Queue scans on tensor cores: Output, GradQ, and GradK with GradV.
void forward_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream);
void query_gradients_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream);
void key_gradients_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream);

// Whether the last one has the shared memory that it needs on this GPU.
bool key_gradients_fit(const LinearAttentionShape& n, Dtype dtype);

// Queues a scan by fused multiply-adds.
void scan_by_fma(const Scan& scan, Dtype dtype, cudaStream_t stream);

// Replaces the state of each segment by the sum of the segments before it in the direction of the scan; not causal: by
// the sum of all.
void add_up_segments(const Scan& scan, Dtype dtype, cudaStream_t stream);

// Whether rows of x, in elements of so many bytes, may be read or written `count` at a time.
inline bool is_in_packs(const Strided<4>& x, int64_t columns, int64_t bytes, int64_t count) {
  bool whole = x.stride[3] == 1 && columns % count == 0 && reinterpret_cast<uintptr_t>(x.data) % (bytes * count) == 0;
  for (int i = 0; i < 3; ++i) whole = whole && x.stride[i] % count == 0;
  return whole;
}

// Queues a step of decoding.
void queue_step(const LinearAttentionForward& p, Dtype dtype, cudaStream_t stream);

// Queues the check that decays are in (0, 1]. Padding is not read.

// What the scans have stored for the gradient of a decay: parts of g.y for each query, and of phi(k).(grad phi(k)) for
// each key; and room for sums.
struct DecayProducts {
  int64_t query_parts, key_parts;
  void* of_keys;  // (parts,B,Hkv,T)
  double* sums;   // (places,Hkv), of kLinearAttentionDecays positions each
};

// Queues the gradient of a decay for each position, when all scans have run.
void finish_grad_decay(const LinearAttentionBackward& p, const DecayProducts& products, Dtype dtype,
                       cudaStream_t stream);

// Calls run(scan, blocks) for each phase of a scan, and adds up the segments in between.
template <typename Run>
void run_phases(Scan scan, Dtype dtype, cudaStream_t stream, const Run& run) {
  const LinearAttentionShape& n = scan.shape;
  if (scan.segments.count > 1) {
    LinearAttentionSegments summed = scan.segments;
    summed.count = scan.summed(summed.count);
    scan.phase = ScanPhase::Sums;
    run(scan, n.Hkv * (n.sequences.packed ? scan.places() : linear_attention_places(n, summed, scan.times())));
    add_up_segments(scan, dtype, stream);
  }
  scan.phase = ScanPhase::Results;
  run(scan, scan.places() * (scan.rows_are_queries() && !scan.segments.grouped ? n.H : n.Hkv));
}

}  // namespace linear_cuda

void linear_attention_sum_decays_cuda(const LinearAttentionDecaySum& p, Dtype dtype, cudaStream_t stream);

}  // namespace memcheck
