// Products of few rows with keys and values in place. Packing these into panels takes as long for one row as for 32, and longer
// than reading them, so it pays only with enough rows.
#pragma once

#include <algorithm>

#include "pack.h"

namespace radixkv {

// So many rows and vectors of dimensions share a loop: their sums, and what they are made of, fit into the registers.
constexpr int kRowsAtOnce = kLanes == 16 ? 4 : 2, kVectorsAtOnce = 4;

// Whether few rows have the same sums as many, to the last bit, so that a row's result does not depend on how many rows are
// beside it.
//
// With tiles, values are added as a tile instruction adds them: the products of every second of its 32 inputs to one sum from
// 0 on, those of the others to another, then both to what was there (Intel's manual, TDPBF16PS). With dot products of pairs,
// few rows get their scores from panels of keys, too: packing a panel takes no longer than adding up the lanes of three rows'
// sums. Values they read where they lie.
template <typename T>
constexpr bool kOneOrder = kAsTiles<T> || kAsPairs<T>;

// Prefetches VECTORS vectors of dimensions into the second-level cache.
template <int VECTORS, typename T>
void fetch(const T* from) {
    for (size_t byte = 0; byte < VECTORS * kLanes * sizeof(T); byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, 0, 2);
}

// sums[row][key] (+)= query[row] . key over VECTORS vectors of dimensions, of which `left` are there, before the lanes are added up.
template <int ROWS, int VECTORS, typename T>
void add_dots(const Input<T>* query, int64_t stride, const T* const* keys, const T* const* next, int64_t dim, int64_t left, bool add,
              F32 (&sums)[ROWS][kLanes]) {
    F32 inputs[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) inputs[row][i] = load_part(query + row * stride + dim + i * kLanes, left - i * kLanes);
    for (int key = 0; key < kLanes; key++) {
        if (next) fetch<VECTORS>(next[key] + dim);
        F32 total[ROWS] = {};
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) {
            const F32 part = VECTORS > 1 ? load(keys[key] + dim + i * kLanes) : load_part(keys[key] + dim, left);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) total[row] += inputs[row][i] * part;
        }
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) sums[row][key] = add ? sums[row][key] + total[row] : total[row];
    }
}

// scores[row][key] = query[row] . keys[key], of as many keys as a vector has lanes.
template <typename T, int ROWS = kRowsAtOnce>
void dots(int64_t rows, const Input<T>* query, int64_t stride, const T* const* keys, const T* const* next, int64_t dim, float* scores,
          int64_t score_stride) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return dots<T, ROWS - 1>(rows, query, stride, keys, next, dim, scores, score_stride);
    }
    F32 sums[ROWS][kLanes];
    int64_t at = 0;
    for (; at + kVectorsAtOnce * kLanes <= dim; at += kVectorsAtOnce * kLanes)
        add_dots<ROWS, kVectorsAtOnce>(query, stride, keys, next, at, kVectorsAtOnce * kLanes, at > 0, sums);
    for (; at < dim; at += kLanes) add_dots<ROWS, 1>(query, stride, keys, next, at, dim - at, at > 0, sums);
    for (int row = 0; row < ROWS; row++) store(scores + row * score_stride, reduce_each(sums[row], [](F32 a, F32 b) { return a + b; }));
    if (rows > ROWS) dots<T>(rows - ROWS, query + ROWS * stride, stride, keys, nullptr, dim, scores + ROWS * score_stride, score_stride);
}

// total[row] += weights[row][key] * values[key] over VECTORS vectors of dimensions, of which `left` are there.
template <int ROWS, int VECTORS, typename T>
__attribute__((always_inline)) inline void add_key(const float* weights, int64_t stride, const T* value, int64_t left,
                                                   F32 (&total)[ROWS][VECTORS]) {
    F32 part[VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) part[i] = VECTORS > 1 ? load(value + i * kLanes) : load_part(value, left);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++) {
        const F32 weight = broadcast(weights[row * stride]);
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) total[row][i] += weight * part[i];
    }
}

// outputs[row] = outputs[row] * shrink[row] + weights[row] . values over VECTORS vectors of dimensions, of which `left` are there.
template <int ROWS, int VECTORS, typename T>
void add_weighted_part(const float* weights, int64_t stride, const T* const* values, const T* const* next, int count, int64_t left,
                       int64_t dim, const float* shrink, float* outputs, int64_t output_stride) {
    F32 total[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) total[row][i] = load(outputs + row * output_stride + dim + i * kLanes) * shrink[row];
    const auto add = [&](int key, F32(&to)[ROWS][VECTORS]) {
        if (next) fetch<VECTORS>(next[key] + dim);
        add_key(weights + key, stride, values[key] + dim, left, to);
    };
    if constexpr (kAsTiles<T>) {
        for (int first = 0; first < count; first += kPanel) {
            const int stop = std::min(first + kPanel, count);
            F32 even[ROWS][VECTORS] = {}, odd[ROWS][VECTORS] = {};
            if constexpr (ROWS * VECTORS <= 12) {
                int key = first;
                for (; key + 1 < stop; key += 2) add(key, even), add(key + 1, odd);
                if (key < stop) add(key, even);
            } else {  // the registers hold only one of the two
                for (int key = first; key < stop; key += 2) add(key, even);
                for (int key = first + 1; key < stop; key += 2) add(key, odd);
            }
            for (int row = 0; row < ROWS; row++)
                for (int i = 0; i < VECTORS; i++) total[row][i] += even[row][i] + odd[row][i];
        }
    } else {
        for (int key = 0; key < count; key++) add(key, total);
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) store(outputs + row * output_stride + dim + i * kLanes, total[row][i]);
}

