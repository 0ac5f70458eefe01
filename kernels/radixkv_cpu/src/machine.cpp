// What this variant was compiled from, and what it needs of the process before it runs.

#include "simd.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The digest of all sources at the time, by which Python checks that this library was compiled from the sources beside it.
RADIXKV_API const char* radixkv_sources() { return RADIXKV_SOURCES; }

// Requests from the operating system what the variant needs of the processor; returns 0 if it is refused.
RADIXKV_API int radixkv_prepare() {
#if defined(__AMX_BF16__)
    // Linux saves a thread's AMX tiles only for processes that request it (Documentation/arch/x86/xstate.rst).
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return 1;
#endif
}
