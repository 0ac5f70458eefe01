// Attention by AMX tiles. The softmax of up to 256 keys, a chunk, is computed at once, of few rows as of many.
//
// Few rows, of all heads, are columns of a narrow tile: keys are multiplied by them as they lie in memory, and values without tiles. More
// rows are computed by strips.h, with the same results, except that tiles take numbers below 2^-126 in magnitude for zero.
#pragma once

#include <algorithm>
#include <iterator>

#include "strips.h"
#include "task_rows.h"
#include "tile_columns.h"
#include "unpacked.h"

namespace radixkv {

#if defined(__AMX_BF16__)
class TileAttention : TaskRows<BF16> {
   public:
    explicit TileAttention(const Attention& call)
        : TaskRows(call),
          strips_(call, softmax_, tiles_),
          columns_(call.num_kv_heads * kTileColumns * key_dim_),
          copied_keys_(kKeys * key_dim_),
          sums_(call.num_kv_heads * kTileColumns * kChunk),
          scores_(kTileColumns * kChunk),
          rounded_(kTileColumns * kChunk),
          weights_(call.num_kv_heads * kTileColumns * kChunk) {}

    // Writes the task's partial results, or the output of its rows if it `is_whole`. Meanwhile the first keys of the `following`
    // task, if any, are prefetched.
    void run(const Task& task, const Task* following, const Partials& shared) {
        TaskRows::run(task, shared, [&](const Partials& partials) {
            task.unpacked ? run_columns(task, following, partials) : run_strips(task, following, partials);
        });
    }

   private:
    void run_strips(const Task& task, const Task* following, const Partials& partials) {
        int64_t slots[kChunk + kKeys];
        const BF16 *keys[kChunk + kKeys], *values[kChunk + kKeys];
        for (int64_t first = task.key_start, past; first < task.key_stop; first = past) {
            past = std::min((first / kChunk + 1) * kChunk, task.key_stop);
            const int count = int(past - first);
            int found = 0;
            for (; found < count; found += kKeys) find_slots(task, first + found, slots + found);
            find_next_slots(task, past, following, slots + found);
            for (int64_t head = task.head_start; head < task.head_stop; head++) {
                const int64_t next = next_head(task, head, past, following);
                find(call_.keys, call_.key_dim, head, slots, found, keys);
                find(call_.keys, call_.key_dim, next, slots + found, kKeys, keys + found);
                find(call_.values, call_.value_dim, head, slots, found, values);
                find(call_.values, call_.value_dim, next, slots + found, kKeys, values + found);
                strips_.pack(keys, values, count);
                strips_.attend(seen_.data(), rows_of(task), first, query_of(task, head), partials_of(task, head, partials));
            }
        }
    }

    // One chunk of keys. Keys of all heads are neighbours in memory: first all scores are computed, 64 keys at a time, then the softmaxes,
    // then values are added likewise. What is read next is prefetched.
    void run_columns(const Task& task, const Task* following, const Partials& partials) {
        const int count = int(task.key_stop - task.key_start);
        int64_t slots[kChunk], next[kKeys];
        for (int at = 0; at < count; at += kKeys) find_slots(task, task.key_start + at, slots + at);
        for (int64_t head = task.head_start; head < task.head_stop; head++)
            pack_columns(rows_of(task), query_of(task, head), key_dim_, columns(head));
        for (int at = 0; at < count; at += kKeys) {
            if (at + kKeys < count)
                prefetch(call_.keys, call_.key_dim, slots + at + kKeys, std::min(kKeys, count - at - kKeys));
            else
                prefetch(call_.values, call_.value_dim, slots, std::min(kKeys, count));
            for (int64_t head = task.head_start; head < task.head_stop; head++)
                score(slots + at, head, task.key_start + at, std::min(kKeys, count - at), columns(head), sums(head) + at * kTileColumns);
        }
        for (int64_t head = task.head_start; head < task.head_stop; head++)
            weigh(rows_of(task), task.key_start, count, head, partials_of(task, head, partials));
        find_next_slots(task, task.key_stop, following, next);
        for (int at = 0; at < count; at += kKeys)
            for (int64_t head = task.head_start; head < task.head_stop; head++)
                add_values(slots + at, next, head, count - at, weights(head) + at, rows_of(task), partials_of(task, head, partials).outputs);
    }

