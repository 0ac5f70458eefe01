// Rows times a panel: the one product that linear layers and attention are made of.
//
// A panel holds 32 columns for all inputs in the order in which they are read, [inputs][32] in float32. In bfloat16 pairs of
// inputs stay together, [inputs / 2][32][2], as dot product instructions and AMX tiles want them. So in both a panel is made of
// lines of 32 words of 32 bits.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "simd.h"
#include "tiles.h"

namespace radixkv {

// Sums of so many rows by 32 columns fill 24 of 32 registers, or by 16 columns 12 of 16.
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;
// So many inputs of a panel stay in the first-level cache: 24 KiB of it; with AMX, where it has 48 KiB, 36 in float32, and 18 in
// bfloat16, because tiles of rows pass through it as well. A multiple of the groups of quantised panels.
template <typename T>
constexpr int64_t kPanelDepth = kHasTiles ? 288 : 24 * 1024 / kPanel / sizeof(T);
constexpr int64_t kAhead = 12;
// With 16 registers, an input takes 12 multiply-adds and 8 loads at most: where another thread shares the core, and the number of
// instructions that begin in a cycle, a tenth of the time would go into counting inputs one by one and into prefetching.
constexpr int kUnrolledInputs = kLanes == 16 ? 1 : 4;
// With up to so many rows, a product takes about as long as reading its weights.
constexpr int64_t kMemoryBoundRows = 96;

template <typename T>
constexpr bool kPairs = std::is_same_v<T, BF16>;
// How products of this type are computed; where both are false, by multiply-adds in float32. They differ in the order in which
// products are added, which other ways of computing the same products must keep.
template <typename T>
constexpr bool kAsTiles = kPairs<T> && kHasTiles;
template <typename T>
constexpr bool kAsPairs = kPairs<T> && kHasPairProducts;
// What rows are kept as while they pass panels: where bfloat16 is multiplied in float32, each input would be converted again for
// every few columns.
template <typename T>
using Input = std::conditional_t<kAsTiles<T> || kAsPairs<T>, T, float>;
template <typename T>
constexpr bool kConverts = !std::is_same_v<T, Input<T>>;

template <typename T>
void copy_inputs(const T* from, int64_t count, Input<T>* to) {
    int64_t at = 0;
    if constexpr (kConverts<T>) {
        for (; at + kLanes <= count; at += kLanes) store(to + at, load(from + at));
        for (; at < count; at++) to[at] = to_float(from[at]);
    } else {
        constexpr int64_t kLine = 64 / sizeof(T);
        for (; at + kLine <= count; at += kLine) std::memcpy(static_cast<void*>(to + at), from + at, 64);
        if (at < count) std::memcpy(static_cast<void*>(to + at), from + at, (count - at) * sizeof(T));
    }
}

// Rows next to each other: themselves, or copies if they are kept as other numbers. Experts have many in all where each has few.
template <typename T>
const Input<T>* as_inputs(int64_t rows, int64_t inputs, const T* x, [[maybe_unused]] Input<T>* copies) {
    if constexpr (kConverts<T>) {
#pragma omp parallel for schedule(static) if (rows > kMaxRows)
        for (int64_t row = 0; row < rows; row++) copy_inputs(x + row * inputs, inputs, copies + row * inputs);
        return copies;
    } else {
        return x;
    }
}

constexpr int kPanelVectors = kPanel / kLanes;

// Loads the initial sums. A row's products are added to them one after the other, however many rows and parts there are, so that
// its sums are the same to the last bit, whatever else is in the batch.
//
// All loops over sums are unrolled; otherwise they would not be in registers.
template <int ROWS, int WIDTH>
void load_sums(F32 (&total)[ROWS][WIDTH], const float* sums, int64_t stride, bool add) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++) total[row][i] = add ? load(sums + row * stride + i * kLanes) : F32{};
}

template <int ROWS, int WIDTH>
void store_sums(const F32 (&total)[ROWS][WIDTH], float* sums, int64_t stride) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++) store(sums + row * stride + i * kLanes, total[row][i]);
}

// Memory that is prefetched into the second-level cache while rows pass a panel: `step` bytes for each of its lines.
struct Upcoming {
    const char* from = nullptr;
    int64_t step = 0;
};

