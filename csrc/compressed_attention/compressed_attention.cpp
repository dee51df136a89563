#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <limits>
#include <tuple>

#include "common/torch/device.h"
#include "common/torch/registration.h"
#include "compressed_attention/compressed_attention_checks.h"
#include "compressed_attention/compressed_attention_plan_cuda.h"

namespace memcheck::compressed_attention_operators {
namespace {

using namespace compressed_attention_glue;

using Op = operators::CompressedAttention;
using BackwardOp = operators::CompressedAttentionBackward;
using Pooled = operators::CompressedAttentionPooled;
using PooledBackwardOp = operators::CompressedAttentionPooledBackward;
using ExtendOp = operators::CompressedAttentionExtend;
using ExtendBackwardOp = operators::CompressedAttentionExtendBackward;
using StepOp = operators::CompressedAttentionStep;
using LastStepOp = operators::CompressedAttentionLastStep;
using WindowStepOp = operators::CompressedAttentionWindowStep;

constexpr const char* kForward = "compressed_attention";
constexpr const char* kBackward = "compressed_attention_backward";
constexpr const char* kPooled = "compressed_attention_pooled";
constexpr const char* kPooledBackward = "compressed_attention_pooled_backward";
constexpr const char* kExtend = "compressed_attention_extend";
constexpr const char* kStep = "compressed_attention_step";
constexpr const char* kLastStep = "compressed_attention_last_step";
constexpr const char* kWindowStep = "compressed_attention_window_step";

// ---- forward

// The sizes, and of the sequences what does not depend on values.
std::pair<Sizes, SequenceArguments> check_forward(const Op::Arguments& in) {
  Sizes n = check_inputs(kForward, in.q, in.k, in.v, options_of(in));
  SequenceArguments sequences = sequence_arguments(kForward, in);
  n.C = block_places(n, in.factor, sequences);
  check_sink(kForward, n, in.q, in.sink);
  return {n, sequences};
}

Op::Results forward_meta(const Op::Arguments& in) {
  const auto [n, sequences] = check_forward(in);
  return {empty_output(n, in.q), empty_lse(n, in.q, in.keep || in.return_lse), empty_compressed(n, in.q, in.keep),
          empty_compressed(n, in.q, in.keep)};
}

void zero_all(std::initializer_list<at::Tensor> tensors) {
  for (const at::Tensor& x : tensors)
    if (x.defined()) x.zero_();
}

// k and v may be undefined without a window.
CompressedAttentionWindow window_of(const CompressedAttentionShape& shape, const Options& options, const at::Tensor& k,
                                    const at::Tensor& v) {
  if (!options.window) return {};
  return {.size = options.window_size(shape.T), .first = shape.T - k.size(2), .k = reads<4>(k), .v = reads<4>(v)};
}

// The tensors of the forward kernel.
struct ForwardTensors {
  const at::Tensor& q;     // (B,H,S,D)
  const at::Tensor& kc;    // (B,Hkv,C,D)
  const at::Tensor& vc;    // (B,Hkv,C,D)
  const at::Tensor& sink;  // (H,), contiguous, or undefined
  const at::Tensor& y;     // (B,H,S,D)
  const at::Tensor& lse;   // (B,H,S), or without elements, or undefined
  void* scratch;
  CompressedAttentionWindow window = {};
};

void run_forward(const CompressedAttentionKernels& kernels, const CompressedAttentionShape& shape,
                 const Options& options, const ForwardTensors& x, const DeviceScope& device) {
  const bool wants_lse = x.lse.defined() && x.lse.size(2) == shape.S;
  const CompressedAttentionForward p{.shape = shape,
                                     .scale = scale_of(shape, options),
                                     .q = reads<4>(x.q),
                                     .kc = reads<4>(x.kc),
                                     .vc = reads<4>(x.vc),
                                     .sink = data_of(x.sink),
                                     .y = writes<4>(x.y),
                                     .lse = wants_lse ? writes<3>(x.lse) : Strided<3>(),
                                     .scratch = x.scratch,
                                     .threads = device.threads};
  kernels.forward({p, x.window}, dtype_of(x.q), device.stream);
}

void fill_padded_outputs(const Sequences& sequences, const at::Tensor& y, const at::Tensor& lse) {
  sequences.fill_if_padded(y);
  sequences.fill_if_padded(lse, -std::numeric_limits<double>::infinity());
}

Op::Results forward(const CompressedAttentionKernels& kernels, const Op::Arguments& in) {
  const auto [n, arguments] = check_forward(in);
  const at::Tensor& q = in.q;
  const Options options = options_of(in);
  const at::Tensor sink = contiguous_or_not(tensor_or_none(in.sink));
  const DeviceScope device(q);
  CompressedAttentionShape shape = n.shape(options);
  const Sequences sequences = sequences_of(kForward, arguments, kernels.build_sequences, q, device, shape);
  const CompressedAttentionWindow window = window_of(shape, options, in.k, in.v);
  const auto plan = kernels.plan(shape, window, dtype_of(q), device.threads);
  const at::Tensor y = empty_output(n, q);
  const at::Tensor lse = empty_lse(n, q, in.keep || in.return_lse);
  const at::Tensor kc = empty_compressed(n, q, true), vc = empty_compressed(n, q, true);
  const Scratch scratch(plan.forward_scratch_bytes, q);
  fill_padded_outputs(sequences, y, lse);
  if (shape.sequences && in.keep) zero_all({kc, vc});  // places without a block
  const CompressedAttentionPooling pooling{.shape = shape,
                                           .k = reads<4>(in.k),
                                           .v = reads<4>(in.v),
                                           .kc = writes<4>(kc),
                                           .vc = writes<4>(vc),
                                           .scratch = scratch.data(),
                                           .threads = device.threads};
  kernels.pool(pooling, dtype_of(q), device.stream);
  const ForwardTensors x{
      .q = q, .kc = kc, .vc = vc, .sink = sink, .y = y, .lse = lse, .scratch = scratch.data(), .window = window};
  run_forward(kernels, shape, options, x, device);
  if (in.keep) return {y, lse, kc, vc};
  return {y, lse, empty_compressed(n, q, false), empty_compressed(n, q, false)};
}

std::pair<Sizes, SequenceArguments> check_pooled(const Pooled::Arguments& in) {
  const Sizes n = check_blocks(kPooled, in.q, in.kc, in.vc, in.kv_len, options_of(in), true);
  SequenceArguments sequences = sequence_arguments(kPooled, in);
  check_block_count(kPooled, n, options_of(in), sequences);
  check_window(kPooled, n, in.q, options_of(in), in.k, in.v, true, sequences);
  check_sink(kPooled, n, in.q, in.sink);
  return {n, sequences};
}

Pooled::Results pooled_meta(const Pooled::Arguments& in) {
  const auto [n, sequences] = check_pooled(in);
  return {empty_output(n, in.q), empty_lse(n, in.q, in.keep || in.return_lse)};
}

Pooled::Results pooled(const CompressedAttentionKernels& kernels, const Pooled::Arguments& in) {
  const auto [n, arguments] = check_pooled(in);
  const at::Tensor& q = in.q;
  const Options options = options_of(in);
  const at::Tensor sink = contiguous_or_not(tensor_or_none(in.sink));
  const DeviceScope device(q);
  CompressedAttentionShape shape = n.shape(options);
  const Sequences sequences = sequences_of(kPooled, arguments, kernels.build_sequences, q, device, shape);
  const CompressedAttentionWindow window = window_of(shape, options, tensor_or_none(in.k), tensor_or_none(in.v));
  const auto plan = kernels.plan(shape, window, dtype_of(q), device.threads);
  const at::Tensor y = empty_output(n, q);
  const at::Tensor lse = empty_lse(n, q, in.keep || in.return_lse);
  const Scratch scratch(plan.pooled_forward_scratch_bytes, q);
  fill_padded_outputs(sequences, y, lse);
  const ForwardTensors x{
      .q = q, .kc = in.kc, .vc = in.vc, .sink = sink, .y = y, .lse = lse, .scratch = scratch.data(), .window = window};
  run_forward(kernels, shape, options, x, device);
  return {y, lse};
}

// ---- blocks that go on from a state

struct NewBlocks {
  c10::SymInt B, Hkv, T, D;  // of k and v
  c10::SymInt rows, C, N;    // of kc and vc, and sequences
};

// in: the arguments of the forward or the backward.
template <typename Arguments>
NewBlocks check_new_blocks(const Arguments& in, const Sizes& n) {
  const size_t count = in.counts.size();
  const bool dense = in.places.empty();
  TORCH_CHECK_VALUE(!dense || (count == 0 && in.begins.empty() && in.positions.size() == 1), kExtend,
                    ": without places begins and counts must be empty and positions one, got ", in.begins.size(), ", ",
                    count, " and ", in.positions.size());
  TORCH_CHECK_VALUE(
      dense || (in.begins.size() == count && in.positions.size() == count && in.places.size() == count + 1), kExtend,
      ": begins and positions must be as many as counts, ", count, ", and places one more, got ", in.begins.size(),
      ", ", in.positions.size(), " and ", in.places.size());
  for (const c10::SymInt& x : in.positions)
    TORCH_CHECK_VALUE(x >= 0 && x < in.factor, kExtend, ": positions must be from 0 to factor - 1 = ", in.factor - 1,
                      ", got ", x);
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(in.begins[i] >= 0 && in.counts[i] >= 0 && in.begins[i] <= n.T - in.counts[i], kExtend,
                      ": begins and counts must be of the ", n.T, " positions of k, got ", in.begins[i], " and ",
                      in.counts[i]);
    TORCH_CHECK_VALUE(in.places[i] >= 0 && in.places[i + 1] >= in.places[i] &&
                          (in.positions[i] + in.counts[i]) / in.factor <= in.places[i + 1] - in.places[i],
                      kExtend, ": places must leave room for all blocks, got ", in.places[i], " and ",
                      in.places[i + 1]);
  }
  TORCH_CHECK_VALUE(dense || (in.packed ? n.B == 1 : n.B == count), kExtend, ": k must be a row, or one for each of ",
                    count, " sequences, got B = ", n.B);
  return {.B = n.B,
          .Hkv = n.Hkv,
          .T = n.T,
          .D = n.D,
          .rows = dense ? n.B : c10::SymInt(1),
          .C = dense ? (in.positions[0] + n.T) / in.factor : in.places.back(),
          .N = dense ? n.B : c10::SymInt(static_cast<int64_t>(count))};
}

NewBlocks check_extend(const ExtendOp::Arguments& in) {
  const Sizes n = check_new_keys(kExtend, in.k, in.v, in.factor);
  const NewBlocks x = check_new_blocks(in, n);
  for (const auto& [name, sum] : {std::pair<const char*, const at::Tensor&>{"k_sum", in.k_sum}, {"v_sum", in.v_sum}}) {
    check_tensor(kExtend, name, sum);
    check_shape(kExtend, name, sum, "(N,Hkv,D)", {x.N, x.Hkv, x.D}, "k");
    check_dtype(kExtend, name, sum, acc_scalar_type(in.k.scalar_type()), "the accumulation type of k");
    check_device(kExtend, name, sum, in.k, "k");
  }
  return x;
}

ExtendOp::Results empty_blocks(const NewBlocks& x, const at::Tensor& k, const at::Tensor& sum) {
  const auto means = [&] { return at::empty_symint({x.rows, x.Hkv, x.C, x.D}, k.options()); };
  const auto sums = [&] { return at::empty_symint({x.N, x.Hkv, x.D}, sum.options()); };
  return {means(), means(), sums(), sums()};
}

// The sequences of a call, and memory for its kernel.
struct ExtensionMemory {
  std::vector<CompressedAttentionNew> sequences;
  Scratch scratch;
};

// Parameters without tensors.
template <typename Arguments>
CompressedAttentionExtension extension_of(const CompressedAttentionKernels& kernels, const NewBlocks& x,
                                          const Arguments& in, const at::Tensor& like, const DeviceScope& device,
                                          ExtensionMemory& memory) {
  const int64_t N = x.N.expect_int(), T = x.T.expect_int(), rows = x.rows.expect_int();
  int64_t results = 0;
  for (int64_t i = 0; i < N; ++i) {
    const CompressedAttentionNew one = in.places.empty()
                                           ? CompressedAttentionNew{.row = i,
                                                                    .first = 0,
                                                                    .count = T,
                                                                    .positions = in.positions[0].expect_int(),
                                                                    .to = i,
                                                                    .place = 0,
                                                                    .first_result = results}
                                           : CompressedAttentionNew{.row = in.packed ? 0 : i,
                                                                    .first = in.begins[i],
                                                                    .count = in.counts[i],
                                                                    .positions = in.positions[i].expect_int(),
                                                                    .to = 0,
                                                                    .place = in.places[i],
                                                                    .first_result = results};
    memory.sequences.push_back(one);
    results += one.blocks(in.factor) + 1;
  }
  const int64_t C = rows == 0 ? 0 : results / rows, Hkv = x.Hkv.expect_int();
  const CompressedAttentionShape shape{.B = rows,
                                       .H = Hkv,
                                       .Hkv = Hkv,
                                       .S = 0,
                                       .T = C * in.factor,
                                       .D = x.D.expect_int(),
                                       .C = C,
                                       .factor = in.factor,
                                       .causal = false,
                                       .strict = false};
  const auto plan = kernels.plan(shape, {}, dtype_of(like), device.threads);
  memory.scratch = Scratch(plan.extension_scratch_bytes, like);
  CompressedAttentionExtension p{shape, memory.sequences.data(), N};
  p.scratch = memory.scratch.data();
  p.threads = device.threads;
  return p;
}

ExtendOp::Results extend_meta(const ExtendOp::Arguments& in) {
  return empty_blocks(check_extend(in), in.k, in.k_sum);
}

ExtendOp::Results extend(const CompressedAttentionKernels& kernels, const ExtendOp::Arguments& in) {
  const NewBlocks n = check_extend(in);
  const DeviceScope device(in.k);
  const ExtendOp::Results results = empty_blocks(n, in.k, in.k_sum);
  const auto& [kc, vc, new_k_sum, new_v_sum] = results;
  if (!in.places.empty()) zero_all({kc, vc});  // other places
  ExtensionMemory memory;
  CompressedAttentionExtension p = extension_of(kernels, n, in, in.k, device, memory);
  p.k = reads<4>(in.k);
  p.v = reads<4>(in.v);
  p.k_sum = with_dimension(reads<3>(in.k_sum), 2);
  p.v_sum = with_dimension(reads<3>(in.v_sum), 2);
  p.new_k_sum = with_dimension(writes<3>(new_k_sum), 2);
  p.new_v_sum = with_dimension(writes<3>(new_v_sum), 2);
  p.kc = writes<4>(kc);
  p.vc = writes<4>(vc);
  kernels.extend(p, dtype_of(in.k), device.stream);
  return results;
}

NewBlocks check_extend_backward(const ExtendBackwardOp::Arguments& in) {
  check_tensor(kExtend, "like", in.like);
  TORCH_CHECK_VALUE(in.sizes.size() == 4, kExtend, ": sizes must be 4, got ", in.sizes);
  const NewBlocks x = check_new_blocks(in, {.B = in.sizes[0], .Hkv = in.sizes[1], .T = in.sizes[2], .D = in.sizes[3]});
  const auto check = [&](const char* name, const MaybeTensor& grad, const char* letters,
                         std::initializer_list<c10::SymInt> shape, at::ScalarType type) {
    if (!grad) return;
    check_shape(kExtend, name, *grad, letters, shape, "k");
    check_dtype(kExtend, name, *grad, type, "k");
    check_device(kExtend, name, *grad, in.like, "k");
  };
  const at::ScalarType type = in.like.scalar_type(), acc = acc_scalar_type(type);
  check("grad_kc", in.grad_kc, "(B,Hkv,C,D)", {x.rows, x.Hkv, x.C, x.D}, type);
  check("grad_vc", in.grad_vc, "(B,Hkv,C,D)", {x.rows, x.Hkv, x.C, x.D}, type);
  check("grad_k_sum", in.grad_k_sum, "(N,Hkv,D)", {x.N, x.Hkv, x.D}, acc);
  check("grad_v_sum", in.grad_v_sum, "(N,Hkv,D)", {x.N, x.Hkv, x.D}, acc);
  return x;
}

Gradients empty_extend_gradients(const NewBlocks& x, const ExtendBackwardOp::Arguments& in) {
  const auto& wanted = in.output_mask;
  const auto acc = in.like.options().dtype(acc_scalar_type(in.like.scalar_type()));
  const auto sum = [&](bool is_wanted) { return is_wanted ? at::empty_symint({x.N, x.Hkv, x.D}, acc) : at::Tensor(); };
  return {empty_of_strides(kExtend, wanted[0], "k_stride", in.sizes, in.k_stride, in.like.options()),
          empty_of_strides(kExtend, wanted[1], "v_stride", in.sizes, in.v_stride, in.like.options()), sum(wanted[2]),
          sum(wanted[3])};
}

Gradients extend_backward_meta(const ExtendBackwardOp::Arguments& in) {
  return empty_extend_gradients(check_extend_backward(in), in);
}

Gradients extend_backward(const CompressedAttentionKernels& kernels, const ExtendBackwardOp::Arguments& in) {
  const NewBlocks n = check_extend_backward(in);
  const DeviceScope device(in.like);
  const Gradients gradients = empty_extend_gradients(n, in);
  const auto& [grad_k, grad_v, grad_k_sum, grad_v_sum] = gradients;
  if (!in.places.empty() && !in.packed) zero_all({grad_k, grad_v});  // padding
  ExtensionMemory memory;
  CompressedAttentionExtension p = extension_of(kernels, n, in, in.like, device, memory);
  p.k = writes<4>(grad_k);
  p.v = writes<4>(grad_v);
  p.k_sum = with_dimension(writes<3>(grad_k_sum), 2);
  p.v_sum = with_dimension(writes<3>(grad_v_sum), 2);
  p.new_k_sum = with_dimension(reads<3>(in.grad_k_sum), 2);
  p.new_v_sum = with_dimension(reads<3>(in.grad_v_sum), 2);
  p.kc = reads<4>(in.grad_kc);
  p.vc = reads<4>(in.grad_vc);
  kernels.extend_backward(p, dtype_of(in.like), device.stream);
  return gradients;
}

// ---- one position further

struct StepInputs {
  const at::Tensor& q;  // (B,H,S,D)
  const at::Tensor& k;  // (B,Hkv,1,D), as v
  const at::Tensor& v;
  State state;  // before
  Options options;
};

Sizes check_new_position(const char* op, const at::Tensor& k, const at::Tensor& v, int64_t factor) {
  const Sizes n = check_new_keys(op, k, v, factor);
  TORCH_CHECK_VALUE(n.T == 1, op, ": k must be one position, (B,Hkv,1,D), got ", k.sym_sizes());
  return n;
}

// y, and the sums over the open block after the position.
using StepResult = StepOp::Results;

// T and C are those after the position. If it completes a block, kc and vc of the state have a place for that behind
// `blocks` of them; else they have no others.
Sizes check_step(const char* op, const StepInputs& in, const std::optional<c10::SymInt>& blocks) {
  Sizes n = check_new_position(op, in.k, in.v, in.options.factor);
  check_state(op, n, in.state, in.k, in.options.factor);
  const c10::SymInt places = in.state.kc.sym_size(2);
  TORCH_CHECK_VALUE(blocks || in.state.positions + 1 < in.options.factor, op,
                    ": positions must be less than factor - 1, so that no block is complete, got positions = ",
                    in.state.positions, " and factor = ", in.options.factor);
  TORCH_CHECK_VALUE(!blocks || (*blocks >= 0 && *blocks < places), op, ": kc must have a place behind ",
                    blocks.value_or(0), " blocks, got ", places);
  n.T += blocks.value_or(places) * in.options.factor + in.state.positions;
  n.C = blocks ? *blocks + 1 : places;
  check_new_queries(op, n, in.q, in.k, in.options.scale);
  return n;
}

// sum (B,Hkv,D) + x (B,Hkv,1,D). In a short call on the CPU torch's sum would take longer than attention.
at::Tensor added(const at::Tensor& sum, const at::Tensor& x) {
  const bool plain = sum.is_cpu() && sum.scalar_type() == at::kFloat && x.scalar_type() == at::kFloat;
  if (!plain || !sum.is_contiguous() || !x.is_contiguous()) return at::add(sum, x.select(2, 0));
  at::Tensor total = at::empty(sum.sizes(), sum.options());
  const auto* from = static_cast<const float*>(sum.const_data_ptr());
  const auto* more = static_cast<const float*>(x.const_data_ptr());
  auto* to = static_cast<float*>(total.mutable_data_ptr());
  for (int64_t i = 0; i < sum.numel(); ++i) to[i] = from[i] + more[i];
  return total;
}

StepResult empty_output_and_sums(const Sizes& n, const StepInputs& in) {
  return {empty_output(n, in.q), added(in.state.k_sum, in.k), added(in.state.v_sum, in.v)};
}

StepResult run_step(const CompressedAttentionKernels& kernels, const Sizes& n, const StepInputs& in, bool completes) {
  const DeviceScope device(in.q);
  const StepResult result = empty_output_and_sums(n, in);
  const auto& [y, k_sum, v_sum] = result;
  if (completes) {
    const auto complete = [&](const at::Tensor& blocks, const at::Tensor& sum) {
      blocks.select_symint(2, n.C - 1).copy_(sum.div_(in.options.factor));
      sum.zero_();
    };
    complete(in.state.kc, k_sum);
    complete(in.state.vc, v_sum);
  }
  const CompressedAttentionShape shape = n.shape(in.options);
  const Scratch scratch(kernels.plan(shape, {}, dtype_of(in.q), device.threads).pooled_forward_scratch_bytes, in.q);
  const at::Tensor none;
  const ForwardTensors x{
      .q = in.q, .kc = in.state.kc, .vc = in.state.vc, .sink = none, .y = y, .lse = none, .scratch = scratch.data()};
  run_forward(kernels, shape, in.options, x, device);
  return result;
}

StepInputs inputs_of(const StepOp::Arguments& in, c10::SymInt positions) {
  return {.q = in.q,
          .k = in.k,
          .v = in.v,
          .state = {.kc = in.kc, .vc = in.vc, .k_sum = in.k_sum, .v_sum = in.v_sum, .positions = std::move(positions)},
          .options = {.factor = in.factor, .causal = true, .strict = in.strict, .scale = in.scale}};
}

StepResult step_meta(const StepOp::Arguments& arguments) {
  const StepInputs in = inputs_of(arguments, arguments.number);
  return empty_output_and_sums(check_step(kStep, in, std::nullopt), in);
}

StepResult step(const CompressedAttentionKernels& kernels, const StepOp::Arguments& arguments) {
  const StepInputs in = inputs_of(arguments, arguments.number);
  return run_step(kernels, check_step(kStep, in, std::nullopt), in, /*completes=*/false);
}

StepResult last_step_meta(const StepOp::Arguments& arguments) {
  const StepInputs in = inputs_of(arguments, arguments.factor - 1);
  return empty_output_and_sums(check_step(kLastStep, in, arguments.number), in);
}

StepResult last_step(const CompressedAttentionKernels& kernels, const StepOp::Arguments& arguments) {
  const StepInputs in = inputs_of(arguments, arguments.factor - 1);
  return run_step(kernels, check_step(kLastStep, in, arguments.number), in, /*completes=*/true);
}

// ---- one position further, with a window

Options options_of_step(const WindowStepOp::Arguments& in) {
  return {.factor = in.factor, .causal = true, .strict = in.strict, .scale = in.scale, .window = in.window};
}

// A state has at most window + factor - 2 positions.
bool completes_block(const WindowStepOp::Arguments& in) {
  return in.positions == in.window + in.factor - 2;
}

// T is that after the position, and C that of the blocks before it.
Sizes check_window_step(const WindowStepOp::Arguments& in) {
  Sizes n = check_new_position(kWindowStep, in.k, in.v, in.factor);
  check_options(kWindowStep, options_of_step(in), in.k);
  const int64_t most = in.window + in.factor - 2, least = in.blocks > 0 ? in.window - 1 : 0;
  TORCH_CHECK_VALUE(in.positions >= least && in.positions <= most, kWindowStep, ": positions must be from ", least,
                    " to ", most, " for factor = ", in.factor, " and window = ", in.window, ", got ", in.positions);
  const auto check_places = [&](const char* name, const at::Tensor& x, const c10::SymInt& first, c10::SymInt count) {
    check_rank(kWindowStep, name, x, 4, "(B,Hkv,places,D)");
    check_shape(kWindowStep, name, x, "(B,Hkv,places,D)", {n.B, n.Hkv, x.sym_size(2), n.D}, "k");
    check_like(kWindowStep, name, x, in.k, "k");
    TORCH_CHECK_VALUE(first >= 0 && first <= x.sym_size(2) - count, kWindowStep, ": ", name, " must have ", count,
                      " places from ", first, " on, got ", x.sym_size(2));
  };
  check_places("kc", in.kc, in.blocks, completes_block(in) ? 1 : 0);
  check_places("vc", in.vc, in.blocks, completes_block(in) ? 1 : 0);
  check_places("near_k", in.near_k, in.start, in.positions + 1);
  check_places("near_v", in.near_v, in.start, in.positions + 1);
  n.C = in.blocks;
  n.T += in.blocks * in.factor + in.positions;
  check_new_queries(kWindowStep, n, in.q, in.k, std::nullopt);
  TORCH_CHECK_VALUE(n.S == 1, kWindowStep, ": q must be one position, (B,H,1,D), got ", in.q.sym_sizes());
  return n;
}

// x (B,Hkv,1,D) at a place of `to` (B,Hkv,places,D). On the CPU torch's copy would take longer than attention.
void write_position(const at::Tensor& x, const at::Tensor& to, int64_t place) {
  if (!x.is_cpu() || x.stride(3) != 1 || to.stride(3) != 1) {
    to.select(2, place).copy_(x.select(2, 0));
    return;
  }
  const int64_t bytes = x.element_size();
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* target = static_cast<char*>(to.mutable_data_ptr()) + place * to.stride(2) * bytes;
  for (int64_t b = 0; b < x.size(0); ++b)
    for (int64_t h = 0; h < x.size(1); ++h)
      std::memcpy(target + (b * to.stride(0) + h * to.stride(1)) * bytes,
                  from + (b * x.stride(0) + h * x.stride(1)) * bytes, x.size(3) * bytes);
}

WindowStepOp::Results window_step_meta(const WindowStepOp::Arguments& in) {
  return empty_output(check_window_step(in), in.q);
}

WindowStepOp::Results window_step(const CompressedAttentionKernels& kernels, const WindowStepOp::Arguments& in) {
  const Sizes n = check_window_step(in);
  const Options options = options_of_step(in);
  const Dtype dtype = dtype_of(in.q);
  const DeviceScope device(in.q);
  const CompressedAttentionShape shape = n.shape(options);
  const int64_t start = in.start.expect_int(), positions = in.positions.expect_int();
  write_position(in.k, in.near_k, start + positions);
  write_position(in.v, in.near_v, start + positions);
  const CompressedAttentionWindow window{.size = options.window_size(shape.T),
                                         .first = shape.C * shape.factor,
                                         .k = starting_at(reads<4>(in.near_k), dtype, {0, 0, start, 0}),
                                         .v = starting_at(reads<4>(in.near_v), dtype, {0, 0, start, 0})};
  const at::Tensor y = empty_output(n, in.q);
  const Scratch scratch(kernels.plan(shape, window, dtype, device.threads).pooled_forward_scratch_bytes, in.q);
  if (completes_block(in)) {
    CompressedAttentionShape block = shape;
    block.T = block.factor;
    block.C = 1;
    // One thread: pooling needs less scratch than a thread of attention.
    const CompressedAttentionPooling pooling{.shape = block,
                                             .k = window.k,
                                             .v = window.v,
                                             .kc = starting_at(writes<4>(in.kc), dtype, {0, 0, shape.C, 0}),
                                             .vc = starting_at(writes<4>(in.vc), dtype, {0, 0, shape.C, 0}),
                                             .scratch = scratch.data(),
                                             .threads = 1};
    kernels.pool(pooling, dtype, device.stream);
  }
  const at::Tensor none;
  const ForwardTensors x{.q = in.q,
                         .kc = in.kc,
                         .vc = in.vc,
                         .sink = none,
                         .y = y,
                         .lse = none,
                         .scratch = scratch.data(),
                         .window = window};
  run_forward(kernels, shape, options, x, device);
  return y;
}

// ---- backward

// Fills the gradients, of which those of keys and values are pooled or not. of_window: those of its keys and values.
template <typename Arguments>
void run_backward(const CompressedAttentionKernels& kernels, const char* op, const Sizes& n, const Arguments& in,
                  bool pooled, const Gradients& gradients, const std::array<at::Tensor, 2>& of_window) {
  const auto& [grad_q, grad_k, grad_v, grad_sink] = gradients;
  const at::Tensor sink = contiguous_or_not(tensor_or_none(in.sink));
  const DeviceScope device(in.q);
  CompressedAttentionShape shape = n.shape(options_of(in));
  const Sequences sequences =
      sequences_of(op, sequence_arguments(op, in), kernels.build_sequences, in.q, device, shape);
  CompressedAttentionWindow window = window_of(shape, options_of(in), tensor_or_none(in.k), tensor_or_none(in.v));
  const auto plan = kernels.plan(shape, window, dtype_of(in.q), device.threads);
  const bool keeps_delta = grad_k.defined() || grad_sink.defined() || of_window[0].defined();
  const Scratch delta(keeps_delta ? plan.delta_bytes : 0, in.q);
  const Scratch scratch(plan.backward_scratch_bytes, in.q);
  sequences.fill_if_padded(grad_q);
  for (const at::Tensor& x : {grad_k, grad_v}) {
    if (!pooled) sequences.fill_if_padded(x);
    if (pooled && shape.sequences) zero_all({x});  // places without a block
  }
  if (window.size > 0) {
    for (const at::Tensor& x : of_window) sequences.fill_if_padded(x);
    window.grad_k = writes<4>(of_window[0]);
    window.grad_v = writes<4>(of_window[1]);
  }
  const CompressedAttentionBackward p{.shape = shape,
                                      .scale = scale_of(shape, options_of(in)),
                                      .grad_y = reads<4>(in.grad_y),
                                      .grad_lse = reads<3>(in.grad_lse),
                                      .q = reads<4>(in.q),
                                      .kc = reads<4>(in.kc),
                                      .vc = reads<4>(in.vc),
                                      .y = is_exact(in.q) ? reads<4>(in.y) : Strided<4>(),
                                      .lse = reads<3>(in.lse),
                                      .sink = data_of(sink),
                                      .pooled = pooled,
                                      .grad_q = writes<4>(grad_q),
                                      .grad_k = writes<4>(grad_k),
                                      .grad_v = writes<4>(grad_v),
                                      .grad_sink = data_to_write(grad_sink),
                                      .delta = {delta.data(), {shape.H * shape.S, shape.S, 1}},
                                      .scratch = scratch.data(),
                                      .threads = device.threads};
  kernels.backward({p, window}, dtype_of(in.q), device.stream);
}

Gradients empty_gradients(const Sizes& n, const BackwardOp::Arguments& in) {
  const auto& wanted = in.output_mask;
  const auto of_keys = [&, sizes = std::array{n.B, n.Hkv, n.T, n.D}](bool is_wanted, const char* name,
                                                                     c10::SymIntArrayRef stride) {
    return empty_of_strides(kBackward, is_wanted, name, sizes, stride, in.q.options());
  };
  return {empty_gradient(wanted[0], in.q), of_keys(wanted[1], "grad_k_stride", in.grad_k_stride),
          of_keys(wanted[2], "grad_v_stride", in.grad_v_stride), empty_gradient(wanted[3], tensor_or_none(in.sink))};
}

Gradients backward_meta(const BackwardOp::Arguments& in) {
  return empty_gradients(check_backward(kBackward, in), in);
}

Gradients backward(const CompressedAttentionKernels& kernels, const BackwardOp::Arguments& in) {
  const Sizes n = check_backward(kBackward, in);
  const Gradients gradients = empty_gradients(n, in);
  run_backward(kernels, kBackward, n, in, /*pooled=*/false, gradients,
               {std::get<1>(gradients), std::get<2>(gradients)});
  return gradients;
}

PooledBackwardOp::Results empty_pooled_gradients(const PooledBackwardOp::Arguments& in) {
  const auto& wanted = in.output_mask;
  return {
      empty_gradient(wanted[0], in.q),
      empty_gradient(wanted[1], in.kc),
      empty_gradient(wanted[2], tensor_or_none(in.vc), in.kc.sym_sizes(), in.kc.options()),
      empty_gradient(wanted[3], tensor_or_none(in.sink)),
      in.window ? empty_gradient(wanted[4], *in.k) : at::Tensor(),
      in.window ? empty_gradient(wanted[5], tensor_or_none(in.v), in.k->sym_sizes(), in.kc.options()) : at::Tensor()};
}

PooledBackwardOp::Results pooled_backward_meta(const PooledBackwardOp::Arguments& in) {
  check_backward(kPooledBackward, in);
  return empty_pooled_gradients(in);
}

PooledBackwardOp::Results pooled_backward(const CompressedAttentionKernels& kernels,
                                          const PooledBackwardOp::Arguments& in) {
  const Sizes n = check_backward(kPooledBackward, in);
  const PooledBackwardOp::Results gradients = empty_pooled_gradients(in);
  const auto& [grad_q, grad_kc, grad_vc, grad_sink, grad_k, grad_v] = gradients;
  run_backward(kernels, kPooledBackward, n, in, /*pooled=*/true, {grad_q, grad_kc, grad_vc, grad_sink},
               {grad_k, grad_v});
  return gradients;
}

const Registration registration(MEMCHECK_KERNELS(compressed_attention, compressed_attention_plan_cuda),
                                kernels_of<Op>(forward_meta, forward, /*cast_inputs=*/3),
                                kernels_of<BackwardOp>(backward_meta, backward),
                                kernels_of<Pooled>(pooled_meta, pooled, /*cast_inputs=*/3),
                                kernels_of<PooledBackwardOp>(pooled_backward_meta, pooled_backward),
                                kernels_of<ExtendOp>(extend_meta, extend),
                                kernels_of<ExtendBackwardOp>(extend_backward_meta, extend_backward),
                                kernels_of<StepOp>(step_meta, step, /*cast_inputs=*/3),
                                kernels_of<LastStepOp>(last_step_meta, last_step, /*cast_inputs=*/3),
                                kernels_of<WindowStepOp>(window_step_meta, window_step, /*cast_inputs=*/3));

}  // namespace
}  // namespace memcheck::compressed_attention_operators
