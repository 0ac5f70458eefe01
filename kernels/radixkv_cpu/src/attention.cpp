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
#include "panel.h"
#include "unpacked.h"

namespace radixkv {
namespace {

constexpr int kKeys = 64;        // keys that are read at a time
constexpr int kTileRows = 192;   // query rows, heads folded in, that pass them
constexpr int kFewRows = 32;     // up to so many, a task is for all heads: it takes as long as its keys take to be read
constexpr int64_t kChunk = 128;  // keys of such a task
constexpr int64_t kLongChunk = 2048;  // and of others
// Up to so many rows of a head pass its keys as they lie in memory. AMX tiles compute 16 rows in the time of one, and so gain
// from panels earlier.
#if defined(__AMX_BF16__)
template <typename T>
constexpr int kUnpackedRows = kPairs<T> ? 4 : 8;
#else
template <typename T>
constexpr int kUnpackedRows = 8;
#endif

struct Task {
    int64_t range, head_start, head_stop, row_start, row_stop, key_start, key_stop;
    int64_t partial;      // of its first row and head; those of the other rows and of the head's group follow
    int64_t head_stride;  // from there to those of the next key-value head
};

// One range's partial result of one row.
struct Part {
    int64_t partial, num_chunks, chunk_stride;
};

int64_t padded(int64_t dim) { return (dim + kPanel - 1) / kPanel * kPanel; }

// A square of 16 x 16 words, mirrored.
#if defined(__AVX512F__)
__attribute__((always_inline))  // all of it fits into registers
#endif
inline void transpose(const U32* from, U32* to) {
    U32 a[16], b[16];
    // Four times a perfect shuffle of rows i and i + 8: each turns one bit of the row's number into one of the column's.
    for (int i = 0; i < 8; i++) {
        a[2 * i] = interleave_low(from[i], from[i + 8]);
        a[2 * i + 1] = interleave_high(from[i], from[i + 8]);
    }
    for (int i = 0; i < 8; i++) {
        b[2 * i] = interleave_low(a[i], a[i + 8]);
        b[2 * i + 1] = interleave_high(a[i], a[i + 8]);
    }
    for (int i = 0; i < 8; i++) {
        a[2 * i] = interleave_low(b[i], b[i + 8]);
        a[2 * i + 1] = interleave_high(b[i], b[i + 8]);
    }
    for (int i = 0; i < 8; i++) {
        to[2 * i] = interleave_low(a[i], a[i + 8]);
        to[2 * i + 1] = interleave_high(a[i], a[i + 8]);
    }
}

// Keys into panels of 32 of them: [panels][words of a key][32 keys]. Missing keys and dimensions become zeros. Meanwhile the
// `next` ones are fetched: they lie scattered, where no processor foresees them.
template <typename T>
void pack_keys(const T* const* keys, const T* const* next, int count, int64_t dim, T* to) {
    constexpr int64_t kWord = 4 / sizeof(T);
    const int64_t words = padded(dim) / kWord;
    for (int first = 0; first < kKeys; first += kLanes) {
        auto* panel = reinterpret_cast<uint32_t*>(to) + first / kPanel * words * kPanel + first % kPanel;
        for (int64_t word = 0; word < words; word += kLanes) {
            U32 rows[kLanes], columns[kLanes];
            const int64_t left = std::min<int64_t>(dim - word * kWord, kLanes * kWord);
            for (int i = 0; i < kLanes; i++) {
                __builtin_prefetch(next[first + i] + word * kWord, 0, 2);
                rows[i] = U32{};
                if (first + i < count && left > 0) {
                    if (left == kLanes * kWord)
                        std::memcpy(&rows[i], keys[first + i] + word * kWord, sizeof rows[i]);
                    else
                        std::memcpy(&rows[i], keys[first + i] + word * kWord, left * sizeof(T));
                }
            }
            transpose(rows, columns);
            for (int i = 0; i < kLanes; i++) std::memcpy(panel + (word + i) * kPanel, &columns[i], sizeof columns[i]);
        }
    }
}

// Values into panels of 32 dimensions: [panels][keys][32], by pairs of keys in bfloat16. Missing keys become zeros.
void pack_values(const float* const* values, const float* const* next, int count, int64_t dim, float* to) {
    for (int64_t column = 0; column < padded(dim); column += kPanel)
        for (int key = 0; key < kKeys; key++) {
            __builtin_prefetch(next[key] + column, 0, 2);
            __builtin_prefetch(next[key] + column + kLanes, 0, 2);
            for (int half = 0; half < kPanel; half += kLanes, to += kLanes)
                store(to, key < count ? load_part(values[key] + column + half, dim - column - half) : F32{});
        }
}

void pack_values(const BF16* const* values, const BF16* const* next, int count, int64_t dim, BF16* to) {
    typedef uint16_t Line __attribute__((vector_size(64)));
    const Line low = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const Line high = low + 16;
    const auto part = [&](int key, int64_t column) {
        Line line{};
        if (key < count) std::memcpy(&line, values[key] + column, std::min<int64_t>(dim - column, kPanel) * sizeof(BF16));
        return line;
    };
    for (int64_t column = 0; column < padded(dim); column += kPanel)
        for (int key = 0; key < kKeys; key += 2, to += 2 * kPanel) {
            __builtin_prefetch(next[key] + column, 0, 2);
            __builtin_prefetch(next[key + 1] + column, 0, 2);
            Line even, odd;
            if (key + 1 < count && column + kPanel <= dim) {
                std::memcpy(&even, values[key] + column, sizeof even);
                std::memcpy(&odd, values[key + 1] + column, sizeof odd);
            } else {
                even = part(key, column), odd = part(key + 1, column);
            }
            const Line lines[2] = {__builtin_shuffle(even, odd, low), __builtin_shuffle(even, odd, high)};
            std::memcpy(static_cast<void*>(to), lines, sizeof lines);
        }
}

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
          scores_(rows_of_all_ * kKeys),
          weights_(rows_of_all_ * kKeys),
          seen_(rows_of_all_),
          shrink_(rows_of_all_ + kLanes) {}