// Where row r's word k is, of rows that are packed word by word or lie apart.
template <int ROWS>
struct PackedRows {
    // Of many blocks of rows, only the first finds the panel outside the first-level cache.
    static constexpr bool kFetchesUpcoming = false, kFetchesPanel = kUnrolledInputs == 1;
    static int64_t at(int64_t row, int64_t word, int64_t) { return word * ROWS + row; }
};
template <int ROWS>
struct StridedRows {
    static constexpr bool kFetchesUpcoming = false, kFetchesPanel = true;
    static int64_t at(int64_t row, int64_t word, int64_t stride) { return row * stride + word; }
};
// Packed rows that prefetch. Without it, only the first of a few blocks of rows would read memory, which would idle during the
// others.
template <int ROWS>
struct FetchingPackedRows : PackedRows<ROWS> {
    static constexpr bool kFetchesUpcoming = true;
};

#if defined(__AVX512BF16__)
// The two inputs that a word holds, in every word.
inline __m512bh broadcast_pair(const BF16* from) {
    int32_t two;
    std::memcpy(&two, from, sizeof two);
    return (__m512bh)_mm512_set1_epi32(two);
}
#endif

// sums[row] (+)= x[row] . panel for ROWS rows, and as many of a panel's columns as WIDTH registers have: all sums stay in registers.
template <int ROWS, int WIDTH, typename Rows>
void multiply_tile(const float* x, int64_t stride, const float* panel, int64_t inputs, float* sums, int64_t sum_stride, bool add,
                   [[maybe_unused]] Upcoming upcoming) {
    F32 total[ROWS][WIDTH];
    load_sums(total, sums, sum_stride, add);
#pragma GCC unroll kUnrolledInputs
    for (int64_t k = 0; k < inputs; k++) {
        const float* line = panel + k * kPanel;
        if constexpr (Rows::kFetchesUpcoming) {
            __builtin_prefetch(upcoming.from + k * upcoming.step, 0, 2);
        } else if constexpr (Rows::kFetchesPanel) {
            // With few rows, the processor's own prefetching comes too late.
            __builtin_prefetch(line + kAhead * kPanel);
            __builtin_prefetch(line + kAhead * kPanel + kPanel / 2);
        }
        F32 weights[WIDTH];
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++) weights[i] = load(line + i * kLanes);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const F32 input = broadcast(x[Rows::at(row, k, stride)]);
#pragma GCC unroll 4
            for (int i = 0; i < WIDTH; i++) total[row][i] += input * weights[i];
        }
    }
    store_sums(total, sums, sum_stride);
}

template <int ROWS, int WIDTH, typename Rows>
void multiply_tile(const Input<BF16>* x, int64_t stride, const BF16* panel, int64_t inputs, float* sums, int64_t sum_stride, bool add,
                   [[maybe_unused]] Upcoming upcoming) {
    F32 total[ROWS][WIDTH];
    load_sums(total, sums, sum_stride, add);
    for (int64_t pair = 0; pair < inputs / 2; pair++) {
        const BF16* line = panel + pair * 2 * kPanel;
        if constexpr (Rows::kFetchesUpcoming) __builtin_prefetch(upcoming.from + pair * upcoming.step, 0, 2);
#if defined(__AVX512BF16__)
        // With few rows the processor prefetches by itself; many leave it no room to.
        if constexpr (!Rows::kFetchesUpcoming && ROWS > 8) {
            __builtin_prefetch(line + kAhead * 2 * kPanel);
            __builtin_prefetch(line + kAhead * 2 * kPanel + kPanel);
        }
        __m512bh weights[WIDTH];
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++) weights[i] = load_as<__m512bh>(line + i * kPanel);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const __m512bh input = broadcast_pair(x + Rows::at(row, pair, stride / 2) * 2);
#pragma GCC unroll 4
            for (int i = 0; i < WIDTH; i++) total[row][i] = _mm512_dpbf16_ps(total[row][i], input, weights[i]);
        }
