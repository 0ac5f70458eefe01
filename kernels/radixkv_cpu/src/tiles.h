// AMX tiles: up to 32 rows times a panel in two registers' columns, or keys times a few rows.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace radixkv {

constexpr int kPanel = 32;  // columns of a panel: see panel.h
// Columns of a narrow tile.
constexpr int kTileColumns = 4;
// Parts of a float32: see triples.h.
constexpr int kTriple = 3;
// Words of a tile, and of all parts of 32 rows, or of as many features, for 32 inputs: [parts][2][16][16].
constexpr int64_t kTileWords = 16 * 16, kStepWords = 2 * kTriple * kTileWords;

// Memory that is read next, fetched into the second-level cache a few lines a step: tile loads leave the processor no room to
// see that far ahead by itself.
class Ahead {
   public:
    Ahead(const void* next, int64_t bytes, int64_t steps)
        : next_(static_cast<const char*>(next)), lines_(next ? int((bytes / 64 + steps - 1) / steps) : 0) {}

    void step() {
        for (int line = 0; line < lines_; line++, next_ += 64) __builtin_prefetch(next_, 0, 2);
    }

   private:
    const char* next_;
    int lines_;
};

// A thread's configuration of AMX tiles, kept while the number of rows stays the same.
class Tiles {
   public:
    // Rows of a block.
    static constexpr int kBlock = 32;
    // Inputs that a tile instruction takes.
    static constexpr int kStep = 32;

#if defined(__AMX_BF16__)
    ~Tiles() {
        if (rows_) _tile_release();
    }

    // sums[row][0..31] (+)= x[row] . panel for up to 32 rows; inputs are a multiple of 32.
    struct Product {
        int rows;
        const BF16* x;
        int64_t stride;
        const BF16* panel;
        int64_t inputs;
        float* sums;
        int64_t sum_stride;
        bool add;
    };

    // Before a step, some of what is read `ahead` is fetched.
    void multiply(const Product& product, Ahead& ahead) {
        begin(product);
        for (int64_t k = 0; k < product.inputs; k += kStep) {
            ahead.step();
            step(product, k);
        }
        end(product);
    }

    // The parts of a product, so that other instructions can come between: its beginning, `kStep` inputs from `k` on, and its end. Until
    // then, tiles 0 to 3 are its sums.
    void begin(const Product& product) {
        configure(product.rows);
        load_sums(product.rows, product.sums, product.sum_stride, product.add);
    }

    void step(const Product& product, int64_t k) {
        constexpr int kLineBytes = kPanel * 2 * sizeof(BF16);
        const BF16 *x = product.x + k, *panel = product.panel + k * kPanel;
        _tile_loadd(6, panel, kLineBytes);
        _tile_loadd(7, panel + kPanel, kLineBytes);
        _tile_loadd(4, x, product.stride * sizeof(BF16));
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (product.rows > 16) {
            _tile_loadd(5, x + 16 * product.stride, product.stride * sizeof(BF16));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    void end(const Product& product) { store_sums(product.rows, product.sums, product.sum_stride); }

    // sums[row][0..3] = x[row] . columns for `parts` times 16 rows, up to 4 times, each beginning anywhere; columns are
    // [inputs / 2][4][2], and inputs a multiple of 32. The sums are those of `multiply` with the factors' roles exchanged.
    void multiply_columns(int parts, const BF16* const* x, int64_t stride, const BF16* columns, int64_t inputs, float* sums) {
        constexpr int kBytes = kTileColumns * sizeof(float);
        configure(kOfColumns);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < inputs; k += kStep) {
            _tile_loadd(4, columns + k * kTileColumns, kBytes);
            _tile_loadd(5, x[0] + k, stride * sizeof(BF16));
            _tile_dpbf16ps(0, 5, 4);
            if (parts > 1) {
                _tile_loadd(6, x[1] + k, stride * sizeof(BF16));
                _tile_dpbf16ps(1, 6, 4);
            }
            if (parts > 2) {
                _tile_loadd(5, x[2] + k, stride * sizeof(BF16));
                _tile_dpbf16ps(2, 5, 4);
            }
            if (parts > 3) {
                _tile_loadd(6, x[3] + k, stride * sizeof(BF16));
                _tile_dpbf16ps(3, 6, 4);
            }
        }
        _tile_stored(0, sums, kBytes);
        _tile_stored(1, sums + 16 * kTileColumns, kBytes);
        _tile_stored(2, sums + 32 * kTileColumns, kBytes);
        _tile_stored(3, sums + 48 * kTileColumns, kBytes);
    }

    // sums[row][0..31] (+)= x[row] . weights for up to 32 rows and 32 times `steps` inputs. Both are tiles of parts,
    // [steps][parts][2][1 KiB], and of nine products of parts the six largest are added, beginning with small ones. Twice a step, something
    // else is done `meanwhile`: tile instructions leave most of the processor to it.
    template <typename Meanwhile>
    void multiply_triples(int rows, const uint32_t* x, const uint32_t* weights, int64_t steps, float* sums, bool add, Meanwhile meanwhile) {
        constexpr int kBytes = 64;
        configure(rows);
        const auto load_x = [&](int part) {
            _tile_loadd(4, x + 2 * part * kTileWords, kBytes);
            if (rows > 16) _tile_loadd(5, x + (2 * part + 1) * kTileWords, kBytes);
        };
        const auto load_weights = [&](int part) {
            _tile_loadd(6, weights + 2 * part * kTileWords, kBytes);
            _tile_loadd(7, weights + (2 * part + 1) * kTileWords, kBytes);
        };
        const auto add_products = [&] {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (rows > 16) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        };
        load_sums(rows, sums, kPanel, add);
        for (int64_t step = 0; step < steps; step++, x += kStepWords, weights += kStepWords) {
            load_x(0), load_weights(2), add_products();
            load_weights(1), add_products();
            meanwhile();
            load_x(1), add_products();
            load_weights(0), add_products();
            meanwhile();
            load_x(2), add_products();
            load_x(0), add_products();
        }
        store_sums(rows, sums, kPanel);
    }

   private:
    void load_sums(int rows, const float* sums, int64_t stride, bool add) {
        if (!add) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            return;
        }
        _tile_loadd(0, sums, stride * sizeof(float));
        _tile_loadd(1, sums + kLanes, stride * sizeof(float));
        if (rows > 16) {
            _tile_loadd(2, sums + 16 * stride, stride * sizeof(float));
            _tile_loadd(3, sums + 16 * stride + kLanes, stride * sizeof(float));
        }
    }

