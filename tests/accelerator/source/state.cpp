// Vector clocks, late arrivals and the record of every access.
#include <Python.h> // before all others

#include "state.h"

#include <algorithm>

namespace emulated {

namespace {
constexpr size_t kMostRaces = 100;
constexpr size_t kMostRuns = 256;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams; // what is missing is the default stream
thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::shared_ptr<torch::CapturedTraceback> stack_of_call;
thread_local int entries = 0;
} // namespace

Entry::Entry() {
  if (entries == 0 && State::get().stacks)
    stack_of_call = torch::CapturedTraceback::gather(true, false, false);
  lock_ = std::unique_lock<std::recursive_mutex>(State::get().mutex, std::try_to_lock);
  if (!lock_.owns_lock()) {
    // Whoever holds it may want the GIL: copying a tensor is enough.
    const bool python = Py_IsInitialized() && PyGILState_Check();
    auto* thread = python ? PyEval_SaveThread() : nullptr;
    lock_.lock();
    if (python)
      PyEval_RestoreThread(thread);
  }
  ++entries;
}

bool Entry::inside() {
  return entries != 0;
}

Entry::Leave::~Leave() {
  if (--entries != 0)
    return;
  stack_of_call = nullptr;
  dropped.swap(State::get().dropped);
}

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size())
    into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i)
    into[i] = std::max(into[i], other[i]);
}

bool reaches(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i)
    if (other[i] > (i < clock.size() ? clock[i] : 0))
      return false;
  return true;
}

State& State::get() {
  static State* state = new State(); // never destroyed: tensors may outlive everything
  return *state;
}

State::State() {
  for (int device = 0; device < device_count; ++device) {
    c10::Stream stream(c10::Stream::DEFAULT, c10::Device(kDevice, static_cast<c10::DeviceIndex>(device)));
    streams.push_back(std::make_unique<StreamState>(StreamState{device + 1, stream, {}, {}}));
  }
}

StreamState& State::of(const c10::Stream& stream) {
  const auto id = stream.id();
  return *streams.at(id == 0 ? stream.device_index() : static_cast<size_t>(id));
}

c10::DeviceIndex State::current_device() const {
  return device_of_thread;
}

void State::set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count, "invalid device ordinal: ", int(device), " of ", device_count);
  device_of_thread = device;
}

StreamState& State::current(c10::DeviceIndex device) {
  if (device < 0)
    device = device_of_thread;
  auto found = current_streams.find(device);
  return *streams.at(found == current_streams.end() || found->second == 0 ? device : found->second);
}

c10::Stream State::exchange_stream(const c10::Stream& stream) {
  auto before = current(stream.device_index()).stream;
  current_streams[stream.device_index()] = stream.id();
  return before;
}

c10::Stream State::make_stream(c10::DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto id = static_cast<c10::StreamId>(streams.size());
  c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
  streams.push_back(std::make_unique<StreamState>(StreamState{static_cast<int>(id) + 1, stream, {}, {}}));
  return stream;
}

uint32_t State::launch(StreamState& stream, const char* what, bool lands) {
  join(stream.clock, host_clock);
  if (stream.clock.size() <= static_cast<size_t>(stream.actor))
    stream.clock.resize(stream.actor + 1);
  const auto epoch = ++stream.clock[stream.actor];
  ++host_clock[kHost];
  if (capture_origin != nullptr && !stream.capturing)
    capture_error(std::string("work on a stream that is not captured: ") + what);
  if (lands)
    land_before(stream.clock);
  return epoch;
}

void State::wait(StreamState& stream, const Clock& clock) {
  join(stream.clock, host_clock);
  join(stream.clock, clock);
}

void State::host_wait(const Clock& clock, const SitePtr& site) {
  join(host_clock, clock);
  count(&Counted::host_syncs, site);
  if (capture_origin != nullptr)
    capture_error("host synchronization: " + site->what);
  land_before(host_clock);
  for (auto& shelved : shelf)
    if (reaches(host_clock, shelved.end)) {
      dropped.insert(dropped.end(), shelved.tensors.begin(), shelved.tensors.end());
      shelved.tensors.clear();
    }
  shelf.erase(
      std::remove_if(shelf.begin(), shelf.end(), [](auto& shelved) { return shelved.tensors.empty(); }), shelf.end());
}

bool State::reached(const Clock& clock) const {
  for (size_t actor = 0; actor < clock.size(); ++actor)
    if (clock[actor] > (actor < host_clock.size() ? host_clock[actor] : 0))
      return false;
  return true;
}

void State::host_step() {
  land_before(host_clock);
  ++host_clock[kHost];
}

void State::land_before(const Clock& clock) {
  if (late_count_ == 0)
    return;
  for (auto& stream : streams) {
    const auto actor = static_cast<size_t>(stream->actor);
    const auto reached = actor < clock.size() ? clock[actor] : 0;
    while (!stream->late.empty() && stream->late.front()->epoch <= reached) {
      auto late = stream->late.front();
      stream->late.erase(stream->late.begin());
      --late_count_;
      late->land(late->gone);
    }
  }
}

void State::freed(const Range& range) {
  for (auto& stream : streams)
    for (auto& late : stream->late)
      for (auto& target : late->targets)
        if (target.begin < range.end && range.begin < target.end)
          late->gone.push_back(range);
}

