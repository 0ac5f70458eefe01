// The rows of a task of attention: their queries, the keys that they see, and what becomes of their results.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_tasks.h"
#include "calls.h"
#include "pack.h"
#include "softmax.h"

namespace radixkv {

template <typename T>
class TaskRows {
   protected:
    explicit TaskRows(const Attention& call)
        : call_(call),
          group_(call.num_query_heads / call.num_kv_heads),
          // Rows, heads folded in, of one key-value head, or of all.
          rows_of_all_(std::max({int64_t(kTileRows<T>), group_, kFewRows * call.num_kv_heads})),
          key_dim_(padded(call.key_dim)),
          value_dim_(padded(call.value_dim)),
          softmax_(call),
          query_(rows_of_all_ * key_dim_),
          seen_(rows_of_all_),
          outputs_(rows_of_all_ * value_dim_),
          maxima_(rows_of_all_),
          totals_(rows_of_all_) {}

    // Has `attend` compute partial results, which are those of no keys when it is called. If the task `is_whole`, these are not
    // `shared`, and the output of its rows is written.
    template <typename Attend>
    void run(const Task& task, const Partials& shared, Attend attend) {
        const Partials partials = task.is_whole ? Partials{outputs_.get(), maxima_.get(), totals_.get()} : shared;
        const int64_t num_rows = rows_of(task);
        for (int64_t head = task.head_start; head < task.head_stop; head++) {
            copy_query(task, head, query_of(task, head));
            clear(partials_of(task, head, partials), num_rows);
        }
        for (int64_t row = 0; row < num_rows; row++) {
            Seen& seen = seen_[row];
            seen.stop = call_.positions[task.row_start + row / group_] + 1;
            seen.start = call_.window ? std::max<int64_t>(seen.stop - call_.window, 0) : 0;
        }
        attend(partials);
        if (task.is_whole) write_out(task);
    }

    // Of one key-value head.
    int64_t rows_of(const Task& task) const { return (task.row_stop - task.row_start) * group_; }

    Input<T>* query_of(const Task& task, int64_t head) const { return query_.get() + (head - task.head_start) * rows_of(task) * key_dim_; }

    Partials partials_of(const Task& task, int64_t head, const Partials& of_task) const {
        return of_task.from(task.partial + (head - task.head_start) * task.head_stride, value_dim_);
    }

    void clear(const Partials& partials, int64_t num_rows) const {
        std::fill_n(partials.outputs, num_rows * value_dim_, 0.0f);
        std::fill_n(partials.maxima, num_rows, -INFINITY);
        std::fill_n(partials.totals, num_rows, 0.0f);
    }

    // The slots of 64 of the task's keys, from `first` on. Beyond its end, the last key's slot is repeated.
    void find_slots(const Task& task, int64_t first, int64_t* slots) const {
        const int32_t* blocks = call_.block_ids + call_.table[task.range] * call_.blocks_per_table;
        const int64_t start = std::min(first, task.key_stop - 1);
        int64_t block = start / call_.block_size, offset = start % call_.block_size;
        for (int i = 0; i < kKeys; i++) {
            slots[i] = blocks[block] * call_.block_size + offset;
            if (first + i + 1 < task.key_stop && ++offset == call_.block_size) offset = 0, block++;
        }
    }

    // Those of the keys that are read after those before `past`, of this task or of the `following` one, if any.
    void find_next_slots(const Task& task, int64_t past, const Task* following, int64_t* slots) const {
        if (following && past == task.key_stop)
            find_slots(*following, following->key_start, slots);
        else
            find_slots(task, past, slots);
    }

    // Of which head they are read when this one's have been.
    static int64_t next_head(const Task& task, int64_t head, int64_t past, const Task* following) {
        const bool is_single = following && following->head_stop - following->head_start == 1;
        return is_single && past == task.key_stop ? following->head_start : head;
    }

    void find(const void* cache, int64_t dim, int64_t head, const int64_t* slots, int count, const T** to) const {
        for (int i = 0; i < count; i++) to[i] = static_cast<const T*>(cache) + (slots[i] * call_.num_kv_heads + head) * dim;
    }

    const Attention& call_;
    const int64_t group_, rows_of_all_, key_dim_, value_dim_;
    const Softmax softmax_;
    Scratch<Input<T>> query_;
    std::vector<Seen> seen_;

   private:
    // A head's queries and outputs are not contiguous from row to row, so they are prefetched so many rows ahead.
    static constexpr int64_t kRowsAhead = 8;

    void copy_query(const Task& task, int64_t kv_head, Input<T>* to) {
        for (int64_t row = task.row_start; row < task.row_stop; row++) {
            const T* from = static_cast<const T*>(call_.query) + row * call_.query_row_stride + kv_head * group_ * call_.query_head_stride;
            for (int64_t head = 0; head < group_; head++, from += call_.query_head_stride, to += key_dim_) {
                if (row + kRowsAhead < task.row_stop) fetch_vector(from + kRowsAhead * call_.query_row_stride, call_.key_dim);
                copy_padded(from, call_.key_dim, to);
            }
        }
    }

    // Writes the output of a whole task's rows, with the same bits as `merge`.
    void write_out(const Task& task) {
        for (int64_t row = task.row_start; row < task.row_stop; row++) {
            T* out = static_cast<T*>(call_.out) + row * call_.out_row_stride;
            for (int64_t kv_head = task.head_start; kv_head < task.head_stop; kv_head++)
                for (int64_t member = 0; member < group_; member++) {
                    const int64_t head = kv_head * group_ + member;
                    const int64_t at = (kv_head - task.head_start) * task.head_stride + (row - task.row_start) * group_ + member;
                    T* to = out + head * call_.value_dim;
                    if (row + kRowsAhead < task.row_stop) fetch_vector(to + kRowsAhead * call_.out_row_stride, call_.value_dim);
                    F32 share = broadcast(1.0f), total = broadcast(totals_.get()[at]);
                    if (call_.sinks) {
                        F32 maximum = broadcast(call_.sinks[head] * kLog2E), sum = broadcast(1.0f);
                        share = add_part(maximum, sum, broadcast(maxima_.get()[at]), total).part;
                        total = sum;
                    }
                    const F32 norm = 1.0f / total;
                    for (int64_t column = 0; column < call_.value_dim; column += kLanes)
                        store_part(to + column, load(outputs_.get() + at * value_dim_ + column) * share * norm, call_.value_dim - column);
                }
        }
    }

    Scratch<float> outputs_, maxima_, totals_;  // of a whole task
};

}  // namespace radixkv
