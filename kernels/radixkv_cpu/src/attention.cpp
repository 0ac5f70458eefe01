// Attention over paged keys and values, read where they lie.
//
// A task is some query rows over a stretch of one range of keys: for one key-value head, with the heads of its group folded
// into the rows, or where the rows are few for all heads, in the order in which their keys lie in memory. It takes 64 keys at a
// time. Few rows read them where they lie; for more they are packed into panels, so that scores and outputs are the same product
// that linear layers use. It keeps a running softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). Tasks leave partial results, which are merged by their
// log-sum-exp (Flash-Decoding, Dao et al. 2023):
//
//     range 0, shared   rows 0..3   |  chunk 0  |  chunk 1  |            a partial result each, per row and head
//     range 1, tail     row 0                               | chunk 0 |
//
// Where chunks begin depends on the range alone, never on the number of threads: so results do not, either.

#include <omp.h>

#include <vector>

#include "calls.h"
#include "pack.h"
#include "unpacked.h"

namespace radixkv {
namespace {

constexpr int kTileRows = 192;   // query rows, heads folded in, that pass them
constexpr int kFewRows = 32;     // up to so many, a task is for all heads: it takes as long as its keys take to be read
constexpr int64_t kChunk = 128;  // keys of such a task
constexpr int64_t kLongChunk = 2048;  // and of a prompt's
constexpr int64_t kMostDrafted = 32;  // rows of a sequence that is not in its prompt: each is computed as if it were the only one
// Up to so many rows of a head pass its keys as they lie in memory. AMX tiles compute 16 rows in the time of one, and so gain
// from panels earlier.
#if defined(__AMX_BF16__)
template <typename T>
constexpr int kUnpackedRows = kPairs<T> ? kTileColumns : 8;
#else
template <typename T>
constexpr int kUnpackedRows = 8;
#endif

struct Task {
    int64_t range, head_start, head_stop, row_start, row_stop, key_start, key_stop;
    int64_t partial;      // of its first row and head; those of the other rows and of the head's group follow
    int64_t head_stride;  // from there to those of the next key-value head
    bool unpacked;        // its rows pass keys as they lie in memory
};

// One range's partial result of one row.
struct Part {
    int64_t partial, num_chunks, chunk_stride;
};

template <typename T>
class Worker {
   public:
    explicit Worker(const Attention& call)
        : call_(call),
          group_(call.num_query_heads / call.num_kv_heads),
          // Of one key-value head, or of all.
          rows_of_all_(std::max({int64_t(kTileRows), group_, kFewRows * call.num_kv_heads})),
          key_dim_(padded(call.key_dim)),
          value_dim_(padded(call.value_dim)),
          query_(rows_of_all_ * key_dim_),
          keys_(kKeys * key_dim_),
          values_(kKeys * value_dim_),
          tile_sums_(call.num_kv_heads * kKeys * kTileColumns),
          scores_(rows_of_all_ * kKeys),
          weights_(rows_of_all_ * kKeys),
          seen_(rows_of_all_),
          shrink_(rows_of_all_ + kLanes) {}

    // Writes output, maximum and sum of each row and head of the task. Meanwhile the first keys of the `following` one, or null,
    // are fetched.
    void run(const Task& task, const Task* following, float* outputs, float* maxima, float* totals) {
        const int64_t num_rows = (task.row_stop - task.row_start) * group_, query_rows = std::max<int64_t>(num_rows, kUnpackedRows<T>);
        for (int64_t head = task.head_start; head < task.head_stop; head++) {
            const int64_t at = task.partial + (head - task.head_start) * task.head_stride;
            load_query(task, head, query_.get() + (head - task.head_start) * query_rows * key_dim_);
            std::fill_n(outputs + at * value_dim_, num_rows * value_dim_, 0.0f);
            std::fill_n(maxima + at, num_rows, -INFINITY);
            std::fill_n(totals + at, num_rows, 0.0f);
        }
        for (int64_t row = 0; row < num_rows; row++) {
            Seen& seen = seen_[row];
            seen.stop = call_.positions[task.row_start + row / group_] + 1;
            seen.start = call_.window ? std::max<int64_t>(seen.stop - call_.window, 0) : 0;
        }
        int64_t slots[kKeys], next[kKeys];
        find_slots(task, task.key_start, next);
        for (int64_t first = task.key_start; first < task.key_stop; first += kKeys) {
            const int count = int(std::min<int64_t>(kKeys, task.key_stop - first));
            std::memcpy(slots, next, sizeof slots);
            if (following && first + kKeys >= task.key_stop)
                find_slots(*following, following->key_start, next);
            else
                find_slots(task, first + kKeys, next);
            const auto query = [&](int64_t head) { return query_.get() + (head - task.head_start) * query_rows * key_dim_; };
            const auto sums = [&](int64_t head) { return tile_sums_.get() + (head - task.head_start) * kKeys * kTileColumns; };
            // Of all heads first: what a tile instruction has stored cannot be read until it has left the processor.
            if constexpr (kAsTiles<T>)
                for (int64_t head = task.head_start; head < task.head_stop && task.unpacked; head++)
                    score_in_tiles(slots, head, first, count, query(head), sums(head));
            for (int64_t head = task.head_start; head < task.head_stop; head++) {
                const int64_t at = task.partial + (head - task.head_start) * task.head_stride;
                attend(slots, next, head, first, count, num_rows, task.unpacked, query(head), sums(head), outputs + at * value_dim_,
                       maxima + at, totals + at);
            }
        }
    }

