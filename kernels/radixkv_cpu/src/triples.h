// Products of float32 by AMX tiles. A number is the sum of three of bfloat16, which hold 8 each of its 24 bits (Henry, Tang and
// Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations"):
//
//     x = x0 + x1 + x2        x w = x0 w0 + (x0 w1 + x1 w0) + (x0 w2 + x1 w1 + x2 w0) + less than 2^-23 of it
//
// Tiles have 16 times the throughput of float32 multiply-adds, so six products of parts take less than half of the time.
// Their sums are nearer to the exact ones than those of multiply-adds, because a tile adds up 16 products before it adds them
// to what is there. Tiles take numbers below 2^-126 for zero, parts among them. Inputs and weights from 2^128 - 2^119 on,
// which are rounded to infinity, give NaN.
#pragma once

#include <algorithm>

#include "panel.h"

#if defined(__AMX_BF16__)
#define RADIXKV_TRIPLES

namespace radixkv {

// Splits pairs of numbers into words of two parts each, [parts]. Parts are rounded, so that the next one is as small as
// possible; the last needs no rounding.
inline void split(F32 even, F32 odd, uint32_t* to) {
    constexpr uint32_t kUpper = 0xffff0000, kHalf = 0x8000;
#pragma GCC unroll 3
    for (int part = 0; part < kTriple; part++, to += 2 * kTileWords) {
        const uint32_t rounding = part + 1 < kTriple ? kHalf : 0;
        const U32 first = (reinterpret_cast<U32>(even) + rounding) & kUpper, second = (reinterpret_cast<U32>(odd) + rounding) & kUpper;
        const U32 pairs = (first >> 16) | second;
        std::memcpy(to, &pairs, sizeof pairs);
        even -= reinterpret_cast<F32>(first), odd -= reinterpret_cast<F32>(second);
    }
}

// Up to 32 rows to [inputs / 32][parts][2][16 rows][16 pairs of inputs]; missing inputs become zeros, missing rows are left out.
inline void split_rows(int64_t rows, const float* x, int64_t stride, int64_t inputs, uint32_t* to) {
    for (int64_t k = 0; k < inputs; k += Tiles::kStep, to += kStepWords)
        for (int64_t row = 0; row < rows; row++) {
            const float* from = x + row * stride + k;
            const F32 low = load_part(from, inputs - k), high = load_part(from + kLanes, inputs - k - kLanes);
            const F32 even = __builtin_shuffle(low, high, 2 * kLaneNumbers), odd = __builtin_shuffle(low, high, 2 * kLaneNumbers + 1);
            split(even, odd, to + row * kLanes);
        }
}

// Splits the weights of a stretch of a panel, a few at a time, to [inputs / 32][parts][2][16 pairs of inputs][16 features].
class SplitWeights {
   public:
    SplitWeights() = default;
    SplitWeights(const float* panel, int64_t inputs, uint32_t* to)
        : panel_(panel), inputs_(inputs), end_((inputs + Tiles::kStep - 1) / Tiles::kStep * kLanes), to_(to) {}

    // Pairs of inputs.
    int64_t left() const { return end_ - at_; }

    void run(int64_t count) {
        for (const int64_t stop = std::min(at_ + count, end_); at_ < stop; at_++) {
            const float* from = panel_ + at_ * 2 * kPanel;
            uint32_t* to = to_ + at_ / kLanes * kStepWords + at_ % kLanes * kLanes;
            // Weights that are read with pauses must be prefetched explicitly.
            for (int line = 0; line < 4; line++) __builtin_prefetch(from + kAheadFloats + line * kLanes);
            if (2 * at_ + 1 < inputs_) {
                split(load(from), load(from + kPanel), to);
                split(load(from + kLanes), load(from + kPanel + kLanes), to + kTileWords);
            } else {
                const bool is_there = 2 * at_ < inputs_;
                split(is_there ? load(from) : F32{}, F32{}, to);
                split(is_there ? load(from + kLanes) : F32{}, F32{}, to + kTileWords);
            }
        }
    }

   private:
    static constexpr int64_t kAheadFloats = 1024;

    const float* panel_ = nullptr;
    int64_t inputs_ = 0, at_ = 0, end_ = 0;
    uint32_t* to_ = nullptr;
};

// Products of chunks of rows with panels, by one thread.
class TripleProduct {
   public:
    // Panels are next to each other up to `end`: nothing behind it is split.
    TripleProduct(int64_t inputs, const float* end) : inputs_(inputs), end_(end) {}

    static int64_t steps(int64_t inputs) { return (inputs + Tiles::kStep - 1) / Tiles::kStep; }

    // So many rows' parts stay in the second-level cache, except where inputs are many: with fewer rows every panel would be
    // split more often.
    static int64_t most_rows(int64_t inputs) {
        constexpr int64_t kBytes = 1 << 20;
        const int64_t blocks = kBytes / (steps(inputs) * kStepWords * int64_t(sizeof(uint32_t)));
        return std::clamp<int64_t>(blocks, 4, 9) * Tiles::kBlock;
    }

    // sums[row][0..31] = x[row] . panel for rows by `split_rows`, 32 at a time; sums of rows are next to each other. While tiles
    // multiply, the weights that follow are split: mostly they are the next that are asked for.
    void multiply(int64_t rows, const uint32_t* x, const float* panel, float* sums) {
        for (int64_t start = 0; start < inputs_; start += kDepth) {
            const int64_t count = std::min(kDepth, inputs_ - start), num_steps = steps(count);
            const float* weights = panel + start * kPanel;
            if (split_ != weights) SplitWeights(weights, count, parts_[other_].get()).run(INT64_MAX / 2);
            const uint32_t* current = parts_[other_].get();
            other_ ^= 1;
            split_ = weights + count * kPanel;
            SplitWeights following;
            if (split_ < end_) {
                const int64_t left = start + count < inputs_ ? inputs_ - start - count : inputs_;
                following = SplitWeights(split_, std::min(kDepth, left), parts_[other_].get());
            }
            const int64_t blocks = (rows + Tiles::kBlock - 1) / Tiles::kBlock, share = following.left() / (2 * blocks * num_steps) + 1;
            for (int64_t block = 0; block < blocks; block++)
                tiles_.multiply_triples(int(std::min<int64_t>(Tiles::kBlock, rows - block * Tiles::kBlock)),
                                        x + (block * steps(inputs_) + start / Tiles::kStep) * kStepWords, current, num_steps,
                                        sums + block * Tiles::kBlock * kPanel, start > 0, [&] { following.run(share); });
            following.run(following.left());
        }
    }

   private:
    // Weights of so many inputs, and those that follow, stay in the first-level cache.
    static constexpr int64_t kDepth = 3 * Tiles::kStep;

    const int64_t inputs_;
    const float* const end_;
    const float* split_ = nullptr;  // the weights whose parts are in parts_[other_]
    int other_ = 0;
    Scratch<uint32_t> parts_[2]{Scratch<uint32_t>(kDepth / Tiles::kStep * kStepWords), Scratch<uint32_t>(kDepth / Tiles::kStep * kStepWords)};
    Tiles tiles_;
};

}  // namespace radixkv
#endif
