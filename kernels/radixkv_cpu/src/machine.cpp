// What this variant was compiled from, and what it needs of the process before it runs.

#include "simd.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The digest of all sources at the time, by which Python tells whether this is the library that it knows.
RADIXKV_API const char* radixkv_sources() { return RADIXKV_SOURCES; }

// Asks the operating system to let this process use what the variant was compiled for; 0: it refuses.
RADIXKV_API int radixkv_prepare() {
#if defined(__AMX_BF16__)
    // Linux saves a thread's AMX tiles only for processes that ask (Documentation/arch/x86/xstate.rst).
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return 1;
#endif
}
