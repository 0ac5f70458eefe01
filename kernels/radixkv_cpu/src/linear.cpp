// y = x W^T with weights packed into panels, for one row to thousands.
//
// A panel holds 32 output features for all input features, in the order in which they are read:
//
//     float32    [features / 32][inputs][32]
//     bfloat16   [features / 32][inputs / 2][32][2]    pairs of inputs, as dot product instructions and AMX tiles want them
//
// quantised.h describes quantised panels; factored.h and triples.h describe other ways to multiply some rows on some processors.
// With few rows a product takes as long as reading its weights, so each thread reads neighbouring panels once, in order. With
// many rows a chunk of rows stays in the second-level cache while all panels are read.

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "chunks.h"
#include "factored.h"
#include "linear.h"
#include "triples.h"

namespace radixkv {
namespace {

template <Activation KIND>
F32 activate(F32 x) {
    if constexpr (KIND == Activation::kSilu) return x * sigmoid(x);
    if constexpr (KIND == Activation::kGeluTanh) return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    if constexpr (KIND == Activation::kGelu)
        for (int i = 0; i < kLanes; i++) x[i] *= 0.5f * (1.0f + std::erf(x[i] * 0.70710678118654752f));
    if constexpr (KIND == Activation::kRelu) return max(F32{}, x);  // in this order a NaN stays one
    return x;
}

// Writes a panel's features of some rows; the activation is applied to `gates`.
template <typename T, Activation KIND>
void write(const Linear& linear, const Chunk& chunk, int64_t column, const float* gates, const float* sums) {
    const int64_t outputs = linear.outputs, count = outputs - column;
    const auto* bias = linear.bias ? static_cast<const T*>(linear.bias) + chunk.section * outputs + column : nullptr;
    const auto* residual = linear.residual ? static_cast<const T*>(linear.residual) + chunk.first * outputs + column : nullptr;
    auto* out = static_cast<T*>(linear.out) + chunk.first * outputs + column;
    const auto each = [&](auto&& load_some, auto&& store_some) {
        for (int64_t row = 0; row < chunk.rows; row++)
            for (int at = 0; at < kPanel; at += kLanes) {
                F32 value = load(sums + row * kPanel + at);
                if constexpr (KIND != Activation::kNone) value *= activate<KIND>(load(gates + row * kPanel + at));
                if (bias) value += load_some(bias + at, count - at);
                if (residual) value += load_some(residual + row * outputs + at, count - at);
                store_some(out + row * outputs + at, value, count - at);
            }
    };
    if (count >= kPanel)
        each([](const T* from, int64_t) { return load(from); }, [](T* to, F32 value, int64_t) { store(to, value); });
    else
        each(load_part<T>, store_part<T>);
}

template <typename T>
void write(const Linear& linear, const Chunk& chunk, int64_t column, const float* gates, const float* sums) {
    switch (linear.activation) {
        case Activation::kSilu:
            return write<T, Activation::kSilu>(linear, chunk, column, gates, sums);
        case Activation::kGeluTanh:
            return write<T, Activation::kGeluTanh>(linear, chunk, column, gates, sums);
        case Activation::kGelu:
            return write<T, Activation::kGelu>(linear, chunk, column, gates, sums);
        case Activation::kRelu:
            return write<T, Activation::kRelu>(linear, chunk, column, gates, sums);
        default:
            return write<T, Activation::kNone>(linear, chunk, column, gates, sums);
    }
}

// A unit is 32 features of the result: those of a panel, or of a gate's panel and of the next one, which it gates.
int64_t num_units(const Linear& linear) { return (linear.outputs + kPanel - 1) / kPanel; }

int panels_per_unit(const Linear& linear) { return linear.activation == Activation::kNone ? 1 : 2; }

// Memory for the sums of a unit: of one panel after the other, each [rows][32].
struct UnitSums {
    UnitSums(const Linear& linear, int64_t most_rows) : stride(most_rows * kPanel), sums(panels_per_unit(linear) * stride) {}

