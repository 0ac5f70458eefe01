// Decoder layers in one call: with few rows and a call per part, the work between the products took as long as the products.
// Every part is a function that can also be called alone.

#include <algorithm>
#include <cstring>
#include <vector>

#include "calls.h"
#include "panel.h"

namespace radixkv {
namespace {

// The width of a row's queries, keys and values.
int64_t heads_width(const Layer& layer) { return (layer.num_query_heads + 2 * layer.num_kv_heads) * layer.head_dim; }

int64_t attended_width(const Layer& layer) { return layer.num_query_heads * layer.head_dim; }

int64_t gated_width(const Layer& layer) { return layer.gate_up ? layer.gate_up->outputs : 1; }

// Layers share the buffers, so that each finds in the caches what the one before wrote there.
template <typename T>
class LayersRun {
   public:
    explicit LayersRun(const Layers& call)
        : call_(call),
          rows_(call.rows),
          width_(call.layers->width),
          decoding_(call.decoding, call.decoding + call.num_decoding),
          states_(call.num_layers > 1 ? rows_ * width_ : 1),
          normed_(rows_ * width_),
          between_(rows_ * width_),
          projected_(rows_ * widest(heads_width)),
          attended_(rows_ * widest(attended_width)),
          gated_(rows_ * widest(gated_width)) {}

    void run() {
        const auto* x = static_cast<const T*>(call_.x);
        for (int64_t i = 0; i + 1 < call_.num_layers; i++, x = states_.get()) run(call_.layers[i], x, states_.get(), false);
        run(call_.layers[call_.num_layers - 1], x, static_cast<T*>(call_.out), true);
    }

   private:
    static constexpr int32_t kIsBF16 = kPairs<T>;

    int64_t widest(int64_t (*width)(const Layer&)) const {
        int64_t widest = 0;
        for (int64_t i = 0; i < call_.num_layers; i++) widest = std::max(widest, width(call_.layers[i]));
        return widest;
    }

    // Out may be x.
    void run(const Layer& layer, const T* x, T* out, bool is_last) {
        const Attention& attention = is_last ? *call_.last_attention : *call_.attention;
        norm(x, layer.input_norm, layer.input_epsilon, normed_.get());
        multiply(*layer.project, normed_.get(), nullptr, projected_.get());
        store(layer);
        if (is_last && call_.kept) {
            rows_ = attention.num_rows;
            // In place: a row never moves behind one that is still to be read.
            keep(projected_.get(), projected_.get(), heads_width(layer));
            keep(x, out, width_);
            x = out;
            keep_decoding();
        }
        attend(layer, attention);
        T* between = layer.gate_up ? between_.get() : out;
        multiply_and_add(*layer.project_back, attended_.get(), layer.attention_norm, layer.attention_epsilon, x, between);
        norm(between, layer.post_norm, layer.post_epsilon, layer.gate_up ? normed_.get() : static_cast<T*>(call_.normed));
        if (!layer.gate_up) return;
        multiply(*layer.gate_up, normed_.get(), nullptr, gated_.get());
        multiply_and_add(*layer.down, gated_.get(), layer.mlp_norm, layer.mlp_epsilon, between, out);
    }

    void norm(const T* x, const float* weight, float epsilon, T* out) {
        const Norm call{x, weight, out, rows_, 1, width_, width_, epsilon};
        radixkv_rms_norm(&call, kIsBF16);
    }

    void norm_heads(const Layer& layer, T* x, const float* weight, float epsilon, int64_t num_heads) {
        const Norm call{x, weight, x, rows_, num_heads, layer.head_dim, heads_width(layer), epsilon};
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
            for (int64_t at = row * width_; at < (row + 1) * width_; at += kLanes) {
                const int64_t count = (row + 1) * width_ - at;
                store_part(out + at, load_part(x + at, count) + load_part(product + at, count), count);
            }
    }

    void keep(const T* from, T* to, int64_t width) {
        for (int64_t row = 0; row < rows_; ++row) std::memmove(to + row * width, from + call_.kept[row] * width, width * sizeof(T));
    }

    // Keeps the decoding rows among the kept rows, by their numbers there.
    void keep_decoding() {
        std::vector<int64_t> kept;
        for (int64_t row = 0; row < rows_; ++row)
            if (std::binary_search(decoding_.begin(), decoding_.end(), call_.kept[row])) kept.push_back(row);
        decoding_ = std::move(kept);
    }

    // Norms and turns queries and keys, and writes keys and values into the cache.
    void store(const Layer& layer) {
        const int64_t dim = layer.head_dim, head_bytes = dim * int64_t(sizeof(T));
        const int64_t width = heads_width(layer), row_bytes = width * int64_t(sizeof(T));
        T* query = projected_.get();
        T* key = query + layer.num_query_heads * dim;
        T* value = key + layer.num_kv_heads * dim;
        if (layer.query_norm) {
            norm_heads(layer, query, layer.query_norm, layer.query_epsilon, layer.num_query_heads);
            norm_heads(layer, key, layer.key_norm, layer.key_epsilon, layer.num_kv_heads);
        }
        const Rope rope{query, key, call_.cos, call_.sin, rows_, layer.num_query_heads, layer.num_kv_heads,
                        dim, call_.rotary_dim, width};
        radixkv_rope(&rope, kIsBF16);
        const Write write{key, value, layer.keys, layer.values, call_.slots, rows_, layer.num_kv_heads,
                          head_bytes, head_bytes, row_bytes, head_bytes, row_bytes, head_bytes};
        radixkv_write(&write, kIsBF16);
    }

    void attend(const Layer& layer, const Attention& attention) {
        const int64_t dim = layer.head_dim;
        Attention call = attention;
        call.query = projected_.get(), call.keys = layer.keys, call.values = layer.values, call.out = attended_.get();
        call.num_query_heads = layer.num_query_heads, call.num_kv_heads = layer.num_kv_heads;
        call.key_dim = call.value_dim = call.query_head_stride = dim;
        call.query_row_stride = heads_width(layer), call.out_row_stride = attended_width(layer);
        call.sinks = layer.sinks, call.window = layer.window, call.scale = layer.scale, call.softcap = layer.softcap;
        radixkv_attention(&call, kIsBF16);
    }

    const Layers& call_;
    int64_t rows_;  // that are computed: all, and in the end only those that are kept
    const int64_t width_;
    std::vector<int64_t> decoding_;  // the decoding rows among these
    Scratch<T> states_, normed_, between_, projected_, attended_, gated_;
};

}  // namespace
}  // namespace radixkv

RADIXKV_API void radixkv_layers(const radixkv::Layers* call, int32_t is_bf16) {
    using namespace radixkv;
    is_bf16 ? LayersRun<BF16>(*call).run() : LayersRun<float>(*call).run();
}
