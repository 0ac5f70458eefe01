// Attention over paged keys and values, read where they lie.
//
// A task is a tile of query rows over a stretch of one range of keys, with the heads of a group folded into the rows. It is for
// one key-value head; with few rows it is for all heads, in the order in which their keys lie in memory. It takes 64 keys at a
// time. Few rows read keys in place; for more rows, keys are packed into panels and multiplied by the code of linear layers. A
// task keeps a running softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). The partial results of tasks are
// merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023):
//
//     range 0, shared   rows 0..3   |  chunk 0  |  chunk 1  |            a partial result each, per row and head
//     range 1, tail     row 0                               | chunk 0 |
//
// If keys and values are finite, a row's result depends only on its ranges and its kind, to the last bit, not on other rows or on
// threads: softmaxes of 256 keys are added in order to those of 2,048 keys, and these to one, whichever tasks do it. A value that
// a row does not see may be multiplied by 0, which gives NaN if it is infinite.

#include <omp.h>

#include <vector>

#include "attention_tasks.h"
#include "calls.h"
#include "pack.h"
#include "softmax.h"
#include "unpacked.h"

namespace radixkv {
namespace {

// Rows multiplied by packed keys and values at a time: many with AMX, because reading what a tile has just stored is slow.
constexpr int64_t kBandRows = kHasTiles ? kTileRows : kMaxRows;
// A head's queries and outputs are not contiguous from row to row, so they are prefetched so many rows ahead.
constexpr int64_t kRowsAhead = 8;

// One addition of a merge: of the part `at`; if that is below 0, of the sum of all parts since the last such step.
struct Step {
    int64_t at;
    Shares shares;
};

// For every row and head: the sum of values, weighted by the softmax and padded; the softmax's maximum; the sum of weights.
struct Partials {
    float *outputs, *maxima, *totals;
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

template <typename T>
class Worker {
   public:
    explicit Worker(const Attention& call)
        : call_(call),
          group_(call.num_query_heads / call.num_kv_heads),
          // Rows, heads folded in, of one key-value head, or of all.
          rows_of_all_(std::max({int64_t(kTileRows), group_, kFewRows * call.num_kv_heads})),
          key_dim_(padded(call.key_dim)),
          value_dim_(padded(call.value_dim)),
          softmax_(call),
          query_(rows_of_all_ * key_dim_),
          keys_(kKeys * key_dim_),
          values_(kKeys * value_dim_),
          tile_sums_(call.num_kv_heads * kKeys * kTileColumns),
          scores_(rows_of_all_ * kKeys),
          weights_(rows_of_all_ * kKeys),
          seen_(rows_of_all_),
          shrink_(rows_of_all_ + kLanes),
          outputs_(rows_of_all_ * value_dim_),
          maxima_(rows_of_all_),
          totals_(rows_of_all_),
          chunk_outputs_(rows_of_all_ * value_dim_),
          chunk_maxima_(rows_of_all_),
          chunk_totals_(rows_of_all_) {}

    // Writes the task's partial results, or the output of its rows if it `is_whole`. Meanwhile the first keys of the `following`
    // task, if any, are prefetched.
    void run(const Task& task, const Task* following, const Partials& shared) {
        const Partials partials = task.is_whole ? Partials{outputs_.get(), maxima_.get(), totals_.get()} : shared;
        const int64_t num_rows = (task.row_stop - task.row_start) * group_, query_rows = std::max<int64_t>(num_rows, kUnpackedRows<T>);
        // A task with several chunks is for one head.
        const bool has_chunks = task.key_start / kChunk < (task.key_stop - 1) / kChunk;
        for (int64_t head = task.head_start; head < task.head_stop; head++) {
            load_query(task, head, query_.get() + (head - task.head_start) * query_rows * key_dim_);
            clear(partials, task.partial + (head - task.head_start) * task.head_stride, num_rows);
        }
        if (has_chunks) clear(chunk(), 0, num_rows);
        for (int64_t row = 0; row < num_rows; row++) {
            Seen& seen = seen_[row];
            seen.stop = call_.positions[task.row_start + row / group_] + 1;
            seen.start = call_.window ? std::max<int64_t>(seen.stop - call_.window, 0) : 0;
        }
        int64_t slots[kKeys], next[kKeys];
        find_slots(task, task.key_start, next);
        for (int64_t first = task.key_start, past; first < task.key_stop; first = past) {
            const int64_t chunk_stop = std::min((first / kChunk + 1) * kChunk, task.key_stop);
            past = std::min(first + kKeys, chunk_stop);
            const int count = int(past - first);
            std::memcpy(slots, next, sizeof slots);
            if (following && past == task.key_stop)
                find_slots(*following, following->key_start, next);
            else
                find_slots(task, past, next);
            const auto query = [&](int64_t head) { return query_.get() + (head - task.head_start) * query_rows * key_dim_; };
            const auto sums = [&](int64_t head) { return tile_sums_.get() + (head - task.head_start) * kKeys * kTileColumns; };
            // Scores of all heads first: what a tile instruction has stored cannot be read until it has left the processor.
            if constexpr (kAsTiles<T>)
                for (int64_t head = task.head_start; head < task.head_stop && task.unpacked; head++)
                    score_in_tiles(slots, head, first, count, query(head), sums(head));
            for (int64_t head = task.head_start; head < task.head_stop; head++) {
                const int64_t at = task.partial + (head - task.head_start) * task.head_stride;
                const Partials whole = {partials.outputs + at * value_dim_, partials.maxima + at, partials.totals + at};
                const auto [outputs, maxima, totals] = has_chunks ? chunk() : whole;
                attend(slots, next, head, first, count, num_rows, task.unpacked, query(head), sums(head), outputs, maxima, totals);
            }
            if (has_chunks && past == chunk_stop) add_chunk(num_rows, partials, task.partial);
        }
        if (task.is_whole) write_out(task, partials);
    }