    void store_sums(int rows, float* sums, int64_t stride) {
        _tile_stored(0, sums, stride * sizeof(float));
        _tile_stored(1, sums + kLanes, stride * sizeof(float));
        if (rows > 16) {
            _tile_stored(2, sums + 16 * stride, stride * sizeof(float));
            _tile_stored(3, sums + 16 * stride + kLanes, stride * sizeof(float));
        }
    }

    // What `rows_` is while tiles are those of `multiply_columns`.
    static constexpr int kOfColumns = -1;

    struct Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };

    // Tiles 0..3 are sums of 2 x 2, 4 and 5 inputs, 6 and 7 weights. Of columns, 0..3 are sums, 4 columns, 5 and 6 inputs.
    void configure(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        const bool of_columns = rows == kOfColumns;
        const int first = of_columns ? 16 : std::min(rows, 16), second = of_columns ? 16 : std::max(rows - 16, 1);
        const int tile_rows[8] = {first, first, second, second, first, second, 16, 16};
        Config config;
        for (int tile = 0; tile < 8; tile++) {
            config.rows[tile] = uint8_t(tile_rows[tile]);
            config.row_bytes[tile] = of_columns && tile < 5 ? kTileColumns * sizeof(float) : 64;
        }
        _tile_loadconfig(&config);
    }

    int rows_ = 0;
#endif
};

#if defined(__AMX_BF16__)
// Products of which a few instructions at a time come between those of other work. A processor looks only a few hundred instructions
// ahead: one behind the other, neither would be computed while the other waits.
class TileProducts {
   public:
    explicit TileProducts(Tiles& tiles) : tiles_(tiles) {}

    void add(const Tiles::Product& product) {
        products_.push_back(product);
        num_steps_ += product.inputs / Tiles::kStep;
    }

    // Computes the share of the products that belongs to one of `count` equal parts of the other work.
    void share(int count) {
        for (due_ += num_steps_; due_ >= count; due_ -= count) step();
    }

    // Computes what is left.
    void finish() {
        while (at_ < products_.size()) step();
        products_.clear();
        at_ = 0, due_ = 0, num_steps_ = 0;
    }

   private:
    void step() {
        if (at_ == products_.size()) return;
        const Tiles::Product& product = products_[at_];
        if (k_ == 0) tiles_.begin(product);
        tiles_.step(product, k_);
        k_ += Tiles::kStep;
        if (k_ < product.inputs) return;
        tiles_.end(product);
        k_ = 0, at_++;
    }

    Tiles& tiles_;
    std::vector<Tiles::Product> products_;
    size_t at_ = 0;
    int64_t k_ = 0, due_ = 0, num_steps_ = 0;
};
#endif

}  // namespace radixkv
