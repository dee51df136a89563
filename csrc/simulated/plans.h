// What a plan of an operator's call is made of: the layouts of its results, the key that decides them, and operands on
// meta.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace memcheck::simulated {

struct TensorLayout {
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset;
  at::ScalarType dtype;
  bool is_conj, is_neg;

  static TensorLayout of(const at::Tensor& t) {
    return {{t.sizes().begin(), t.sizes().end()},
            {t.strides().begin(), t.strides().end()},
            t.storage_offset(),
            t.scalar_type(),
            t.is_conj(),
            t.is_neg()};
  }
  at::Tensor tensor_in(c10::Storage storage, c10::DispatchKey key) const {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                         c10::scalarTypeToTypeMeta(dtype));
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    if (is_conj) made._set_conj(true);
    if (is_neg) made._set_neg(true);
    return made;
  }
};

// A result of an operator, or one of a list of results.
struct Result {
  enum Kind {
    kUndefined,
    kValue,    // no tensor
    kOperand,  // an operand itself
    kView,     // of an operand
    kFresh,    // with memory of its own
    kShared,   // in the memory of an earlier fresh result
    kHost      // on the CPU, of a GPU's operator
  };
  Kind kind;
  int source = 0;  // the operand, or the number of the fresh result or of its allocation
  int64_t bytes = 0;
  TensorLayout layout{};
  c10::IValue value;
};

struct Output {
  bool is_list;
  std::vector<Result> parts;
};

// An operand that the operator gives another layout.
struct Resize {
  int operand;
  int64_t bytes;
  TensorLayout layout;
};

using Key = std::vector<int64_t>;
struct HashOfKey {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 0x9E3779B97F4A7C15ull + (hash >> 29);
    return hash;
  }
};

// FNV-1a: the same in all processes and builds.
inline int64_t hash_of(std::string_view bytes) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3ull;
  return static_cast<int64_t>(hash);
}

inline bool is_view_by_schema(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() &&
         std::all_of(schema.returns().begin(), schema.returns().end(),
                     [](const auto& each) { return each.alias_info() != nullptr && !each.alias_info()->isWrite(); });
}

// What decides a plan, as numbers. False: something in it has no number.
class KeyBuilder {
 public:
  // Without the values of floating-point numbers that change from step to step, as those of optimizers do.
  explicit KeyBuilder(bool rounds_numbers = false) : rounds_numbers_(rounds_numbers) {}

  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isNone()) return push(-1);
    if (value.isInt()) return push(1) && push(value.toInt());
    if (value.isBool()) return push(2) && push(value.toBool());
    if (value.isDouble()) return push(3) && push_double(value.toDouble());
    if (value.isDevice()) return push(4) && push(static_cast<int>(value.toDevice().type()));
    if (value.isString()) return add_text(value.toStringRef());
    if (value.isComplexDouble())
      return push(6) && push_double(value.toComplexDouble().real()) && push_double(value.toComplexDouble().imag());
    if (value.isGenerator()) return push(7);
    if (!value.isList()) return false;
    push(8);
    const auto list = value.toListRef();
    push(static_cast<int64_t>(list.size()));
    return std::all_of(list.begin(), list.end(), [&](const c10::IValue& part) { return add(part); });
  }
  bool push(int64_t number) {
    key.push_back(number);
    return true;
  }
  Key key;

 private:
  bool push_double(double number) {
    if (rounds_numbers_) return push(number == 0 ? 0 : number == 1 ? 1 : number == -1 ? 2 : number == 2 ? 3 : 4);
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return push(bits);
  }
  bool add_text(const std::string& text) {
    push(5);
    return push(hash_of(text));
  }
  bool add_tensor(const at::Tensor& t) {
    if (!t.defined()) return push(-2);
    if (!t.has_storage() || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
    const auto* storage = t.storage().unsafeGetStorageImpl();
    const auto found = storages_.try_emplace(storage, static_cast<int64_t>(storages_.size())).first;
    const auto same = tensors_.try_emplace(t.unsafeGetTensorImpl(), static_cast<int64_t>(tensors_.size())).first;
    const int64_t bits = t.is_cuda() | t.is_cpu() << 1 | t.is_conj() << 2 | t.is_neg() << 3 |
                         t.unsafeGetTensorImpl()->is_wrapped_number() << 4;
    push(9);
    push(static_cast<int64_t>(t.scalar_type()) << 8 | bits);
    push(found->second << 32 | same->second);
    push(static_cast<int64_t>(storage->nbytes()));
    push(t.storage_offset());
    push(t.dim());
    key.insert(key.end(), t.sizes().begin(), t.sizes().end());
    key.insert(key.end(), t.strides().begin(), t.strides().end());
    return true;
  }
  bool rounds_numbers_;
  std::unordered_map<const void*, int64_t> storages_, tensors_;
};

inline int64_t global_switches() {
  const auto& context = at::globalContext();
  return context.userEnabledCuDNN() | context.benchmarkCuDNN() << 1 | context.deterministicCuDNN() << 2 |
         context.deterministicAlgorithms() << 3 | context.deterministicFillUninitializedMemory() << 4 |
         context.userEnabledMkldnn() << 5 | static_cast<int64_t>(c10::get_default_dtype_as_scalartype()) << 8;
}

// The operands of a call, and their twins on meta.
class Twins {
 public:
  at::Tensor of(const at::Tensor& t, bool keeps_host) {
    // Kernels in Python read the value of a wrapped number.
    if (t.is_meta() || (t.is_cpu() && (keeps_host || t.unsafeGetTensorImpl()->is_wrapped_number()))) return t;
    for (const auto& [ours, twin] : pairs)
      if (ours.is_same(t)) return twin;
    auto twin =
        at::detail::make_tensor<c10::TensorImpl>(storage_of(t), c10::DispatchKeySet(c10::DispatchKey::Meta), t.dtype());
    auto* impl = twin.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj()) twin._set_conj(true);
    if (t.is_neg()) twin._set_neg(true);
    pairs.emplace_back(t, twin);
    return twin;
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // ours, and the twin

 private:
  // Storages that are the same in the operands are so in their twins.
  c10::Storage storage_of(const at::Tensor& t) {
    auto& storage = storages_[t.storage().unsafeGetStorageImpl()];
    if (!storage)
      storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                             c10::DataPtr(nullptr, c10::Device(c10::DeviceType::Meta)),
                             c10::GetAllocator(c10::DeviceType::Meta), true);
    return storage;
  }
  std::unordered_map<const void*, c10::Storage> storages_;
};

}  // namespace memcheck::simulated
