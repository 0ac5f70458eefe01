// y = x W^T with weights packed into panels, for one row to thousands.
//
// A panel holds 32 output features for all input features, in the order in which they are read:
//
//     float32    [features / 32][inputs][32]
//     bfloat16   [features / 32][inputs / 2][32][2]    pairs of inputs, as dot product instructions and AMX tiles want them
//     int8, int4 [features / 32][inputs / 32] groups of 32 inputs, unpacked to one of the above panel by panel
//
// With few rows a product takes as long as its weights take to be read, so each thread reads neighbouring panels once, in
// order. With many rows a panel stays in the second-level cache while all rows pass it.

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "panel.h"

namespace radixkv {
namespace {

constexpr int kGroup = 32;  // inputs that share a scale
// Rows that pass a panel before the next panel is read: their inputs stay in the second-level cache. Whole blocks of rows.
constexpr int64_t kRowChunk = 288;

enum class Format : int32_t { kPlain = 0, kInt8 = 1, kInt4 = 2 };
enum class Activation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3, kRelu = 4 };

struct Linear {
    const void* x;         // [rows, inputs], rows x_stride apart
    const void* weight;    // packed
    const float* scale;    // of quantised weights: [panels][groups][32], or [panels][32] without groups
    const float* minimum;  // likewise, or null
    const void* bias;      // [features], or null
    const void* residual;  // [rows, outputs], added to the result, or null
    void* out;             // [rows, outputs]
    int64_t rows, inputs, outputs, x_stride, out_stride, residual_stride;
    Format format;
    // Other than none: panels alternate between gate and up, and what is written is activation(gate) * up.
    Activation activation;
    int32_t out_is_float;
};

F32 activate(Activation kind, F32 x) {
    switch (kind) {
        case Activation::kSilu:
            return x * sigmoid(x);
        case Activation::kGeluTanh:
            return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
        case Activation::kGelu:
            for (int i = 0; i < kLanes; i++) x[i] *= 0.5f * (1.0f + std::erf(x[i] * 0.70710678118654752f));
            return x;
        case Activation::kRelu:
            return max(F32{}, x);  // in this order a NaN stays one
        default:
            return x;
    }
}

// Quantised weights of one panel as they would have been packed unquantised. int8 without groups stays whole numbers, which
// bfloat16 holds exactly, and is scaled in the sums.
template <typename T>
void unpack(const Linear& linear, int64_t panel, T* to) {
    const int64_t groups = linear.inputs / kGroup;
    const int bits = linear.format == Format::kInt8 ? 8 : 4;
    const auto* bytes = static_cast<const uint8_t*>(linear.weight) + panel * linear.inputs * kPanel * bits / 8;
    const bool grouped = linear.format == Format::kInt4;
    for (int64_t group = 0; group < groups; group++) {
        F32 scale[2], minimum[2] = {};
        for (int half = 0; half < 2; half++) {
            const int64_t at = (panel * groups + group) * kPanel + half * kLanes;
            scale[half] = grouped ? load(linear.scale + at) : broadcast(1.0f);
            if (linear.minimum) minimum[half] = load(linear.minimum + at);
        }
        for (int pair = 0; pair < kGroup / 2; pair++) {
            for (int half = 0; half < 2; half++) {
                typedef int8_t I8 __attribute__((vector_size(16)));
                typedef uint8_t U8 __attribute__((vector_size(16)));
                F32 even, odd;
                if (bits == 8) {
                    I8 quants[2];
                    std::memcpy(quants, bytes + ((group * kGroup + pair * 2) * kPanel + half * 32), sizeof quants);
                    even = __builtin_convertvector(__builtin_convertvector(quants[0], I32), F32);
                    odd = __builtin_convertvector(__builtin_convertvector(quants[1], I32), F32);
                } else {
                    // The low half of a byte is the pair's first input, the high half its second.
                    U8 quants;
                    std::memcpy(&quants, bytes + ((group * kGroup / 2 + pair) * kPanel + half * kLanes), sizeof quants);
                    const I32 both = __builtin_convertvector(quants, I32);
                    even = __builtin_convertvector(both & 15, F32);
                    odd = __builtin_convertvector(both >> 4, F32);
                }
                even = even * scale[half] + minimum[half];
                odd = odd * scale[half] + minimum[half];
                const int64_t k = group * kGroup + pair * 2;
                if constexpr (kPairs<T>) {
                    const U32 low = reinterpret_cast<U32>(even), high = reinterpret_cast<U32>(odd);
                    const U32 both = ((low + 0x8000) >> 16) | ((high + 0x8000) & 0xffff0000);
                    std::memcpy(to + k * kPanel + half * kPanel, &both, sizeof both);
                } else {
                    store(to + k * kPanel + half * kLanes, even);
                    store(to + (k + 1) * kPanel + half * kLanes, odd);
                }
            }
        }
    }
}

template <typename T, typename Out>
void write_row(const Linear& linear, int64_t row, int64_t column, const float* sums, const float* gate) {
    auto* out = static_cast<Out*>(linear.out) + row * linear.out_stride + column;
    const int64_t count = linear.outputs - column;
    const auto* bias = linear.bias ? static_cast<const T*>(linear.bias) + column : nullptr;
    const auto* residual = linear.residual ? static_cast<const T*>(linear.residual) + row * linear.residual_stride + column : nullptr;
    for (int at = 0; at < kPanel; at += kLanes) {
        F32 value = load(sums + at);
        if (gate) value *= activate(linear.activation, load(gate + at));
        if (bias) value += load_part(bias + at, count - at);
        if (residual) value += load_part(residual + at, count - at);
        store_part(out + at, value, count - at);
    }
}

template <typename T, typename Out>
void run(const Linear& linear) {
    const bool gated = linear.activation != Activation::kNone;
    const int panels_per_unit = gated ? 2 : 1;
    const int64_t units = (linear.outputs + kPanel - 1) / kPanel;
    const int64_t chunks = (linear.rows + kRowChunk - 1) / kRowChunk;
    const int64_t chunk_rows = std::min(linear.rows, kRowChunk);
    const int64_t panel_size = linear.inputs * kPanel;
    const bool packed = linear.format != Format::kPlain, scaled = linear.format == Format::kInt8;
    const bool packs = PanelProduct<T>::packs(chunk_rows);
    Scratch<T> x_packed(packs ? linear.rows * linear.inputs : 1);
#pragma omp parallel
    {
        if (packs) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < linear.rows; row += kMaxRows)
                PanelProduct<T>::pack(std::min<int64_t>(kMaxRows, linear.rows - row), static_cast<const T*>(linear.x) + row * linear.x_stride,
                                      linear.x_stride, linear.inputs, x_packed.get() + row * linear.inputs);
        }
        PanelProduct<T> product;
        Scratch<float> sums(panels_per_unit * chunk_rows * kPanel);
        Scratch<T> unpacked(packed ? panels_per_unit * panel_size : 1);
        int64_t unpacked_unit = -1;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < units * chunks; task++) {
            const int64_t unit = task / chunks, first = task % chunks * kRowChunk;
            const int64_t rows = std::min(linear.rows - first, kRowChunk);
            const T* x = static_cast<const T*>(linear.x) + first * linear.x_stride;
            if (packed && unpacked_unit != unit) {
                for (int i = 0; i < panels_per_unit; i++)
                    unpack(linear, unit * panels_per_unit + i, unpacked.get() + i * panel_size);
                unpacked_unit = unit;
            }
            for (int i = 0; i < panels_per_unit; i++) {
                const int64_t panel = unit * panels_per_unit + i;
                const T* weights = packed ? unpacked.get() + i * panel_size : static_cast<const T*>(linear.weight) + panel * panel_size;
                float* to = sums.get() + i * chunk_rows * kPanel;
                if (packs)
                    product.multiply_packed(rows, x_packed.get() + first * linear.inputs, weights, linear.inputs, to, kPanel);
                else
                    product.multiply(rows, x, linear.x_stride, weights, linear.inputs, to, kPanel);
                if (scaled) {
                    const F32 low = load(linear.scale + panel * kPanel), high = load(linear.scale + panel * kPanel + kLanes);
                    for (int64_t row = 0; row < rows; row++) {
                        store(to + row * kPanel, load(to + row * kPanel) * low);
                        store(to + row * kPanel + kLanes, load(to + row * kPanel + kLanes) * high);
                    }
                }
            }
            const float* last = sums.get() + (panels_per_unit - 1) * chunk_rows * kPanel;
            for (int64_t row = 0; row < rows; row++) {
                const float* gate = gated ? sums.get() + row * kPanel : nullptr;
                write_row<T, Out>(linear, first + row, unit * kPanel, last + row * kPanel, gate);
            }
        }
    }
}

}  // namespace
}  // namespace radixkv

using namespace radixkv;


RADIXKV_API void radixkv_linear(const Linear* linear, int32_t is_bf16) {
    if (!is_bf16) return run<float, float>(*linear);
    return linear->out_is_float ? run<BF16, float>(*linear) : run<BF16, BF16>(*linear);
}