   private:
    // The keys that a row sees, heads folded in.
    struct Seen {
        int64_t start = 0, stop = 0;
    };

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
            for (int64_t head = 0; head < group_; head++, to += key_dim_) {
                std::memcpy(static_cast<void*>(to), from + head * call_.query_head_stride, call_.key_dim * sizeof(T));
                std::memset(static_cast<void*>(to + call_.key_dim), 0, (key_dim_ - call_.key_dim) * sizeof(T));
            }
        }
    }

    // Where the task's keys from `first` on lie. Beyond its end, the last one's is repeated.
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

    // All rows over up to 64 keys of one head; of unpacked ones, tiles have the `sums` that are their scores.
    void attend(const int64_t* slots, const int64_t* next, int64_t head, int64_t first, int count, int64_t num_rows, bool unpacked,
                const T* query, const float* sums, float* outputs, float* maxima, float* totals) {
        const T *keys[kKeys], *values[kKeys], *next_keys[kKeys], *next_values[kKeys];
        find(call_.keys, call_.key_dim, head, slots, keys);
        find(call_.keys, call_.key_dim, head, next, next_keys);
        if (unpacked && kAsTiles<T>) {
            for (int at = 0; at < count; at += kLanes) unpack_columns(sums + at * kTileColumns, num_rows, scores_.get() + at, kKeys);
        } else if (unpacked) {
            for (int at = 0; at < count; at += kLanes)
                dots<T>(num_rows, query, key_dim_, keys + at, next_keys + at, call_.key_dim, scores_.get() + at, kKeys);
        } else {
            pack_keys(keys, next_keys, count, call_.key_dim, keys_.get());
            for (int panel = 0; panel * kPanel < count; panel++)
                product_.multiply(num_rows, query, key_dim_, keys_.get() + panel * kPanel * key_dim_, key_dim_, scores_.get() + panel * kPanel,
                                  kKeys);
        }
        for (int64_t row = 0; row < num_rows; row += kLanes)
            if (const int rows = int(std::min<int64_t>(kLanes, num_rows - row)); unpacked && !kAsTiles<T>)
                weigh(row, rows, first, count, scores_.get(), maxima + row, totals + row);
            else
                weigh(row, rows, first, count, weights_.get(), maxima + row, totals + row);
        find(call_.values, call_.value_dim, head, slots, values);
        find(call_.values, call_.value_dim, head, next, next_values);
        if (unpacked && kAsTiles<T>)  // as rounded
            for (int64_t at = 0; at < num_rows * kKeys; at += kLanes) store(scores_.get() + at, load(weights_.get() + at));
        if (unpacked)
            return add_weighted<T>(num_rows, scores_.get(), kKeys, values, next_values, kAsTiles<T> ? next_keys : nullptr, count,
                                   call_.value_dim, shrink_.get(), outputs, value_dim_);
        pack_values(values, next_values, count, call_.value_dim, values_.get());
        const int64_t used = count > kPanel ? kKeys : kPanel;
        // The highest score seldom grows.
        for (int64_t row = 0; row < num_rows; row++)
            if (const float shrink = shrink_.get()[row]; shrink != 1.0f)
                for (float* output = outputs + row * value_dim_; output < outputs + (row + 1) * value_dim_; output += kLanes)
                    store(output, load(output) * shrink);
        for (int64_t column = 0; column < value_dim_; column += kPanel)
            product_.multiply(num_rows, weights_.get(), kKeys, values_.get() + column * kKeys, used, outputs + column, value_dim_, true);
    }

