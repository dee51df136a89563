// Operators that are more than a kernel: those that allocate, copy, fill, read a number, or set a storage.

#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_embedding_bag_backward_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include "simulated/exports.h"
#include "simulated/host.h"
#include "simulated/kernels.h"
#include "simulated/memory.h"
#include "simulated/values.h"

namespace memcheck::simulated {
namespace {

int index_of(const std::optional<at::Device>& device) {
  if (!device.has_value() || !device->has_index()) return current_device();
  check_device(device->index());
  return device->index();
}

at::Tensor make_empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                      std::optional<at::Device> device, std::optional<bool> pins,
                      std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pins.value_or(false), "Only dense CPU tensors can be pinned");
  static const c10::OperatorName name("aten::empty", "memory_format");
  Running running(&name);
  at::Tensor made = new_tensor(index_of(device), sizes, c10::dtype_or_default(dtype));
  if (format.has_value() && *format != at::MemoryFormat::Contiguous)
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

at::Tensor make_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  static const c10::OperatorName name("aten::empty_strided", "");
  Running running(&name);
  return new_tensor(index_of(device), sizes, strides, c10::dtype_or_default(dtype));
}

// Zeros without memory, which transforms make in place of tangents and gradients: _efficientzerotensor_cuda.
at::Tensor make_zeros(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                      std::optional<at::Device> device, std::optional<bool>) {
  at::native::ZeroTensorAllocator none(device_at(index_of(device)));
  const c10::DispatchKeySet keys({c10::DispatchKey::CUDA, c10::DispatchKey::ZeroTensor});
  return at::detail::empty_generic(sizes, &none, keys, c10::dtype_or_default(dtype), std::nullopt);
}

int64_t bytes_of(const at::Tensor& t) {
  return static_cast<int64_t>(
      at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.dtype().itemsize(), t.storage_offset()));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow_storage(self, bytes_of(self));
  return self;
}

// As copy_requires_temporaries and copy_kernel_cuda of ATen/native/cuda/Copy.cu: between devices only memory of one
// layout and dtype is copied as it is. Returns what is allocated on the GPU for other copies.
c10::DataPtr temporary(const at::Tensor& to, const at::Tensor& from) {
  if (to.device() == from.device()) return {};
  const bool same_dtype = to.dtype() == from.dtype();
  if (same_dtype && to.sizes() == from.sizes() && to.strides() == from.strides() && to.is_non_overlapping_and_dense())
    return {};
  if (to.is_cuda()) {
    if (to.is_contiguous()) return {};
    return allocate(to.get_device(), static_cast<int64_t>(to.numel() * to.dtype().itemsize()));
  }
  if (from.is_contiguous() && from.sizes() == to.sizes()) return {};
  return allocate(from.get_device(), static_cast<int64_t>(to.numel() * from.dtype().itemsize()));
}

void copy_to_host(at::Tensor& self, const at::Tensor& source) {
  if (is_lazy(self)) return;
  if (is_known(source) && source.numel() <= kMostElements && !is_doubtful(source)) {
    self.copy_(on_host(source));
    return;
  }
  doubt("the numbers of a tensor of " + name_of(source.scalar_type()) + " were copied to the CPU");
  self.fill_(is_known(source) ? c10::Scalar(on_host(source).flatten()[0].item()) : scalar_in_place_of(source));
}

void copy_on_device(at::Tensor& self, const at::Tensor& source) {
  const Allocation* from = allocation_of(source);
  const Allocation* to = allocation_of(self);
  if (from != nullptr && from->contents.state == Contents::kConstant && covers_storage(self) && !self.is_complex() &&
      !to->contents.is_small) {
    set_constant(self, from->contents.constant);
    return;
  }
  const bool can = !source.is_meta() && !is_lazy(source) && is_known(source) && source.numel() <= kMostElements;
  if (!can || !prepare_write(self, true)) {
    const auto value = stand_in(source);
    forget(self);
    if (value) set_stand_in(self, *value);
    return;
  }
  on_host(self).copy_(on_host(source));
  if (is_doubtful(source)) set_doubtful(self);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  if (self.numel() == 0 || self.is_same(source)) return self;
  const c10::DataPtr held = temporary(self, source);
  BelowPython below;
  if (self.is_cpu()) {
    copy_to_host(self, source.expand_as(self));
  } else if (source.is_meta()) {
    forget(self);
  } else {
    copy_on_device(self, source.expand_as(self));
  }
  return self;
}

at::Tensor& fill_tensor(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  const Allocation* allocation = allocation_of(self);
  BelowPython below;
  if (allocation != nullptr && !allocation->contents.is_small && covers_storage(self) && !value.isComplex()) {
    set_constant(self, value.toDouble());
  } else if (prepare_write(self, true)) {
    on_host(self).fill_(value);
  }
  return self;
}

at::Tensor& zero_tensor(at::Tensor& self) {
  return fill_tensor(self, 0);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

at::Tensor& set_place(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                      at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const at::DimVector its = strides.size() == sizes.size() ? at::DimVector(strides) : c10::contiguous_strides(sizes);
  impl->set_sizes_and_strides(sizes, its, offset);
  grow_storage(self, bytes_of(self));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_place(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_place(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_place(self, new_storage(self.get_device(), 0, self.scalar_type()), 0, {0}, {});
}

}  // namespace
}  // namespace memcheck::simulated

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using namespace memcheck::simulated;
  m.impl("empty.memory_format", make_empty);
  m.impl("empty_strided", make_strided);
  m.impl("_efficientzerotensor", make_zeros);
  m.impl("_embedding_bag_backward", at::native::_embedding_bag_backward_symint);
  m.impl("resize_", resize_);
  m.impl("copy_", copy_);
  m.impl("fill_.Scalar", fill_tensor);
  m.impl("zero_", zero_tensor);
  m.impl("_local_scalar_dense", read_number);
  m.impl("equal", are_equal);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_place);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::native::view));
  m.impl("unfold", at::native::unfold);
}
