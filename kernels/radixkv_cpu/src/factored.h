// Products of 4-bit integers with decoding rows: a group's products are added before they are scaled.
//
//     x . weights = sum over groups of scale * (x . integers) + centre * (sum of x)
//
// No weight is computed. A prompt's rows are not multiplied so: two additions more for every group of a row are a tenth of its
// products, while hundreds of rows share the work of making weights. With AMX no rows are: tiles would be stored, scaled and
// added after every group, and many rows are slower without tiles.
#pragma once

#include "quantised.h"

#if (defined(__AVX512BF16__) && !defined(__AMX_BF16__)) || !defined(__AVX512F__)
#define RADIXKV_FACTORED

namespace radixkv {

// Products that are computed so: with dot products of bfloat16 only those in bfloat16, of which they gain most.
template <typename T, typename Format>
constexpr bool kIsFactored = false;
template <typename T, typename Number, int LOWEST>
constexpr bool kIsFactored<T, Nibbles<Number, LOWEST>> = kPairs<T> || !kHasPairProducts;

#if defined(__AVX512BF16__)
// sums[group] = sum of a row's inputs of a group.
inline void sum_groups(const BF16* x, int64_t inputs, float* sums) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int64_t k = 0; k < inputs; k += kGroup)
        *sums++ = sum(_mm512_dpbf16_ps(F32{}, (__m512bh)_mm512_loadu_si512(x + k), ones));
}

// Products with panels of a format. A row's are the same to the last bit, however many rows there are. Integers of 4 bits are
// exact in bfloat16, so two shifts and look-ups give the factors of two dot product instructions.
template <typename Format>
class FactoredProduct {
   public:
    // So many rows' sums, and their factors, fill the registers.
    static constexpr int kRows = 8;

    // sums[row][0..31] = x[row] . panel, of rows next to each other; `x_sums` are those of their groups, by `sum_groups`.
    static void multiply(int64_t rows, const BF16* x, const float* x_sums, const uint8_t* panel, int64_t inputs, float* sums) {
        const int64_t parts = (rows + kRows - 1) / kRows, at_once = (rows + parts - 1) / parts;
        for (int64_t row = 0; row < rows; row += at_once)
            multiply_rows(std::min(at_once, rows - row), x + row * inputs, x_sums + row * (inputs / kGroup), panel, inputs,
                          sums + row * kPanel);
    }

   private:
    template <int ROWS = kRows>
    static void multiply_rows(int64_t rows, const BF16* x, const float* x_sums, const uint8_t* panel, int64_t inputs, float* sums) {
        if constexpr (ROWS > 1) {
            if (rows < ROWS) return multiply_rows<ROWS - 1>(rows, x, x_sums, panel, inputs, sums);
        }
        const int64_t num_groups = inputs / kGroup;
        const __m512i integers = looked_up();
        F32 total[ROWS][2] = {};
        for (int64_t group = 0; group < num_groups; group++, panel += Format::kGroupBytes) {
            prefetch<Format>(panel);
            F32 part[ROWS][2] = {};
            add_products<ROWS>(x + group * kGroup, inputs, panel + Format::Header::kBytes, integers, part);
            const typename Format::Header numbers(panel, 0, 0);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                const F32 x_sum = broadcast(x_sums[row * num_groups + group]);
                for (int half = 0; half < 2; half++) {
                    total[row][half] += numbers.scale[half] * part[row][half];
                    total[row][half] += numbers.centre[half] * x_sum;
                }
            }
        }
        store_sums(total, sums, kPanel);
    }

    // part[row] += x[row] . integers of a group.
    template <int ROWS>
    static void add_products(const BF16* x, int64_t stride, const uint8_t* nibbles, __m512i integers, F32 (&part)[ROWS][2]) {
        for (int input = 0; input < kGroup; input += 4, nibbles += sizeof(U32)) {
            const __m512i words = _mm512_loadu_si512(nibbles);
#pragma GCC unroll 2
            for (int pair = 0; pair < 4; pair += 2) {
                const __m512bh low = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * pair), integers);
                const __m512bh high = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * pair + 4), integers);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; row++) {
                    const __m512bh two = broadcast_pair(x + row * stride + input + pair);
                    part[row][0] = _mm512_dpbf16_ps(part[row][0], two, low);
                    part[row][1] = _mm512_dpbf16_ps(part[row][1], two, high);
                }
            }
        }
    }

    // What the lowest five bits of 16 stand for. The fifth belongs to another integer, so the 16 numbers stand there twice.
    static __m512i looked_up() {
        const F32 integers = __builtin_convertvector(kLaneNumbers, F32) + float(Format::kLowest);
        return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(integers));
    }
};
#else
// sums[group] = sum of a row's inputs of a group.
inline void sum_groups(const float* x, int64_t inputs, float* sums) {
    for (int64_t k = 0; k < inputs; k += kGroup) {
        F32 total{};
        for (int i = 0; i < kGroup; i += kLanes) total += load(x + k + i);
        *sums++ = sum(total);
    }
}

