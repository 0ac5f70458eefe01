// Attention without tiles: 64 keys at a time, with a running softmax. Few rows read keys in place; for more rows, keys are packed into
// panels and multiplied by the code of linear layers.
#pragma once

#include <algorithm>
#include <cstring>

#include "pack.h"
#include "task_rows.h"
#include "unpacked.h"

namespace radixkv {

template <typename T>
class RunningAttention : TaskRows<T> {
    using Rows = TaskRows<T>;
    using Rows::call_, Rows::clear, Rows::find, Rows::find_next_slots, Rows::find_slots, Rows::key_dim_, Rows::next_head, Rows::partials_of,
        Rows::query_of, Rows::rows_of, Rows::rows_of_all_, Rows::seen_, Rows::softmax_, Rows::value_dim_;

   public:
    explicit RunningAttention(const Attention& call)
        : Rows(call),
          keys_(kKeys * key_dim_),
          values_(kKeys * value_dim_),
          scores_(rows_of_all_ * kKeys),
          weights_(rows_of_all_ * kKeys),
          shrink_(rows_of_all_ + kLanes),
          chunk_outputs_(rows_of_all_ * value_dim_),
          chunk_maxima_(rows_of_all_),
          chunk_totals_(rows_of_all_) {}

    // Writes the task's partial results, or the output of its rows if it `is_whole`. Meanwhile the first keys of the `following`
    // task, if any, are prefetched.
    void run(const Task& task, const Task* following, const Partials& shared) {
        Rows::run(task, shared, [&](const Partials& partials) { attend_all(task, following, partials); });
    }

   private:
    void attend_all(const Task& task, const Task* following, const Partials& partials) {
        const int64_t num_rows = rows_of(task);
        // A task with several chunks is for one head.
        const bool has_chunks = task.key_start / kChunk < (task.key_stop - 1) / kChunk;
        if (has_chunks) clear(chunk(), num_rows);
        int64_t slots[kKeys], next[kKeys];
        find_slots(task, task.key_start, next);
        for (int64_t first = task.key_start, past; first < task.key_stop; first = past) {
            const int64_t chunk_stop = std::min((first / kChunk + 1) * kChunk, task.key_stop);
            past = std::min(first + kKeys, chunk_stop);
            std::memcpy(slots, next, sizeof slots);
            find_next_slots(task, past, following, next);
            for (int64_t head = task.head_start; head < task.head_stop; head++)
                attend(slots, next, head, next_head(task, head, past, following), first, int(past - first), num_rows, task.unpacked,
                       query_of(task, head), has_chunks ? chunk() : partials_of(task, head, partials));
            if (has_chunks && past == chunk_stop) {
                add_partials(num_rows, value_dim_, chunk(), partials_of(task, task.head_start, partials));
                clear(chunk(), num_rows);
            }
        }
    }

    // Partial results of one chunk and head.
    Partials chunk() const { return {chunk_outputs_.get(), chunk_maxima_.get(), chunk_totals_.get()}; }

    // All rows over up to 64 keys of one head.
    void attend(const int64_t* slots, const int64_t* next, int64_t head, int64_t following_head, int64_t first, int count, int64_t num_rows,
                bool unpacked, const Input<T>* query, const Partials& to) {
        const T *keys[kKeys], *values[kKeys], *next_keys[kKeys], *next_values[kKeys];
        find(call_.keys, call_.key_dim, head, slots, kKeys, keys);
        find(call_.keys, call_.key_dim, following_head, next, kKeys, next_keys);
        find(call_.values, call_.value_dim, head, slots, kKeys, values);
        find(call_.values, call_.value_dim, following_head, next, kKeys, next_values);
        if (unpacked && !kAsPairs<T>) {
            for (int at = 0; at < count; at += kLanes)
                dots<T>(num_rows, query, key_dim_, keys + at, next_keys + at, call_.key_dim, scores_.get() + at, kKeys);
            weigh(0, num_rows, first, count, 0, kKeys, scores_.get(), to);
            return add_weighted<T>(num_rows, scores_.get(), kKeys, values, next_values, count, call_.value_dim, shrink_.get(), to.outputs,
                                   value_dim_);
        }
        pack_keys(keys, next_keys, count, call_.key_dim, keys_.get());
        if (unpacked) return attend_band(0, num_rows, first, count, query, values, next_values, to);
        pack_values(values, next_values, count, call_.value_dim, kKeys, values_.get());
        for (int64_t row = 0; row < num_rows; row += kMaxRows)
            attend_band(row, std::min<int64_t>(kMaxRows, num_rows - row), first, count, query + row * key_dim_, nullptr, nullptr,
                        to.from(row, value_dim_));
    }

    // Some of the rows: so few that their scores and weights stay in the first-level cache. Panels of keys that none of them sees
    // are skipped. Values are packed, unless `values` points to them.
    void attend_band(int64_t first_row, int64_t num_rows, int64_t first, int count, const Input<T>* query, const T* const* values,
                     const T* const* next_values, const Partials& to) {
        const Seen all = seen_by_any(&seen_[first_row], num_rows);
        const int start = int(std::clamp<int64_t>(all.start - first, 0, kKeys) / kPanel * kPanel);
        const int stop = int(std::min<int64_t>(all.stop - first, count));
        if (start >= stop) return;
        for (int key = start; key < stop; key += kPanel)
            product_.multiply(num_rows, query, key_dim_, keys_.get() + key * key_dim_, key_dim_, scores_.get() + key, kKeys);
        constexpr int kStep = PanelProduct<T>::kStep;
        const int used = (stop + kStep - 1) / kStep * kStep;
        weigh(first_row, num_rows, first, count, start, (used + kLanes - 1) / kLanes * kLanes, weights_.get(), to);
        if constexpr (kAsPairs<T>)
            if (values)
                return add_pairs(num_rows, weights_.get(), values, next_values, start, used, count, call_.value_dim, shrink_.get(),
                                 to.outputs, value_dim_);
        // Rare: the highest score seldom grows.
        for (int64_t row = 0; row < num_rows; row++)
            if (const float shrink = shrink_.get()[row]; shrink != 1.0f)
                for (float *output = to.outputs + row * value_dim_, *end = output + value_dim_; output < end; output += kLanes)
                    store(output, load(output) * shrink);
        for (int64_t column = 0; column < value_dim_; column += kPanel)
            product_.multiply(num_rows, weights_.get() + start, kKeys, values_.get() + column * kKeys + start * kPanel, used - start,
                              to.outputs + column, value_dim_, true);
    }

    // Turns scores into weights, possibly in place, and finds the factors by which the rows' outputs shrink.
    template <typename Weight>
    void weigh(int64_t first_row, int64_t num_rows, int64_t first, int count, int start, int stop, Weight* weights,
               const Partials& to) {
        for (int64_t row = 0; row < num_rows; row += kLanes) {
            const int rows = int(std::min<int64_t>(kLanes, num_rows - row));
            store(shrink_.get() + row, softmax_.weigh(&seen_[first_row + row], rows, first, count, start, stop,
                                                      scores_.get() + row * kKeys, weights + row * kKeys, to.maxima + row, to.totals + row));
        }
    }

    PanelProduct<T> product_;
    Scratch<T> keys_, values_;
    Scratch<float> scores_;
    Scratch<Input<T>> weights_;
    Scratch<float> shrink_, chunk_outputs_, chunk_maxima_, chunk_totals_;
};

}  // namespace radixkv
