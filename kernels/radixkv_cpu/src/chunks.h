// Which rows of a product pass its panels together.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "calls.h"
#include "panel.h"

namespace radixkv {

// Rows that pass a panel before the next panel is read: their inputs stay in the second-level cache. Whole blocks of rows.
constexpr int64_t kRowChunk = 288;

// Rows that pass a section of the weight together.
struct Chunk {
    int64_t section, first, rows;
};

inline void add_chunks(std::vector<Chunk>& chunks, int64_t section, int64_t first, int64_t stop, int64_t most = kRowChunk) {
    for (; first < stop; first += most) chunks.push_back({section, first, std::min(stop - first, most)});
}

inline std::vector<Chunk> chunks_of(int64_t num_sections, const int64_t* starts) {
    std::vector<Chunk> chunks;
    for (int64_t section = 0; section < num_sections; section++) add_chunks(chunks, section, starts[section], starts[section + 1]);
    return chunks;
}

// Runs of rows that hold all but the decoding rows. Short runs of these are included: each chunk converts panels anew.
inline std::vector<Chunk> prompt_chunks(const Linear& linear, int64_t most) {
    std::vector<Chunk> chunks;
    int64_t first = 0, stop = 0, next = 0;
    for (int64_t i = 0; i <= linear.num_decoding; i++) {
        const int64_t end = i < linear.num_decoding ? linear.decoding[i] : linear.rows;
        if (next < end) {
            if (next - stop > kMaxRows) {
                add_chunks(chunks, 0, first, stop, most);
                first = next;
            }
            stop = end;
        }
        next = end + 1;
    }
    add_chunks(chunks, 0, first, stop, most);
    return chunks;
}

// The decoding rows of a product. The other rows' products overwrite theirs, so they are copied, and put back last.
template <typename T>
class DecodingRows {
   public:
    explicit DecodingRows(const Linear& all)
        : all_(all),
          x_(all.num_decoding * all.inputs),
          residual_(all.num_decoding * all.outputs),
          out_(all.num_decoding * all.outputs),
          rows_(all) {
        gather(all.x, all.inputs, x_.get());
        if (all.residual) {
            gather(all.residual, all.outputs, residual_.get());
            rows_.residual = residual_.get();
        }
        rows_.x = x_.get(), rows_.out = out_.get(), rows_.rows = all.num_decoding;
    }

    // Of these alone.
    const Linear& linear() const { return rows_; }

    void put_back() const {
        for (int64_t i = 0; i < all_.num_decoding; i++)
            std::memcpy(static_cast<void*>(static_cast<T*>(all_.out) + all_.decoding[i] * all_.outputs), out_.get() + i * all_.outputs,
                        all_.outputs * sizeof(T));
    }

   private:
    void gather(const void* from, int64_t width, T* to) const {
        for (int64_t i = 0; i < all_.num_decoding; i++)
            std::memcpy(static_cast<void*>(to + i * width), static_cast<const T*>(from) + all_.decoding[i] * width, width * sizeof(T));
    }

    const Linear& all_;
    Scratch<T> x_, residual_, out_;
    Linear rows_;
};

}  // namespace radixkv