// Products with one thread's panels of a format. A row's are the same to the last bit, however many rows there are. Integers count
// from 0 up here, so that nothing is added to each: centres make up for it.
template <typename Format>
class FactoredProduct {
   public:
    // sums[row][0..31] = x[row] . panel, of rows next to each other; `x_sums` are those of their groups, by `sum_groups`.
    void multiply(int64_t rows, const float* x, const float* x_sums, const uint8_t* panel, int64_t inputs, float* sums) {
        const int64_t num_groups = inputs / kGroup;
        std::fill_n(sums, rows * kPanel, 0.0f);
        for (int64_t group = 0; group < num_groups; group++, x += kGroup, panel += Format::kGroupBytes) {
            prefetch<Format>(panel);
            const uint8_t* nibbles = panel + Format::Header::kBytes;
            Header numbers(panel, 0, 0);
            for (int j = 0; j < kVectors; j++) numbers.centre[j] += float(Format::kLowest) * numbers.scale[j];
            const Group of_group{x, inputs, x_sums + group, num_groups, numbers, sums};
            if (rows == 1) {
                multiply_few<1>(of_group, nibbles);
            } else if (rows == 2) {
                multiply_few<2>(of_group, nibbles);
            } else {
                for_integers(nibbles, [&](int input, const F32(&integers)[kVectors]) {
                    for (int j = 0; j < kVectors; j++) store(integers_.get() + input * kPanel + j * kLanes, integers[j]);
                });
                const int64_t block = PanelProduct<float>::rows_at_once(rows);
                for (int64_t row = 0; row < rows; row += block) multiply_block(int(std::min(block, rows - row)), of_group.from(row));
            }
        }
    }

   private:
    using Header = typename Format::Header;

    // Rows' inputs of a group, their sums, the group's numbers, and the rows' sums over all groups.
    struct Group {
        const float* x;
        int64_t stride;
        const float* x_sums;
        int64_t num_groups;
        const Header& numbers;
        float* sums;

        Group from(int64_t row) const {
            return {x + row * stride, stride, x_sums + row * num_groups, num_groups, numbers, sums + row * kPanel};
        }
    };

    // Integers go from registers to registers.
    template <int ROWS>
    static void multiply_few(const Group& group, const uint8_t* nibbles) {
        F32 part[ROWS][kVectors] = {};
        for_integers(nibbles, [&](int input, const F32(&integers)[kVectors]) {
#pragma GCC unroll 2
            for (int row = 0; row < ROWS; row++) {
                const F32 factor = broadcast(group.x[row * group.stride + input]);
#pragma GCC unroll 4
                for (int j = 0; j < kVectors; j++) part[row][j] += factor * integers[j];
            }
        });
        add_scaled<ROWS, kVectors>(part, group, 0);
    }

    // Integers have been converted for all rows.
    template <int ROWS = kMaxRows>
    void multiply_block(int rows, const Group& group) const {
        if constexpr (ROWS > 1) {
            if (rows < ROWS) return multiply_block<ROWS - 1>(rows, group);
        }
        constexpr int kWidth = width_of(ROWS);
        for (int first = 0; first < kVectors; first += kWidth) {
            F32 part[ROWS][kWidth] = {};
#pragma GCC unroll kUnrolledInputs
            for (int input = 0; input < kGroup; input++) {
                F32 integers[kWidth];
#pragma GCC unroll 4
                for (int j = 0; j < kWidth; j++) integers[j] = load(integers_.get() + input * kPanel + (first + j) * kLanes);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; row++) {
                    const F32 factor = broadcast(group.x[row * group.stride + input]);
#pragma GCC unroll 4
                    for (int j = 0; j < kWidth; j++) part[row][j] += factor * integers[j];
                }
            }
            add_scaled<ROWS, kWidth>(part, group, first);
        }
    }

    // Calls use(input, integers) for every input of a group, and all features.
    template <typename Use>
    static void for_integers(const uint8_t* nibbles, Use use) {
        for (int input = 0; input < kGroup; input += 4, nibbles += 2 * sizeof(U32)) {
            const U32 words[2] = {load_as<U32>(nibbles), load_as<U32>(nibbles + sizeof(U32))};
#pragma GCC unroll 4
            for (int next = 0; next < 4; next++) {
                F32 integers[kVectors];
#pragma GCC unroll 4
                for (int j = 0; j < kVectors; j++)
                    integers[j] = lowest_nibbles<0>(words[j % 2] >> (next % 2 * 16 + next / 2 * 8 + j / 2 * 4));
                use(input + next, integers);
            }
        }
    }

    template <int ROWS, int WIDTH>
    static void add_scaled(const F32 (&part)[ROWS][WIDTH], const Group& group, int first) {
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const F32 x_sum = broadcast(group.x_sums[row * group.num_groups]);
#pragma GCC unroll 4
            for (int j = 0; j < WIDTH; j++) {
                float* to = group.sums + row * kPanel + (first + j) * kLanes;
                F32 total = load(to);
                total += group.numbers.scale[first + j] * part[row][j];
                total += group.numbers.centre[first + j] * x_sum;
                store(to, total);
            }
        }
    }

    Scratch<float> integers_{kGroup * kPanel};
};
#endif

}  // namespace radixkv
#endif
