// Products of 4-bit integers with decoding rows, in bfloat16: a group's products are added before they are scaled.
//
//     x . weights = sum over groups of scale * (x . integers) + centre * (sum of x)
//
// No weight is computed: integers of 4 bits are exact in bfloat16, so two shifts and look-ups give the factors of two dot
// product instructions. A prompt's rows are not multiplied so: two additions more for every group of a row are a tenth of its
// products, while hundreds of rows share the work of making weights. With AMX no rows are: tiles would be stored, scaled and
// added after every group, and many rows are slower without tiles.
#pragma once

#include "quantised.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define RADIXKV_FACTORED

namespace radixkv {

// Formats whose products are computed so.
template <typename Format>
constexpr bool kIsFactored = false;
template <typename Number, int LOWEST>
constexpr bool kIsFactored<Nibbles<Number, LOWEST>> = true;

// sums[group] = sum of a row's inputs of a group.
inline void sum_groups(const BF16* x, int64_t inputs, float* sums) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int64_t k = 0; k < inputs; k += kGroup)
        *sums++ = sum(_mm512_dpbf16_ps(F32{}, (__m512bh)_mm512_loadu_si512(x + k), ones));
}

// Products with panels of a format. A row's are the same to the last bit, however many rows there are.
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

}  // namespace radixkv
#endif