bool State::ordered(const Access& access, const Clock& clock) const {
  return static_cast<size_t>(access.actor) < clock.size() && access.epoch <= clock[access.actor];
}

void State::split(uintptr_t at) {
  auto after = cells_.upper_bound(at);
  if (after == cells_.begin())
    return;
  auto cell = std::prev(after);
  if (cell->first == at || cell->second.end <= at)
    return;
  Cell rest = cell->second;
  cell->second.end = at;
  cells_.emplace_hint(after, at, std::move(rest));
}

void State::touch(const Range& range, bool write, StreamState* stream, const SitePtr& site) {
  if (!checking || range.begin >= range.end)
    return;
  const int actor = stream == nullptr ? kHost : stream->actor;
  const Clock& clock = stream == nullptr ? host_clock : stream->clock;
  const Access access{actor, clock[actor], site};
  split(range.begin);
  split(range.end);
  auto cell = cells_.lower_bound(range.begin);
  if (write) {
    while (cell != cells_.end() && cell->first < range.end) {
      auto bytes = cell->second.end - cell->first;
      if (cell->second.write.actor >= 0 && !ordered(cell->second.write, clock))
        report("write after write", cell->second.write.site, site, bytes);
      for (auto& read : cell->second.reads)
        if (!ordered(read, clock))
          report("write after read", read.site, site, bytes);
      cell = cells_.erase(cell);
    }
    cells_.emplace_hint(cell, range.begin, Cell{range.end, access, {}});
    return;
  }
  auto at = range.begin;
  while (at < range.end) {
    if (cell == cells_.end() || cell->first > at) {
      const auto end = cell == cells_.end() ? range.end : std::min<uintptr_t>(range.end, cell->first);
      cell = cells_.emplace_hint(cell, at, Cell{end, {-1, 0, nullptr}, {}});
    }
    auto& found = cell->second;
    if (found.write.actor >= 0 && !ordered(found.write, clock))
      report("read after write", found.write.site, site, found.end - cell->first);
    auto same = std::find_if(found.reads.begin(), found.reads.end(), [&](auto& read) { return read.actor == actor; });
    if (same != found.reads.end())
      *same = access;
    else
      found.reads.push_back(access);
    at = found.end;
    ++cell;
  }
}

void State::forget(const Range& range) {
  split(range.begin);
  split(range.end);
  cells_.erase(cells_.lower_bound(range.begin), cells_.lower_bound(range.end));
}

std::vector<Access> State::unordered(const Range& range, const Clock& clock) {
  std::vector<Access> found;
  auto cell = cells_.upper_bound(range.begin);
  if (cell != cells_.begin())
    --cell;
  for (; cell != cells_.end() && cell->first < range.end; ++cell) {
    if (cell->second.end <= range.begin)
      continue;
    if (cell->second.write.actor >= 0 && !ordered(cell->second.write, clock))
      found.push_back(cell->second.write);
    for (auto& read : cell->second.reads)
      if (!ordered(read, clock))
        found.push_back(read);
  }
  return found;
}

void State::report(const std::string& kind, const SitePtr& first, const SitePtr& second, uint64_t bytes) {
  for (auto& race : races)
    if (race.kind == kind && race.first == first && race.second == second) {
      race.bytes += bytes;
      return;
    }
  if (races.size() < kMostRaces)
    races.push_back({kind, first, second, bytes});
}

SitePtr State::site(std::string what, int actor) {
  std::string name = "host";
  if (actor != kHost)
    name = "stream " + std::to_string(streams.at(actor - 1)->stream.id());
  return std::make_shared<Site>(Site{std::move(what), name, stack_of_call});
}

void State::count(std::vector<SitePtr> Counted::*which, const SitePtr& site) {
  if (counting)
    (counted.*which).push_back(site);
}

void State::capture_error(const std::string& what) {
  counted.capture_errors.push_back(site(what, kHost));
}

std::vector<Range> ranges(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage())
    return {};
  const auto item = static_cast<uintptr_t>(tensor.element_size());
  const auto start = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * item;
  // Dims by stride, smallest first, without those that repeat or hold one element.
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1 && tensor.stride(dim) != 0)
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(dims.begin(), dims.end());
  uintptr_t run = item;
  size_t next = 0;
  while (next < dims.size() && static_cast<uintptr_t>(dims[next].first) * item <= run) {
    run = std::max(run, static_cast<uintptr_t>(dims[next].first * (dims[next].second - 1)) * item + run);
    ++next;
  }
  size_t runs = 1;
  for (size_t dim = next; dim < dims.size() && runs <= kMostRuns; ++dim)
    runs *= dims[dim].second;
  if (runs > kMostRuns) {
    for (; next < dims.size(); ++next)
      run += static_cast<uintptr_t>(dims[next].first * (dims[next].second - 1)) * item;
    return {{start, start + run}};
  }
  std::vector<Range> found{{start, start + run}};
  for (; next < dims.size(); ++next) {
    std::vector<Range> more;
    for (int64_t index = 0; index < dims[next].second; ++index)
      for (auto& range : found)
        more.push_back({range.begin + index * dims[next].first * item, range.end + index * dims[next].first * item});
    found = std::move(more);
  }
  return found;
}

} // namespace emulated