   private:
    // Partial results of one chunk and head.
    Partials chunk() const { return {chunk_outputs_.get(), chunk_maxima_.get(), chunk_totals_.get()}; }

    void clear(const Partials& partials, int64_t at, int64_t num_rows) const {
        std::fill_n(partials.outputs + at * value_dim_, num_rows * value_dim_, 0.0f);
        std::fill_n(partials.maxima + at, num_rows, -INFINITY);
        std::fill_n(partials.totals + at, num_rows, 0.0f);
    }

    // Adds the chunk to partial results, as `merge` does, and clears it.
    void add_chunk(int64_t num_rows, const Partials& partials, int64_t at) {
        for (int64_t row = 0; row < num_rows; row += kLanes) {
            const int64_t count = std::min<int64_t>(kLanes, num_rows - row);
            float *to_maxima = partials.maxima + at + row, *to_totals = partials.totals + at + row;
            F32 maximum = load_part(to_maxima, count), total = load_part(to_totals, count);
            const Shares shares = add_part(maximum, total, load_part(chunk_maxima_.get() + row, count),
                                           load_part(chunk_totals_.get() + row, count));
            store_part(to_maxima, maximum, count);
            store_part(to_totals, total, count);
            std::fill_n(chunk_maxima_.get() + row, count, -INFINITY);
            std::fill_n(chunk_totals_.get() + row, count, 0.0f);
            for (int64_t i = 0; i < count; i++) {
                float *to = partials.outputs + (at + row + i) * value_dim_, *from = chunk_outputs_.get() + (row + i) * value_dim_;
                for (int64_t column = 0; column < value_dim_; column += kLanes) {
                    F32 sum = load(to + column);
                    add_shared(sum, load(from + column), shares.sum[i], shares.part[i]);
                    store(to + column, sum);
                    store(from + column, F32{});
                }
            }
        }
    }

    // Writes the output of a whole task's rows, with the same bits as `merge`.
    void write_out(const Task& task, const Partials& partials) {
        for (int64_t row = task.row_start; row < task.row_stop; row++) {
            T* out = static_cast<T*>(call_.out) + row * call_.out_row_stride;
            for (int64_t kv_head = task.head_start; kv_head < task.head_stop; kv_head++)
                for (int64_t member = 0; member < group_; member++) {
                    const int64_t head = kv_head * group_ + member;
                    const int64_t at = (kv_head - task.head_start) * task.head_stride + (row - task.row_start) * group_ + member;
                    T* to = out + head * call_.value_dim;
                    if (row + kRowsAhead < task.row_stop) fetch_vector(to + kRowsAhead * call_.out_row_stride, call_.value_dim);
                    F32 share = broadcast(1.0f), total = broadcast(partials.totals[at]);
                    if (call_.sinks) {
                        F32 maximum = broadcast(call_.sinks[head] * kLog2E), sum = broadcast(1.0f);
                        share = add_part(maximum, sum, broadcast(partials.maxima[at]), total).part;
                        total = sum;
                    }
                    const F32 norm = 1.0f / total;
                    for (int64_t column = 0; column < call_.value_dim; column += kLanes)
                        store_part(to + column, load(partials.outputs + at * value_dim_ + column) * share * norm, call_.value_dim - column);
                }
        }
    }

