// Attention over paged keys and values, read where they lie.
//
// A task is a tile of query rows over a stretch of one range of keys, with the heads of a group folded into the rows. It is for
// one key-value head; with few rows it is for all heads, in the order in which their keys lie in memory. It reads each key once
// (FlashAttention, Dao et al. 2022). The partial results of tasks are merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023):
//
//     range 0, shared   rows 0..3   |  chunk 0  |  chunk 1  |            a partial result each, per row and head
//     range 1, tail     row 0                               | chunk 0 |
//
// If keys and values are finite, and with tiles not below 2^-126 in magnitude, a row's result depends only on its ranges and its
// kind, to the last bit, not on other rows or on threads: softmaxes of 256 keys are added in order to those of 2,048 keys, and these to one, whichever tasks do it. A value that
// a row does not see may be multiplied by 0, which gives NaN if it is infinite.

#include <omp.h>

#include <vector>

#include "attention_tasks.h"
#include "calls.h"
#include "pack.h"
#include "running_attention.h"
#include "softmax.h"
#include "tile_attention.h"

namespace radixkv {
namespace {

// One addition of a merge: of the part `at`; if that is below 0, of the sum of all parts since the last such step.
struct Step {
    int64_t at;
    Shares shares;
};

// Merges the partial results and the sink of one row and head. `steps` is memory for the additions, the same for all columns.
template <typename T>
void merge(const Attention& call, const std::vector<Part>& parts, int64_t head, const Partials& partials, std::vector<Step>& steps, T* out) {
    const int64_t group = call.num_query_heads / call.num_kv_heads, kv_head = head / group, member = head % group;
    const int64_t value_dim = padded(call.value_dim);
    const F32 nothing = broadcast(-INFINITY);
    F32 maximum = call.sinks ? broadcast(call.sinks[head] * kLog2E) : nothing, total = broadcast(call.sinks ? 1.0f : 0.0f);
    steps.clear();
    for (const Part& part : parts) {
        F32 long_maximum = nothing, long_total{};
        for (int64_t chunk = 0; chunk < part.num_chunks; chunk++) {
            const int64_t at = part.partial + (kv_head * part.num_chunks + chunk) * part.chunk_stride + member;
            steps.push_back({at, add_part(long_maximum, long_total, broadcast(partials.maxima[at]), broadcast(partials.totals[at]))});
            if (chunk + 1 == part.num_chunks || (part.first_chunk + chunk + 1) * part.chunk % kLongChunk == 0) {
                steps.push_back({-1, add_part(maximum, total, long_maximum, long_total)});
                long_maximum = nothing, long_total = F32{};
            }
        }
    }
    const F32 norm = 1.0f / total;
    for (int64_t column = 0; column < call.value_dim; column += kLanes) {
        F32 sum{}, long_sum{};
        for (const auto& [at, shares] : steps) {
            if (at >= 0)
                add_shared(long_sum, load(partials.outputs + at * value_dim + column), shares.sum[0], shares.part[0]);
            else
                add_shared(sum, long_sum, shares.sum[0], shares.part[0]), long_sum = F32{};
        }
        store_part(out + column, sum * norm, call.value_dim - column);
    }
}

template <typename T, typename Worker>
void run(const Attention& call) {
    const Work work = divide<T>(call);
    Scratch<float> outputs(work.num_partials * padded(call.value_dim)), maxima(work.num_partials), totals(work.num_partials);
    const Partials partials{outputs.get(), maxima.get(), totals.get()};
    // A thread takes neighbouring tasks, so that it can prefetch the next one's keys, but so few that no thread waits long.
    const int64_t num_tasks = int64_t(work.tasks.size()), at_once = std::clamp<int64_t>(num_tasks / (8 * omp_get_max_threads()), 1, 8);
#pragma omp parallel
    {
        {
            Worker worker(call);
#pragma omp for schedule(dynamic, at_once)
            for (int64_t i = 0; i < num_tasks; i++) {
                const bool is_last = (i + 1) % at_once == 0 || i + 1 == num_tasks;
                worker.run(work.tasks[i], is_last ? nullptr : &work.tasks[i + 1], partials);
            }
        }
        std::vector<Step> steps;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < call.num_rows * call.num_query_heads; i++) {
            const int64_t row = i / call.num_query_heads, head = i % call.num_query_heads;
            T* out = static_cast<T*>(call.out) + row * call.out_row_stride + head * call.value_dim;
            if (!work.parts[row].empty()) merge(call, work.parts[row], head, partials, steps, out);
        }
    }
}

}  // namespace
}  // namespace radixkv

RADIXKV_API void radixkv_attention(const radixkv::Attention* call, int32_t is_bf16) {
    using namespace radixkv;
#if defined(__AMX_BF16__)
    using BF16Worker = TileAttention;
#else
    using BF16Worker = RunningAttention<BF16>;
#endif
    is_bf16 ? run<BF16, BF16Worker>(*call) : run<float, RunningAttention<float>>(*call);
}
