// As many lanes of float32 as a register has, written with the compiler's vector extensions. Wider vectors than the processor has
// would lie in memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <immintrin.h>

#define RADIXKV_API extern "C" __attribute__((visibility("default")))

namespace radixkv {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

// What multiplies bfloat16 numbers without converting them to float32 first: AMX tiles, or dot products of pairs.
#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true, kHasPairProducts = false;
#elif defined(__AVX512BF16__)
constexpr bool kHasTiles = false, kHasPairProducts = true;
#else
constexpr bool kHasTiles = false, kHasPairProducts = false;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t U8 __attribute__((vector_size(kLanes)));

#if defined(__AVX512F__)
constexpr I32 kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
constexpr I32 kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

// bfloat16 is the upper half of a float32.
struct BF16 {
    uint16_t bits;
};
constexpr uint32_t kUpperHalf = 0xffff0000;

struct F16 {
    uint16_t bits;
};

// float8_e4m3fn: four bits of exponent, three of fraction, no infinities.
struct E4M3 {
    uint8_t bits;
};

inline F32 broadcast(float x) { return x - F32{}; }

inline F32 load(const float* from) {
    F32 v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// The compiler would widen half a register at a time.
inline U32 widened(const uint16_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<U32>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
    return reinterpret_cast<U32>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
}

inline F32 load(const BF16* from) { return reinterpret_cast<F32>(widened(reinterpret_cast<const uint16_t*>(from)) << 16); }

inline F32 load(const F16* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

// Read as a float16 of the same bits, whose exponents count from 8 lower: its conversion handles subnormals, too. NaN is
// lost.
inline F32 load(const E4M3* from) {
    U8 bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const U16 wide = __builtin_convertvector(bytes, U16);
    const U16 half = ((wide & 0x7f) << 7) | ((wide & 0x80) << 8);
    F16 numbers[kLanes];
    std::memcpy(static_cast<void*>(numbers), &half, sizeof half);
    return load(numbers) * 256.0f;
}

template <typename V, typename T>
V load_as(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, F32 v) { std::memcpy(to, &v, sizeof v); }

// Rounds to nearest, ties to even, as torch does; a NaN stays one.
inline void store(BF16* to, F32 v) {
#if defined(__AVX512BF16__)
    const __m256bh half = _mm512_cvtneps_pbh(v);
#else
    const U32 bits = reinterpret_cast<U32>(v);
    const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const U32 kept = v == v ? rounded : (bits >> 16) | 0x40;
    const U16 half = __builtin_convertvector(kept, U16);
#endif
    std::memcpy(to, &half, sizeof half);
}

#if defined(__AVX512F__)
inline __mmask16 first_lanes(int64_t count) { return count > 0 ? __mmask16((1u << count) - 1) : __mmask16(0); }
#endif

// The first `count` lanes only; the others are 0, or left alone.
template <typename T>
F32 load_part(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) return _mm512_maskz_loadu_ps(first_lanes(count), from);
#endif
    T part[kLanes] = {};
    if (count > 0) std::memcpy(static_cast<void*>(part), from, count * sizeof(T));
    return load(part);
}

template <typename T>
void store_part(T* to, F32 v, int64_t count) {
    if (count >= kLanes) return store(to, v);
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) return _mm512_mask_storeu_ps(to, first_lanes(count), v);
#endif
    T part[kLanes];
    store(part, v);
    if (count > 0) std::memcpy(static_cast<void*>(to), part, count * sizeof(T));
}

inline float to_float(float x) { return x; }
inline float to_float(BF16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline F32 max(F32 a, F32 b) { return a > b ? a : b; }

// The first halves of two vectors, their lanes in turns, and the second halves: a perfect shuffle.
template <typename V>
V interleave_low(V a, V b) {
#if defined(__AVX512F__)
    return __builtin_shuffle(a, b, I32{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#else
    return __builtin_shuffle(a, b, I32{0, 8, 1, 9, 2, 10, 3, 11});
#endif
}
template <typename V>
V interleave_high(V a, V b) {
#if defined(__AVX512F__)
    return __builtin_shuffle(a, b, I32{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#else
    return __builtin_shuffle(a, b, I32{4, 12, 5, 13, 6, 14, 7, 15});
#endif
}

// Transposes a square of words: as many rows as a register has lanes.
#if defined(__AVX512F__)
// A perfect shuffle of rows i and i + 8: it turns one bit of the row's number into one of the column's.
__attribute__((always_inline)) inline void shuffle_rows(const U32* from, U32* to) {
    for (int i = 0; i < 8; i++) {
        to[2 * i] = interleave_low(from[i], from[i + 8]);
        to[2 * i + 1] = interleave_high(from[i], from[i + 8]);
    }
}

__attribute__((always_inline))  // all of it fits into registers
inline void transpose(const U32* from, U32* to) {
    U32 a[16], b[16];
    shuffle_rows(from, a);
    shuffle_rows(a, b);
    shuffle_rows(b, a);
    shuffle_rows(a, to);
}
#else
inline void transpose(const U32* from, U32* to) {
    // Squares of one word change places, then of two, within halves of a register; then of four.
    U32 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shuffle(from[i], from[i + 1], U32{0, 8, 1, 9, 4, 12, 5, 13});
        a[i + 1] = __builtin_shuffle(from[i], from[i + 1], U32{2, 10, 3, 11, 6, 14, 7, 15});
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = __builtin_shuffle(a[i + j], a[i + j + 2], U32{0, 1, 8, 9, 4, 5, 12, 13});
            b[i + 2 * j + 1] = __builtin_shuffle(a[i + j], a[i + j + 2], U32{2, 3, 10, 11, 6, 7, 14, 15});
        }
    for (int i = 0; i < 4; i++) {
        to[i] = __builtin_shuffle(b[i], b[i + 4], U32{0, 1, 2, 3, 8, 9, 10, 11});
        to[i + 4] = __builtin_shuffle(b[i], b[i + 4], U32{4, 5, 6, 7, 12, 13, 14, 15});
    }
}
#endif

// Halves meet until one lane is left.
inline float sum(F32 v) {
    for (int half = kLanes / 2; half > 0; half /= 2) v += __builtin_shuffle(v, kLaneNumbers ^ half);
    return v[0];
}

// As many vectors at once as they have lanes, in a sixth of the time that each by itself would take: lane i is what is left of vector
// i. Of sixteen, vectors i and i + 8 come to share one, then i and i + 4, and so on, in registers.
template <int COUNT, typename Combine>
F32 reduce_each(const F32 (&v)[COUNT], Combine combine) {
    if constexpr (COUNT == 1) {
        return v[0];
    } else {
        constexpr int kHalf = COUNT / 2;
        F32 shared[kHalf];
#pragma GCC unroll 8
        for (int i = 0; i < kHalf; i++) shared[i] = combine(interleave_low(v[i], v[i + kHalf]), interleave_high(v[i], v[i + kHalf]));
        return reduce_each(shared, combine);
    }
}

// e^x to about 2 units in the last place; 0 below -87, infinity above 89. A NaN stays one.
inline F32 exp(F32 x) {
#if defined(__AVX512F__)
    const auto vanishes = x < -87.0f;
    // Results beyond the first bound would be denormal, which stalls the processor, and beyond the second infinite. In this
    // order a NaN stays one.
    x = _mm512_min_ps(_mm512_set1_ps(90.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
#endif
    const F32 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const F32 shifted = x * 1.44269504088896341f + magic;
    const F32 n = shifted - magic;
    // ln 2 in two parts, so that the remainder is exact.
    const F32 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    F32 p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
    return vanishes ? F32{} : F32(_mm512_scalef_ps(p, n));
#else
    // 2^n is added to the exponent.
    const F32 result = reinterpret_cast<F32>(reinterpret_cast<U32>(p) + (reinterpret_cast<U32>(shifted) << 23));
    return x < -87.0f ? F32{} : (x > 88.72283f ? broadcast(INFINITY) : (x == x ? result : x));
#endif
}

// 2^x to about 2 units in the last place for x up to 126; 0 below -126, where it would become denormal, which stalls
// processors. A NaN stays one.
inline F32 exp2(F32 x) {
#if defined(__AVX512F__)
    const F32 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const F32 magic = broadcast(12582912.0f);  // as in exp
    const F32 shifted = x + magic, n = shifted - magic;
#endif
    // The polynomial of degree 5 whose largest relative error on [-1/2, 1/2] is least, 2^-23.4.
    const F32 r = x - n;
    F32 p = broadcast(1.32647273e-3f);
    p = p * r + 9.67151299e-3f;
    p = p * r + 5.55073358e-2f;
    p = p * r + 2.40222424e-1f;
    p = p * r + 6.93147004e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p, n);
#else
    const F32 result = reinterpret_cast<F32>(reinterpret_cast<U32>(p) + (reinterpret_cast<U32>(shifted) << 23));
    return x < -126.0f ? F32{} : (x == x ? result : x);
#endif
}

inline F32 sigmoid(F32 x) { return 1.0f / (1.0f + exp(-x)); }

// By its series near 0, where 1 - 2 / (e^2x + 1) would cancel the digits of a small x.
inline F32 tanh(F32 x) {
    const F32 square = x * x;
    F32 series = broadcast(62.0f / 2835.0f);
    series = series * square - 17.0f / 315.0f;
    series = series * square + 2.0f / 15.0f;
    series = series * square - 1.0f / 3.0f;
    const F32 near_zero = x + x * square * series;
    const F32 elsewhere = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
    return square < 0.09f ? near_zero : elsewhere;
}

}  // namespace radixkv
