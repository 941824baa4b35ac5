// Operations of the device by kernels of the CPU.
#pragma once

#include "state.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace emulated {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool on_device(const at::Tensor& tensor);
at::Tensor on_host(const at::Tensor& tensor); // a CPU tensor on the memory of a device's; it owns nothing
void touch_all(const at::Tensor& tensor, bool write, StreamState* stream, const SitePtr& site);
void redirect(const char* name, torch::jit::Stack* stack); // runs the CPU's operation of another name

} // namespace emulated