#else
        // First the even inputs of all rows, then the odd ones: a pair at a time, there would not be registers for both.
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            F32 weights[WIDTH];
#pragma GCC unroll 4
            for (int i = 0; i < WIDTH; i++) {
                const U32 words = load_as<U32>(line + i * 2 * kLanes);
                weights[i] = reinterpret_cast<F32>(odd ? words & kUpperHalf : words << 16);
            }
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                const F32 input = broadcast(x[Rows::at(row, 2 * pair + odd, stride)]);
#pragma GCC unroll 4
                for (int i = 0; i < WIDTH; i++) total[row][i] += input * weights[i];
            }
        }
#endif
    }
    store_sums(total, sums, sum_stride);
}

// How many registers of columns so many rows pass at once; the other columns follow, out of the first-level cache.
constexpr int width_of(int64_t rows) { return kLanes == 16 || rows <= 2 ? kPanelVectors : kPanelVectors / 2; }

// sums[row][0..31] (+)= x[row] . panel, for ROWS rows.
template <int ROWS, template <int> typename Rows, typename T>
void multiply(const Input<T>* x, int64_t stride, const T* panel, int64_t inputs, float* sums, int64_t sum_stride, bool add,
              Upcoming upcoming) {
    constexpr int kWidth = width_of(ROWS);
    for (int column = 0; column < kPanel; column += kWidth * kLanes)
        multiply_tile<ROWS, kWidth, Rows<ROWS>>(x, stride, panel + column * (4 / sizeof(T)), inputs, sums + column, sum_stride, add, upcoming);
}

template <template <int> typename Rows, typename T, int ROWS = kMaxRows>
void multiply_rows(int rows, const Input<T>* x, int64_t stride, const T* panel, int64_t inputs, float* sums, int64_t sum_stride, bool add,
                   Upcoming upcoming = {}) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_rows<Rows, T, ROWS - 1>(rows, x, stride, panel, inputs, sums, sum_stride, add, upcoming);
    }
    multiply<ROWS, Rows>(x, stride, panel, inputs, sums, sum_stride, add, upcoming);
}

template <typename T>
class PanelProduct {
   public:
    // Inputs are a multiple of so many.
    static constexpr int kStep = kAsTiles<T> ? Tiles::kStep : kPairs<T> ? 2 : 1;

    // sums[row][0..31] (+)= x[row] . panel. Rows are stride and sum_stride apart. The panel that is read next, or null, is
    // `next`.
    void multiply(int64_t rows, const Input<T>* x, int64_t stride, const T* panel, int64_t inputs, float* sums, int64_t sum_stride,
                  bool add = false, const T* next = nullptr) {
        const int64_t block = rows_at_once(rows);
        Ahead ahead(next, inputs * kPanel * int64_t(sizeof(T)), (rows + block - 1) / block * ((inputs + 31) / 32));
        // What is passed again and again should stay in the first-level cache.
        const int64_t depth = rows > block || width_of(block) < kPanelVectors ? kPanelDepth<T> : inputs;
        for (int64_t start = 0; start < inputs; start += depth) {
            const int64_t count = std::min(depth, inputs - start);
            for (int64_t row = 0; row < rows; row += block)
                multiply_block(int(std::min(block, rows - row)), x + row * stride + start, stride, panel + start * kPanel, count,
                               sums + row * sum_stride, sum_stride, add || start > 0, ahead);
        }
    }

    // Rows of a block: the fewest blocks that fit the registers, as equal as possible.
    static int64_t rows_at_once(int64_t rows) {
        if (kAsTiles<T>) return Tiles::kBlock;
        const int64_t parts = (rows + kMaxRows - 1) / kMaxRows;
        return (rows + parts - 1) / parts;
    }

    // Whether that many rows should be packed first, so that they are read in one stream. AMX gains nothing.
    static bool packs(int64_t rows) { return rows > kMaxRows && rows_at_once(rows) <= kMaxRows; }

