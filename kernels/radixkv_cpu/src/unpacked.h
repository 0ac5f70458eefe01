// Products of few rows with keys and values as they lie in memory. Packing these into panels takes as long for one row as for
// 32, and longer than reading them: it pays only where enough rows pass the panels.
#pragma once

#include <algorithm>

#include "panel.h"

namespace radixkv {

// So many rows and vectors of 16 dimensions share a loop: their sums, and what they are made of, fit into the registers.
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 4, kVectorsAtOnce = 4;
#else
constexpr int kRowsAtOnce = 2, kVectorsAtOnce = 2;
#endif

// The first lines of so many dimensions are on their way to the second-level cache after this.
template <int VECTORS, typename T>
void fetch(const T* from) {
    for (size_t byte = 0; byte < VECTORS * kLanes * sizeof(T); byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, 0, 2);
}

// sums[row][key] (+)= query[row] . key over VECTORS x 16 dimensions, of which `left` are there, before the lanes are added up.
template <int ROWS, int VECTORS, typename T>
void add_dots(const T* query, int64_t stride, const T* const* keys, const T* const* next, int64_t dim, int64_t left, bool add,
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

// scores[row][0..15] = query[row] . keys[0..15].
template <typename T, int ROWS = kRowsAtOnce>
void dots(int64_t rows, const T* query, int64_t stride, const T* const* keys, const T* const* next, int64_t dim, float* scores,
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

// outputs[row] = outputs[row] * shrink[row] + weights[row] . values over VECTORS x 16 dimensions, of which `left` are there.
template <int ROWS, int VECTORS, typename T>
void add_weighted_part(const float* weights, int64_t stride, const T* const* values, const T* const* next, int count, int64_t left,
                       int64_t dim, const float* shrink, float* outputs, int64_t output_stride) {
    F32 total[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) total[row][i] = load(outputs + row * output_stride + dim + i * kLanes) * shrink[row];
    for (int key = 0; key < count; key++) {
        if (next) fetch<VECTORS>(next[key] + dim);
        F32 part[VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) part[i] = VECTORS > 1 ? load(values[key] + dim + i * kLanes) : load_part(values[key] + dim, left);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            const F32 weight = broadcast(weights[row * stride + key]);
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) total[row][i] += weight * part[i];
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) store(outputs + row * output_stride + dim + i * kLanes, total[row][i]);
}

// outputs[row] = outputs[row] * shrink[row] + the sum of weights[row][key] * values[key]. Outputs are padded to 16 dimensions.
template <typename T, int ROWS = kRowsAtOnce>
void add_weighted(int64_t rows, const float* weights, int64_t stride, const T* const* values, const T* const* next, int count, int64_t dim,
                  const float* shrink, float* outputs, int64_t output_stride) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return add_weighted<T, ROWS - 1>(rows, weights, stride, values, next, count, dim, shrink, outputs, output_stride);
    }
    int64_t at = 0;
    for (; at + kVectorsAtOnce * kLanes <= dim; at += kVectorsAtOnce * kLanes)
        add_weighted_part<ROWS, kVectorsAtOnce>(weights, stride, values, next, count, kVectorsAtOnce * kLanes, at, shrink, outputs,
                                                output_stride);
    for (; at < dim; at += kLanes)
        add_weighted_part<ROWS, 1>(weights, stride, values, next, count, dim - at, at, shrink, outputs, output_stride);
    if (rows > ROWS)
        add_weighted<T>(rows - ROWS, weights + ROWS * stride, stride, values, nullptr, count, dim, shrink + ROWS,
                        outputs + ROWS * output_stride, output_stride);
}

}  // namespace radixkv