    const int64_t stride;
    Scratch<float> sums;
};

// Computes and writes a unit of a chunk's rows. `multiply(panel, to)` computes the sums of each of its panels.
template <typename T, typename Multiply>
void compute_unit(const Linear& linear, const Chunk& chunk, int64_t unit, const UnitSums& unit_sums, Multiply multiply) {
    const int panels = panels_per_unit(linear);
    float* sums = unit_sums.sums.get();
    for (int i = 0; i < panels; i++) multiply((chunk.section * num_units(linear) + unit) * panels + i, sums + i * unit_sums.stride);
    write<T>(linear, chunk, unit * kPanel, sums, sums + (panels - 1) * unit_sums.stride);
}

// So many tasks a thread takes at a time: neighbouring ones, but so few that no thread waits long at the end.
int64_t tasks_at_once(int64_t num_tasks) { return std::max<int64_t>(1, num_tasks / (8 * omp_get_max_threads())); }

// Products with one thread's panels of floats.
template <typename T>
class FloatProduct {
   public:
    static int64_t panel_bytes(int64_t inputs) { return inputs * kPanel * sizeof(T); }

    // sums[row][0..31] = x[row] . panel; sums of rows are next to each other.
    void multiply(int64_t rows, const Input<T>* x, int64_t stride, const uint8_t* panel, int64_t inputs, float* sums) {
        const auto* weights = reinterpret_cast<const T*>(panel);
        product_.multiply(rows, x, stride, weights, inputs, sums, kPanel, false, weights + inputs * kPanel);
    }

    void multiply_packed(int64_t rows, const Input<T>* packed, const uint8_t* panel, int64_t inputs, float* sums) {
        const auto* weights = reinterpret_cast<const T*>(panel);
        if constexpr (kConverts<T>)
            if (rows > kFewPackedRows)
                return multiply_parts<Input<T>>(rows, packed, weights, inputs, sums, [this](const T* part, int64_t count) {
                    widen(part, count);
                    return widened_.get();
                });
        multiply_parts<T>(rows, packed, weights, inputs, sums, [](const T* part, int64_t) { return part; });
    }

   private:
    // So few rows are multiplied sooner by weights that are converted for every few of them than by weights converted once.
    static constexpr int64_t kFewPackedRows = 8;

    // All rows pass a part of the panel, in the first-level cache, before the next.
    template <typename Multiplied, typename Prepare>
    void multiply_parts(int64_t rows, const Input<T>* packed, const T* weights, int64_t inputs, float* sums, Prepare prepare) {
        for (int64_t start = 0; start < inputs; start += kPanelDepth<Multiplied>) {
            const int64_t count = std::min(kPanelDepth<Multiplied>, inputs - start);
            const T* next = weights + (start + count) * kPanel;
            PanelProduct<Multiplied>::multiply_packed(rows, packed, inputs, start, count, prepare(weights + start * kPanel, count), sums, kPanel,
                                                      next, count * kPanel * sizeof(T));
        }
    }

    // Pairs of inputs, in bfloat16, to inputs in float32.
    void widen(const T* from, int64_t inputs) {
        for (int64_t input = 0; input < inputs; input += 2)
            for (int64_t at = input * kPanel; at < (input + 1) * kPanel; at += kLanes) {
                const U32 pairs = load_as<U32>(from + 2 * at - input * kPanel);
                store(widened_.get() + at, reinterpret_cast<F32>(pairs << 16));
                store(widened_.get() + at + kPanel, reinterpret_cast<F32>(pairs & kUpperHalf));
            }
    }

