// A mixture of experts (Shazeer et al. 2017): each row passes those gated MLPs that were chosen for it, and their outputs are
// added, weighted. Rows are sorted by expert, so an expert's weights are read once however many rows chose it, and those of
// an expert that no row chose are not read.
//
//     rows a b c, two experts each        sorted                  added
//     a: 0 2   b: 2 5   c: 0 2     ->     0: a c   2: a b c   5: b   ->   a b c

#include <cstring>

#include "linear.h"
#include "panel.h"

namespace radixkv {
namespace {

template <typename T>
class ExpertsRun {
   public:
    explicit ExpertsRun(const Experts& experts)
        : experts_(experts),
          width_(experts.down->outputs / experts.num_experts),
          inner_(experts.down->inputs),
          places_(experts.rows * experts.per_row),
          starts_(experts.num_experts + 1),
          sorted_(experts.rows * experts.per_row * width_),
          gated_(experts.rows * experts.per_row * inner_) {}

    void run() {
        sort();
        gather();
        multiply(*experts_.gate_up, sorted_.get(), gated_.get());
        multiply(*experts_.down, gated_.get(), sorted_.get());
        add();
    }

   private:
    static constexpr int32_t kIsBF16 = kPairs<T>;
    static constexpr int64_t kNowhere = -1;

    // A counting sort: where each row's copy for each of its experts goes.
    void sort() {
        const int64_t count = experts_.rows * experts_.per_row, num_experts = experts_.num_experts;
        int64_t* starts = starts_.get();
        const auto is_expert = [&](int64_t chosen) { return chosen >= 0 && chosen < num_experts; };
        std::memset(starts, 0, (num_experts + 1) * sizeof(int64_t));
        for (int64_t i = 0; i < count; i++)
            if (is_expert(experts_.chosen[i])) starts[experts_.chosen[i] + 1]++;
        for (int64_t expert = 0; expert < num_experts; expert++) starts[expert + 1] += starts[expert];
        Scratch<int64_t> next(num_experts);
        std::memcpy(next.get(), starts, num_experts * sizeof(int64_t));
        for (int64_t i = 0; i < count; i++) {
            const int64_t chosen = experts_.chosen[i];
            places_.get()[i] = is_expert(chosen) ? next.get()[chosen]++ : kNowhere;
        }
    }

    void gather() {
        const auto* x = static_cast<const T*>(experts_.x);
#pragma omp parallel for schedule(static) if (experts_.rows > kMaxRows)
        for (int64_t row = 0; row < experts_.rows; row++)
            for (int64_t i = row * experts_.per_row; i < (row + 1) * experts_.per_row; i++)
                if (const int64_t place = places_.get()[i]; place != kNowhere)
                    std::memcpy(static_cast<void*>(sorted_.get() + place * width_), x + row * width_, width_ * sizeof(T));
    }

    void multiply(const Linear& weight, const T* x, T* out) {
        Linear call = weight;
        call.x = x, call.residual = nullptr, call.out = out, call.outputs /= experts_.num_experts, call.rows = starts_.get()[experts_.num_experts];
        multiply_sections(call, experts_.num_experts, starts_.get(), kIsBF16);
    }

    // In the order in which a row's experts are given: so its sum does not depend on the other rows.
    void add() {
        auto* out = static_cast<T*>(experts_.out);
#pragma omp parallel for schedule(static) if (experts_.rows > kMaxRows)
        for (int64_t row = 0; row < experts_.rows; row++)
            for (int64_t at = 0; at < width_; at += kLanes) {
                F32 total{};
                for (int64_t i = row * experts_.per_row; i < (row + 1) * experts_.per_row; i++)
                    if (const int64_t place = places_.get()[i]; place != kNowhere)
                        total += experts_.weights[i] * load(sorted_.get() + place * width_ + at);
                store(out + row * width_ + at, total);
            }
    }

    const Experts& experts_;
    const int64_t width_, inner_;
    Scratch<int64_t> places_, starts_;  // [rows, per row]; [experts + 1]
    Scratch<T> sorted_, gated_;         // [copies of rows, width], which become what experts give; [copies of rows, inner]
};

}  // namespace
}  // namespace radixkv

RADIXKV_API void radixkv_experts(const radixkv::Experts* call, int32_t is_bf16) {
    using namespace radixkv;
    is_bf16 ? ExpertsRun<BF16>(*call).run() : ExpertsRun<float>(*call).run();
}
