// Tells torch that there is one CUDA device. Without it torch refuses to make a tensor that says cuda:0; where torch is
// built for CUDA, this takes the place of what asks the driver.

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device getDevice() const override {
    return c10::Device(CUDA, 0);
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return c10::Device(CUDA, 0);
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(CUDA, 0));
  }
};

} // namespace

C10_REGISTER_GUARD_IMPL(CUDA, OneDevice);
