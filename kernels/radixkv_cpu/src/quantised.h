// Panels whose weights are integers of 8 or 4 bits, or floats of 8, which become float32 on their way to a product.
//
// 32 inputs of a feature are a group with numbers of its own: weight = integer * scale + centre. A panel is a sequence of groups of
// 32 inputs. Each begins with a header, of scales [parts][32] and, in some formats, centres [parts][32], of equal parts of its
// inputs; then the integers follow, [32 inputs][32]:
//
//     format      integers             scales, centres
//     kInt8       8 bits               bfloat16, none
//     kInt4       4 bits, -8 to 7      bfloat16, bfloat16
//     kHalf8      8 bits               float16, none             GGUF: Q8_0
//     kHalf4      4 bits, 0 to 15      float16, float16                Q4_0, Q4_1
//     kFloat4     4 bits, 0 to 15      float32, float32                Q4_K
//     kFloat8     8 bits               float32, float32, of 16 inputs  all others, and several of them in one product
//     kScaled8    8 bits               float32, none
//     kE4M3       float8_e4m3fn        float32, none
//
// Formats for GGUF's kinds of blocks, and for weights that others quantised, stand for the original numbers, to the last bit.
//
// Of integers of 4 bits, the lowest is stored as 0. Each 64 bytes hold 8 vectors of 16 of them, in every 32 bits one of each, so that
// a shift and a look-up give a vector: nibbles 0 to 3 are of inputs 0 and 2, 4 to 7 of inputs 1 and 3, of each input two, 16 features
// apart. So a shift and a look-up of 16 bits give pairs of inputs, too.
//
// For products in bfloat16, weights are rounded to it, to nearest and ties away from zero, however many rows there are: what a
// weight is never depends on the number of rows, only on whether a row is a decoding one; see factored.h.
#pragma once

#include "panel.h"

namespace radixkv {

constexpr int kGroup = 32;

// Signed bytes. The compiler would widen them in several steps.
inline F32 load(const int8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#endif
}

// The integers in the lowest four bits of each lane, of which 0 stands for `LOWEST`.
template <int LOWEST>
F32 lowest_nibbles(U32 v) {
#if defined(__AVX512F__)
    const F32 integers = __builtin_convertvector(kLaneNumbers, F32) + float(LOWEST);
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(v), integers);
#else
    return __builtin_convertvector(reinterpret_cast<I32>(v & 15) + LOWEST, F32);
#endif
}

// So many vectors of a panel's features are converted at once, of so many inputs: they and a row's sums stay in registers (with
// AVX2, not all scales and centres do), and sums are enough not to keep each other waiting.
constexpr int kVectors = kLanes == 16 ? 2 : 4, kColumns = kVectors * kLanes, kInputs = kLanes == 16 ? 2 : 1;

typedef F32 Weights[kInputs][kVectors];

// Scales of one part of a group, of the features from `column` on, and centres if there are any.
template <typename Number, int PARTS, bool CENTRED>
struct Numbers {
    static constexpr int64_t kBytes = PARTS * (CENTRED ? 2 : 1) * kPanel * sizeof(Number);

    Numbers(const uint8_t* group, int part, int column) {
        const Number* from = reinterpret_cast<const Number*>(group) + part * kPanel + column;
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; j++) {
            scale[j] = load(from + j * kLanes);
            if constexpr (CENTRED) centre[j] = load(from + PARTS * kPanel + j * kLanes);
        }
    }

    F32 weight(F32 integer, int j) const {
        if constexpr (CENTRED) return integer * scale[j] + centre[j];
        return integer * scale[j];
    }

    F32 scale[kVectors], centre[kVectors];
};

template <typename Integer, typename Number, int PARTS, bool CENTRED>
struct Bytes {
    using Header = Numbers<Number, PARTS, CENTRED>;
    static constexpr int64_t kGroupBytes = Header::kBytes + kGroup * kPanel;

    // Calls use(input, weights) for every `kInputs` inputs of a group, and its features from `column` on.
    template <typename Use>
    static void for_inputs(const uint8_t* group, int column, Use use) {
        const auto* from = reinterpret_cast<const Integer*>(group + Header::kBytes) + column;
        for (int part = 0; part < PARTS; part++) {
            const Header numbers(group, part, column);
            for (int input = part * kGroup / PARTS; input < (part + 1) * kGroup / PARTS; input += kInputs) {
                Weights weights;
#pragma GCC unroll 2
                for (int i = 0; i < kInputs; i++)
#pragma GCC unroll 4
                    for (int j = 0; j < kVectors; j++) weights[i][j] = numbers.weight(load(from + (input + i) * kPanel + j * kLanes), j);
                use(input, weights);
            }
        }
    }
};

