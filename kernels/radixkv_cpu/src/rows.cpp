// Blocks of a pool, which lie in many parts, as rows of bytes.

#include <cstring>

#include "calls.h"

using namespace radixkv;

// Part by part: blocks that follow one another in the pool are then one piece of memory.
RADIXKV_API void radixkv_rows(const Rows* call, int32_t into_rows) {
#pragma omp parallel for schedule(static) if (call->in_parallel)
    for (int64_t part = 0; part < call->num_parts; part++) {
        const int64_t bytes = call->part_bytes[part];
        char* row = call->rows;
        for (int64_t before = 0; before < part; before++) row += call->part_bytes[before];
        for (int64_t i = 0; i < call->num_rows; i++, row += call->row_bytes) {
            char* block = call->parts[part] + call->block_ids[i] * bytes;
            std::memcpy(into_rows ? row : block, into_rows ? block : row, bytes);
        }
    }
}