    PanelProduct<T> product_;
    Scratch<float> widened_{kConverts<T> ? kPanelDepth<float> * kPanel : 1};
};

template <typename T, typename Product>
void run(const Linear& linear, const std::vector<Chunk>& chunks) {
    const int64_t units = num_units(linear);
    int64_t most_rows = 0;
    for (const Chunk& chunk : chunks) most_rows = std::max(most_rows, chunk.rows);
    const int64_t panel_bytes = Product::panel_bytes(linear.inputs);
    const bool packs = PanelProduct<T>::packs(most_rows);
    const int64_t num_tasks = units * int64_t(chunks.size()), at_once = tasks_at_once(num_tasks);
    Scratch<Input<T>> prepared(packs || kConverts<T> ? linear.rows * linear.inputs : 1);
    const auto* x = static_cast<const T*>(linear.x);
    const Input<T>* rows = packs ? prepared.get() : as_inputs(linear.rows, linear.inputs, x, prepared.get());
#pragma omp parallel
    {
        if (packs) {
            for (const Chunk& chunk : chunks) {
                const int64_t block = PanelProduct<T>::rows_at_once(chunk.rows);
#pragma omp for schedule(static) nowait
                for (int64_t row = 0; row < chunk.rows; row += block) {
                    const int64_t first = (chunk.first + row) * linear.inputs;
                    PanelProduct<T>::pack(std::min(block, chunk.rows - row), x + first, linear.inputs, linear.inputs, prepared.get() + first);
                }
            }
#pragma omp barrier
        }
        Product product;
        const UnitSums sums(linear, most_rows);
        const auto multiply = [&](int64_t task) {
            // All units of a chunk, then the next chunk: the chunk stays in the second-level cache.
            const Chunk& chunk = chunks[task / units];
            const int64_t first = chunk.first * linear.inputs;
            compute_unit<T>(linear, chunk, task % units, sums, [&](int64_t panel, float* to) {
                const auto* weights = static_cast<const uint8_t*>(linear.weight) + panel * panel_bytes;
                if (packs)
                    product.multiply_packed(chunk.rows, rows + first, weights, linear.inputs, to);
                else
                    product.multiply(chunk.rows, rows + first, linear.inputs, weights, linear.inputs, to);
            });
        };
        // If reading memory takes most of the time, each thread reads one contiguous part. Otherwise equal numbers of tasks are
        // not equal work: chunks have different numbers of rows, and a core may be shared.
        if (most_rows <= (chunks.size() == 1 ? kMemoryBoundRows : kMaxRows)) {
#pragma omp for schedule(static)
            for (int64_t task = 0; task < num_tasks; task++) multiply(task);
        } else {
#pragma omp for schedule(dynamic, at_once)
            for (int64_t task = 0; task < num_tasks; task++) multiply(task);
        }
    }
}

#if defined(RADIXKV_FACTORED)
// Products of all rows, by factored.h.
template <typename T, typename Format>
void run_factored(const Linear& linear) {
    const int64_t units = num_units(linear), inputs = linear.inputs, num_groups = inputs / kGroup;
    const int64_t panel_bytes = num_groups * Format::kGroupBytes, threads = omp_get_max_threads();
    const bool are_few = linear.rows <= kFewRows;
    const int64_t at_once = are_few ? (units + threads - 1) / threads : tasks_at_once(units);
    Scratch<Input<T>> converted(kConverts<T> ? linear.rows * inputs : 1);
    const Input<T>* x = as_inputs(linear.rows, inputs, static_cast<const T*>(linear.x), converted.get());
    Scratch<float> x_sums(linear.rows * num_groups);
    // For few rows, having threads wait for each other would take longer.
#pragma omp parallel for schedule(static) if (!are_few)
    for (int64_t row = 0; row < linear.rows; row++) sum_groups(x + row * inputs, inputs, x_sums.get() + row * num_groups);
#pragma omp parallel
    {
        const UnitSums sums(linear, std::min(linear.rows, kRowChunk));
        FactoredProduct<Format> product;
#pragma omp for schedule(dynamic, at_once)
        for (int64_t unit = 0; unit < units; unit++)
            for (int64_t first = 0; first < linear.rows; first += kRowChunk) {
                const int64_t rows = std::min(linear.rows - first, kRowChunk);
                compute_unit<T>(linear, {0, first, rows}, unit, sums, [&](int64_t panel, float* to) {
                    product.multiply(rows, x + first * inputs, x_sums.get() + first * num_groups,
                                     static_cast<const uint8_t*>(linear.weight) + panel * panel_bytes, inputs, to);
                });
            }
    }
}
#endif

#if defined(RADIXKV_TRIPLES)
// Products of a prompt's rows by triples.h, and of the decoding rows beside them: a panel is read once for both.
void run_triples(const Linear& linear, const Linear& decoding) {
    const std::vector<Chunk> chunks = prompt_chunks(linear, TripleProduct::most_rows(linear.inputs));
    const int64_t units = num_units(linear), inputs = linear.inputs, panel_size = inputs * kPanel;
    const int64_t num_tasks = units * int64_t(chunks.size()), at_once = tasks_at_once(num_tasks);
    const int64_t block_words = TripleProduct::steps(inputs) * kStepWords;
    const auto* x = static_cast<const float*>(linear.x);
    const auto* weight = static_cast<const float*>(linear.weight);
    // The first block of each chunk, and one past the last chunk's.
    std::vector<int64_t> first_blocks{0};
    for (const Chunk& chunk : chunks) first_blocks.push_back(first_blocks.back() + (chunk.rows + Tiles::kBlock - 1) / Tiles::kBlock);
    Scratch<uint32_t> parts(first_blocks.back() * block_words);
#pragma omp parallel
    {
        for (size_t i = 0; i < chunks.size(); i++) {
            const Chunk& chunk = chunks[i];
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < chunk.rows; row += Tiles::kBlock)
                split_rows(std::min<int64_t>(Tiles::kBlock, chunk.rows - row), x + (chunk.first + row) * inputs, inputs, inputs,
                           parts.get() + (first_blocks[i] + row / Tiles::kBlock) * block_words);
        }
#pragma omp barrier
        TripleProduct product(inputs, weight + units * panels_per_unit(linear) * panel_size);
        FloatProduct<float> decoding_product;
        const UnitSums sums(linear, TripleProduct::most_rows(inputs)), decoding_sums(linear, decoding.rows);
#pragma omp for schedule(dynamic, at_once)
        for (int64_t task = 0; task < num_tasks; task++) {
            const int64_t unit = task % units;
            const Chunk& chunk = chunks[task / units];
            compute_unit<float>(linear, chunk, unit, sums, [&](int64_t panel, float* to) {
                product.multiply(chunk.rows, parts.get() + first_blocks[task / units] * block_words, weight + panel * panel_size, to);
            });
            if (task >= units || decoding.rows == 0) continue;
            compute_unit<float>(decoding, {0, 0, decoding.rows}, unit, decoding_sums, [&](int64_t panel, float* to) {
                decoding_product.multiply(decoding.rows, static_cast<const float*>(decoding.x), inputs,
                                          reinterpret_cast<const uint8_t*>(weight + panel * panel_size), inputs, to);
            });
        }
    }
}
#endif

template <typename T, typename Format>
void run_quantised(const Linear& linear, const std::vector<Chunk>& chunks) {
#if defined(RADIXKV_FACTORED)
    if constexpr (kIsFactored<T, Format>)
        if (linear.num_decoding > 0) {
            if (linear.num_decoding == linear.rows) return run_factored<T, Format>(linear);
            const DecodingRows<T> decoding(linear);
            run_factored<T, Format>(decoding.linear());
            run<T, QuantisedProduct<T, Format>>(linear, prompt_chunks(linear, kRowChunk));
            return decoding.put_back();
        }
#endif
    run<T, QuantisedProduct<T, Format>>(linear, chunks);
}

template <typename T>
void run(const Linear& linear, const std::vector<Chunk>& chunks) {
    switch (linear.format) {
        case Format::kInt8:
            return run_quantised<T, Int8>(linear, chunks);
        case Format::kInt4:
            return run_quantised<T, Int4>(linear, chunks);
        case Format::kHalf8:
            return run_quantised<T, Half8>(linear, chunks);
        case Format::kHalf4:
            return run_quantised<T, Half4>(linear, chunks);
        case Format::kFloat4:
            return run_quantised<T, Float4>(linear, chunks);
        case Format::kFloat8:
            return run_quantised<T, Float8>(linear, chunks);
        case Format::kScaled8:
            return run_quantised<T, Scaled8>(linear, chunks);
        case Format::kE4M3:
            return run_quantised<T, ScaledE4M3>(linear, chunks);
        default:
#if defined(RADIXKV_TRIPLES)
            if constexpr (!kPairs<T>)
                if (linear.num_decoding >= 0 && linear.num_decoding < linear.rows) {
                    const DecodingRows<T> decoding(linear);
                    run_triples(linear, decoding.linear());
                    return decoding.put_back();
                }
#endif
            return run<T, FloatProduct<T>>(linear, chunks);
    }
}

}  // namespace

void multiply_sections(const Linear& linear, int64_t num_sections, const int64_t* starts, int32_t is_bf16) {
    const auto chunks = chunks_of(num_sections, starts);
    is_bf16 ? run<BF16>(linear, chunks) : run<float>(linear, chunks);
}

}  // namespace radixkv

RADIXKV_API void radixkv_linear(const radixkv::Linear* linear, int32_t is_bf16) {
    const int64_t starts[] = {0, linear->rows};
    radixkv::multiply_sections(*linear, 1, starts, is_bf16);
}