    // Writes output, maximum and sum of each row and head of the task. Meanwhile the first keys of the `following` one, or null,
    // are fetched.
    void run(const Task& task, const Task* following, float* outputs, float* maxima, float* totals) {
        const int64_t num_rows = (task.row_stop - task.row_start) * group_;
        for (int64_t head = task.head_start; head < task.head_stop; head++) {
            const int64_t at = task.partial + (head - task.head_start) * task.head_stride;
            load_query(task, head, query_.get() + (head - task.head_start) * num_rows * key_dim_);
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
            for (int64_t head = task.head_start; head < task.head_stop; head++) {
                const int64_t at = task.partial + (head - task.head_start) * task.head_stride;
                const T* query = query_.get() + (head - task.head_start) * num_rows * key_dim_;
                attend(slots, next, head, first, count, num_rows, query, outputs + at * value_dim_, maxima + at, totals + at);
            }
        }
    }

   private:
    // The keys that a row sees, heads folded in.
    struct Seen {
        int64_t start = 0, stop = 0;
    };

    void load_query(const Task& task, int64_t kv_head, T* to) {
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

    // All rows over up to 64 keys of one head.
    void attend(const int64_t* slots, const int64_t* next, int64_t head, int64_t first, int count, int64_t num_rows, const T* query, float* outputs,
                float* maxima, float* totals) {
        const T *keys[kKeys], *values[kKeys], *next_keys[kKeys], *next_values[kKeys];
        find(call_.keys, call_.key_dim, head, slots, keys);
        find(call_.keys, call_.key_dim, head, next, next_keys);
        const bool unpacked = num_rows <= kUnpackedRows<T>;
        if (unpacked) {
            for (int at = 0; at < count; at += kLanes)
                dots<T>(num_rows, query, key_dim_, keys + at, next_keys + at, call_.key_dim, scores_.get() + at, kKeys);
        } else {
            pack_keys(keys, next_keys, count, call_.key_dim, keys_.get());
            for (int panel = 0; panel * kPanel < count; panel++)
                product_.multiply(num_rows, query, key_dim_, keys_.get() + panel * kPanel * key_dim_, key_dim_, scores_.get() + panel * kPanel,
                                  kKeys);
        }
        for (int64_t row = 0; row < num_rows; row += kLanes)
            if (const int rows = int(std::min<int64_t>(kLanes, num_rows - row)); unpacked)
                weigh(row, rows, first, count, scores_.get(), maxima + row, totals + row);
            else
                weigh(row, rows, first, count, weights_.get(), maxima + row, totals + row);
        find(call_.values, call_.value_dim, head, slots, values);
        find(call_.values, call_.value_dim, head, next, next_values);
        if (unpacked)
            return add_weighted<T>(num_rows, scores_.get(), kKeys, values, next_values, count, call_.value_dim, shrink_.get(), outputs, value_dim_);
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
    Scratch<float> scores_;
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
            const bool few = stride <= kFewRows;
            const int64_t chunk = few || call.row_stop[range] - call.row_start[range] <= tile ? kChunk : kLongChunk;
            const auto [lowest, highest] = std::minmax_element(call.positions + row, call.positions + row_stop);
            const int64_t stop = std::min(call.key_stop[range], *highest + 1);
            int64_t start = call.key_start[range];
            if (call.window) start = std::max(start, *lowest + 1 - call.window);
            if (start >= stop) continue;
            const int64_t first_chunk = start / chunk, num_chunks = (stop - 1) / chunk - first_chunk + 1;
            for (int64_t r = row; r < row_stop; r++) parts[r].push_back({num_partials + (r - row) * group, num_chunks, stride});
            const int64_t heads_per_task = few ? call.num_kv_heads : 1;
            for (int64_t head = 0; head < call.num_kv_heads; head += heads_per_task)
                for (int64_t c = 0; c < num_chunks; c++) {
                    const int64_t key_start = std::max(start, (first_chunk + c) * chunk), key_stop = std::min(stop, (first_chunk + c + 1) * chunk);
                    const int64_t partial = num_partials + (head * num_chunks + c) * stride;
                    tasks.push_back({range, head, head + heads_per_task, row, row_stop, key_start, key_stop, partial, num_chunks * stride});
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
