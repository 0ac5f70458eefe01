// Panels whose weights are integers of 8 or 4 bits, which become floats on their way to a product.
//
// 32 inputs of a feature are a group with numbers of its own. A panel is a sequence of groups of 32 inputs:
//
//     8 bits    scales [32] in bfloat16, then bytes [32 inputs][32]                        weight = integer * scale
//     4 bits    scales [32] and centres [32] in bfloat16, then nibbles [32 inputs][32]     weight = integer * scale + centre
//
// Integers of 4 bits are from -8 to 7 and have 8 added. Each 64 bytes hold 8 vectors of 16 of them, the first in the lowest
// nibble of every 32 bits, so that a shift and a look-up give a vector.
//
// For products in bfloat16, weights are rounded to it, to nearest and ties away from zero, however many rows there are: what a
// weight is never depends on the number of rows.
#pragma once

#include "panel.h"

namespace radixkv {

constexpr int kGroup = 32;

typedef int8_t I8 __attribute__((vector_size(16)));

// Sixteen signed bytes.
inline F32 load(const int8_t* from) {
    I8 bytes;
    std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(bytes)));
#else
    return __builtin_convertvector(__builtin_convertvector(bytes, I32), F32);
#endif
}

// The integers in the lowest four bits of each lane.
inline F32 lowest_nibbles(U32 v) {
#if defined(__AVX512F__)
    const F32 integers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(v), integers);
#else
    return __builtin_convertvector(reinterpret_cast<I32>(v & 15) - 8, F32);
#endif
}

// The weights of two inputs, each of 32 features in two vectors.
typedef F32 InputPair[2][2];

struct Int8 {
    static constexpr int64_t kHeaderBytes = kPanel * sizeof(BF16);
    static constexpr int64_t kGroupBytes = kHeaderBytes + kGroup * kPanel;

    // Calls use(input, weights) for every second input of a group.
    template <typename Use>
    static void for_pairs(const uint8_t* group, Use use) {
        const auto* header = reinterpret_cast<const BF16*>(group);
        const F32 scale[2] = {load(header), load(header + kLanes)};
        const auto* from = reinterpret_cast<const int8_t*>(group + kHeaderBytes);
        for (int input = 0; input < kGroup; input += 2) {
            InputPair weights;
            for (int i = 0; i < 2; i++)
                for (int half = 0; half < 2; half++) weights[i][half] = load(from + (input + i) * kPanel + half * kLanes) * scale[half];
            use(input, weights);
        }
    }
};

struct Int4 {
    static constexpr int64_t kHeaderBytes = 2 * kPanel * sizeof(BF16);
    static constexpr int64_t kGroupBytes = kHeaderBytes + kGroup * kPanel / 2;

    template <typename Use>
    static void for_pairs(const uint8_t* group, Use use) {
        const auto* header = reinterpret_cast<const BF16*>(group);
        const F32 scale[2] = {load(header), load(header + kLanes)};
        const F32 centre[2] = {load(header + kPanel), load(header + kPanel + kLanes)};
        const uint8_t* from = group + kHeaderBytes;
        for (int input = 0; input < kGroup; input += 4, from += sizeof(U32)) {
            U32 words;
            std::memcpy(&words, from, sizeof words);
#pragma GCC unroll 2
            for (int pair = 0; pair < 4; pair += 2) {
                InputPair weights;
                for (int i = 0; i < 2; i++)
                    for (int half = 0; half < 2; half++)
                        weights[i][half] = lowest_nibbles(words >> (8 * (pair + i) + 4 * half)) * scale[half] + centre[half];
                use(input + pair, weights);
            }
        }
    }
};

constexpr uint32_t kUpperHalf = 0xffff0000;

// To bfloat16, as the upper halves of words whose lower halves are to be ignored.
inline U32 rounded(F32 v) { return reinterpret_cast<U32>(v) + 0x8000; }

// A vector of an ordinary panel in bfloat16.
inline U32 rounded_pairs(F32 first, F32 second) { return (rounded(first) >> 16) | (rounded(second) & kUpperHalf); }

// A group to its part of an ordinary panel.
template <typename Format, typename T>
void dequantise(const uint8_t* group, T* to) {
    Format::for_pairs(group, [to](int input, const InputPair& weights) {
        for (int half = 0; half < 2; half++)
            if constexpr (kPairs<T>) {
                const U32 pairs = rounded_pairs(weights[0][half], weights[1][half]);
                std::memcpy(static_cast<void*>(to + input * kPanel + half * 2 * kLanes), &pairs, sizeof pairs);
            } else {
                for (int i = 0; i < 2; i++) store(to + (input + i) * kPanel + half * kLanes, weights[i][half]);
            }
    });
}

