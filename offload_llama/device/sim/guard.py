"""Lets a PyTorch build without a usable CUDA card hold tensors that say they are on one."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import torch

from offload_llama.errors import DeviceError

# c10/core/DeviceType.h
_CUDA, _META = 1, 14
_N_DEVICE_TYPES = 21
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"


@functools.cache
def install_device_guard() -> bool:
    """Return whether real CUDA is usable; where it is not, its device guard is set to do nothing.

    ATen looks for a device guard whenever it indexes or copies a tensor. Builds with CUDA but
    without a card have a switch for that; builds without CUDA have an empty slot, which takes the
    guard of the meta device, one that does nothing.

    Raises:
        DeviceError: this platform's PyTorch does not show that slot.
    """
    if torch.cuda.is_available():
        return True
    if torch.cuda._is_compiled():
        torch._C._ensureCUDADeviceGuardSet()
        return False
    library_name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / library_name))
        registry = (ctypes.c_void_p * _N_DEVICE_TYPES).in_dll(library, _REGISTRY)
        register = library[_REGISTER]
    except (OSError, ValueError, AttributeError) as error:
        raise DeviceError(
            "simulated cards need PyTorch on Linux or macOS; use --device cpu"
        ) from error
    if registry[_CUDA] is None:
        register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
        register(_CUDA, registry[_META])
    return False
