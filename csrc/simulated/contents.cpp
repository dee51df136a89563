#include "simulated/contents.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/fill.h>

#include "simulated/exports.h"

namespace memcheck::simulated {
namespace {

DoubtListener doubt_listener = nullptr;

at::Tensor cpu_tensor(c10::Storage storage, const at::Tensor& like, at::IntArrayRef strides, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), strides, offset);
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

// One element in memory, seen as often as the tensor has elements.
at::Tensor expanded(const at::Tensor& like, double value) {
  at::Tensor one = at::detail::empty_cpu({1}, like.scalar_type());
  one.fill_(value);
  return cpu_tensor(one.storage(), like, std::vector<int64_t>(like.dim(), 0), 0);
}

}  // namespace

bool keeps_contents(int64_t bytes, at::ScalarType dtype) {
  return bytes <= kMostBytes || (bytes <= kMostIntegerBytes && at::isIntegralType(dtype, /*includeBool=*/true));
}

bool is_known(const at::Tensor& tensor) {
  if (const Contents* contents = contents_of(tensor)) return contents->state != Contents::kUnknown;
  // Outputs of replayed CUDA graphs have memory that others own.
  return !tensor.defined() || !is_simulated(tensor) || !tensor.has_storage() ||
         tensor.storage().data_ptr().get() == nullptr;
}

bool is_doubtful(const at::Tensor& tensor) {
  const Contents* contents = contents_of(tensor);
  return contents != nullptr && contents->is_doubtful;
}

bool covers_storage(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.numel() * tensor.dtype().itemsize()) >=
             static_cast<int64_t>(tensor.storage().nbytes()) &&
         tensor.is_non_overlapping_and_dense();
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_simulated(tensor)) return tensor;
  Contents* contents = contents_of(tensor);
  if (contents == nullptr) return expanded(tensor, 0);
  if (contents->state == Contents::kConstant) return expanded(tensor, contents->constant);
  if (tensor.is_cpu()) return tensor;  // The simulated CPU's numbers lie where they are.
  c10::DataPtr pointer(numbers_of(*contents, tensor), c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(pointer), nullptr, false);
  return cpu_tensor(std::move(storage), tensor, tensor.strides(), tensor.storage_offset());
}

bool prepare_write(const at::Tensor& tensor, bool overwrites) {
  Contents* contents = contents_of(tensor);
  if (contents == nullptr) return true;
  const bool is_whole = overwrites && covers_storage(tensor);
  if (!contents->is_small || (!is_whole && contents->state == Contents::kUnknown)) {
    forget(tensor);
    return false;
  }
  keep_original(tensor);
  if (contents->state == Contents::kConstant && !is_whole) {
    const auto items = static_cast<int64_t>(tensor.storage().nbytes() / tensor.dtype().itemsize());
    const double constant = contents->constant;
    contents->state = Contents::kKnown;
    auto all = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                     c10::DataPtr(numbers_of(*contents, tensor), c10::Device(c10::DeviceType::CPU)), nullptr, false),
        c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    all.unsafeGetTensorImpl()->set_sizes_contiguous({items});
    all.fill_(constant);
  }
  contents->state = Contents::kKnown;
  if (is_whole) contents->is_doubtful = false;
  contents->has_stand_in = false;
  return true;
}

void forget(const at::Tensor& tensor) {
  Contents* contents = contents_of(tensor);
  if (contents == nullptr) return;
  contents->state = Contents::kUnknown;
  contents->is_doubtful = contents->has_stand_in = false;
  contents->host.reset();
}

void set_constant(const at::Tensor& tensor, double value) {
  Contents* contents = contents_of(tensor);
  if (contents == nullptr) return;
  forget(tensor);
  contents->state = Contents::kConstant;
  contents->constant = value;
}

void set_doubtful(const at::Tensor& tensor) {
  if (Contents* contents = contents_of(tensor)) contents->is_doubtful = true;
}

void set_stand_in(const at::Tensor& tensor, int64_t value) {
  Contents* contents = contents_of(tensor);
  if (contents == nullptr) return;
  contents->has_stand_in = true;
  contents->stand_in = value;
}

std::optional<int64_t> stand_in(const at::Tensor& tensor) {
  const Contents* contents = contents_of(tensor);
  if (contents == nullptr || !contents->has_stand_in) return std::nullopt;
  return contents->stand_in;
}

at::Scalar scalar_in_place_of(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (at::isFloatingType(dtype) || at::isComplexType(dtype)) return at::Scalar(1.0);
  if (dtype == at::kBool) return at::Scalar(false);
  return at::Scalar(stand_in(tensor).value_or(0));
}

void doubt(const std::string& what) {
  if (doubt_listener != nullptr) doubt_listener(what.c_str());
}

void set_doubt_listener(DoubtListener listener) {
  doubt_listener = listener;
}

}  // namespace memcheck::simulated

MEMCHECK_EXPORT void memcheck_simulated_listen_to_doubts(memcheck::simulated::DoubtListener listener) {
  memcheck::simulated::set_doubt_listener(listener);
}
