// Softmaxes: running ones (Milakov and Gimelshein 2018) of scores that come 64 keys at a time, and whole ones, which are added.
//
// They are kept in powers of two: a weight is 2^(score * factor - maximum), so that scaling a score, subtracting the maximum and
// changing the base are one instruction. Maxima are such exponents, too.
#pragma once

#include <algorithm>

#include "calls.h"
#include "pack.h"
#include "simd.h"

namespace radixkv {

constexpr float kLog2E = 1.44269504088896341f;

// The keys that a row sees.
struct Seen {
    int64_t start = 0, stop = 0;
};

// The keys between the first and the last that any of some rows sees.
inline Seen seen_by_any(const Seen* rows, int64_t num_rows) {
    Seen all = rows[0];
    for (int64_t row = 1; row < num_rows; row++) all = {std::min(all.start, rows[row].start), std::max(all.stop, rows[row].stop)};
    return all;
}

// By how much a sum of softmaxes, and the next part, shrink when the part is added: the greater maximum stays, so one of them
// is 1.
struct Shares {
    F32 sum, part;
};

// One share is 1, so only one product is not exact, and no compiler can choose which of two to round.
inline void add_shared(F32& sum, F32 part, float sum_share, float part_share) {
    if (sum_share == 1.0f)
        sum += part * part_share;
    else
        sum = sum * sum_share + part;
}

// Adds a part's weights to those of a sum, lane by lane; a part without keys, whose maximum is minus infinity, changes nothing.
inline Shares add_part(F32& maximum, F32& total, F32 part_maximum, F32 part_total) {
    const F32 highest = max(maximum, part_maximum), one = broadcast(1.0f);
    const Shares shares = {maximum == highest ? one : exp2(maximum - highest), part_maximum == highest ? one : exp2(part_maximum - highest)};
    maximum = highest;
    total = shares.sum == one ? total + part_total * shares.part : total * shares.sum + part_total;
    return shares;
}

// For every row: the sum of values, weighted by the softmax and padded; the softmax's maximum; the sum of weights.
struct Partials {
    float *outputs, *maxima, *totals;

    // Those from a row on.
    Partials from(int64_t row, int64_t value_dim) const { return {outputs + row * value_dim, maxima + row, totals + row}; }
};

// Adds the partial results of some rows to those of the same rows over other keys.
inline void add_partials(int64_t num_rows, int64_t value_dim, const Partials& part, const Partials& to) {
    for (int64_t row = 0; row < num_rows; row += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, num_rows - row);
        F32 maximum = load_part(to.maxima + row, count), total = load_part(to.totals + row, count);
        const Shares shares = add_part(maximum, total, load_part(part.maxima + row, count), load_part(part.totals + row, count));
        store_part(to.maxima + row, maximum, count);
        store_part(to.totals + row, total, count);
        for (int64_t i = 0; i < count; i++)
            for (int64_t at = (row + i) * value_dim; at < (row + i + 1) * value_dim; at += kLanes) {
                F32 sum = load(to.outputs + at);
                add_shared(sum, load(part.outputs + at), shares.sum[i], shares.part[i]);
                store(to.outputs + at, sum);
            }
    }
}

class Softmax {
   public:
    explicit Softmax(const Attention& call)
        : scale_(call.scale),
          softcap_(call.softcap),
          // A maximum is found among unscaled scores, whose order a scale below 0 would reverse.
          scales_first_(call.softcap > 0 || !(call.scale > 0)),
          factor_(scales_first_ ? kLog2E : call.scale * kLog2E) {}

