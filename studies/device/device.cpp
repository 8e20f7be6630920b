// A device that is none: memory of its own that the host may not touch, CPU kernels behind it, two devices of it.
//
// Every allocation lies in pages without access. They are opened while a copy or a kernel of this device runs, and closed
// again: a read or write by the host in between ends the process. Kernels are torch's own for the CPU, on copies. What they
// read and write is checked against streams, events and waits: order.h.

#include <chrono>
#include <thread>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_and_resize.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <atomic>

#include "order.h"

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> held{0}, peak{0}, limit{int64_t(1) << 40}, copies{0}, kernels{0}, slow{0};

// -- memory

struct Block {
  size_t nbytes;
  order::Uses uses;
  int open = 0;
};

std::map<char*, Block> blocks;  // by where they begin

size_t pages(size_t nbytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  return ((nbytes ? nbytes : 1) + page - 1) / page * page;
}

Block* block_of(const at::Tensor& tensor, char** begin) {
  if (tensor.device().type() != KIND || !tensor.storage().nbytes()) return nullptr;
  auto found = blocks.upper_bound(static_cast<char*>(tensor.storage().mutable_data()));
  TORCH_CHECK(found != blocks.begin(), "memory that is not this device's");
  *begin = (--found)->first;
  return &found->second;
}

// Opens the memory of a tensor, for as long as it lives.
class Open {
 public:
  explicit Open(const at::Tensor& tensor) {
    const order::Held now(order::lock);
    Block* found = block_of(tensor, &begin_);
    if (!found) return;
    if (found->open++ == 0) mprotect(begin_, found->nbytes, PROT_READ | PROT_WRITE);
  }
  ~Open() {
    if (!begin_) return;
    const order::Held now(order::lock);
    auto& block = blocks.at(begin_);
    if (--block.open == 0) mprotect(begin_, block.nbytes, PROT_NONE);
  }
  Open(const Open&) = delete;

 private:
  char* begin_ = nullptr;
};

void freed(void* address) {
  const order::Held now(order::lock);
  auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end()) return;
  order::freed(found->second.uses);
  held -= found->second.nbytes;
  munmap(address, found->second.nbytes);
  blocks.erase(found);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(KIND, current);
    if (!nbytes) return {nullptr, nullptr, &freed, device};
    const size_t whole = pages(nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, held + int64_t(whole) <= limit, "the test device has no memory for ", nbytes, " bytes");
    void* made = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(made != MAP_FAILED, "mmap failed");
    memset(made, 0xA5, whole);  // never zeros by chance
    mprotect(made, whole, PROT_NONE);
    const order::Held now(order::lock);
    blocks[static_cast<char*>(made)] = Block{whole, {order::current_queue(current)}};
    held += whole;
    if (held > peak) peak.store(held);
    return {made, made, &freed, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { TORCH_CHECK(false, "not by the host"); }
};

Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const size_t whole = pages(nbytes);
    void* made = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(made != MAP_FAILED, "mmap failed");
    const order::Held now(order::lock);
    order::pinned[static_cast<char*>(made)] = {whole, false};
    return {made, made, &unpinned, c10::Device(c10::DeviceType::CPU)};
  }
  static void unpinned(void* address) {
    const order::Held now(order::lock);
    const auto found = order::pinned.find(static_cast<char*>(address));
    if (found == order::pinned.end()) return;
    found->second.second = true;
    order::unmap_unused(found->first);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpinned; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { memcpy(to, from, nbytes); }
};

Pinned pinned;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  bool isPinnedPtr(const void* data) const override {
    const order::Held now(order::lock);
    return order::pinned_at(data) != order::pinned.end();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
};

// -- which device and stream are current; events

order::Queue queue_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
order::Event& event_of(void* event) { return *static_cast<order::Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(KIND, current);
    current = device.index() < 0 ? current : device.index();
    return before;
  }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < COUNT, "there are ", int(COUNT), " test devices");
    current = device.index() < 0 ? current : device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index() < 0 ? current : device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::UNSAFE, {KIND, index}, order::current[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> made{0};
    return c10::Stream(c10::Stream::UNSAFE, {KIND, device.index() < 0 ? current : device.index()}, ++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    order::current[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const order::Held now(order::lock);
    if (!*event) *event = new order::Event;
    order::launch(queue_of(stream));
    event_of(*event).clock = order::clocks[queue_of(stream)];
    event_of(*event).asked = false;
    event_of(*event).when = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<order::Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    const order::Held now(order::lock);
    if (event) order::join(order::clocks[queue_of(stream)], event_of(event).clock);
  }
  bool queryEvent(void* event) const override {  // late: not done when it is asked for the first time
    const order::Held now(order::lock);
    if (!event) return true;
    const auto& clock = event_of(event).clock;
    const bool known = std::all_of(clock.begin(), clock.end(), [](const auto& one) {
      return order::knows(order::host, one.first, one.second);
    });
    if (!known && !std::exchange(event_of(event).asked, true)) return false;
    order::host_knows(event_of(event).clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    const order::Held now(order::lock);
    if (event) order::host_knows(event_of(event).clock);
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const order::Held now(order::lock);
    order::host_knows(order::clocks[queue_of(stream)]);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    const order::Held now(order::lock);
    for (const auto& [queue, clock] : order::clocks)
      if (queue.first == device) order::host_knows(order::Clock(clock));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const order::Held now(order::lock);
    const auto found = blocks.find(static_cast<char*>(data.get()));
    if (found != blocks.end()) found->second.uses.recorded.insert(queue_of(stream));
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const order::Held now(order::lock);
    TORCH_CHECK(from && to, "an event that was not recorded");
    for (void* event : {from, to})
      for (const auto& [queue, at] : event_of(event).clock)
        TORCH_CHECK(order::knows(order::host, queue, at), "an event that nobody has waited for has no time");
    return std::chrono::duration<double, std::milli>(event_of(to).when - event_of(from).when).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- kernels

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(KIND, current)));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(KIND, current)));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the host's: only while it is open.
at::Tensor seen(const at::Tensor& tensor) {
  if (tensor.device().type() != KIND) return tensor;
  auto made = at::from_blob(tensor.storage().mutable_data(), {int64_t(tensor.storage().nbytes())}, at::kByte);
  auto found = at::empty({0}, tensor.options().device(at::kCPU));
  found.set_(made.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) found._set_conj(true);
  if (tensor.is_neg()) found._set_neg(true);
  return found;
}

