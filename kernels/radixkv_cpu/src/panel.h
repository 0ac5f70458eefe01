// Rows times a panel: the one product that linear layers and attention are made of.
//
// A panel holds 32 columns for all inputs in the order in which they are read, [inputs][32] in float32. In bfloat16 pairs of
// inputs stay together, [inputs / 2][32][2], as dot product instructions and AMX tiles want them. So in both a panel is made of
// lines of 32 words of 32 bits.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "simd.h"

namespace radixkv {

constexpr int kPanel = 32;
// Accumulators of so many rows by 32 columns fill 24 of 32 registers.
constexpr int kMaxRows = 12;

template <typename T>
constexpr bool kPairs = std::is_same_v<T, BF16>;

// sums[row][0..31] += x[row] . panel, for ROWS rows.
template <int ROWS>
void multiply(const float* x, int64_t stride, const float* panel, int64_t inputs, float* sums, int64_t sum_stride) {
    F32 total[ROWS][2] = {};
    for (int64_t k = 0; k < inputs; k++) {
        const F32 low = load(panel + k * kPanel), high = load(panel + k * kPanel + kLanes);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const F32 input = broadcast(x[row * stride + k]);
            total[row][0] += input * low;
            total[row][1] += input * high;
        }
    }
    for (int row = 0; row < ROWS; row++) {
        store(sums + row * sum_stride, total[row][0]);
        store(sums + row * sum_stride + kLanes, total[row][1]);
    }
}

template <int ROWS>
void multiply(const BF16* x, int64_t stride, const BF16* panel, int64_t inputs, float* sums, int64_t sum_stride) {
#if defined(__AVX512BF16__)
    // With one or two rows, several sums a column hide the latency of the additions.
    constexpr int kChains = ROWS <= 2 ? 4 : 1;
    __m512 total[kChains][ROWS][2];
    for (auto& chain : total)
        for (auto& row : chain) row[0] = row[1] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < inputs / 2; pair += kChains) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; chain++) {
            const BF16* line = panel + (pair + chain) * 2 * kPanel;
            const __m512bh low = (__m512bh)_mm512_loadu_si512(line), high = (__m512bh)_mm512_loadu_si512(line + kPanel);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                int32_t two;
                std::memcpy(&two, x + row * stride + (pair + chain) * 2, sizeof two);
                const __m512bh input = (__m512bh)_mm512_set1_epi32(two);
                total[chain][row][0] = _mm512_dpbf16_ps(total[chain][row][0], input, low);
                total[chain][row][1] = _mm512_dpbf16_ps(total[chain][row][1], input, high);
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) {
            __m512 all = total[0][row][half];
            for (int chain = 1; chain < kChains; chain++) all = _mm512_add_ps(all, total[chain][row][half]);
            _mm512_storeu_ps(sums + row * sum_stride + half * kLanes, all);
        }
#else
    F32 total[ROWS][2] = {};
    for (int64_t k = 0; k < inputs; k += 2) {
        U32 lines[2];
        std::memcpy(lines, panel + k * kPanel, sizeof lines);
        for (int half = 0; half < 2; half++) {
            const F32 even = reinterpret_cast<F32>(lines[half] << 16), odd = reinterpret_cast<F32>(lines[half] & 0xffff0000);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                const BF16* input = x + row * stride + k;
                total[row][half] += to_float(input[0]) * even + to_float(input[1]) * odd;
            }
        }
    }
    for (int row = 0; row < ROWS; row++) {
        store(sums + row * sum_stride, total[row][0]);
        store(sums + row * sum_stride + kLanes, total[row][1]);
    }
#endif
}

template <typename T, int ROWS = kMaxRows>
void multiply_rows(int rows, const T* x, int64_t stride, const T* panel, int64_t inputs, float* sums, int64_t sum_stride) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_rows<T, ROWS - 1>(rows, x, stride, panel, inputs, sums, sum_stride);
    }
    multiply<ROWS>(x, stride, panel, inputs, sums, sum_stride);
}

// A thread's configuration of AMX tiles, kept while the number of rows stays the same.
class Tiles {
   public:
#if defined(__AMX_BF16__)
    static constexpr int kBlock = 32;
    // From here on a tile instruction, which computes 16 rows in the time of one, gains.
    static constexpr int kMinRows = 2;

    ~Tiles() {
        if (rows_) _tile_release();
    }

    // sums[row][0..31] = x[row] . panel for up to 32 rows; inputs are a multiple of 32.
    void multiply(int rows, const BF16* x, int64_t stride, const BF16* panel, int64_t inputs, float* sums, int64_t sum_stride) {
        constexpr int kLineBytes = kPanel * 2 * sizeof(BF16);
        configure(rows);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < inputs; k += 32) {
            _tile_loadd(6, panel + k * kPanel, kLineBytes);
            _tile_loadd(7, panel + k * kPanel + kPanel, kLineBytes);
            _tile_loadd(4, x + k, stride * sizeof(BF16));
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (rows > 16) {
                _tile_loadd(5, x + 16 * stride + k, stride * sizeof(BF16));
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, sum_stride * sizeof(float));
        _tile_stored(1, sums + kLanes, sum_stride * sizeof(float));
        if (rows > 16) {
            _tile_stored(2, sums + 16 * sum_stride, sum_stride * sizeof(float));
            _tile_stored(3, sums + 16 * sum_stride + kLanes, sum_stride * sizeof(float));
        }
    }

   private:
    struct Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };

    // Tiles 0..3 are sums of 2 x 2, 4 and 5 inputs, 6 and 7 weights.
    void configure(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        const int first = std::min(rows, 16), second = std::max(rows - 16, 1);
        const int tile_rows[8] = {first, first, second, second, first, second, 16, 16};
        Config config;
        for (int tile = 0; tile < 8; tile++) {
            config.rows[tile] = uint8_t(tile_rows[tile]);
            config.row_bytes[tile] = 64;
        }
        _tile_loadconfig(&config);
    }

    int rows_ = 0;
#endif
};

template <typename T>
class PanelProduct {
   public:
    // sums[row][0..31] = x[row] . panel. Rows are stride and sum_stride apart.
    void multiply(int64_t rows, const T* x, int64_t stride, const T* panel, int64_t inputs, float* sums, int64_t sum_stride) {
        const int64_t block = rows_at_once(rows);
        for (int64_t row = 0; row < rows; row += block) {
            const int count = int(std::min(block, rows - row));
            const T* from = x + row * stride;
            float* to = sums + row * sum_stride;
#if defined(__AMX_BF16__)
            if constexpr (kPairs<T>) {
                if (rows >= Tiles::kMinRows) {
                    tiles_.multiply(count, from, stride, panel, inputs, to, sum_stride);
                    continue;
                }
            }
#endif
            multiply_rows<T>(count, from, stride, panel, inputs, to, sum_stride);
        }
    }

   private:
    // As equal parts of all rows as the registers allow.
    static int64_t rows_at_once(int64_t rows) {
#if defined(__AMX_BF16__)
        if (kPairs<T> && rows >= Tiles::kMinRows) return Tiles::kBlock;
#endif
        const int64_t parts = (rows + kMaxRows - 1) / kMaxRows;
        return (rows + parts - 1) / parts;
    }

    Tiles tiles_;
};

// Aligned memory of a thread's own.
template <typename T>
class Scratch {
   public:
    explicit Scratch(int64_t size)
        : data_(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64)), &std::free) {}
    T* get() const { return data_.get(); }

   private:
    std::unique_ptr<T, decltype(&std::free)> data_;
};

}  // namespace radixkv