    // Of a head's queries, scores and weights.
    BF16* columns(int64_t head) const { return columns_.get() + head * kTileColumns * key_dim_; }
    float* sums(int64_t head) const { return sums_.get() + head * kTileColumns * kChunk; }
    float* weights(int64_t head) const { return weights_.get() + head * kTileColumns * kChunk; }

    // All heads' keys or values of some slots, into the second-level cache.
    void prefetch(const void* cache, int64_t dim, const int64_t* slots, int count) const {
        const int64_t bytes = call_.num_kv_heads * dim * int64_t(sizeof(BF16));
        for (int i = 0; i < count; i++)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(cache) + slots[i] * bytes + at, 0, 2);
    }

    // Scores of the columns with up to 64 keys of a head as they lie in memory.
    void score(const int64_t* slots, int64_t head, int64_t first, int count, const BF16* columns, float* sums) {
        const BF16 *keys[kKeys], *parts[kKeys / kLanes];
        find(call_.keys, call_.key_dim, head, slots, kKeys, keys);
        // Sixteen successive keys are a tile as they lie, where they do not reach into another block.
        const bool in_place = call_.block_size % kLanes == 0 && first % kLanes == 0 && call_.key_dim == key_dim_;
        for (int key = 0; key < count && !in_place; key++)
            copy_padded(keys[key], call_.key_dim, copied_keys_.get() + key * key_dim_);
        for (int at = 0; at < count; at += kLanes) parts[at / kLanes] = in_place ? keys[at] : copied_keys_.get() + at * key_dim_;
        const int64_t stride = in_place ? call_.num_kv_heads * key_dim_ : key_dim_;
        tiles_.multiply_columns((count + kLanes - 1) / kLanes, parts, stride, columns, key_dim_, sums);
    }

    // Weights out of the sums of a head's columns, rounded as tiles would get them.
    void weigh(int64_t num_rows, int64_t first, int count, int64_t head, const Partials& to) {
        for (int at = 0; at < count; at += kLanes) unpack_columns(sums(head) + at * kTileColumns, num_rows, scores_.get() + at, kChunk);
        softmax_.weigh_all(seen_.data(), int(num_rows), first, count, 0, int(padded(count)), scores_.get(), kChunk, rounded_.get(), kChunk,
                           to.maxima, to.totals, [] {});
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t at = row * kChunk; at < row * kChunk + count; at += kLanes) store(weights(head) + at, load(rounded_.get() + at));
    }

    // Adds up to 64 of the `count` values that are left. What is read next is prefetched: more values, or the keys of `next_slots`.
    void add_values(const int64_t* slots, const int64_t* next_slots, int64_t head, int count, const float* weights, int64_t num_rows,
                    float* outputs) const {
        constexpr float kUnchanged[] = {1, 1, 1, 1};
        static_assert(std::size(kUnchanged) == kTileColumns);
        const BF16 *values[kKeys], *next[kKeys];
        find(call_.values, call_.value_dim, head, slots, kKeys, values);
        if (count > kKeys)
            find(call_.values, call_.value_dim, head, slots + kKeys, kKeys, next);
        else
            find(call_.keys, call_.key_dim, head, next_slots, kKeys, next);
        add_weighted<BF16>(num_rows, weights, kChunk, values, next, std::min(kKeys, count), call_.value_dim, kUnchanged, outputs, value_dim_);
    }

    Tiles tiles_;
    Strips strips_;
    Scratch<BF16> columns_, copied_keys_;
    Scratch<float> sums_, scores_;
    Scratch<BF16> rounded_;
    Scratch<float> weights_;
};
#endif

}  // namespace radixkv
