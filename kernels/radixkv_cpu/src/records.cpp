// Reads records of blocks from files, and compares each with the one that is wanted. A header is
//
//     magic 8 | checksum 16 | fields
//
// and the checksum is the 128-bit XXH3, big-endian, of the fields and the row.

#include <cerrno>
#include <cstring>
#include <vector>

#include <unistd.h>

#define XXH_INLINE_ALL
#include "xxhash.h"

#include "calls.h"

using namespace radixkv;

namespace {

constexpr int64_t kMagicBytes = 8;
constexpr int64_t kFieldsStart = kMagicBytes + sizeof(XXH128_canonical_t);

// An outcome below zero is a negated number of <cerrno>.
enum Outcome : int32_t { kRight = 0, kOther = 1, kCorrupt = 2 };

// Zero, or the negated number of an error; `whole` is false where the file ends before.
int32_t read_all(int file, int64_t offset, char* out, int64_t size, bool* whole) {
    while (size > 0) {
        const ssize_t length = pread(file, out, size, offset);
        if (length < 0 && errno == EINTR) continue;
        if (length < 0) return -errno;
        if (length == 0) break;
        offset += length;
        out += length;
        size -= length;
    }
    *whole = size == 0;
    return 0;
}

Outcome compare(const char* header, const char* expected, int64_t header_bytes, const char* row, int64_t row_bytes) {
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, header + kFieldsStart, header_bytes - kFieldsStart);
    XXH3_128bits_update(&state, row, row_bytes);
    XXH128_canonical_t checksum;
    XXH128_canonicalFromHash(&checksum, XXH3_128bits_digest(&state));
    const bool is_record = std::memcmp(header, expected, kMagicBytes) == 0;
    if (!is_record || std::memcmp(header + kMagicBytes, &checksum, sizeof checksum) != 0) return kCorrupt;
    const bool same = std::memcmp(header + kFieldsStart, expected + kFieldsStart, header_bytes - kFieldsStart) == 0;
    return same ? kRight : kOther;
}

}  // namespace

// Record by record, so that a row is summed while it is in the processor's caches. After an error nothing more is read.
RADIXKV_API void radixkv_records(const Records* call, int32_t) {
    std::vector<char> header(call->header_bytes);
    int32_t error = 0;
    for (int64_t i = 0; i < call->num_records; i++) {
        char* row = call->rows + i * call->row_bytes;
        bool whole = false;
        if (error == 0) error = read_all(call->files[i], call->offsets[i], header.data(), call->header_bytes, &whole);
        if (error == 0 && whole) {
            const int64_t row_offset = call->offsets[i] + call->slot_bytes - call->row_bytes;
            error = read_all(call->files[i], row_offset, row, call->row_bytes, &whole);
        }
        if (error != 0) {
            call->outcomes[i] = error;
        } else if (!whole) {
            call->outcomes[i] = kCorrupt;
        } else {
            const char* expected = call->headers + i * call->header_bytes;
            call->outcomes[i] = compare(header.data(), expected, call->header_bytes, row, call->row_bytes);
        }
    }
}
