// The work between the products of a layer: norms, rotary positions, and writing new keys and values into the cache.

#include "calls.h"
#include "simd.h"

namespace radixkv {
namespace {

// Rows are worth a second thread from so many elements on.
constexpr int64_t kParallel = 1 << 14;

template <typename T>
void norm(const Norm& call) {
#pragma omp parallel for schedule(static) if (call.rows * call.groups * call.dim >= kParallel)
    for (int64_t i = 0; i < call.rows * call.groups; i++) {
        const int64_t row = i / call.groups, group = i % call.groups;
        const T* x = static_cast<const T*>(call.x) + row * call.stride + group * call.dim;
        T* out = static_cast<T*>(call.out) + row * call.stride + group * call.dim;
        F32 squares{};
        for (int64_t d = 0; d < call.dim; d += kLanes) {
            const F32 v = load_part(x + d, call.dim - d);
            squares += v * v;
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / float(call.dim) + call.epsilon);
        for (int64_t d = 0; d < call.dim; d += kLanes) {
            const int64_t count = call.dim - d;
            store_part(out + d, load_part(x + d, count) * scale * load_part(call.weight + d, count), count);
        }
    }
}

// Halves of the rotary dimensions are pairs: (a, b) becomes (a cos - b sin, b cos + a sin).
template <typename T>
void rope(const Rope& call) {
    const int64_t heads = call.num_query_heads + call.num_kv_heads, half = call.rotary_dim / 2;
#pragma omp parallel for schedule(static) if (call.rows * heads * call.dim >= kParallel)
    for (int64_t row = 0; row < call.rows; row++) {
        const T* cos = static_cast<const T*>(call.cos) + row * call.rotary_dim;
        const T* sin = static_cast<const T*>(call.sin) + row * call.rotary_dim;
        for (int64_t head = 0; head < heads; head++) {
            T* x = head < call.num_query_heads
                       ? static_cast<T*>(call.query) + row * call.row_stride + head * call.dim
                       : static_cast<T*>(call.key) + row * call.row_stride + (head - call.num_query_heads) * call.dim;
            for (int64_t d = 0; d < half; d += kLanes) {
                const int64_t count = half - d;
                const F32 a = load_part(x + d, count), b = load_part(x + half + d, count);
                store_part(x + d, a * load_part(cos + d, count) - b * load_part(sin + d, count), count);
                store_part(x + half + d, b * load_part(cos + half + d, count) + a * load_part(sin + half + d, count), count);
            }
        }
    }
}

}  // namespace
}  // namespace radixkv

using namespace radixkv;

RADIXKV_API void radixkv_rms_norm(const Norm* call, int32_t is_bf16) { is_bf16 ? norm<BF16>(*call) : norm<float>(*call); }

RADIXKV_API void radixkv_rope(const Rope* call, int32_t is_bf16) { is_bf16 ? rope<BF16>(*call) : rope<float>(*call); }

RADIXKV_API void radixkv_write(const Write* call, int32_t) {
    const int64_t bytes = call->rows * call->num_kv_heads * (call->key_bytes + call->value_bytes);
#pragma omp parallel for schedule(static) if (bytes >= 4 * kParallel)
    for (int64_t row = 0; row < call->rows; row++) {
        const int64_t slot = call->slots[row];
        for (int64_t head = 0; head < call->num_kv_heads; head++) {
            const int64_t at = slot * call->num_kv_heads + head;
            std::memcpy(static_cast<char*>(call->keys) + at * call->key_bytes,
                        static_cast<const char*>(call->key) + row * call->key_row_stride + head * call->key_head_stride, call->key_bytes);
            std::memcpy(static_cast<char*>(call->values) + at * call->value_bytes,
                        static_cast<const char*>(call->value) + row * call->value_row_stride + head * call->value_head_stride, call->value_bytes);
        }
    }
}
