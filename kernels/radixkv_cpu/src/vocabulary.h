// The likeliest tokens of a row of a vocabulary: numbers of which most are too small to matter.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "simd.h"

namespace radixkv {

struct Candidate {
    float weight;
    int32_t id;
};

// Among equally likely tokens, those with the lowest ids come first.
inline bool is_likelier(const Candidate& a, const Candidate& b) { return a.weight != b.weight ? a.weight > b.weight : a.id < b.id; }

// The lanes for which a comparison with a bound holds, such as _CMP_GE_OQ; a bit for each.
template <int kComparison>
inline uint32_t lanes_where(F32 weights, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(weights, _mm512_set1_ps(bound), kComparison);
#else
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(weights, _mm256_set1_ps(bound), kComparison)));
#endif
}

// The lanes that belong to a row, `left` numbers before its end.
inline uint32_t lanes_left(int64_t left) { return left >= kLanes ? (1u << kLanes) - 1 : (1u << left) - 1; }

// A weight that at least `count` tokens, 1 or more, reach. Peaks are the largest weights of some tokens each, none
// of which is NaN; they are reordered. If there are too few, `lowest`.
inline float bound_of_likeliest(std::vector<float>& peaks, int64_t count, float lowest) {
    if (count > int64_t(peaks.size())) return lowest;
    std::nth_element(peaks.begin(), peaks.begin() + (count - 1), peaks.end(), std::greater<float>());
    return peaks[count - 1];
}

// The tokens with at least this weight, in the order of their ids.
inline void gather_candidates(const float* weights, int64_t vocab_size, float least, std::vector<Candidate>& candidates) {
    candidates.clear();
    const auto add = [&](F32 some, int64_t from) {
        for (uint32_t found = lanes_where<_CMP_GE_OQ>(some, least) & lanes_left(vocab_size - from); found; found &= found - 1) {
            const int64_t id = from + __builtin_ctz(found);
            // Made in place: of a copy, both halves would be loaded at once, before they have reached the cache.
            Candidate& candidate = candidates.emplace_back();
            candidate.weight = weights[id], candidate.id = int32_t(id);
        }
    };
    int64_t from = 0;
    for (; from + kLanes <= vocab_size; from += kLanes) add(load(weights + from), from);
    if (from < vocab_size) add(load_part(weights + from, vocab_size - from), from);
}

}  // namespace radixkv
