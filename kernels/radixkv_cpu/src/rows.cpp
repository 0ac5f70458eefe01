// Blocks of a pool, which lie in many parts, as rows of bytes.

#include <cstring>

#include "calls.h"

using namespace radixkv;

namespace {

// Copies what is not used soon: a non-temporal store does not read what it overwrites.
void copy_around_caches(char* to, const char* from, int64_t bytes) {
    constexpr int64_t kVectorBytes = sizeof(__m256i);
    if (reinterpret_cast<uintptr_t>(to) % kVectorBytes != 0 || bytes % kVectorBytes != 0) {
        std::memcpy(to, from, bytes);
        return;
    }
    for (int64_t i = 0; i < bytes; i += kVectorBytes) {
        const __m256i vector = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), vector);
    }
}

}  // namespace

// Part by part: blocks that follow one another in the pool are then one piece of memory.
RADIXKV_API void radixkv_rows(const Rows* call, int32_t into_rows) {
#pragma omp parallel for schedule(static) if (call->in_parallel)
    for (int64_t part = 0; part < call->num_parts; part++) {
        const int64_t bytes = call->part_bytes[part];
        char* row = call->rows;
        for (int64_t before = 0; before < part; before++) row += call->part_bytes[before];
        for (int64_t i = 0; i < call->num_rows; i++, row += call->row_bytes) {
            char* block = call->parts[part] + call->block_ids[i] * bytes;
            if (into_rows) {
                std::memcpy(row, block, bytes);
            } else {
                copy_around_caches(block, row, bytes);
            }
        }
        _mm_sfence();  // non-temporal stores are not ordered with any others
    }
}