// total[row] += x[row] . group, of weights in T, without anything written between. Multiplications in float32 are faster here
// than dot products in bfloat16, whose instructions take at least twice as long. Products of two numbers in bfloat16 are exact, so
// they have only to be added in the order of the instructions by which many rows are multiplied, to give the same to the last bit.
template <typename Format, typename T, int ROWS>
void multiply_group(const float* x, int64_t stride, const uint8_t* group, F32 (&total)[ROWS][2]) {
#if defined(__AMX_BF16__)
    F32 sums[2][ROWS][2] = {};  // of every second input, as in a tile
#endif
    Format::for_pairs(group, [&](int input, const InputPair& weights) {
        for (int half = 0; half < 2; half++) {
            F32 pair[2] = {weights[0][half], weights[1][half]};
            if constexpr (kPairs<T>)
                for (F32& weight : pair) weight = reinterpret_cast<F32>(rounded(weight) & kUpperHalf);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) {
                const F32 first = broadcast(x[row * stride + input]), second = broadcast(x[row * stride + input + 1]);
                if constexpr (kPairs<T>) {
#if defined(__AMX_BF16__)
                    sums[0][row][half] += first * pair[0];
                    sums[1][row][half] += second * pair[1];
#elif defined(__AVX512BF16__)
                    total[row][half] += second * pair[1];
                    total[row][half] += first * pair[0];
#else
                    total[row][half] += first * pair[0] + second * pair[1];
#endif
                } else {
                    total[row][half] += first * pair[0];
                    total[row][half] += second * pair[1];
                }
            }
        }
    });
#if defined(__AMX_BF16__)
    if constexpr (kPairs<T>)
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++) total[row][half] += sums[0][row][half] + sums[1][row][half];
#endif
}

// Up to so many rows multiply integers in registers; more would turn the same ones into floats too often.
constexpr int kFewRows = 4;
constexpr int64_t kPrefetchBytes = 2048;

// Products with one thread's panels of a format.
template <typename T, typename Format>
class QuantisedProduct {
   public:
    static int64_t panel_bytes(int64_t inputs) { return inputs / kGroup * Format::kGroupBytes; }

    // sums[row][0..31] = x[row] . panel; sums of rows are next to each other.
    void multiply(int64_t rows, const T* x, int64_t stride, const uint8_t* panel, int64_t inputs, float* sums) {
        if (rows <= kFewRows) return multiply_few(int(rows), x, stride, panel, inputs, sums);
        for_blocks(panel, inputs, [&](int64_t start, int64_t count) {
            product_.multiply(rows, x + start, stride, block_.get(), count, sums, kPanel, start > 0);
        });
    }

    void multiply_packed(int64_t rows, const T* packed, const uint8_t* panel, int64_t inputs, float* sums) {
        for_blocks(panel, inputs, [&](int64_t start, int64_t count) {
            product_.multiply_packed(rows, packed, inputs, start, count, block_.get(), sums, kPanel);
        });
    }

   private:
    // All rows pass a block of an ordinary panel, in the first-level cache, before the next takes its place.
    template <typename Multiply>
    void for_blocks(const uint8_t* panel, int64_t inputs, Multiply multiply) {
        for (int64_t start = 0; start < inputs; start += kPanelDepth<T>) {
            const int64_t count = std::min(kPanelDepth<T>, inputs - start);
            for (int64_t k = 0; k < count; k += kGroup, panel += Format::kGroupBytes) {
                prefetch(panel);
                dequantise<Format>(panel, block_.get() + k * kPanel);
            }
            multiply(start, count);
        }
    }

    template <int ROWS = kFewRows>
    void multiply_few(int rows, const T* x, int64_t stride, const uint8_t* panel, int64_t inputs, float* sums) {
        if constexpr (ROWS > 1) {
            if (rows < ROWS) return multiply_few<ROWS - 1>(rows, x, stride, panel, inputs, sums);
        }
        F32 total[ROWS][2] = {};
        for (int64_t start = 0; start < inputs; start += kFewDepth) {
            const int64_t count = std::min(kFewDepth, inputs - start);
            for (int row = 0; row < ROWS; row++)
                for (int64_t k = 0; k < count; k += kLanes) store(few_.get() + row * kFewStride + k, load(x + row * stride + start + k));
            for (int64_t k = 0; k < count; k += kGroup, panel += Format::kGroupBytes) {
                prefetch(panel);
                multiply_group<Format, T>(few_.get() + k, kFewStride, panel, total);
            }
        }
        store_sums<ROWS>(total, sums, kPanel);
    }

    // As many lines as a group has, so far ahead that they arrive in time.
    static void prefetch(const uint8_t* group) {
#pragma GCC unroll 32
        for (int64_t at = 0; at < Format::kGroupBytes; at += 64) __builtin_prefetch(group + kPrefetchBytes + at);
    }

    PanelProduct<T> product_;
    Scratch<T> block_{kPanelDepth<T> * kPanel};
    // Inputs of few rows in float32, not a power of two apart, so that they do not compete for the same lines of a cache.
    static constexpr int64_t kFewDepth = 1024, kFewStride = kFewDepth + 2 * kLanes;
    Scratch<float> few_{kFewRows * kFewStride};
};

}  // namespace radixkv