    // Up to `kMaxRows` rows, word by word; a word is two inputs in bfloat16, unless they become float32 here.
    static void pack(int64_t rows, const T* x, int64_t stride, int64_t inputs, Input<T>* to) {
        constexpr int64_t kWord = 4 / sizeof(T), kParts = sizeof(Input<T>) / sizeof(T);
        const int64_t words = inputs / kWord, size = words * kParts * rows;
        auto* out = reinterpret_cast<uint32_t*>(to);
        int64_t word = 0;
        for (; word + kLanes <= words; word += kLanes) {
            U32 lines[kLanes], columns[kLanes];
            for (int i = 0; i < kLanes; i++) lines[i] = i < rows ? load_as<U32>(x + i * stride + word * kWord) : U32{};
            transpose(lines, columns);
            // What is behind a word's rows is overwritten by the next one, but not what is behind the last.
            const bool whole = ((word + kLanes) * kParts - 1) * rows + kLanes <= size;
            const auto write = [&](int64_t at, U32 column) { std::memcpy(out + at, &column, whole ? sizeof column : rows * 4); };
            for (int i = 0; i < kLanes; i++) {
                const int64_t at = (word + i) * kParts * rows;
                if constexpr (kParts == 1) {
                    write(at, columns[i]);
                } else {
                    write(at, columns[i] << 16);
                    write(at + rows, columns[i] & kUpperHalf);
                }
            }
        }
        for (; word < words; word++)
            for (int64_t row = 0; row < rows; row++) {
                const T* from = x + row * stride + word * kWord;
                if constexpr (kParts == 1)
                    std::memcpy(out + word * rows + row, from, 4);
                else
                    for (int64_t i = 0; i < kWord; i++) to[(word * kWord + i) * rows + row] = to_float(from[i]);
            }
    }

    // As `multiply`, with rows packed `rows_at_once(rows)` at a time, of whose inputs the panel holds `count` from `start` on.
    // Meanwhile the bytes from `next` on are prefetched, if rows are few.
    static void multiply_packed(int64_t rows, const Input<T>* packed, int64_t inputs, int64_t start, int64_t count, const T* panel,
                                float* sums, int64_t sum_stride, const void* next, int64_t next_bytes) {
        const int64_t block = rows_at_once(rows), lines = count * int64_t(sizeof(T)) / 4;
        const auto multiply_blocks = [&](auto multiply) {
            for (int64_t row = 0; row < rows; row += block) {
                const int64_t num_rows = std::min(block, rows - row);
                multiply(int(num_rows), packed + row * inputs + start * num_rows, sums + row * sum_stride);
            }
        };
        if (rows > kMemoryBoundRows) {
            multiply_blocks([&](int num_rows, const Input<T>* x, float* to) {
                multiply_rows<PackedRows, T>(num_rows, x, 0, panel, count, to, sum_stride, start > 0);
            });
        } else {
            Upcoming upcoming{static_cast<const char*>(next), next_bytes * block / (rows * lines)};
            multiply_blocks([&](int num_rows, const Input<T>* x, float* to) {
                multiply_rows<FetchingPackedRows, T>(num_rows, x, 0, panel, count, to, sum_stride, start > 0, upcoming);
                upcoming.from += lines * upcoming.step;
            });
        }
    }

   private:
    void multiply_block(int rows, const Input<T>* x, int64_t stride, const T* panel, int64_t inputs, float* sums, int64_t sum_stride, bool add,
                        [[maybe_unused]] Ahead& ahead) {
#if defined(__AMX_BF16__)
        // A single row, too: so it adds in the order in which many do, and fetches ahead as they do.
        if constexpr (kAsTiles<T>) return tiles_.multiply({rows, x, stride, panel, inputs, sums, sum_stride, add}, ahead);
#endif
        multiply_rows<StridedRows, T>(rows, x, stride, panel, inputs, sums, sum_stride, add);
    }

    Tiles tiles_;
};

// Aligned memory of a thread's own.
template <typename T>
class Scratch {
   public:
    explicit Scratch(int64_t size)
        : data_(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64)), &std::free) {
        // Within a parallel region nothing can be returned or thrown; the message at least says why the process ends.
        if (data_ == nullptr && size > 0) {
            std::fprintf(stderr, "radixkv_cpu: there is no memory for %zu bytes\n", static_cast<size_t>(size) * sizeof(T));
            std::abort();
        }
    }
    T* get() const { return data_.get(); }

   private:
    std::unique_ptr<T, decltype(&std::free)> data_;
};

}  // namespace radixkv
