// Attention of rows over packed keys by AMX tiles: up to 256 keys at a time, by strips of 32 rows.
//
// A strip's softmax is that of all these keys, so its outputs are sums of tiles from 0 on, which are added to those of other
// keys once. Tile instructions are mostly waiting, for what they load or for each other: so the steps of neighbouring strips
// overlap, and some tile instructions follow every row of weights.
//
//     tiles:     scores 0 | scores 1  | outputs 0, scores 2 | outputs 1, scores 3 | ...
//     vectors:            | weights 0 | weights 1           | weights 2           | ...
#pragma once

#include <algorithm>

#include "attention_tasks.h"
#include "pack.h"
#include "softmax.h"
#include "tiles.h"

namespace radixkv {

#if defined(__AMX_BF16__)
class Strips {
   public:
    Strips(const Attention& call, const Softmax& softmax, Tiles& tiles)
        : call_(call),
          key_dim_(padded(call.key_dim)),
          value_dim_(padded(call.value_dim)),
          softmax_(softmax),
          products_(tiles),
          keys_(kChunk * key_dim_),
          values_(kChunk * value_dim_),
          buffers_{Buffer(value_dim_), Buffer(value_dim_)} {}

    // Packs up to `kChunk` keys and values. There are `kKeys` more of each, which are not packed but prefetched.
    void pack(const BF16* const* keys, const BF16* const* values, int count) {
        count_ = count;
        pack_keys(keys, keys + kKeys, count, call_.key_dim, keys_.get());
        pack_values(values, values + kKeys, count, call_.value_dim, kChunk, values_.get());
    }

    // Adds the results of rows over the packed keys, of which the first has the position `first`.
    void attend(const Seen* seen, int64_t num_rows, int64_t first, const BF16* query, const Partials& to) {
        Strip before{}, strip = strip_at(0, seen, num_rows, first);
        compute_scores(strip, query);
        products_.finish();
        while (strip.num_rows > 0) {
            const Strip next = strip_at(strip.row + kRows, seen, num_rows, first);
            compute_outputs(before);
            compute_scores(next, query);
            weigh(strip, seen, first);
            products_.finish();
            add(before, to);
            before = strip, strip = next;
        }
        compute_outputs(before);
        products_.finish();
        add(before, to);
    }

   private:
    static constexpr int kRows = Tiles::kBlock;
    // Rows that are a power of two apart would share the same few sets of the first-level cache.
    static constexpr int64_t kScoreStride = kChunk + 16, kWeightStride = kChunk + 32;

    struct Strip {
        int64_t row, num_rows;
        int start, stop;  // of the keys that any row sees, in whole panels; the same if there is none
    };

    // What belongs to every second strip.
    struct Buffer {
        explicit Buffer(int64_t value_dim)
            : scores(kRows * kScoreStride), weights(kRows * kWeightStride), outputs(kRows * value_dim), maxima(kRows), totals(kRows) {}

        Scratch<float> scores;
        Scratch<BF16> weights;
        Scratch<float> outputs, maxima, totals;
    };

    Buffer& buffer(const Strip& strip) { return buffers_[strip.row / kRows % 2]; }

    Strip strip_at(int64_t row, const Seen* seen, int64_t num_rows, int64_t first) const {
        Strip strip{row, std::clamp<int64_t>(num_rows - row, 0, kRows), 0, 0};
        if (strip.num_rows == 0) return strip;
        const Seen all = seen_by_any(seen + row, strip.num_rows);
        const int64_t low = std::max<int64_t>(all.start - first, 0), high = std::min<int64_t>(all.stop - first, count_);
        if (low < high) strip.start = int(low / kPanel * kPanel), strip.stop = int(padded(high));
        return strip;
    }

    void compute_scores(const Strip& strip, const BF16* query) {
        for (int key = strip.start; key < strip.stop; key += kPanel)
            products_.add({int(strip.num_rows), query + strip.row * key_dim_, key_dim_, keys_.get() + key * key_dim_, key_dim_,
                           buffer(strip).scores.get() + key, kScoreStride, false});
    }

    // Meanwhile, the products that have been added are computed.
    void weigh(const Strip& strip, const Seen* seen, int64_t first) {
        if (strip.start == strip.stop) return;
        Buffer& of_strip = buffer(strip);
        for (int64_t row = 0; row < strip.num_rows; row += kLanes)
            softmax_.weigh_all(seen + strip.row + row, int(std::min<int64_t>(kLanes, strip.num_rows - row)), first, count_, strip.start, strip.stop,
                               of_strip.scores.get() + row * kScoreStride, kScoreStride, of_strip.weights.get() + row * kWeightStride,
                               kWeightStride, of_strip.maxima.get() + row, of_strip.totals.get() + row,
                               [&] { products_.share(int(strip.num_rows)); });
    }

    void compute_outputs(const Strip& strip) {
        if (strip.start == strip.stop) return;
        for (int64_t column = 0; column < value_dim_; column += kPanel)
            products_.add({int(strip.num_rows), buffer(strip).weights.get() + strip.start, kWeightStride,
                           values_.get() + column * kChunk + strip.start * kPanel, strip.stop - strip.start,
                           buffer(strip).outputs.get() + column, value_dim_, false});
    }

    void add(const Strip& strip, const Partials& to) {
        if (strip.start == strip.stop) return;
        const Buffer& part = buffer(strip);
        add_partials(strip.num_rows, value_dim_, {part.outputs.get(), part.maxima.get(), part.totals.get()}, to.from(strip.row, value_dim_));
    }

    const Attention& call_;
    const int64_t key_dim_, value_dim_;
    const Softmax& softmax_;
    TileProducts products_;
    Scratch<BF16> keys_, values_;
    Buffer buffers_[2];
    int count_ = 0;
};
#endif

}  // namespace radixkv
