// What Python sees of the emulated accelerator.
#include "collectives.h"
#include "state.h"

#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

namespace emulated {

namespace {

std::string frames(const std::shared_ptr<torch::CapturedTraceback>& stack) {
  if (stack == nullptr)
    return "";
  const auto symbols = torch::symbolize({stack.get()});
  std::string text;
  for (const auto index : symbols.tracebacks.at(0)) {
    const auto& frame = symbols.all_frames[index];
    text += frame.filename + ":" + std::to_string(frame.lineno) + " in " + frame.funcname + "\n";
  }
  return text;
}

using Described = std::tuple<std::string, std::string, std::string>; // what, actor, frames

Described described(const SitePtr& site) {
  return {site->what, site->actor, frames(site->stack)};
}

std::vector<Described> described(const std::vector<SitePtr>& sites) {
  std::vector<Described> all;
  for (const auto& site : sites)
    all.push_back(described(site));
  return all;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def(py::init<const c10::intrusive_ptr<c10d::Backend>&, int, int, std::string, std::chrono::milliseconds>());
  m.def("device_count", [] { return State::get().device_count; });
  m.def("take_races", [] {
    auto races = std::move(State::get().races);
    State::get().races.clear();
    std::vector<std::tuple<std::string, uint64_t, Described, Described>> all;
    for (const auto& race : races)
      all.emplace_back(race.kind, race.bytes, described(race.first), described(race.second));
    return all;
  });
  m.def("check_races", [](bool enabled) { State::get().checking = enabled; });
  m.def("late_delivery", [](bool enabled) { State::get().late_delivery = enabled; });
  m.def("stacks", [](bool enabled) { State::get().stacks = enabled; });
  m.def("start_counting", [] {
    auto& state = State::get();
    state.counted = Counted{};
    state.counting = true;
  });
  m.def("stop_counting", [] {
    auto& state = State::get();
    state.counting = false;
    std::map<std::string, std::vector<Described>> all;
    all["host_syncs"] = described(state.counted.host_syncs);
    all["events_made"] = described(state.counted.events_made);
    all["streams_made"] = described(state.counted.streams_made);
    return all;
  });
  m.def("is_capturing", [] {
    Entry entry;
    auto& state = State::get();
    return state.capture_origin != nullptr && state.current().capturing;
  });
  m.def("start_capture", &start_capture);
  m.def("end_capture", [] {
    end_capture();
    return described(State::get().counted.capture_errors);
  });
  m.def("replay", &replay, py::call_guard<py::gil_scoped_release>());
  m.def("memory", [](int device) {
    const auto counts = memory(static_cast<c10::DeviceIndex>(device));
    return std::map<std::string, int64_t>{
        {"allocated", counts.allocated}, {"peak_allocated", counts.peak_allocated}, {"reserved", counts.reserved},
        {"peak_reserved", counts.peak_reserved}, {"allocations", counts.allocations}};
  });
  m.def("default_generator", [](int device) {
    return at::globalContext().defaultGenerator(c10::Device(kDevice, static_cast<c10::DeviceIndex>(device)));
  });
  observe_host();
}

} // namespace emulated