// outputs[row] = outputs[row] * shrink[row] + the sum of weights[row][key] * values[key]. Outputs are padded to whole vectors.
// Meanwhile as many vectors that come `next` are prefetched.
template <typename T, int ROWS = kRowsAtOnce>
void add_weighted(int64_t rows, const float* weights, int64_t stride, const T* const* values, const T* const* next, int count, int64_t dim,
                  const float* shrink, float* outputs, int64_t output_stride) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS)
            return add_weighted<T, ROWS - 1>(rows, weights, stride, values, next, count, dim, shrink, outputs, output_stride);
    }
    int64_t at = 0;
    for (; at + kVectorsAtOnce * kLanes <= dim; at += kVectorsAtOnce * kLanes)
        add_weighted_part<ROWS, kVectorsAtOnce>(weights, stride, values, next, count, kVectorsAtOnce * kLanes, at, shrink,
                                                outputs, output_stride);
    for (; at < dim; at += kLanes)
        add_weighted_part<ROWS, 1>(weights, stride, values, next, count, dim - at, at, shrink, outputs, output_stride);
    if (rows > ROWS)
        add_weighted<T>(rows - ROWS, weights + ROWS * stride, stride, values, nullptr, count, dim, shrink + ROWS,
                        outputs + ROWS * output_stride, output_stride);
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
// outputs[row] = outputs[row] * shrink[row] + weights[row] . values over LINES x 32 dimensions, of which `left` are there.
template <int ROWS, int LINES>
void add_pairs_part(const BF16* weights, const BF16* const* values, const BF16* const* next, int start, int stop, int count, int64_t dim,
                    int64_t left, const float* shrink, float* outputs, int64_t output_stride) {
    __mmask32 there[LINES];
    for (int i = 0; i < LINES; i++) there[i] = left >= (i + 1) * kPanel ? ~__mmask32(0) : (__mmask32(1) << (left - i * kPanel)) - 1;
    // All loops over it are unrolled, or it would lie in memory.
    F32 total[ROWS][2 * LINES];
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * LINES; i++) total[row][i] = load(outputs + row * output_stride + dim + i * kLanes) * shrink[row];
    for (int key = start; key < stop; key += 2) {
        __m512bh pairs[2 * LINES];
#pragma GCC unroll 2
        for (int i = 0; i < LINES; i++) {
            if (next) __builtin_prefetch(next[key] + dim + i * kPanel, 0, 2), __builtin_prefetch(next[key + 1] + dim + i * kPanel, 0, 2);
            const auto even = (Line)_mm512_maskz_loadu_epi16(there[i], values[key] + dim + i * kPanel);
            const auto odd = key + 1 < count ? (Line)_mm512_maskz_loadu_epi16(there[i], values[key + 1] + dim + i * kPanel) : Line{};
            pairs[2 * i] = (__m512bh)first_pairs(even, odd);
            pairs[2 * i + 1] = (__m512bh)last_pairs(even, odd);
        }
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            const __m512bh weight = broadcast_pair(weights + row * kKeys + key);
#pragma GCC unroll 4
            for (int i = 0; i < 2 * LINES; i++) total[row][i] = _mm512_dpbf16_ps(total[row][i], weight, pairs[i]);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * LINES; i++) store(outputs + row * output_stride + dim + i * kLanes, total[row][i]);
}

// outputs[row] = outputs[row] * shrink[row] + the sum of weights[row][key] * values[key], the keys from `start` to `stop` by pairs, as in
// a product with panels of them. Outputs are padded to 32 dimensions. Meanwhile the next values are prefetched.
template <int ROWS = kRowsAtOnce>
void add_pairs(int64_t rows, const BF16* weights, const BF16* const* values, const BF16* const* next, int start, int stop, int count,
               int64_t dim, const float* shrink, float* outputs, int64_t output_stride) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return add_pairs<ROWS - 1>(rows, weights, values, next, start, stop, count, dim, shrink, outputs, output_stride);
    }
    int64_t at = 0;
    for (; at + kPanel < dim; at += 2 * kPanel)
        add_pairs_part<ROWS, 2>(weights, values, next, start, stop, count, at, dim - at, shrink, outputs, output_stride);
    if (at < dim) add_pairs_part<ROWS, 1>(weights, values, next, start, stop, count, at, dim - at, shrink, outputs, output_stride);
    if (rows > ROWS)
        add_pairs<>(rows - ROWS, weights + ROWS * kKeys, values, nullptr, start, stop, count, dim, shrink + ROWS,
                    outputs + ROWS * output_stride, output_stride);
}
#endif

}  // namespace radixkv
