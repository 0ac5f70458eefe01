// How a batch's attention is divided into tasks, and which of their partial results are merged; see attention.cpp.
#pragma once

#include <algorithm>
#include <vector>

#include "calls.h"
#include "unpacked.h"

namespace radixkv {

// Query rows of a task, heads folded in. Keys are packed for each task, which matters more where products are fast.
template <typename T>
constexpr int kTileRows = kAsTiles<T> ? 384 : 192;
constexpr int64_t kShortRows = 192;  // ranges with no more rows are divided into chunks, or there would be too few tasks
constexpr int kFewRows = 32;  // a task with no more rows is for all heads: reading its keys takes most of the time
constexpr int64_t kChunk = 256;  // keys of a task with few rows, and of each partial softmax
constexpr int64_t kLongChunk = 2048;  // keys of a prompt's task; a multiple of kChunk
constexpr int64_t kMaxDecodingRows = 32;  // of a range: each is computed as if it were the only one

// Up to so many rows of a head read its keys in place. AMX tiles compute 16 rows in the time of one, so for them panels pay off
// earlier.
template <typename T>
constexpr int kUnpackedRows = kAsTiles<T> ? kTileColumns : 8;

struct Task {
    int64_t range, head_start, head_stop, row_start, row_stop, key_start, key_stop;
    int64_t partial;      // index of the result of its first row and head; other rows and the head's group follow
    int64_t head_stride;  // from there to those of the next key-value head
    bool unpacked;        // its rows read keys in place
    bool is_whole;        // no other task has results of its rows and heads: it writes their output
};

// One range's partial results of one row.
struct Part {
    int64_t partial, num_chunks, chunk_stride;
    int64_t first_chunk, chunk;  // the number of the first one, and how many keys make one
};

// Whether `num_rows` rows of a range, heads of a group folded in, read its keys in place. If products with panels are added in
// another order, this must not depend on the number of rows: all of a prompt's rows use panels, however few are left of it, and
// rows with drafts read in place if a single row would.
template <typename T>
bool is_unpacked(const Attention& call, int64_t range, int64_t num_rows, int64_t group) {
    const RowKind kind = call.kinds[range];
    if (kOneOrder<T> || kind == RowKind::kShared) return num_rows <= kUnpackedRows<T>;
    return kind == RowKind::kDecoding && group <= kUnpackedRows<T> && num_rows <= kMaxDecodingRows * group;
}

// A batch's tasks, and what is merged once they are done.
struct Work {
    std::vector<Task> tasks;
    std::vector<std::vector<Part>> parts;  // of each row; none where a task writes the row's output itself
    int64_t num_partials = 0;
};

// The keys of a range that some of a tile's rows see, cut at multiples of `size` into chunks.
struct Chunks {
    int64_t start, stop, size;

    int64_t first() const { return start / size; }
    int64_t count() const { return start < stop ? (stop - 1) / size - first() + 1 : 0; }
    int64_t start_of(int64_t i) const { return std::max(start, (first() + i) * size); }
    int64_t stop_of(int64_t i) const { return std::min(stop, (first() + i + 1) * size); }
};

inline Chunks chunks_of(const Attention& call, int64_t range, int64_t row_start, int64_t row_stop, int64_t size) {
    const auto [lowest, highest] = std::minmax_element(call.positions + row_start, call.positions + row_stop);
    int64_t start = call.key_start[range];
    if (const int64_t seen = *lowest + 1 - call.window; call.window && seen > start) {
        // A chunk's keys are taken in the same groups of 64 whatever rows are beside a row.
        const int64_t first_group = std::max(start, seen / kChunk * kChunk);
        start = first_group + (seen - first_group) / kKeys * kKeys;
    }
    return {start, std::min(call.key_stop[range], *highest + 1), size};
}

// How many ranges each row has.
inline std::vector<int> count_ranges(const Attention& call) {
    std::vector<int> counts(call.num_rows);
    for (int64_t range = 0; range < call.num_ranges; range++)
        for (int64_t row = call.row_start[range]; row < call.row_stop[range]; row++) counts[row]++;
    return counts;
}

template <typename T>
Work divide(const Attention& call) {
    const int64_t group = call.num_query_heads / call.num_kv_heads, tile = std::max<int64_t>(kTileRows<T> / group, 1);
    const std::vector<int> num_ranges = count_ranges(call);
    Work work;
    work.parts.resize(call.num_rows);
    for (int64_t range = 0; range < call.num_ranges; range++) {
        const int64_t num_rows = call.row_stop[range] - call.row_start[range];
        const bool is_short = num_rows <= std::max(kShortRows / group, kMaxDecodingRows);
        // A prompt's last rows see most keys: first come the long tasks, so that no thread is left with one at the end.
        for (int64_t i = (num_rows + tile - 1) / tile - 1; i >= 0; i--) {
            const int64_t row = call.row_start[range] + i * tile, row_stop = std::min(row + tile, call.row_stop[range]);
            const int64_t stride = (row_stop - row) * group;
            const bool few = stride <= kFewRows, unpacked = is_unpacked<T>(call, range, stride, group);
            const Chunks chunks = chunks_of(call, range, row, row_stop, few || is_short ? kChunk : kLongChunk);
            const int64_t num_chunks = chunks.count();
            if (!num_chunks) continue;
            const bool is_whole = num_chunks == 1 && std::all_of(num_ranges.begin() + row, num_ranges.begin() + row_stop,
                                                                 [](int count) { return count == 1; });
            for (int64_t r = row; r < row_stop && !is_whole; r++)
                work.parts[r].push_back({work.num_partials + (r - row) * group, num_chunks, stride, chunks.first(), chunks.size});
            const int64_t heads_per_task = few ? call.num_kv_heads : 1;
            for (int64_t head = 0; head < call.num_kv_heads; head += heads_per_task)
                for (int64_t c = 0; c < num_chunks; c++) {
                    const int64_t partial = is_whole ? 0 : work.num_partials + (head * num_chunks + c) * stride;
                    work.tasks.push_back({range, head, head + heads_per_task, row, row_stop, chunks.start_of(c), chunks.stop_of(c), partial,
                                          num_chunks * stride, unpacked, is_whole});
                }
            if (!is_whole) work.num_partials += call.num_kv_heads * num_chunks * stride;
        }
    }
    return work;
}

}  // namespace radixkv
