// For each row of logits: its log-sum-exp, the rank of one token, and the likeliest tokens. A row is passed over twice, in
// the second-level cache; only tokens that can be among the likeliest are sorted.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "calls.h"
#include "vocabulary.h"

namespace radixkv {
namespace {

// Vectors of logits of which the peaks are kept together: few enough that there are more peaks than tokens asked for.
constexpr int64_t kVectorsPerPeak = 16;

class Describer {
   public:
    explicit Describer(const Logprobs& call) : call_(call) {}

    void describe(int64_t row) {
        const float* logits = call_.logits + row * call_.vocab_size;
        find_peaks(logits, logits[call_.token_ids[row]]);
        const float total = log_sum_exp(logits);
        call_.totals[row] = total;
        call_.ranks[row] = rank_;
        if (!call_.count) return;
        int64_t* ids = call_.top_ids + row * call_.count;
        float* values = call_.top_logits + row * call_.count;
        if (!std::isfinite(total)) {  // no numbers: no order either
            for (int64_t i = 0; i < call_.count; i++) ids[i] = i, values[i] = logits[i];
            return;
        }
        gather_candidates(logits, call_.vocab_size, bound_of_likeliest(peaks_, call_.count, -INFINITY), candidates_);
        std::partial_sort(candidates_.begin(), candidates_.begin() + call_.count, candidates_.end(), is_likelier);
        for (int64_t i = 0; i < call_.count; i++) ids[i] = candidates_[i].id, values[i] = candidates_[i].weight;
    }

   private:
    // Finds the largest logits of neighbouring vectors, lane by lane, the largest of all, and how many are above the token's
    // own.
    void find_peaks(const float* logits, float own) {
        peaks_.clear();
        rank_ = 1, maximum_ = -INFINITY;
        for (int64_t first = 0; first < call_.vocab_size; first += kVectorsPerPeak * kLanes) {
            const int64_t stop = std::min(first + kVectorsPerPeak * kLanes, call_.vocab_size);
            F32 peak = broadcast(-INFINITY);
            int64_t from = first;
            for (; from + kLanes <= stop; from += kLanes) {
                const F32 some = load(logits + from);
                peak = max(some, peak);
                rank_ += __builtin_popcount(lanes_where<_CMP_GT_OQ>(some, own));
            }
            float lanes[kLanes];
            store(lanes, peak);
            for (; from < stop; from++) {
                lanes[from % kLanes] = std::max(lanes[from % kLanes], logits[from]);
                rank_ += logits[from] > own;
            }
            for (const float lane : lanes) maximum_ = std::max(maximum_, lane);
            peaks_.insert(peaks_.end(), lanes, lanes + kLanes);
        }
    }

    float log_sum_exp(const float* logits) const {
        double total = 0;
        for (int64_t first = 0; first < call_.vocab_size; first += kVectorsPerPeak * kLanes) {
            const int64_t stop = std::min(first + kVectorsPerPeak * kLanes, call_.vocab_size);
            F32 sums{};
            int64_t from = first;
            for (; from + kLanes <= stop; from += kLanes) sums += exp(load(logits + from) - maximum_);
            total += sum(sums);
            for (; from < stop; from++) total += std::exp(logits[from] - maximum_);
        }
        return maximum_ + float(std::log(total));
    }

    const Logprobs& call_;
    int64_t rank_ = 1;
    float maximum_ = -INFINITY;
    std::vector<float> peaks_;
    std::vector<Candidate> candidates_;
};

}  // namespace
}  // namespace radixkv

RADIXKV_API void radixkv_logprobs(const radixkv::Logprobs* call, int32_t) {
#pragma omp parallel if (call->rows > 1)
    {
        radixkv::Describer describer(*call);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < call->rows; row++) describer.describe(row);
    }
}
