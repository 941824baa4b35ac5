// Every operation by the CPU's kernel, on tensors that alias the device's memory.
#include "operations.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace emulated {

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// A CPU tensor on the memory of a device's tensor. It owns nothing.
at::Tensor on_host(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.layout() == c10::kStrided, "the emulated accelerator has dense and COO tensors, not ", tensor.layout());
  const auto& storage = tensor.storage();
  if (tensor.numel() != 0) {
    int64_t last = tensor.storage_offset();
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    TORCH_CHECK(
        static_cast<size_t>(last + 1) * tensor.element_size() <= storage.nbytes(),
        "illegal memory access on the emulated accelerator: a tensor of shape ", tensor.sizes(), " needs ",
        (last + 1) * tensor.element_size(), " bytes of a storage that has ", storage.nbytes());
  }
  auto own = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), c10::DeviceType::CPU),
      c10::GetAllocator(c10::DeviceType::CPU),
      /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(own), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj())
    made._set_conj(true);
  if (tensor.is_neg())
    made._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

void touch_all(const at::Tensor& tensor, bool write, StreamState* stream, const SitePtr& site) {
  for (const auto& range : ranges(tensor))
    State::get().touch(range, write, stream, site);
}

namespace {

at::Tensor empty_like_host(const at::Tensor& host) {
  return at::Tensor(at::detail::empty_strided_generic(
      host.sizes(), host.strides(), device_allocator(), kKeys, host.scalar_type()));
}

size_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0)
      return 0;
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<size_t>(last + 1) * tensor.element_size();
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  if (const auto bytes = extent(from))
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), bytes);
}

// A sparse tensor of the sizes of another one, with these indices and values.
at::Tensor sparse_like(
    const at::Tensor& other, c10::DispatchKey key, const at::Tensor& indices, const at::Tensor& values) {
  const auto* from = at::sparse::get_sparse_impl(other);
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), other.dtype());
  auto* into = at::sparse::get_sparse_impl(made);
  into->raw_resize_(from->sparse_dim(), from->dense_dim(), other.sizes());
  into->set_indices_and_values_unsafe(indices, values);
  into->set_coalesced(from->coalesced());
  return made;
}

// What a schema says about an operation.
struct Operation {
  std::string name;
  std::vector<bool> writes; // by argument
  bool synchronizes = false; // on real devices: its result's size or value depends on values
  bool mixes_devices = false;
  bool views = false; // and nothing else: no kernel runs
  bool indexes = false; // argument 1 are indices or masks
  bool copies = false; // of the sparse tensors of a device: dense ones have a kernel
};