    // Turns the scores of up to `kLanes` rows into weights, possibly in place: of keys `start` to `stop`, multiples of
    // `kLanes`, of the `count` from `first` on. Returns, by lanes, the factor by which what each row has so far shrinks.
    template <typename Weight>
    F32 weigh(const Seen* seen, int num_rows, int64_t first, int count, int start, int stop, float* scores, Weight* weights, float* maxima,
              float* totals) const {
        const F32 before = load_part(maxima, num_rows);
        const F32 maximum = max(before, hide_all(seen, num_rows, first, count, start, stop, scores, kKeys));
        float subtracted[kLanes];
        store(subtracted, subtrahend(maximum));
        F32 sums[kLanes] = {};
        for (int row = 0; row < num_rows; row++) {
            F32 sum{};
            for (int at = start; at < stop; at += kLanes) {
                const F32 weight = exp2(load(scores + row * kKeys + at) * factor_ - subtracted[row]);
                sum += weight;
                store(weights + row * kKeys + at, weight);
            }
            sums[row] = sum;
        }
        // Before the first score outputs are 0, and need no factor.
        const F32 shrink = (before == maximum) | (before == -INFINITY) ? broadcast(1.0f) : exp2(before - maximum);
        store_part(totals, load_part(totals, num_rows) * shrink + reduce_each(sums, [](F32 a, F32 b) { return a + b; }), num_rows);
        store_part(maxima, maximum, num_rows);
        return shrink;
    }

#if defined(__AMX_BF16__)
    // The whole softmax of up to `kLanes` rows: of keys `start` to `stop`, multiples of 32, of the `count` from `first` on. The
    // strides are between rows. After each row, something else is done `meanwhile`.
    template <typename Meanwhile>
    void weigh_all(const Seen* seen, int num_rows, int64_t first, int count, int start, int stop, float* scores, int64_t score_stride,
                   BF16* weights, int64_t weight_stride, float* maxima, float* totals, Meanwhile meanwhile) const {
        const F32 maximum = hide_all(seen, num_rows, first, count, start, stop, scores, score_stride);
        float subtracted[kLanes];
        store(subtracted, subtrahend(maximum));
        F32 sums[kLanes] = {};
        for (int row = 0; row < num_rows; row++) {
            F32 sum[2] = {};
            for (int at = start; at < stop; at += 2 * kLanes) {
                const float* score = scores + row * score_stride + at;
                const F32 low = exp2(load(score) * factor_ - subtracted[row]), high = exp2(load(score + kLanes) * factor_ - subtracted[row]);
                sum[0] += low, sum[1] += high;
                const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
                std::memcpy(static_cast<void*>(weights + row * weight_stride + at), &both, sizeof both);
            }
            sums[row] = sum[0] + sum[1];
            meanwhile();
        }
        store_part(maxima, maximum, num_rows);
        store_part(totals, reduce_each(sums, [](F32 a, F32 b) { return a + b; }), num_rows);
    }
#endif

   private:
    // Replaces the scores of keys that rows do not see, and returns the rows' highest exponents, by lanes.
    F32 hide_all(const Seen* seen, int num_rows, int64_t first, int count, int start, int stop, float* scores, int64_t stride) const {
        F32 peaks[kLanes];
        for (int row = num_rows; row < kLanes; row++) peaks[row] = broadcast(-INFINITY);
        for (int row = 0; row < num_rows; row++) peaks[row] = hide(seen[row], first, count, start, stop, scores + row * stride);
        return reduce_each(peaks, max) * factor_;
    }

    // Without a score above minus infinity all weights are 0, but for those that are NaN: these must not pass unseen.
    static F32 subtrahend(F32 maximum) { return maximum == -INFINITY ? F32{} : maximum; }

    // Replaces the scores of keys that a row does not see, and returns the highest, by lanes.
    F32 hide(const Seen& row, int64_t first, int count, int start, int stop, float* scores) const {
        const int low = int(std::clamp<int64_t>(row.start - first, 0, count)), high = int(std::clamp<int64_t>(row.stop - first, 0, count));
        F32 peak = broadcast(-INFINITY);
        // Nearly all rows of a long prompt.
        if (!scales_first_ && low <= start && high >= stop) {
            for (int at = start; at < stop; at += kLanes) peak = max(peak, load(scores + at));
            return peak;
        }
        for (int at = start; at < stop; at += kLanes) {
            F32 score = load(scores + at);
            const bool hides = low > at || high < at + kLanes;
            if (scales_first_) {
                score *= scale_;
                if (softcap_ > 0) score = softcap_ * tanh(score / softcap_);
            }
            if (hides) {
                const I32 key = kLaneNumbers + at;
                score = (key >= low) & (key < high) ? score : broadcast(-INFINITY);
            }
            if (hides || scales_first_) store(scores + at, score);
            peak = max(peak, score);
        }
        return peak;
    }

    const float scale_, softcap_;
    const bool scales_first_;
    const float factor_;
};

}  // namespace radixkv
