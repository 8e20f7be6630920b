// A device that is none: memory of its own that the host may not touch, CPU kernels behind it, two devices of it.
//
// Every allocation lies in pages without access. They are opened while a copy or a kernel of this device runs, and closed
// again: a read or write by the host in between ends the process. Kernels are torch's own for the CPU, on copies.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_and_resize.h>
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
#include <torch/extension.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> held{0}, peak{0}, limit{int64_t(1) << 40}, copies{0}, kernels{0};

// -- memory

struct Block {
  size_t nbytes;
  int open = 0;
};

std::mutex lock;
std::map<char*, Block> blocks;  // by where they begin

size_t pages(size_t nbytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  return ((nbytes ? nbytes : 1) + page - 1) / page * page;
}

// Opens the block that an address lies in, for as long as it lives.
class Open {
 public:
  explicit Open(const at::Tensor& tensor) {
    if (tensor.device().type() != KIND || !tensor.storage().nbytes()) return;
    std::lock_guard<std::mutex> held_lock(lock);
    auto found = blocks.upper_bound(static_cast<char*>(tensor.storage().mutable_data()));
    TORCH_CHECK(found != blocks.begin(), "memory that is not this device's");
    begin_ = (--found)->first;
    if (found->second.open++ == 0) mprotect(begin_, found->second.nbytes, PROT_READ | PROT_WRITE);
  }
  ~Open() {
    if (!begin_) return;
    std::lock_guard<std::mutex> held_lock(lock);
    auto& block = blocks.at(begin_);
    if (--block.open == 0) mprotect(begin_, block.nbytes, PROT_NONE);
  }
  Open(const Open&) = delete;

 private:
  char* begin_ = nullptr;
};

void freed(void* address) {
  std::lock_guard<std::mutex> held_lock(lock);
  auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end()) return;
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
    std::lock_guard<std::mutex> held_lock(lock);
    blocks[static_cast<char*>(made)] = Block{whole};
    held += whole;
    if (held > peak) peak.store(held);
    return {made, made, &freed, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { TORCH_CHECK(false, "not by the host"); }
};

Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

// -- which device is current; there is one queue, and what is asked for is done when the call returns

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
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return c10::Stream(c10::Stream::DEFAULT, stream.device()); }
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

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  ++copies;
  const Open from(self), to(dst);
  auto target = seen(dst);
  target.copy_(seen(self));
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

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  ++kernels;
  const std::optional<at::Tensor> added = bias && bias->defined() ? std::optional<at::Tensor>(bias->cpu()) : std::nullopt;
  return at::convolution_symint(input.cpu(), weight.cpu(), added, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++kernels;
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
  m.def("counts", [] { return std::make_pair(copies.load(), kernels.load()); });
}