    void load_query(const Task& task, int64_t kv_head, T* to) {
        if constexpr (kAsTiles<T>) {
            if (task.unpacked) {
                copy_query(task, kv_head, keys_.get());
                return pack_columns((task.row_stop - task.row_start) * group_, keys_.get(), key_dim_, to);
            }
        }
        copy_query(task, kv_head, to);
    }

    void copy_query(const Task& task, int64_t kv_head, T* to) {
        for (int64_t row = task.row_start; row < task.row_stop; row++) {
            const T* from = static_cast<const T*>(call_.query) + row * call_.query_row_stride + kv_head * group_ * call_.query_head_stride;
            for (int64_t head = 0; head < group_; head++, from += call_.query_head_stride, to += key_dim_) {
                if (row + kRowsAhead < task.row_stop) fetch_vector(from + kRowsAhead * call_.query_row_stride, call_.key_dim);
                copy_padded(from, call_.key_dim, to);
            }
        }
    }

    // The slots of the task's keys from `first` on. Beyond its end, the last key's slot is repeated.
    void find_slots(const Task& task, int64_t first, int64_t* slots) const {
        const int32_t* blocks = call_.block_ids + call_.table[task.range] * call_.blocks_per_table;
        const int64_t start = std::min(first, task.key_stop - 1);
        int64_t block = start / call_.block_size, offset = start % call_.block_size;
        for (int i = 0; i < kKeys; i++) {
            slots[i] = blocks[block] * call_.block_size + offset;
            if (first + i + 1 < task.key_stop && ++offset == call_.block_size) offset = 0, block++;
        }
    }

    void find(const void* cache, int64_t dim, int64_t head, const int64_t* slots, const T** to) const {
        for (int i = 0; i < kKeys; i++) to[i] = static_cast<const T*>(cache) + (slots[i] * call_.num_kv_heads + head) * dim;
    }

    // All rows over up to 64 keys of one head. `sums` are scores of unpacked rows that tiles have computed before.
    void attend(const int64_t* slots, const int64_t* next, int64_t head, int64_t first, int count, int64_t num_rows, bool unpacked,
                const T* query, const float* sums, float* outputs, float* maxima, float* totals) {
        const T *keys[kKeys], *values[kKeys], *next_keys[kKeys], *next_values[kKeys];
        find(call_.keys, call_.key_dim, head, slots, keys);
        find(call_.keys, call_.key_dim, head, next, next_keys);
        find(call_.values, call_.value_dim, head, slots, values);
        find(call_.values, call_.value_dim, head, next, next_values);
        if (unpacked && !kAsPairs<T>)
            return attend_unpacked(keys, values, next_keys, next_values, first, count, num_rows, query, sums, outputs, maxima, totals);
        pack_keys(keys, next_keys, count, call_.key_dim, keys_.get());
        if (unpacked)
            return attend_band(0, num_rows, first, count, query, values, next_values, outputs, maxima, totals);
        pack_values(values, next_values, count, call_.value_dim, values_.get());
        for (int64_t row = 0; row < num_rows; row += kBandRows)
            attend_band(row, std::min(kBandRows, num_rows - row), first, count, query + row * key_dim_, nullptr, nullptr,
                        outputs + row * value_dim_, maxima + row, totals + row);
    }

    void attend_unpacked(const T* const* keys, const T* const* values, const T* const* next_keys, const T* const* next_values, int64_t first,
                         int count, int64_t num_rows, const T* query, const float* sums, float* outputs, float* maxima, float* totals) {
        for (int at = 0; at < count; at += kLanes) {
            if constexpr (kAsTiles<T>)
                unpack_columns(sums + at * kTileColumns, num_rows, scores_.get() + at, kKeys);
            else
                dots<T>(num_rows, query, key_dim_, keys + at, next_keys + at, call_.key_dim, scores_.get() + at, kKeys);
        }
        if constexpr (kAsTiles<T>) {
            weigh(0, num_rows, first, count, 0, kKeys, weights_.get(), maxima, totals);
            for (int64_t at = 0; at < num_rows * kKeys; at += kLanes) store(scores_.get() + at, load(weights_.get() + at));  // as rounded
        } else {
            weigh(0, num_rows, first, count, 0, kKeys, scores_.get(), maxima, totals);
        }
        add_weighted<T>(num_rows, scores_.get(), kKeys, values, next_values, kAsTiles<T> ? next_keys : nullptr, count, call_.value_dim,
                        shrink_.get(), outputs, value_dim_);
    }