    // Scores of few rows, query columns, with up to 64 keys of a head as they lie in memory, by narrow tiles.
    void score_in_tiles(const int64_t* slots, int64_t head, int64_t first, int count, const T* query, float* sums) {
        const T *keys[kKeys], *parts[kKeys / kLanes];
        find(call_.keys, call_.key_dim, head, slots, keys);
        // Sixteen keys in a row are a tile as they are, where none reaches into another block.
        const bool in_place = call_.block_size % kLanes == 0 && first % kLanes == 0 && call_.key_dim == key_dim_;
        for (int key = 0; key < count && !in_place; key++) {
            T* to = keys_.get() + key * key_dim_;
            std::memcpy(static_cast<void*>(to), keys[key], call_.key_dim * sizeof(T));
            std::memset(static_cast<void*>(to + call_.key_dim), 0, (key_dim_ - call_.key_dim) * sizeof(T));
        }
        for (int at = 0; at < count; at += kLanes) parts[at / kLanes] = in_place ? keys[at] : keys_.get() + at * key_dim_;
        const int64_t stride = in_place ? call_.num_kv_heads * key_dim_ : key_dim_;
        product_.tiles().multiply_columns((count + kLanes - 1) / kLanes, parts, stride, query, key_dim_, sums);
    }

    // From the scores of up to 16 rows, a lane each in what is kept of them, to the weights of their keys, which may take the
    // scores' place, and to the factor by which what they have so far shrinks.
    template <typename Weight>
    void weigh(int64_t first_row, int num_rows, int64_t first, int count, Weight* all_weights, float* maxima, float* totals) {
        F32 peaks[kLanes], sums[kLanes] = {};
        std::fill_n(peaks, kLanes, broadcast(-INFINITY));
        for (int row = 0; row < num_rows; row++) peaks[row] = mask(seen_[first_row + row], first, count, scores_.get() + (first_row + row) * kKeys);
        const F32 before = load_part(maxima, num_rows), maximum = max(before, reduce_each(peaks, max));
        // Without a score above minus infinity all weights are 0, but for those that are NaN: these must not pass unseen.
        float subtracted[kLanes];
        store(subtracted, maximum == -INFINITY ? F32{} : maximum);
        for (int row = 0; row < num_rows; row++) {
            const float* scores = scores_.get() + (first_row + row) * kKeys;
            Weight* weights = all_weights + (first_row + row) * kKeys;
            for (int at = 0; at < kKeys; at += kLanes) {
                const F32 weight = exp(load(scores + at) - subtracted[row]);
                sums[row] += weight;
                store(weights + at, weight);
            }
        }
        const F32 shrink = before == maximum ? broadcast(1.0f) : exp(before - maximum);
        store(shrink_.get() + first_row, shrink);
        store_part(totals, load_part(totals, num_rows) * shrink + reduce_each(sums, [](F32 a, F32 b) { return a + b; }), num_rows);
        store_part(maxima, maximum, num_rows);
    }

    // Scales a row's scores, hides keys that it does not see, and returns the highest, by lanes.
    F32 mask(const Seen& row, int64_t first, int count, float* scores) const {
        const int64_t low = std::max<int64_t>(row.start - first, 0), high = std::min<int64_t>(row.stop - first, count);
        F32 peak = broadcast(-INFINITY);
        for (int at = 0; at < kKeys; at += kLanes) {
            F32 score = load(scores + at) * call_.scale;
            if (call_.softcap > 0) score = call_.softcap * tanh(score / call_.softcap);
            if (low > at || high < at + kLanes) {
                const I32 key = I32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + at;
                score = (key >= int32_t(low)) & (key < int32_t(high)) ? score : broadcast(-INFINITY);
            }
            store(scores + at, score);
            peak = max(peak, score);
        }
        return peak;
    }

    const Attention& call_;
    const int64_t group_, rows_of_all_, key_dim_, value_dim_;
    PanelProduct<T> product_;
    Scratch<T> query_, keys_, values_;
    Scratch<float> tile_sums_, scores_;
    Scratch<T> weights_;
    std::vector<Seen> seen_;
    Scratch<float> shrink_;
};

// One row and head: its partial results, and a sink, weighed by their shares of the softmax's denominator, for which there is
// room in `shares`.
template <typename T>
void merge(const Attention& call, const std::vector<Part>& parts, int64_t head, int64_t value_dim, const float* outputs,
           const float* maxima, const float* totals, std::vector<float>& shares, T* out) {
    const int64_t group = call.num_query_heads / call.num_kv_heads, kv_head = head / group, member = head % group;
    float maximum = call.sinks ? call.sinks[head] : -INFINITY;
    const auto each = [&](auto&& use) {
        for (const Part& part : parts)
            for (int64_t chunk = 0; chunk < part.num_chunks; chunk++)
                use(part.partial + (kv_head * part.num_chunks + chunk) * part.chunk_stride + member);
    };
    each([&](int64_t at) { maximum = std::max(maximum, maxima[at]); });
    float total = call.sinks ? std::exp(call.sinks[head] - maximum) : 0.0f;
    shares.clear();
    each([&](int64_t at) {
        shares.push_back(std::exp(maxima[at] - maximum));
        total += totals[at] * shares.back();
    });
    for (int64_t column = 0; column < call.value_dim; column += kLanes) {
        F32 sums{};
        auto share = shares.begin();
        each([&](int64_t at) { sums += load(outputs + at * value_dim + column) * *share++; });
        sums /= total;
        store_part(out + column, sums, call.value_dim - column);
    }
}

