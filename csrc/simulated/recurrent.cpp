// cuDNN's recurrent layers and torch's choice of attention, which torch finds by stubs, not by the dispatcher.
//
// Mirrors _cudnn_impl of ATen/native/cudnn/RNN.cpp.

#include <ATen/core/Tensor.h>
#include <ATen/native/RNN.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/empty.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include "simulated/kernels.h"
#include "simulated/memory.h"

namespace memcheck::simulated {
namespace {

enum Mode : int64_t { kRelu, kTanh, kLstm, kGru };

// A recurrent layer as at::lstm and its like give it.
struct Layer {
  int64_t mode;
  at::TensorList weights;
  bool has_biases;
  int64_t layers;
  double dropout;
  bool trains, is_bidirectional, is_batch_first;
};

// The buffer in which cuDNN keeps all weights. Those that lie apart are copied into a new one.
at::Tensor buffer_of(at::TensorList weights) {
  int64_t numbers = 0;
  bool are_together = true;
  for (const at::Tensor& w : weights) {
    numbers += w.numel();
    are_together = are_together && w.storage().is_alias_of(weights[0].storage());
  }
  if (!are_together) return at::empty({numbers}, weights[0].options().requires_grad(false));
  const at::Tensor& w = weights[0];
  at::Tensor buffer = new_tensor(w.get_device(), {0}, w.scalar_type());
  auto* impl = buffer.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(w.storage());
  impl->set_sizes_contiguous({static_cast<int64_t>(w.storage().nbytes() / w.dtype().itemsize())});
  return buffer;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> run(const Layer& layer, const at::Tensor& input, const at::Tensor& sizes,
                                                   const at::Tensor& hx, const at::Tensor& cx) {
  const int64_t hidden = cx.defined() ? cx.size(2) : hx.size(2);
  const int64_t projected = hx.size(2) == hidden ? 0 : hx.size(2);
  const int64_t each = (layer.has_biases ? 4 : 2) + (projected > 0);
  auto given = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  at::Tensor dropout_state;
  if (layer.dropout > 0 && layer.trains) dropout_state = at::empty({0}, input.options().dtype(at::kByte));
  std::vector<int64_t> batches;
  if (sizes.defined()) batches.assign(sizes.const_data_ptr<int64_t>(), sizes.const_data_ptr<int64_t>() + sizes.numel());
  auto [y, hy, cy, reserve, weights] = at::_cudnn_rnn(
      input, layer.weights, each, buffer_of(layer.weights), hx, given(cx), layer.mode, hidden, projected, layer.layers,
      layer.is_batch_first, layer.dropout, layer.trains, layer.is_bidirectional, batches, given(dropout_state));
  return {y, hy, cy};
}

template <int64_t mode>
void run_rnn(at::Tensor& y, at::Tensor& hy, const at::Tensor& x, const at::Tensor& hx, at::TensorList weights,
             bool biases, int64_t layers, double dropout, bool trains, bool both, bool batch_first) {
  at::Tensor cy;
  std::tie(y, hy, cy) = run({mode, weights, biases, layers, dropout, trains, both, batch_first}, x, {}, hx, {});
}

template <int64_t mode>
void run_packed_rnn(at::Tensor& y, at::Tensor& hy, const at::Tensor& x, const at::Tensor& sizes, const at::Tensor& hx,
                    at::TensorList weights, bool biases, int64_t layers, double dropout, bool trains, bool both) {
  at::Tensor cy;
  std::tie(y, hy, cy) = run({mode, weights, biases, layers, dropout, trains, both, false}, x, sizes, hx, {});
}

void run_lstm(at::Tensor& y, at::Tensor& hy, at::Tensor& cy, const at::Tensor& x, at::TensorList hx,
              at::TensorList weights, bool biases, int64_t layers, double dropout, bool trains, bool both,
              bool batch_first) {
  std::tie(y, hy, cy) = run({kLstm, weights, biases, layers, dropout, trains, both, batch_first}, x, {}, hx[0], hx[1]);
}

void run_packed_lstm(at::Tensor& y, at::Tensor& hy, at::Tensor& cy, const at::Tensor& x, const at::Tensor& sizes,
                     at::TensorList hx, at::TensorList weights, bool biases, int64_t layers, double dropout,
                     bool trains, bool both) {
  std::tie(y, hy, cy) = run({kLstm, weights, biases, layers, dropout, trains, both, false}, x, sizes, hx[0], hx[1]);
}

// Joins the weights in one buffer, of which they become views.
at::Tensor flatten_weights(at::TensorList weights, int64_t, c10::SymInt, int64_t, c10::SymInt, c10::SymInt, int64_t,
                           bool, bool) {
  int64_t total = 0, offset = 0;
  for (const at::Tensor& w : weights) total += w.numel();
  static const c10::OperatorName name("aten::_cudnn_rnn_flatten_weight", "");
  Running running(&name);
  at::Tensor buffer = new_tensor(weights[0].get_device(), {total}, weights[0].scalar_type());
  forget(buffer);
  for (const at::Tensor& w : weights) {
    auto* impl = w.unsafeGetTensorImpl();
    const std::vector<int64_t> sizes = w.sizes().vec();
    impl->set_storage_keep_dtype(buffer.storage());
    impl->set_sizes_and_strides(sizes, c10::contiguous_strides(sizes), offset);
    offset += w.numel();
  }
  return buffer;
}

int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  return rules.attention == nullptr ? 0 : rules.attention(q, k, v, mask, dropout, causal, scale, grouped);
}

}  // namespace

#define MEMCHECK_STUB(stub, function) \
  at::native::RegisterCUDADispatch<decltype(at::native::stub)> stub##_of_cuda(at::native::stub, function)

void register_stubs() {
  MEMCHECK_STUB(_fused_sdp_choice_stub, choose_attention);
  MEMCHECK_STUB(lstm_cudnn_stub, run_lstm);
  MEMCHECK_STUB(lstm_packed_cudnn_stub, run_packed_lstm);
  MEMCHECK_STUB(rnn_relu_cudnn_stub, run_rnn<kRelu>);
  MEMCHECK_STUB(rnn_tanh_cudnn_stub, run_rnn<kTanh>);
  MEMCHECK_STUB(gru_cudnn_stub, run_rnn<kGru>);
  MEMCHECK_STUB(rnn_relu_packed_cudnn_stub, run_packed_rnn<kRelu>);
  MEMCHECK_STUB(rnn_tanh_packed_cudnn_stub, run_packed_rnn<kTanh>);
  MEMCHECK_STUB(gru_packed_cudnn_stub, run_packed_rnn<kGru>);
}

}  // namespace memcheck::simulated

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_cudnn_rnn_flatten_weight", memcheck::simulated::flatten_weights);
  m.impl("_fused_sdp_choice", memcheck::simulated::choose_attention);
}