template <typename Number, int LOWEST>
struct Nibbles {
    using Header = Numbers<Number, 1, true>;
    static constexpr int kLowest = LOWEST;
    static constexpr int64_t kGroupBytes = Header::kBytes + kGroup * kPanel / 2;
    // Words hold nibbles of as many features; the other features are in the next nibble.
    static constexpr int kWords = 16;

    template <typename Use>
    static void for_inputs(const uint8_t* group, int column, Use use) {
        const Header numbers(group, 0, column);
        const auto* from = reinterpret_cast<const uint32_t*>(group + Header::kBytes);
        for (int input = 0; input < kGroup; input += 4, from += kWords) {
            U32 words[kVectors];
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; j++)
                words[j] = load_as<U32>(from + (column + j * kLanes) % kWords) >> (column + j * kLanes) / kWords * 4;
#pragma GCC unroll 4
            for (int next = 0; next < 4; next += kInputs) {
                Weights weights;
#pragma GCC unroll 2
                for (int i = 0; i < kInputs; i++)
#pragma GCC unroll 4
                    for (int j = 0; j < kVectors; j++)
                        weights[i][j] = numbers.weight(lowest_nibbles<LOWEST>(words[j] >> ((next + i) % 2 * 16 + (next + i) / 2 * 8)), j);
                use(input + next, weights);
            }
        }
    }
};

using Int8 = Bytes<int8_t, BF16, 1, false>;
using Int4 = Nibbles<BF16, -8>;
using Half8 = Bytes<int8_t, F16, 1, false>;
using Half4 = Nibbles<F16, 0>;
using Float4 = Nibbles<float, 0>;
using Float8 = Bytes<int8_t, float, 2, true>;
using Scaled8 = Bytes<int8_t, float, 1, false>;
using ScaledE4M3 = Bytes<E4M3, float, 1, false>;

// To bfloat16, as the upper halves of words whose lower halves are to be ignored.
inline U32 rounded(F32 v) { return reinterpret_cast<U32>(v) + 0x8000; }

// A vector of an ordinary panel in bfloat16.
inline U32 rounded_pairs(F32 first, F32 second) { return (rounded(first) >> 16) | (rounded(second) & kUpperHalf); }

// A weight as products in T take it.
template <typename T>
F32 as_multiplied(F32 weight) {
    if constexpr (kPairs<T>) return reinterpret_cast<F32>(rounded(weight) & kUpperHalf);
    return weight;
}

// A group to its part of an ordinary panel.
template <typename Format, typename T>
void dequantise(const uint8_t* group, Input<T>* to) {
    for (int column = 0; column < kPanel; column += kColumns)
        Format::for_inputs(group, column, [=](int input, const Weights& weights) {
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; j++)
                if constexpr (kPairs<Input<T>>) {
                    const U32 pairs = rounded_pairs(weights[0][j], weights[1][j]);
                    std::memcpy(static_cast<void*>(to + input * kPanel + 2 * (column + j * kLanes)), &pairs, sizeof pairs);
                } else {
                    for (int i = 0; i < kInputs; i++) store(to + (input + i) * kPanel + column + j * kLanes, as_multiplied<T>(weights[i][j]));
                }
        });
}

// total[row] += x[row] . group, of weights in T, without anything written between. Multiplications in float32 are faster here
// than dot products in bfloat16, whose instructions take at least twice as long. Products of two numbers in bfloat16 are exact, so
// they have only to be added in the order of the instructions by which many rows are multiplied, to give the same to the last bit.
template <typename Format, typename T, int ROWS>
void multiply_group(const float* x, int64_t stride, const uint8_t* group, int column, F32 (&total)[ROWS][kVectors]) {
#if defined(__AMX_BF16__)
    F32 sums[2][ROWS][kVectors] = {};  // of every second input, as in a tile
#endif
    Format::for_inputs(group, column, [&](int input, const Weights& weights) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; j++) {
            F32 multiplied[kInputs];
            for (int i = 0; i < kInputs; i++) multiplied[i] = as_multiplied<T>(weights[i][j]);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) {
                F32 inputs[kInputs];
                for (int i = 0; i < kInputs; i++) inputs[i] = broadcast(x[row * stride + input + i]);
#if defined(__AMX_BF16__)
                if constexpr (kAsTiles<T>) {
                    for (int i = 0; i < kInputs; i++) sums[i][row][j] += inputs[i] * multiplied[i];
                    continue;
                }
#endif
                for (int i = 0; i < kInputs; i++) {
                    const int at = kAsPairs<T> ? kInputs - 1 - i : i;
                    total[row][j] += inputs[at] * multiplied[at];
                }
            }
        }
    });