// Whether `num_rows` rows of a range, heads of a group folded in, pass its keys as they lie in memory. In float32, rows of one sequence
// that is not in its prompt do if a single one of them would: drafts are rows beside the one that there is without them, and products
// with panels are added in another order. In bfloat16 AMX tiles have one order for both; without them, panels take 17 rows
// in two thirds of the time.
template <typename T>
bool is_unpacked(const Attention& call, int64_t range, int64_t num_rows, int64_t group) {
    if (num_rows <= kUnpackedRows<T>) return true;
    const int64_t first = call.row_start[range], last = call.row_stop[range] - 1;
    return !kPairs<T> && group <= kUnpackedRows<T> && last - first < kMostDrafted && call.positions[last] - call.positions[first] == last - first;
}

template <typename T>
void run(const Attention& call) {
    const int64_t group = call.num_query_heads / call.num_kv_heads, value_dim = padded(call.value_dim);
    const int64_t tile = std::max<int64_t>(kTileRows / group, 1);
    std::vector<Task> tasks;
    std::vector<std::vector<Part>> parts(call.num_rows);
    int64_t num_partials = 0;
    for (int64_t range = 0; range < call.num_ranges; range++) {
        for (int64_t row = call.row_start[range]; row < call.row_stop[range]; row += tile) {
            const int64_t row_stop = std::min(row + tile, call.row_stop[range]);
            const int64_t stride = (row_stop - row) * group;
            const bool few = stride <= kFewRows, unpacked = is_unpacked<T>(call, range, stride, group);
            const int64_t chunk = few || call.row_stop[range] - call.row_start[range] <= std::max(tile, kMostDrafted) ? kChunk : kLongChunk;
            const auto [lowest, highest] = std::minmax_element(call.positions + row, call.positions + row_stop);
            const int64_t stop = std::min(call.key_stop[range], *highest + 1);
            int64_t start = call.key_start[range];
            // From a whole multiple on, so that keys are taken by the same 64 whatever rows are beside a row.
            if (call.window) start = std::max(start, (*lowest + 1 - call.window) / kKeys * kKeys);
            if (start >= stop) continue;
            const int64_t first_chunk = start / chunk, num_chunks = (stop - 1) / chunk - first_chunk + 1;
            for (int64_t r = row; r < row_stop; r++) parts[r].push_back({num_partials + (r - row) * group, num_chunks, stride});
            const int64_t heads_per_task = few ? call.num_kv_heads : 1;
            for (int64_t head = 0; head < call.num_kv_heads; head += heads_per_task)
                for (int64_t c = 0; c < num_chunks; c++) {
                    const int64_t key_start = std::max(start, (first_chunk + c) * chunk), key_stop = std::min(stop, (first_chunk + c + 1) * chunk);
                    const int64_t partial = num_partials + (head * num_chunks + c) * stride;
                    tasks.push_back({range, head, head + heads_per_task, row, row_stop, key_start, key_stop, partial, num_chunks * stride, unpacked});
                }
            num_partials += call.num_kv_heads * num_chunks * stride;
        }
    }
    Scratch<float> outputs(num_partials * value_dim), maxima(num_partials), totals(num_partials);
    // A thread takes neighbours, so that it knows what it reads next, but few enough that none waits long for another.
    const int64_t num_tasks = int64_t(tasks.size()), at_once = std::clamp<int64_t>(num_tasks / (8 * omp_get_max_threads()), 1, 8);
#pragma omp parallel
    {
        {
            Worker<T> worker(call);
#pragma omp for schedule(dynamic, at_once)
            for (int64_t i = 0; i < num_tasks; i++) {
                const bool is_last = (i + 1) % at_once == 0 || i + 1 == num_tasks;
                worker.run(tasks[i], is_last ? nullptr : &tasks[i + 1], outputs.get(), maxima.get(), totals.get());
            }
        }
        std::vector<float> shares;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < call.num_rows * call.num_query_heads; i++) {
            const int64_t row = i / call.num_query_heads, head = i % call.num_query_heads;
            T* out = static_cast<T*>(call.out) + row * call.out_row_stride + head * call.value_dim;
            merge(call, parts[row], head, value_dim, outputs.get(), maxima.get(), totals.get(), shares, out);
        }
    }
}

}  // namespace
}  // namespace radixkv

RADIXKV_API void radixkv_attention(const radixkv::Attention* call, int32_t is_bf16) {
    is_bf16 ? radixkv::run<radixkv::BF16>(*call) : radixkv::run<float>(*call);
}
