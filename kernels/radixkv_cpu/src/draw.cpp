// One token per row of logits: the largest ratio of probability to an exponential variate (an exponential race, which Gumbel-max
// sampling is, too). A row is passed over twice, in the second-level cache; what follows looks at few tokens:
//
//     all tokens -> weights, of which the likeliest has 1 -> mass of each block of 256 ids -> the block that wins -> its token
//                                                         -> candidates, at least as likely as what is left -> cut -> the winner
//
// The variates are SplitMix64's (Steele, Lea, Flood 2014), counted from the row's state.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "calls.h"
#include "panel.h"
#include "vocabulary.h"

namespace radixkv {
namespace {

constexpr int64_t kBlockIds = 256;
// Weights are sorted into buckets by their first bits: eight of the exponent, four of what follows. The last one has 1 alone.
constexpr int kBucketShift = 19, kNumBuckets = (0x3f800000 >> kBucketShift) + 1;

int bucket_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return int(bits >> kBucketShift);
}

// A uniform number of (0, 1), a pure function of the two.
float uniform_number(uint64_t state, int64_t token_id) {
    uint64_t x = state + uint64_t(token_id + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    // Rounded to a float last: small numbers decide the draw, and keep their relative precision this way.
    return std::clamp(float(double(x >> 11) * 0x1p-53), 0x1p-60f, 1 - 0x1p-24f);
}

// The race: what has the largest ratio of its weight to its exponential variate wins; the first of several.
class Race {
   public:
    explicit Race(uint64_t state) : state_(state) {}

    void enter(float weight, int64_t token_id) {
        const float uniform = uniform_number(state_, token_id);
        // The variate, of mean 1, is above its uniform number: nearly all lose without a logarithm. The factor covers rounding.
        if (weight < highest_ * uniform * (1 - 0x1p-20f)) return;
        const float ratio = weight / -std::log1p(-uniform);
        if (ratio > highest_) highest_ = ratio, winner_ = token_id;
    }

    int64_t winner() const { return winner_; }

   private:
    const uint64_t state_;
    float highest_ = -1;
    int64_t winner_ = 0;
};

// What truncation leaves: all candidates whose buckets are above this one, and in it those that are not behind the last.
struct Cut {
    int64_t count = 0;
    double mass = 0;
    int bucket = -1;
    Candidate last{INFINITY, -1};

    bool leaves(const Candidate& candidate) const {
        const int own = bucket_of(candidate.weight);
        return own > bucket || (own == bucket && !is_likelier(last, candidate));
    }
};

class Drawer {
   public:
    explicit Drawer(int64_t vocab_size)
        : vocab_size_(vocab_size),
          weights_((vocab_size + kBlockIds - 1) / kBlockIds * kBlockIds),
          masses_((vocab_size + kBlockIds - 1) / kBlockIds),
          peaks_(masses_.size() * kLanes),
          counts_(kNumBuckets),
          bucket_masses_(kNumBuckets) {}

    int64_t draw(const float* logits, float temperature, uint64_t state) {
        weigh(logits, temperature);
        if (!std::isfinite(total_)) return 0;
        Race blocks(state), tokens(state);
        for (int64_t block = 0; block < int64_t(masses_.size()); block++) blocks.enter(masses_[block], -2 - block);
        const int64_t first = (-2 - blocks.winner()) * kBlockIds;
        for (int64_t id = first; id < std::min(first + kBlockIds, vocab_size_); id++) tokens.enter(weights_.get()[id], id);
        return tokens.winner();
    }

    int64_t draw_truncated(const float* logits, float temperature, uint64_t state, int64_t top_k, float top_p, float min_p) {
        weigh(logits, temperature);
        if (!std::isfinite(total_)) return 0;
        const bool only_top_p = top_k >= vocab_size_ && min_p == 0;
        double mass = total_;
        if (only_top_p) {
            const double removed = 1.0 - double(top_p);
            // Nearly always, these candidates together have more than is left. If not: all tokens below the second bound
            // together have at most half of what is removed.
            if (!(gather(float(total_ * removed / 4096)) > (1 - 0.9 * removed) * total_)) gather(float(0.5 * removed / vocab_size_ * total_));
            fill_buckets();
        } else {
            gather(std::max(min_p, bound_of_likeliest(peaks_, top_k, 0)));
            fill_buckets();
            mass = cut(top_k, INFINITY).mass;  // top_p counts within what min_p and top_k have left
        }
        const Cut left = cut(top_k, top_p < 1 ? top_p * mass : INFINITY);
        Race race(state);
        for (const Candidate& candidate : candidates_)
            if (left.leaves(candidate)) race.enter(candidate.weight, candidate.id);
        return race.winner();
    }

   private:
    // Computes weights, each block's sum of them, and the largest in each of its lanes.
    void weigh(const float* logits, float temperature) {
        F32 highest = broadcast(-INFINITY);
        int64_t at = 0;
        for (; at + kLanes <= vocab_size_; at += kLanes) highest = max(load(logits + at), highest);
        float maximum = -INFINITY, lanes[kLanes];
        store(lanes, highest);
        for (int i = 0; i < kLanes; i++) maximum = std::max(maximum, lanes[i]);
        for (; at < vocab_size_; at++) maximum = std::max(maximum, logits[at]);
        const float factor = 1 / temperature;
        total_ = 0;
        for (int64_t block = 0; block < int64_t(masses_.size()); block++) {
            F32 sum{}, peak{};
            for (int64_t first = block * kBlockIds, from = first; from < first + kBlockIds; from += kLanes) {
                F32 weight{};
                if (from + kLanes <= vocab_size_) {
                    weight = exp((load(logits + from) - maximum) * factor);
                } else if (from < vocab_size_) {
                    float rest[kLanes];
                    std::fill_n(rest, kLanes, -INFINITY);
                    std::copy_n(logits + from, vocab_size_ - from, rest);
                    weight = exp((load(rest) - maximum) * factor);
                }
                store(weights_.get() + from, weight);
                sum += weight, peak = max(weight, peak);
            }
            store(peaks_.data() + block * kLanes, peak);
            total_ += masses_[block] = radixkv::sum(sum);
        }
    }

    // The candidates are the tokens with at least this weight. Returns their weights' sum.
    double gather(float least) {
        gather_candidates(weights_.get(), vocab_size_, least, candidates_);
        double mass = 0;
        for (const Candidate& candidate : candidates_) mass += candidate.weight;
        return mass;
    }

    void fill_buckets() {
        std::fill(counts_.begin(), counts_.end(), 0);
        std::fill(bucket_masses_.begin(), bucket_masses_.end(), 0.0);
        for (const Candidate& candidate : candidates_) {
            const int bucket = bucket_of(candidate.weight);
            counts_[bucket]++, bucket_masses_[bucket] += candidate.weight;
        }
    }

    // Of the candidates, the likeliest `most`, and of these each while the likelier ones together have less than `mass`.
    Cut cut(int64_t most, double mass) {
        Cut cut;
        for (int bucket = kNumBuckets - 1; bucket >= 0; bucket--) {
            if (!counts_[bucket]) continue;
            if (cut.count + counts_[bucket] > most || cut.mass + bucket_masses_[bucket] >= mass) {
                cut.bucket = bucket;
                break;
            }
            cut.count += counts_[bucket], cut.mass += bucket_masses_[bucket];
        }
        if (cut.bucket < 0) return cut;
        crossing_.clear();
        for (const Candidate& candidate : candidates_)
            if (bucket_of(candidate.weight) == cut.bucket) crossing_.push_back(candidate);
        std::sort(crossing_.begin(), crossing_.end(), is_likelier);
        for (const Candidate& candidate : crossing_) {
            if (cut.count == most || cut.mass >= mass) break;
            cut.count++, cut.mass += candidate.weight, cut.last = candidate;
        }
        return cut;
    }

    const int64_t vocab_size_;
    Scratch<float> weights_;
    std::vector<float> masses_, peaks_;
    double total_ = 0;
    std::vector<Candidate> candidates_, crossing_;
    std::vector<int32_t> counts_;  // of each bucket
    std::vector<double> bucket_masses_;
};

}  // namespace
}  // namespace radixkv

RADIXKV_API void radixkv_draw(const radixkv::Draw* call, int32_t truncates) {
#pragma omp parallel if (call->rows > 1)
    {
        radixkv::Drawer drawer(call->vocab_size);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < call->rows; row++) {
            const float* logits = call->logits + row * call->vocab_size;
            const float temperature = call->temperatures[row];
            call->token_ids[row] =
                truncates ? drawer.draw_truncated(logits, temperature, call->states[row], call->top_k[row], call->top_p[row], call->min_p[row])
                          : drawer.draw(logits, temperature, call->states[row]);
        }
    }
}
