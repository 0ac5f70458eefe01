// Keys and values out of the cache, where they lie scattered, into panels.
#pragma once

#include <algorithm>

#include "panel.h"

namespace radixkv {

constexpr int kKeys = 64;  // keys that are read at a time

// Up to a whole panel.
inline int64_t padded(int64_t dim) { return (dim + kPanel - 1) / kPanel * kPanel; }

// Prefetches a vector into the caches.
template <typename T>
void fetch_vector(const T* from, int64_t dim) {
    for (int64_t at = 0; at < dim; at += 64 / sizeof(T)) __builtin_prefetch(from + at);
}

// A vector's inputs and zeros up to a whole panel.
template <typename T>
void copy_padded(const T* from, int64_t dim, Input<T>* to) {
    copy_inputs(from, dim, to);
    if (dim < padded(dim)) std::memset(static_cast<void*>(to + dim), 0, (padded(dim) - dim) * sizeof(Input<T>));
}

// `count` keys into panels of 32 of them: [panels][words of a key][32 keys]. Missing keys and dimensions of a panel become zeros.
// Meanwhile the `next` ones, as many, are prefetched: they lie scattered, where no processor foresees them.
template <typename T>
void pack_keys(const T* const* keys, const T* const* next, int count, int64_t dim, T* to) {
    constexpr int64_t kWord = 4 / sizeof(T);
    const int64_t words = padded(dim) / kWord;
    for (int first = 0; first < padded(count); first += kLanes) {
        auto* panel = reinterpret_cast<uint32_t*>(to) + first / kPanel * words * kPanel + first % kPanel;
        for (int64_t word = 0; word < words; word += kLanes) {
            U32 rows[kLanes], columns[kLanes];
            const int64_t left = std::min<int64_t>(dim - word * kWord, kLanes * kWord);
            for (int i = 0; i < kLanes; i++) __builtin_prefetch(next[first + i] + word * kWord, 0, 2);
            if (first + kLanes <= count && left == kLanes * kWord) {
                for (int i = 0; i < kLanes; i++) rows[i] = load_as<U32>(keys[first + i] + word * kWord);
            } else {
                for (int i = 0; i < kLanes; i++) {
                    rows[i] = U32{};
                    if (first + i < count && left > 0) std::memcpy(&rows[i], keys[first + i] + word * kWord, left * sizeof(T));
                }
            }
            transpose(rows, columns);
            for (int i = 0; i < kLanes; i++) std::memcpy(panel + (word + i) * kPanel, &columns[i], sizeof columns[i]);
        }
    }
}

// `count` values into panels of 32 dimensions: [panels][most_keys][32], by pairs of keys in bfloat16. Up to a multiple of 32 keys,
// missing ones become zeros.
inline void pack_values(const float* const* values, const float* const* next, int count, int64_t dim, int64_t most_keys, float* panels) {
    for (int64_t column = 0; column < padded(dim); column += kPanel) {
        float* to = panels + column * most_keys;
        for (int key = 0; key < padded(count); key++) {
            __builtin_prefetch(next[key] + column, 0, 2);
            __builtin_prefetch(next[key] + column + kLanes, 0, 2);
            for (int half = 0; half < kPanel; half += kLanes, to += kLanes)
                store(to, key < count ? load_part(values[key] + column + half, dim - column - half) : F32{});
        }
    }
}

// 32 numbers in bfloat16.
typedef uint16_t Line __attribute__((vector_size(64)));

#if defined(__AVX512F__)
// Pairs of numbers of two lines: the first 16 pairs, and the others.
inline Line first_pairs(Line even, Line odd) {
    return __builtin_shuffle(even, odd, Line{0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                             8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47});
}
inline Line last_pairs(Line even, Line odd) {
    return __builtin_shuffle(even, odd, Line{16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                             24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63});
}
#endif

// Pairs of numbers of two lines. Shuffles of registers that the processor does not have would be done number by number.
inline void store_pairs(const Line& even, const Line& odd, BF16* to) {
#if defined(__AVX512F__)
    const Line lines[2] = {first_pairs(even, odd), last_pairs(even, odd)};
    std::memcpy(static_cast<void*>(to), lines, sizeof lines);
#else
    const auto words = [](const Line& line, int at) { return widened(reinterpret_cast<const uint16_t*>(&line) + at); };
    for (int at = 0; at < kPanel; at += kLanes) {
        const U32 pairs = words(even, at) | words(odd, at) << 16;
        std::memcpy(static_cast<void*>(to + 2 * at), &pairs, sizeof pairs);
    }
#endif
}

inline void pack_values(const BF16* const* values, const BF16* const* next, int count, int64_t dim, int64_t most_keys, BF16* panels) {
    const auto part = [&](int key, int64_t column) {
        Line line{};
        if (key < count) std::memcpy(&line, values[key] + column, std::min<int64_t>(dim - column, kPanel) * sizeof(BF16));
        return line;
    };
    for (int64_t column = 0; column < padded(dim); column += kPanel) {
        BF16* to = panels + column * most_keys;
        for (int key = 0; key < padded(count); key += 2, to += 2 * kPanel) {
            __builtin_prefetch(next[key] + column, 0, 2);
            __builtin_prefetch(next[key + 1] + column, 0, 2);
            Line even, odd;
            if (key + 1 < count && column + kPanel <= dim) {
                std::memcpy(&even, values[key] + column, sizeof even);
                std::memcpy(&odd, values[key + 1] + column, sizeof odd);
            } else {
                even = part(key, column), odd = part(key + 1, column);
            }
            store_pairs(even, odd, to);
        }
    }
}

}  // namespace radixkv
