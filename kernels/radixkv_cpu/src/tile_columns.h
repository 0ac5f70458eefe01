// A few rows as the columns of narrow tiles, and back.
#pragma once

#include <cstring>

#include "tiles.h"

#if defined(__AMX_BF16__)
namespace radixkv {

// Up to four rows, `stride` apart, as columns [stride / 2][4][2].
inline void pack_columns(int64_t rows, const BF16* from, int64_t stride, BF16* to) {
    static_assert(kTileColumns == 4);
    for (int64_t dim = 0; dim < stride; dim += 2 * kLanes, to += 4 * 2 * kLanes) {
        U32 words[4] = {};
        for (int64_t row = 0; row < rows; row++) std::memcpy(&words[row], from + row * stride + dim, sizeof words[row]);
        const U32 even[2] = {interleave_low(words[0], words[2]), interleave_high(words[0], words[2])};
        const U32 odd[2] = {interleave_low(words[1], words[3]), interleave_high(words[1], words[3])};
        const U32 columns[4] = {interleave_low(even[0], odd[0]), interleave_high(even[0], odd[0]), interleave_low(even[1], odd[1]),
                                interleave_high(even[1], odd[1])};
        std::memcpy(static_cast<void*>(to), columns, sizeof columns);
    }
}

// Sums of 16 keys by four rows, [16][4], to scores[row][0..15].
inline void unpack_columns(const float* sums, int64_t rows, float* scores, int64_t stride) {
    const I32 first = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29};
    const I32 low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    for (int pair = 0; pair < 2 && 2 * pair < rows; pair++) {
        // Keys 0..7, and keys 8..15, of rows 2 * pair and the next.
        const F32 left = __builtin_shuffle(load(sums), load(sums + kLanes), first + 2 * pair);
        const F32 right = __builtin_shuffle(load(sums + 2 * kLanes), load(sums + 3 * kLanes), first + 2 * pair);
        store(scores + 2 * pair * stride, __builtin_shuffle(left, right, low));
        store(scores + (2 * pair + 1) * stride, __builtin_shuffle(left, right, low + 8));
    }
}

}  // namespace radixkv
#endif
