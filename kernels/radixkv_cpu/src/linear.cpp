// y = x W^T with weights packed into panels, for one row to thousands.
//
// A panel holds 32 output features for all input features, in the order in which they are read:
//
//     float32    [features / 32][inputs][32]
//     bfloat16   [features / 32][inputs / 2][32][2]    pairs of inputs, as dot product instructions and AMX tiles want them
//
// quantised.h says what quantised panels are. With few rows a product takes as long as its weights take to be read, so each
// thread reads neighbouring panels once, in order. With many rows a panel stays in the second-level cache while all rows pass it.

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "calls.h"
#include "quantised.h"

namespace radixkv {
namespace {

// Rows that pass a panel before the next panel is read: their inputs stay in the second-level cache. Whole blocks of rows.
constexpr int64_t kRowChunk = 288;

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

template <typename T>
void write_row(const Linear& linear, int64_t row, int64_t column, const float* sums, const float* gate) {
    auto* out = static_cast<T*>(linear.out) + row * linear.outputs + column;
    const int64_t count = linear.outputs - column;
    const auto* bias = linear.bias ? static_cast<const T*>(linear.bias) + column : nullptr;
    const auto* residual = linear.residual ? static_cast<const T*>(linear.residual) + row * linear.outputs + column : nullptr;
    for (int at = 0; at < kPanel; at += kLanes) {
        F32 value = load(sums + at);
        if (gate) value *= activate(linear.activation, load(gate + at));
        if (bias) value += load_part(bias + at, count - at);
        if (residual) value += load_part(residual + at, count - at);
        store_part(out + at, value, count - at);
    }
}

// Products with one thread's panels of floats.
template <typename T>
class FloatProduct {
   public:
    static int64_t panel_bytes(int64_t inputs) { return inputs * kPanel * sizeof(T); }

    // sums[row][0..31] = x[row] . panel; sums of rows are next to each other.
    void multiply(int64_t rows, const T* x, int64_t stride, const uint8_t* panel, int64_t inputs, float* sums) {
        const auto* weights = reinterpret_cast<const T*>(panel);
        product_.multiply(rows, x, stride, weights, inputs, sums, kPanel, false, weights + inputs * kPanel);
    }

    void multiply_packed(int64_t rows, const T* packed, const uint8_t* panel, int64_t inputs, float* sums) {
        const auto* weights = reinterpret_cast<const T*>(panel);
        for (int64_t start = 0; start < inputs; start += kPanelDepth<T>)
            product_.multiply_packed(rows, packed, inputs, start, std::min(kPanelDepth<T>, inputs - start), weights + start * kPanel, sums,
                                     kPanel);
    }

   private:
    PanelProduct<T> product_;
};

template <typename T, typename Product>
void run(const Linear& linear) {
    const bool gated = linear.activation != Activation::kNone;
    const int panels_per_unit = gated ? 2 : 1;
    const int64_t units = (linear.outputs + kPanel - 1) / kPanel;
    const int64_t chunks = (linear.rows + kRowChunk - 1) / kRowChunk;
    const int64_t chunk_rows = std::min(linear.rows, kRowChunk);
    const int64_t panel_bytes = Product::panel_bytes(linear.inputs);
    const bool packs = PanelProduct<T>::packs(chunk_rows);
    Scratch<T> x_packed(packs ? linear.rows * linear.inputs : 1);
#pragma omp parallel
    {
        if (packs) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < linear.rows; row += kMaxRows)
                PanelProduct<T>::pack(std::min<int64_t>(kMaxRows, linear.rows - row), static_cast<const T*>(linear.x) + row * linear.inputs,
                                      linear.inputs, linear.inputs, x_packed.get() + row * linear.inputs);
        }
        Product product;
        Scratch<float> sums(panels_per_unit * chunk_rows * kPanel);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < units * chunks; task++) {
            // Weights pass a chunk of rows that stays in the second-level cache, not rows the weights: there are more rows.
            const int64_t unit = task % units, first = task / units * kRowChunk;
            const int64_t rows = std::min(linear.rows - first, kRowChunk);
            const T* x = static_cast<const T*>(linear.x) + first * linear.inputs;
            for (int i = 0; i < panels_per_unit; i++) {
                const int64_t panel = unit * panels_per_unit + i;
                const auto* weights = static_cast<const uint8_t*>(linear.weight) + panel * panel_bytes;
                float* to = sums.get() + i * chunk_rows * kPanel;
                if (packs)
                    product.multiply_packed(rows, x_packed.get() + first * linear.inputs, weights, linear.inputs, to);
                else
                    product.multiply(rows, x, linear.inputs, weights, linear.inputs, to);
            }
            const float* last = sums.get() + (panels_per_unit - 1) * chunk_rows * kPanel;
            for (int64_t row = 0; row < rows; row++) {
                const float* gate = gated ? sums.get() + row * kPanel : nullptr;
                write_row<T>(linear, first + row, unit * kPanel, last + row * kPanel, gate);
            }
        }
    }
}

template <typename T>
void run(const Linear& linear) {
    switch (linear.format) {
        case Format::kInt8:
            return run<T, QuantisedProduct<T, Int8>>(linear);
        case Format::kInt4:
            return run<T, QuantisedProduct<T, Int4>>(linear);
        default:
            return run<T, FloatProduct<T>>(linear);
    }
}

}  // namespace
}  // namespace radixkv

using namespace radixkv;

RADIXKV_API void radixkv_linear(const Linear* linear, int32_t is_bf16) { is_bf16 ? run<BF16>(*linear) : run<float>(*linear); }
