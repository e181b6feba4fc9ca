"""What a pretended device refuses. A GPU would raise, hang, or compute something else."""


class DeviceFault(RuntimeError):
    """With the place that is to blame."""


class MixedDevices(DeviceFault):
    """Tensors of host and device in one operator or launch, or of two ranks."""


class MixedDtypes(DeviceFault):
    """Operands of several kinds of numbers where the kernel knows one."""


class Race(DeviceFault):
    """Host memory was written while it was copied, or read before it was there."""


class ForbiddenWhileRecording(DeviceFault):
    """Something that needs the host, while a graph is recorded."""


class OutsideMemory(DeviceFault):
    """A kernel touches memory that belongs to none of its tensors. A GPU may give what happens to lie there, or end the
    process."""
