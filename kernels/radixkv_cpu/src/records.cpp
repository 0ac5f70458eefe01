// Reads records of blocks from files, and compares each with the one that is wanted. A header is
//
//     magic 8 | checksum 16 | fields
//
// and the checksum is the 128-bit XXH3, big-endian, of the fields and the row.

#include <cerrno>
#include <cstring>
#include <vector>

#include <sys/uio.h>

#define XXH_INLINE_ALL
#include "xxhash.h"

#include "calls.h"

using namespace radixkv;

namespace {

constexpr int64_t kMagicBytes = 8;
constexpr int64_t kFieldsStart = kMagicBytes + sizeof(XXH128_canonical_t);

// An outcome below zero is a negated number of <cerrno>.
enum Outcome : int32_t { kRight = 0, kOther = 1, kCorrupt = 2 };

// Zero, or the negated number of an error; `whole` is false where the file ends before the slot does.
int32_t read_slot(int file, int64_t offset, iovec head, iovec row, bool* whole) {
    while (head.iov_len + row.iov_len > 0) {
        const iovec pieces[2] = {head, row};
        const ssize_t length = preadv(file, pieces, 2, offset);
        if (length < 0 && errno == EINTR) continue;
        if (length < 0) return -errno;
        if (length == 0) break;
        offset += length;
        const size_t of_head = static_cast<size_t>(length) < head.iov_len ? length : head.iov_len;
        const size_t of_row = length - of_head;
        head = {static_cast<char*>(head.iov_base) + of_head, head.iov_len - of_head};
        row = {static_cast<char*>(row.iov_base) + of_row, row.iov_len - of_row};
    }
    *whole = head.iov_len + row.iov_len == 0;
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
    std::vector<char> head(call->slot_bytes - call->row_bytes);
    int32_t error = 0;
    for (int64_t i = 0; i < call->num_records; i++) {
        char* row = call->rows + i * call->row_bytes;
        bool whole = false;
        if (error == 0) {
            const iovec of_row = {row, static_cast<size_t>(call->row_bytes)};
            error = read_slot(call->files[i], call->offsets[i], {head.data(), head.size()}, of_row, &whole);
        }
        if (error != 0) {
            call->outcomes[i] = error;
        } else if (!whole) {
            call->outcomes[i] = kCorrupt;
        } else {
            const char* expected = call->headers + i * call->header_bytes;
            call->outcomes[i] = compare(head.data(), expected, call->header_bytes, row, call->row_bytes);
        }
    }
}