const Operation& operation(const c10::OperatorHandle& handle) {
  static auto* known = new std::unordered_map<const void*, Operation>();
  static const std::unordered_set<std::string> synchronizing{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::repeat_interleave", "aten::bincount", "aten::_unique"};
  static const std::unordered_set<std::string> mixing{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_fused_adamw_",
      "aten::_fused_adam_", "aten::_fused_sgd_", "aten::_fused_adagrad_", "aten::copy_", "aten::copy_sparse_to_sparse_"};
  const auto& schema = handle.schema();
  auto found = known->find(&schema);
  if (found != known->end())
    return found->second;
  Operation made;
  made.name = schema.name();
  for (const auto& argument : schema.arguments())
    made.writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  for (const auto& result : schema.returns()) {
    made.views |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    const auto kind = result.type()->kind();
    if (kind == c10::TypeKind::BoolType || kind == c10::TypeKind::NumberType || kind == c10::TypeKind::FloatType ||
        kind == c10::TypeKind::IntType)
      made.synchronizes = true;
  }
  made.synchronizes |= synchronizing.count(made.name) != 0;
  made.copies = made.name.rfind("aten::copy_", 0) == 0;
  made.mixes_devices = mixing.count(made.name) != 0;
  made.indexes = made.mixes_devices && made.name.find("index") != std::string::npos;
  return known->emplace(&schema, std::move(made)).first->second;
}

struct Argument {
  size_t index; // in the schema
  at::Tensor device, host;
};

class Call {
 public:
  Call(const c10::OperatorHandle& handle, torch::jit::Stack* stack)
      : operation_(operation(handle)),
        stack_(stack),
        state_(State::get()),
        begin_(stack->size() - handle.schema().arguments().size()),
        guard_(device()),
        stream_(state_.current()) {
    const auto count = handle.schema().arguments().size();
    if (!operation_.views)
      state_.launch(stream_, operation_.name.c_str());
    site_ = state_.site(operation_.name, stream_.actor);
    for (size_t index = 0; index < count; ++index)
      convert(index, (*stack)[begin_ + index], handle.schema().arguments()[index]);
    TORCH_CHECK(
        !foreign_ || arguments_.empty() || operation_.mixes_devices,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        arguments_.empty() ? c10::Device(kDevice) : arguments_[0].device.device(), " and cpu! (", operation_.name, ")");
    if (!operation_.views)
      touch();
  }

  void run(const c10::OperatorHandle& handle) {
    const auto given = static_cast<int64_t>(stack_->size() - begin_);
    const torch::jit::Stack arguments(stack_->end() - given, stack_->end());
    {
      at::AutoDispatchBelowADInplaceOrView below;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      handle.callBoxed(stack_);
    }
    if (operation_.synchronizes)
      state_.host_wait(stream_.clock, state_.site(operation_.name, kHost));
    resize_written();
    rewrite_sparse();
    const auto count = handle.schema().returns().size();
    const auto first = stack_->size() - count;
    for (size_t index = 0; index < count; ++index)
      result((*stack_)[first + index]);
    if (state_.capture_origin != nullptr && !operation_.views)
      state_.graph.push_back([handle, arguments, made = made_] { again(handle, arguments, made); });
  }

 private:
  // The kernel on the same memory, and its new tensors where they were when it was captured.
  static void again(
      const c10::OperatorHandle& handle, torch::jit::Stack stack, const std::vector<std::pair<size_t, at::Tensor>>& made) {
    at::AutoDispatchBelowADInplaceOrView below;
    handle.callBoxed(&stack);
    std::vector<at::Tensor> results;
    for (const auto& value : stack) {
      if (value.isTensor())
        results.push_back(value.toTensor());
      else if (value.isTensorList())
        for (const at::Tensor& tensor : value.toTensorList())
          results.push_back(tensor);
    }
    for (const auto& [index, host] : made)
      copy_bytes(host, results.at(index));
  }

  // Where it runs: on the device of its first tensor there, or on the one that it is to make tensors on.
  std::optional<c10::Device> device() const {
    for (auto value = stack_->begin() + static_cast<int64_t>(begin_); value != stack_->end(); ++value) {
      if (value->isTensor() && on_device(value->toTensor()))
        return value->toTensor().device();
      if (value->isTensorList())
        for (const at::Tensor& tensor : value->toTensorList())
          if (on_device(tensor))
            return tensor.device();
      if (value->isDevice() && value->toDevice().type() == kDevice)
        return value->toDevice();
    }
    return std::nullopt;
  }

  at::Tensor convert(size_t index, const at::Tensor& tensor) {
    if (!on_device(tensor)) {
      foreign_ |= tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0;
      if (tensor.defined() && operation_.writes[index])
        foreign_writes_.insert(tensor.unsafeGetTensorImpl());
      return tensor;
    }
    if (tensor.is_sparse()) {
      const auto* parts = at::sparse::get_sparse_impl(tensor);
      auto host = sparse_like(
          tensor, c10::DispatchKey::SparseCPU, convert(index, parts->indices()), convert(index, parts->values()));
      sparse_.push_back({index, tensor, host});
      return host;
    }
    if (operation_.indexes && index == 1 && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte))
      boolean_index_ = true;
    if (operation_.indexes && index == 2 && tensor.numel() == 1)
      fills_ = true;
    TORCH_CHECK(
        tensor.device().index() == state_.current_device() || tensor.dim() == 0 || operation_.copies,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        c10::Device(kDevice, state_.current_device()), " and ", tensor.device(), "! (", operation_.name, ")");
    auto host = on_host(tensor);
    arguments_.push_back({index, tensor, host});
    return host;
  }

  void convert(size_t index, c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      value = convert(index, value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> converted;
      for (const at::Tensor& tensor : value.toTensorList())
        converted.push_back(convert(index, tensor));
      value = converted;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> converted;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        converted.push_back(tensor.has_value() ? std::optional<at::Tensor>(convert(index, *tensor)) : std::nullopt);
      value = converted;
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kDevice)
        value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      value = host_generator(value.toGenerator());
    } else if (value.isNone() && argument.name() == "generator") {
      value = host_generator(std::nullopt);
    }
  }

  void touch() {
    for (const auto& argument : arguments_)
      if (!operation_.writes[argument.index])
        touch_all(argument.device, false, &stream_, site_);
    for (const auto& argument : arguments_)
      if (operation_.writes[argument.index])
        touch_all(argument.device, true, &stream_, site_);
    if (boolean_index_ && !fills_) // the mask becomes indices; or is filled with one value, which needs none
      state_.host_wait(stream_.clock, state_.site(operation_.name + " with a mask", kHost));
    if (foreign_ && operation_.copies)
      state_.host_wait(stream_.clock, state_.site("copy of a sparse tensor", kHost));
  }

  // An output that was too small: the CPU's kernel has put it elsewhere.
  void resize_written() {
    for (auto& argument : arguments_) {
      if (!operation_.writes[argument.index])
        continue;
      const auto& host = argument.host;
      if (host.sizes() == argument.device.sizes() && host.strides() == argument.device.strides() &&
          host.storage().data() == argument.device.storage().data())
        continue;
      argument.device.resize_(host.sizes());
      argument.device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
      if (host.storage().data() != argument.device.storage().data()) {
        copy_bytes(argument.device, host);
        touch_all(argument.device, true, &stream_, site_);
      }
    }
  }

  // In-place operations put new indices and values into a sparse tensor.
  void rewrite_sparse() {
    for (auto& argument : sparse_) {
      if (!operation_.writes[argument.index])
        continue;
      const auto* from = at::sparse::get_sparse_impl(argument.host);
      auto* into = at::sparse::get_sparse_impl(argument.device);
      const auto indices = result(from->indices()), values = result(from->values());
      into->raw_resize_(from->sparse_dim(), from->dense_dim(), argument.host.sizes());
      into->set_indices_and_values_unsafe(indices, values);
      into->set_coalesced(from->coalesced());
    }
  }

  at::Tensor result(const at::Tensor& host) {
    const auto index = results_++;
    if (!host.defined() || foreign_writes_.count(host.unsafeGetTensorImpl()) != 0)
      return host;
    if (host.is_sparse()) {
      for (const auto& argument : sparse_)
        if (argument.host.is_same(host))
          return argument.device;
      const auto* parts = at::sparse::get_sparse_impl(host);
      return sparse_like(
          host, c10::DispatchKey::SparsePrivateUse1, result(parts->indices()), result(parts->values()));
    }
    for (const auto& argument : arguments_) {
      if (argument.host.is_same(host))
        return argument.device;
      if (argument.host.storage().unsafeGetStorageImpl() != host.storage().unsafeGetStorageImpl())
        continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>( // of an argument, and in inference mode what that is
          c10::TensorImpl::VIEW, c10::Storage(argument.device.storage()), argument.device.key_set(), host.dtype());
      view.unsafeGetTensorImpl()->set_storage_offset(host.storage_offset());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
      view._set_conj(host.is_conj());
      view._set_neg(host.is_neg());
      return view;
    }
    auto made = empty_like_host(host);
    copy_bytes(made, host);
    touch_all(made, true, &stream_, site_);
    made_.emplace_back(index, on_host(made));
    return made;
  }

  void result(c10::IValue& value) {
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> converted;
      for (const at::Tensor& tensor : value.toTensorList())
        converted.push_back(result(tensor));
      value = converted;
    }
  }

  const Operation& operation_;
  torch::jit::Stack* stack_;
  State& state_;
  size_t begin_; // of the arguments
  c10::OptionalDeviceGuard guard_;
  StreamState& stream_;
  SitePtr site_;
  size_t results_ = 0;
  std::vector<std::pair<size_t, at::Tensor>> made_; // results by number, on memory of the device
  std::vector<Argument> arguments_, sparse_; // indices and values of sparse ones are arguments, too
  std::unordered_set<const void*> foreign_writes_; // CPU tensors that the operation writes to
  bool foreign_ = false, boolean_index_ = false, fills_ = false;
};

void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Entry entry;
  Call call(handle, stack);
  call.run(handle);
}

} // namespace

// An operation by the CPU's of another name, which takes the same arguments.
void redirect(const char* name, torch::jit::Stack* stack) {
  const auto other = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  Entry entry;
  Call call(other, stack);
  call.run(other);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Before the fallback, torch would take formulas of several operations.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const auto* name : {"index.Tensor", "native_layer_norm", "native_group_norm", "silu_backward", "mish_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Before the fallback, torch would take composite kernels, some of which only say that they want a sparse tensor.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNamesForDispatchKey(c10::DispatchKey::SparseCPU))
    if (name.getNamespace() == "aten") {
      const auto own = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      m.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
}

} // namespace emulated
