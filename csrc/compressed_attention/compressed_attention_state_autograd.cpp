#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>

#include <numeric>

#include "compressed_attention/compressed_attention_autograd.h"
#include "compressed_attention/compressed_attention_checks.h"

// The states after new positions.

namespace memcheck::compressed_attention_autograd {
namespace {

// Where sequences are in a tensor (B,heads,positions,...): `counts` positions from `begins` on, packed in the only row
// or padded in a row each. If neither, one sequence is all of the tensor.
struct Places {
  std::optional<bool> packed;
  at::IntArrayRef begins, counts;

  Tensor of(const Tensor& x, size_t i) const {
    if (!packed || !x.defined()) return x;
    return x.narrow(0, *packed ? 0 : static_cast<int64_t>(i), 1).narrow(2, begins[i], counts[i]);
  }

  void save(AutogradContext* ctx) const {
    ctx->saved_data["packed"] = packed;
    ctx->saved_data["begins"] = begins;
    ctx->saved_data["counts"] = counts;
  }
};

struct SavedPlaces {
  std::vector<int64_t> begins, counts;
  Places places;

  explicit SavedPlaces(AutogradContext* ctx)
      : begins(ctx->saved_data["begins"].toIntVector()),
        counts(ctx->saved_data["counts"].toIntVector()),
        places{ctx->saved_data["packed"].toOptional<bool>(), begins, counts} {}
};

// ---- the states after new positions

// New positions from `first` to `last` fill blocks of their own; those before `first` complete the open block.
struct Cuts {
  c10::SymInt first, last;
};

// None if no block is complete.
std::optional<Cuts> cuts_of(const c10::SymInt& opened, const c10::SymInt& count, int64_t factor) {
  if (opened + count < factor) return std::nullopt;
  return Cuts{(factor - opened) % factor, count - (opened + count) % factor};
}

// As Python divides a tensor by an int.
Tensor divided(const Tensor& x, int64_t factor) {
  return at::div(x, at::native::wrapped_scalar_tensor(factor));
}

Tensor part_of(const Tensor& x, const c10::SymInt& begin, const c10::SymInt& end) {
  return x.slice_symint(2, begin, end);
}

// total (B,Hkv,D) + x (B,Hkv,n,D), summed over its positions
Tensor added(const Tensor& total, const Tensor& x) {
  return at::add(total, x.sym_size(2) == 1 ? x.select(2, 0) : x.sum({2}, /*keepdim=*/false, total.scalar_type()));
}

using Pair = std::array<Tensor, 2>;  // of keys and of values

template <typename F>
Pair of_both(const F& function) {
  return {function(0), function(1)};
}

// The means over blocks of `factor` positions (B,Hkv,n,D), which end with them.
Pair whole_blocks(const Pair& x, int64_t factor, bool in_torch) {
  if (in_torch) {
    return of_both([&](size_t i) {
      return x[i]
          .unflatten_symint(2, {x[i].sym_size(2) / factor, factor})
          .mean({3}, /*keepdim=*/false, acc_scalar_type(x[i].scalar_type()))
          .to(x[i].scalar_type());
    });
  }
  // A forward without queries keeps the means for backward.
  operators::CompressedAttention::Arguments in{part_of(x[0], 0, 0), x[0], x[1]};
  in.left_padded = in.causal = in.strict = in.return_lse = false;
  in.factor = factor;
  in.keep = true;
  const auto kept = call<operators::CompressedAttention>(in);
  return {std::get<2>(kept), std::get<3>(kept)};
}

// kc, vc, k_sum and v_sum after new positions x (B,Hkv,n,D), by the operator or in torch's own operations. If only new
// blocks are wanted, kc and vc are those that x completes.
variable_list state_after(const Pair& x, at::TensorList old, const c10::SymInt& opened, int64_t factor, bool only_new,
                          bool in_torch) {
  const c10::SymInt count = x[0].sym_size(2);
  const auto cuts = cuts_of(opened, count, factor);
  if (!cuts) {
    const auto before = [&](size_t i) { return only_new ? part_of(old[i], 0, 0) : old[i]; };
    return {before(0), before(1), added(old[2], x[0]), added(old[3], x[1])};
  }
  const auto& [first, last] = *cuts;
  const auto parts = [&](const c10::SymInt& begin, const c10::SymInt& end) {
    return of_both([&](size_t i) { return part_of(x[i], begin, end); });
  };
  Pair blocks = whole_blocks(parts(first, last), factor, in_torch);
  if (first != 0) {
    const Pair rest = parts(0, first);
    const Pair means =
        of_both([&](size_t i) { return divided(added(old[2 + i], rest[i]), factor).to(x[i].scalar_type()); });
    blocks = of_both([&](size_t i) { return at::cat({means[i].unsqueeze(2), blocks[i]}, 2); });
  }
  if (!only_new && old[0].sym_size(2) != 0) blocks = of_both([&](size_t i) { return at::cat({old[i], blocks[i]}, 2); });
  const Pair open = parts(last, count);
  const Pair sums = of_both([&](size_t i) { return added(at::zeros_like(old[2 + i]), open[i]); });
  return {blocks[0], blocks[1], sums[0], sums[1]};
}

variable_list states_after(const Tensor& k, const Tensor& v, at::TensorList states, c10::SymIntArrayRef positions,
                           const Places& places, int64_t factor, bool only_new, bool in_torch) {
  variable_list after;
  for (size_t i = 0; i < positions.size(); ++i) {
    const Pair its{places.of(k, i), places.of(v, i)};
    const variable_list one = state_after(its, states.slice(4 * i, 4), positions[i], factor, only_new, in_torch);
    append_tensor(after, at::TensorList(one));
  }
  return after;
}

// Writes the gradient of new positions (B,Hkv,n,D). of_blocks (B,Hkv,C,D) and of_sum (B,Hkv,D) are those of the state
// after them, whose first `old` blocks are not new; they become those of the state before.
void spread(const Tensor& gradient, Tensor& of_blocks, Tensor& of_sum, const std::optional<Cuts>& cuts,
            const c10::SymInt& old, int64_t factor) {
  if (!cuts) {
    gradient.copy_(of_sum.unsqueeze(2));
    return;
  }
  const auto& [first, last] = *cuts;
  const bool opened = first != 0;
  const Tensor shares = divided(part_of(of_blocks, old, of_blocks.sym_size(2)), factor);
  if (opened) part_of(gradient, 0, first).copy_(part_of(shares, 0, 1));
  part_of(gradient, first, last)
      .unflatten_symint(2, {(last - first) / factor, factor})
      .copy_(part_of(shares, opened ? 1 : 0, shares.sym_size(2)).unsqueeze(3));
  part_of(gradient, last, gradient.sym_size(2)).copy_(of_sum.unsqueeze(2));
  of_blocks = part_of(of_blocks, 0, old);
  of_sum = opened ? shares.select(2, 0).to(of_sum.scalar_type()) : at::zeros_like(of_sum);
}

// The states of sequences after new positions. k and v are not saved for backward.
struct NewBlocks : Function<NewBlocks> {
  static variable_list forward(AutogradContext* ctx, const Tensor& k, const Tensor& v, at::TensorList states,
                               c10::SymIntArrayRef positions, const Places& places, int64_t factor) {
    std::vector<c10::SymInt> old;
    for (size_t i = 0; i < positions.size(); ++i) old.push_back(states[4 * i].sym_size(2));
    places.save(ctx);
    ctx->saved_data["sizes"] = k.sym_sizes();
    ctx->saved_data["k_stride"] = gradient_stride(k);
    ctx->saved_data["v_stride"] = gradient_stride(v);
    ctx->saved_data["old"] = old;
    ctx->saved_data["positions"] = positions;
    ctx->saved_data["factor"] = factor;
    return states_after(k, v, states, positions, places, factor, /*only_new=*/false, /*in_torch=*/false);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const SavedPlaces saved(ctx);
    const auto sizes = ctx->saved_data["sizes"].toSymIntVector(), old = ctx->saved_data["old"].toSymIntVector();
    const auto positions = ctx->saved_data["positions"].toSymIntVector();
    const int64_t factor = ctx->saved_data["factor"].toInt();
    const int64_t covered = std::accumulate(saved.counts.begin(), saved.counts.end(), int64_t{0});
    const bool padded = saved.places.packed.has_value() && sizes[0] * sizes[2] != covered;
    variable_list of_states = grads, result;
    for (const size_t x : {0, 1}) {
      const auto stride = ctx->saved_data[x == 0 ? "k_stride" : "v_stride"].toSymIntVector();
      const Tensor gradient = at::empty_strided_symint(sizes, stride, grads[0].options());
      if (padded) gradient.zero_();
      for (size_t i = 0; i < positions.size(); ++i) {
        const Tensor its = saved.places.of(gradient, i);
        spread(its, of_states[4 * i + x], of_states[4 * i + 2 + x], cuts_of(positions[i], its.sym_size(2), factor),
               old[i], factor);
      }
      result.push_back(gradient);
    }
    append_tensor(result, at::TensorList(of_states));
    result.resize(result.size() + 3);  // of positions, places and factor
    return result;
  }
};

void check_extend(const char* op, const MaybeTensor& q, const Tensor& k, const Tensor& v, at::TensorList states,
                  c10::SymIntArrayRef positions, int64_t factor, std::optional<double> scale, const Places& places) {
  using namespace compressed_attention_glue;
  Sizes n = check_new_keys(op, k, v, factor);
  const size_t count = positions.size();
  TORCH_CHECK_VALUE(states.size() == 4 * count, op, ": states must be 4 tensors for each of ", count, ", got ",
                    states.size());
  TORCH_CHECK_VALUE(places.begins.size() == places.counts.size() && (places.packed ? places.begins.size() : 1) == count,
                    op, ": begins and counts must be as many as states, ", count, ", got ", places.begins.size(),
                    " and ", places.counts.size());
  const std::string name = std::string(op) == "compressed_attention" ? "initial_state" : "state";
  const auto check = [&](size_t i, const std::string& prefix) {
    check_state(op, prefix, n, {states[4 * i], states[4 * i + 1], states[4 * i + 2], states[4 * i + 3], positions[i]},
                k, factor);
  };
  if (!places.packed) {
    check(0, name + ".");
    n.T += states[0].sym_size(2) * factor + positions[0];
  }
  if (q) check_new_queries(op, n, *q, k, scale);
  n.B = 1;
  for (size_t i = 0; places.packed && i < count; ++i) check(i, name + "[" + std::to_string(i) + "].");
}

// q and scale are those of the attention that follows, and only checked. `op` is the function that messages name.
variable_list extend(const MaybeTensor& q, const Tensor& k, const Tensor& v, at::TensorList states,
                     c10::SymIntArrayRef positions, int64_t factor, std::optional<double> scale,
                     std::optional<bool> packed, at::IntArrayRef begins, at::IntArrayRef counts, bool only_new,
                     std::string_view op) {
  const Places places{packed, begins, counts};
  check_extend(std::string(op).c_str(), q, k, v, states, positions, factor, scale, places);
  const variable_list inputs = tensors_among(k, v, states);
  // No autograd function of C++ runs under torch.func, nor has tangents.
  const bool in_torch = in_torch_func() || has_tangent(inputs);
  // Autograd of a sum takes no memory.
  const bool only_sums = !places.packed && !cuts_of(positions[0], k.sym_size(2), factor);
  TORCH_CHECK_NOT_IMPLEMENTED(!only_new || in_torch || !wants_gradient(inputs), std::string(op),
                              ": only_new has no gradient");
  if (in_torch || only_sums || !wants_gradient(inputs))
    return states_after(k, v, states, positions, places, factor, only_new, in_torch);
  return NewBlocks::apply(k, v, states, positions, places, factor);
}

TORCH_LIBRARY_FRAGMENT(memcheck, m) {
  m.def(
      "compressed_attention_extend(Tensor? q, Tensor k, Tensor v, Tensor[] states, SymInt[] positions, *, int factor,"
      " float? scale=None, bool? packed=None, int[] begins=[], int[] counts=[], bool only_new=False, str "
      "op=\"compressed_attention\")"
      " -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  m.impl("compressed_attention_extend", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(extend)));
}

// vmap, too, runs the operators inside.
TORCH_LIBRARY_IMPL(memcheck, FuncTorchBatchedDecomposition, m) {
  m.impl("compressed_attention_extend", TORCH_FN(extend));
}

}  // namespace
}  // namespace memcheck::compressed_attention_autograd