int index_of(const at::Tensor& tensor) { return tensor.device().index() < 0 ? current : tensor.device().index(); }

void used(const at::Tensor& tensor, const order::Queue& queue, uint64_t at, bool written) {
  char* begin = nullptr;
  Block* found = block_of(tensor, &begin);
  if (!found) return;
  written ? order::write(found->uses, queue, at) : order::read(found->uses, queue, at);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  ++copies;
  if (const int64_t microseconds = slow) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  const bool in = self.device().type() != KIND, out = dst.device().type() != KIND;
  const order::Queue queue = order::current_queue(index_of(in ? dst : self));
  const bool across = !in && !out && index_of(self) != index_of(dst);
  const order::Queue other = order::current_queue(index_of(dst));
  uint64_t at = 0;
  {  // never held where a tensor may wait for Python's lock
    const order::Held now(order::lock);
    if (across) order::join(order::clocks[queue], order::clocks[other]);  // as torch does between two of CUDA's
    at = order::launch(queue);
    used(self, queue, at, false);
    used(dst, queue, at, true);
    if (across) order::join(order::clocks[other], order::clocks[queue]);
  }
  const Open from(self), to(dst);
  const bool late = non_blocking && !order::inside && (in || out);
  if (late && out && dst.is_contiguous()) {
    auto found = seen(self).contiguous().to(dst.scalar_type());
    const char* data = static_cast<const char*>(found.const_data_ptr());
    char* target = static_cast<char*>(dst.mutable_data_ptr());
    {
      const order::Held now(order::lock);
      order::pending.push_back({queue, at, target, std::vector<char>(data, data + found.nbytes()), true});
    }
    memset(target, 0xA5, found.nbytes());
    return dst;
  }
  auto target = seen(dst);
  target.copy_(seen(self));
  if (order::inside) return dst;
  const order::Held now(order::lock);
  if (late && in) {  // ordinary memory was read before the call returned
    const char* data = static_cast<const char*>(self.const_data_ptr());
    if (order::pinned_at(data) != order::pinned.end() && self.is_contiguous())
      order::pending.push_back({queue, at, const_cast<char*>(data), std::vector<char>(data, data + self.nbytes()), false});
  } else if (in || out) {
    order::host_knows(order::Clock(order::clocks[queue]));
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  auto* impl = self.unsafeGetTensorImpl();
  const int64_t needed = (at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset()));
  if (int64_t(self.storage().nbytes()) < needed) {
    const c10::DeviceGuard guard(self.device());
    const at::Tensor before = self.alias();
    auto fresh = memory.allocate(needed);
    auto old = self.storage().nbytes();
    if (old) {
      const Open source(self);
      std::vector<char> kept(static_cast<char*>(self.storage().mutable_data()), static_cast<char*>(self.storage().mutable_data()) + old);
      self.storage().set_data_ptr_noswap(std::move(fresh));
      self.storage().set_nbytes(needed);
      const Open target(self);
      memcpy(self.storage().mutable_data(), kept.data(), old);
    } else {
      self.storage().set_data_ptr_noswap(std::move(fresh));
      self.storage().set_nbytes(needed);
    }
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return self.cpu().item(); }

at::Tensor& set_source(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data()) {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t size = source.nbytes() / self.dtype().itemsize();
  return set_source(self, std::move(source), 0, {size}, {});
}

struct Inside {  // its copies are part of a kernel, which waits for nobody
  Inside() { ++order::inside; }
  ~Inside() { --order::inside; }
};

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  ++kernels;
  const Inside kernel;
  const std::optional<at::Tensor> added = bias && bias->defined() ? std::optional<at::Tensor>(bias->cpu()) : std::nullopt;
  return at::convolution_symint(input.cpu(), weight.cpu(), added, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  const order::Held now(order::lock);
  char* begin = nullptr;
  if (Block* found = block_of(self, &begin)) found->uses.recorded.insert(queue_of(stream));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++kernels;
  const Inside kernel;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("convolution_overrideable", &convolution);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("current_stream", [](int device) { return order::current[device]; });
  m.def("set_stream", [](int device, int64_t stream) { order::current[device] = stream; });
  m.def("synchronize", [](int device) { Guard().synchronizeDevice(device); });
  m.def("races", [] {
    const order::Held now(order::lock);
    return std::exchange(order::races, {});
  });
  m.def("device_count", [] { return int(COUNT); });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int index) {
    TORCH_CHECK(index >= 0 && index < COUNT, "there are ", int(COUNT), " test devices");
    current = index;
  });
  m.def("memory_allocated", [] { return held.load(); });
  m.def("max_memory_allocated", [] { return peak.load(); });
  m.def("reset_peak_memory_stats", [] { peak.store(held); });
  m.def("set_limit", [](int64_t nbytes) { limit.store(nbytes); });
  m.def("set_slow", [](int64_t microseconds) { slow.store(microseconds); });
  m.def("counts", [] { return std::make_pair(copies.load(), kernels.load()); });
}
