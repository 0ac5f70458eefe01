// A decoder layer in one call: for few rows, what stands between its products took as long as they do when each was called by
// itself. Every part is the function that can also be called alone.

#include <algorithm>
#include <cstring>
#include <vector>

#include "calls.h"
#include "panel.h"

namespace radixkv {
namespace {

template <typename T>
class LayerRun {
   public:
    explicit LayerRun(const Layer& layer)
        : layer_(layer),
          rows_(layer.rows),
          decoding_(layer.decoding, layer.decoding + layer.num_decoding),
          heads_width_((layer.num_query_heads + 2 * layer.num_kv_heads) * layer.head_dim),
          normed_(layer.rows * layer.width),
          projected_(layer.rows * heads_width_),
          attended_(layer.attention->num_rows * layer.num_query_heads * layer.head_dim),
          between_(layer.attention->num_rows * layer.width),
          gated_(layer.gate_up ? layer.attention->num_rows * layer.gate_up->outputs : 1) {}

    void run() {
        const auto* x = static_cast<const T*>(layer_.x);
        auto* out = static_cast<T*>(layer_.out);
        norm(x, layer_.input_norm, layer_.input_epsilon, normed_.get());
        multiply(*layer_.project, normed_.get(), nullptr, projected_.get());
        store();
        if (layer_.kept) {
            rows_ = layer_.attention->num_rows;
            // In place: a row never moves behind one that is still to be read.
            keep(projected_.get(), projected_.get(), heads_width_);
            keep(x, out, layer_.width);
            x = out;
            keep_decoding();
        }
        attend();
        T* between = layer_.gate_up ? between_.get() : out;
        multiply_and_add(*layer_.project_back, attended_.get(), layer_.attention_norm, layer_.attention_epsilon, x, between);
        norm(between, layer_.post_norm, layer_.post_epsilon, layer_.gate_up ? normed_.get() : static_cast<T*>(layer_.normed));
        if (!layer_.gate_up) return;
        multiply(*layer_.gate_up, normed_.get(), nullptr, gated_.get());
        multiply_and_add(*layer_.down, gated_.get(), layer_.mlp_norm, layer_.mlp_epsilon, between, out);
    }

   private:
    static constexpr int32_t kIsBF16 = kPairs<T>;

    void norm(const T* x, const float* weight, float epsilon, T* out) {
        const Norm call{x, weight, out, rows_, 1, layer_.width, layer_.width, epsilon};
        radixkv_rms_norm(&call, kIsBF16);
    }

    void norm_heads(T* x, const float* weight, float epsilon, int64_t num_heads) {
        const Norm call{x, weight, x, rows_, num_heads, layer_.head_dim, heads_width_, epsilon};
        radixkv_rms_norm(&call, kIsBF16);
    }

    void multiply(const Linear& weight, const T* x, const T* residual, T* out) {
        Linear call = weight;
        call.x = x, call.residual = residual, call.out = out, call.rows = rows_;
        call.decoding = decoding_.data(), call.num_decoding = int64_t(decoding_.size());
        radixkv_linear(&call, kIsBF16);
    }

    // out = x + product, which is normed first if there is a norm.
    void multiply_and_add(const Linear& weight, const T* inputs, const float* norm_weight, float epsilon, const T* x, T* out) {
        if (!norm_weight) return multiply(weight, inputs, x, out);
        T* product = normed_.get();
        multiply(weight, inputs, nullptr, product);
        norm(product, norm_weight, epsilon, product);
#pragma omp parallel for schedule(static) if (rows_ > kMaxRows)
        for (int64_t row = 0; row < rows_; row++)
            for (int64_t at = row * layer_.width; at < (row + 1) * layer_.width; at += kLanes) {
                const int64_t count = (row + 1) * layer_.width - at;
                store_part(out + at, load_part(x + at, count) + load_part(product + at, count), count);
            }
    }

    void keep(const T* from, T* to, int64_t width) {
        for (int64_t row = 0; row < rows_; ++row) std::memmove(to + row * width, from + layer_.kept[row] * width, width * sizeof(T));
    }

    // Those of the rows that are kept, by their numbers among these.
    void keep_decoding() {
        std::vector<int64_t> kept;
        for (int64_t row = 0; row < rows_; ++row)
            if (std::binary_search(decoding_.begin(), decoding_.end(), layer_.kept[row])) kept.push_back(row);
        decoding_ = std::move(kept);
    }

    // Norms and turns queries and keys, and writes keys and values into the cache.
    void store() {
        const int64_t dim = layer_.head_dim, head_bytes = dim * int64_t(sizeof(T)), row_bytes = heads_width_ * int64_t(sizeof(T));
        T* query = projected_.get();
        T* key = query + layer_.num_query_heads * dim;
        T* value = key + layer_.num_kv_heads * dim;
        if (layer_.query_norm) {
            norm_heads(query, layer_.query_norm, layer_.query_epsilon, layer_.num_query_heads);
            norm_heads(key, layer_.key_norm, layer_.key_epsilon, layer_.num_kv_heads);
        }
        const Rope rope{query, key, layer_.cos, layer_.sin, rows_, layer_.num_query_heads, layer_.num_kv_heads,
                        dim, layer_.rotary_dim, heads_width_};
        radixkv_rope(&rope, kIsBF16);
        const Write write{key, value, layer_.keys, layer_.values, layer_.slots, rows_, layer_.num_kv_heads,
                          head_bytes, head_bytes, row_bytes, head_bytes, row_bytes, head_bytes};
        radixkv_write(&write, kIsBF16);
    }

    void attend() {
        const int64_t dim = layer_.head_dim;
        Attention call = *layer_.attention;
        call.query = projected_.get(), call.keys = layer_.keys, call.values = layer_.values, call.out = attended_.get();
        call.num_query_heads = layer_.num_query_heads, call.num_kv_heads = layer_.num_kv_heads;
        call.key_dim = call.value_dim = call.query_head_stride = dim;
        call.query_row_stride = heads_width_, call.out_row_stride = layer_.num_query_heads * dim;
        call.sinks = layer_.sinks, call.window = layer_.window, call.scale = layer_.scale, call.softcap = layer_.softcap;
        radixkv_attention(&call, kIsBF16);
    }

    const Layer& layer_;
    int64_t rows_;  // that are computed: all, and only those that are kept once keys and values are in the cache
    std::vector<int64_t> decoding_;  // of these, at which answers go on
    const int64_t heads_width_;  // of queries, keys and values of a row
    Scratch<T> normed_, projected_, attended_, between_, gated_;
};

}  // namespace
}  // namespace radixkv

RADIXKV_API void radixkv_layer(const radixkv::Layer* call, int32_t is_bf16) {
    using namespace radixkv;
    is_bf16 ? LayerRun<BF16>(*call).run() : LayerRun<float>(*call).run();
}