    // Some of the rows: so few that their scores and weights stay in the first-level cache. Panels of keys that none of them sees
    // are skipped. Values are packed, unless `values` points to them.
    void attend_band(int64_t first_row, int64_t num_rows, int64_t first, int count, const T* query, const T* const* values,
                     const T* const* next_values, float* outputs, float* maxima, float* totals) {
        int64_t low = kKeys, high = 0;
        for (const Seen* row = &seen_[first_row]; row < &seen_[first_row] + num_rows; row++)
            low = std::min(low, row->start - first), high = std::max(high, row->stop - first);
        const int start = int(std::max<int64_t>(low, 0) / kPanel * kPanel), stop = int(std::min<int64_t>(high, count));
        if (start >= stop) return;
        for (int key = start; key < stop; key += kPanel)
            product_.multiply(num_rows, query, key_dim_, keys_.get() + key * key_dim_, key_dim_, scores_.get() + key, kKeys);
        constexpr int kStep = PanelProduct<T>::kStep;
        const int used = (stop + kStep - 1) / kStep * kStep;
        weigh(first_row, num_rows, first, count, start, (used + kLanes - 1) / kLanes * kLanes, weights_.get(), maxima, totals);
        if constexpr (kAsPairs<T>)
            if (values)
                return add_pairs(num_rows, weights_.get(), values, next_values, start, used, count, call_.value_dim, shrink_.get(), outputs,
                                 value_dim_);
        // Rare: the highest score seldom grows.
        for (int64_t row = 0; row < num_rows; row++)
            if (const float shrink = shrink_.get()[row]; shrink != 1.0f)
                for (float* output = outputs + row * value_dim_; output < outputs + (row + 1) * value_dim_; output += kLanes)
                    store(output, load(output) * shrink);
        for (int64_t column = 0; column < value_dim_; column += kPanel)
            product_.multiply(num_rows, weights_.get() + start, kKeys, values_.get() + column * kKeys + start * kPanel, used - start,
                              outputs + column, value_dim_, true);
    }

    // Turns scores into weights, possibly in place, and finds the factors by which the rows' outputs shrink.
    template <typename Weight>
    void weigh(int64_t first_row, int64_t num_rows, int64_t first, int count, int start, int stop, Weight* weights, float* maxima,
               float* totals) {
        for (int64_t row = 0; row < num_rows; row += kLanes) {
            const int rows = int(std::min<int64_t>(kLanes, num_rows - row));
            store(shrink_.get() + row, softmax_.weigh(&seen_[first_row + row], rows, first, count, start, stop,
                                                      scores_.get() + row * kKeys, weights + row * kKeys, maxima + row, totals + row));
        }
    }

    // Scores of few rows, the columns of `query`, with up to 64 keys of a head as they lie in memory, by narrow tiles.
    void score_in_tiles(const int64_t* slots, int64_t head, int64_t first, int count, const T* query, float* sums) {
        const T *keys[kKeys], *parts[kKeys / kLanes];
        find(call_.keys, call_.key_dim, head, slots, keys);
        // Sixteen successive keys are a tile as they lie, where they do not reach into another block.
        const bool in_place = call_.block_size % kLanes == 0 && first % kLanes == 0 && call_.key_dim == key_dim_;
        for (int key = 0; key < count && !in_place; key++)
            copy_padded(keys[key], call_.key_dim, keys_.get() + key * key_dim_);
        for (int at = 0; at < count; at += kLanes) parts[at / kLanes] = in_place ? keys[at] : keys_.get() + at * key_dim_;
        const int64_t stride = in_place ? call_.num_kv_heads * key_dim_ : key_dim_;
        product_.tiles().multiply_columns((count + kLanes - 1) / kLanes, parts, stride, query, key_dim_, sums);
    }

    const Attention& call_;
    const int64_t group_, rows_of_all_, key_dim_, value_dim_;
    const RunningSoftmax softmax_;
    PanelProduct<T> product_;
    Scratch<T> query_, keys_, values_;
    Scratch<float> tile_sums_, scores_;
    Scratch<T> weights_;
    std::vector<Seen> seen_;
    Scratch<float> shrink_, outputs_, maxima_, totals_;  // the last three of a whole task
    Scratch<float> chunk_outputs_, chunk_maxima_, chunk_totals_;
};

template <typename T>
void run(const Attention& call) {
    const Work work = divide<T>(call);
    Scratch<float> outputs(work.num_partials * padded(call.value_dim)), maxima(work.num_partials), totals(work.num_partials);
    const Partials partials{outputs.get(), maxima.get(), totals.get()};
    // A thread takes neighbouring tasks, so that it knows what it reads next, but so few that no thread waits long.
    const int64_t num_tasks = int64_t(work.tasks.size()), at_once = std::clamp<int64_t>(num_tasks / (8 * omp_get_max_threads()), 1, 8);
#pragma omp parallel
    {
        {
            Worker<T> worker(call);
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
    is_bf16 ? radixkv::run<radixkv::BF16>(*call) : radixkv::run<float>(*call);
}