#if defined(__AMX_BF16__)
    if constexpr (kAsTiles<T>)
        for (int row = 0; row < ROWS; row++)
            for (int j = 0; j < kVectors; j++) total[row][j] += sums[0][row][j] + sums[1][row][j];
#endif
}

// Up to so many rows multiply integers in registers; more would turn the same ones into floats too often, or find no register.
constexpr int kFewRows = kLanes == 16 ? 4 : 1;
constexpr int64_t kPrefetchBytes = 2048;

// Prefetches as many lines as a group has, so far ahead that they arrive in time.
template <typename Format>
void prefetch(const uint8_t* group) {
#pragma GCC unroll 32
    for (int64_t at = 0; at < Format::kGroupBytes; at += 64) __builtin_prefetch(group + kPrefetchBytes + at);
}

// Products with one thread's panels of a format.
template <typename T, typename Format>
class QuantisedProduct {
   public:
    static int64_t panel_bytes(int64_t inputs) { return inputs / kGroup * Format::kGroupBytes; }

    // sums[row][0..31] = x[row] . panel; sums of rows are next to each other.
    void multiply(int64_t rows, const Input<T>* x, int64_t stride, const uint8_t* panel, int64_t inputs, float* sums) {
        if (rows <= kFewRows) return multiply_few(int(rows), x, stride, panel, inputs, sums);
        for_blocks(panel, inputs, [&](int64_t start, int64_t count, const uint8_t*) {
            product_.multiply(rows, x + start, stride, block_.get(), count, sums, kPanel, start > 0);
        });
    }

    void multiply_packed(int64_t rows, const Input<T>* packed, const uint8_t* panel, int64_t inputs, float* sums) {
        for_blocks(panel, inputs, [&](int64_t start, int64_t count, const uint8_t* next) {
            product_.multiply_packed(rows, packed, inputs, start, count, block_.get(), sums, kPanel, next, panel_bytes(count));
        });
    }

   private:
    // All rows pass a block of an ordinary panel, in the first-level cache, before the next takes its place.
    template <typename Multiply>
    void for_blocks(const uint8_t* panel, int64_t inputs, Multiply multiply) {
        for (int64_t start = 0; start < inputs; start += kPanelDepth<Input<T>>) {
            const int64_t count = std::min(kPanelDepth<Input<T>>, inputs - start);
            for (int64_t k = 0; k < count; k += kGroup, panel += Format::kGroupBytes) {
                prefetch<Format>(panel);
                dequantise<Format, T>(panel, block_.get() + k * kPanel);
            }
            multiply(start, count, panel);
        }
    }

    template <int ROWS = kFewRows>
    void multiply_few(int rows, const Input<T>* x, int64_t stride, const uint8_t* panel, int64_t inputs, float* sums) {
        if constexpr (ROWS > 1) {
            if (rows < ROWS) return multiply_few<ROWS - 1>(rows, x, stride, panel, inputs, sums);
        }
        F32 total[kPanel / kColumns][ROWS][kVectors] = {};
        for (int64_t start = 0; start < inputs; start += kFewDepth) {
            const int64_t count = std::min(kFewDepth, inputs - start);
            for (int row = 0; row < ROWS; row++)
                for (int64_t k = 0; k < count; k += kLanes) store(few_.get() + row * kFewStride + k, load(x + row * stride + start + k));
            for (int64_t k = 0; k < count; k += kGroup, panel += Format::kGroupBytes) {
                prefetch<Format>(panel);
                for (int column = 0; column < kPanel; column += kColumns)
                    multiply_group<Format, T>(few_.get() + k, kFewStride, panel, column, total[column / kColumns]);
            }
        }
        for (int column = 0; column < kPanel; column += kColumns) store_sums(total[column / kColumns], sums + column, kPanel);
    }

    PanelProduct<Input<T>> product_;
    Scratch<Input<T>> block_{kPanelDepth<Input<T>> * kPanel};
    // Inputs of few rows in float32, not a power of two apart, so that they do not compete for the same lines of a cache.
    static constexpr int64_t kFewDepth = 1024, kFewStride = kFewDepth + 2 * kLanes;
    Scratch<float> few_{kFewRows * kFewStride};
};

}  // namespace radixkv
