// AMX tiles computed by ordinary instructions, so that what uses them can be tested on processors without them.
//
// To be included before all else (-include). Sums are added in the order of the instruction: those of even and of odd inputs apart,
// then both, then the tile's (Intel's manual, TDPBF16PS). What the instructions fault at ends the process.
#pragma once

#include <immintrin.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_BF16__ 1
#define syscall(...) 0L  // the permission to use tiles is granted

namespace amx_in_software {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct State {
    bool is_configured = false;
    Config config;
    alignas(64) uint8_t tiles[8][16][64];
};

inline thread_local State state;

inline void require(bool holds) {
    if (!holds) std::abort();
}

inline void load_config(const void* from) {
    std::memcpy(&state.config, from, sizeof(Config));
    require(state.config.palette == 1);
    for (int tile = 0; tile < 8; tile++) require(state.config.rows[tile] <= 16 && state.config.row_bytes[tile] <= 64);
    std::memset(state.tiles, 0, sizeof(state.tiles));
    state.is_configured = true;
}

inline void release() { state.is_configured = false; }

inline int rows_of(int tile) {
    require(state.is_configured);
    return state.config.rows[tile];
}

inline void zero(int tile) {
    rows_of(tile);
    std::memset(state.tiles[tile], 0, sizeof(state.tiles[tile]));
}

inline void load(int tile, const void* base, int64_t stride) {
    const int rows = rows_of(tile);
    std::memset(state.tiles[tile], 0, sizeof(state.tiles[tile]));
    for (int row = 0; row < rows; row++)
        std::memcpy(state.tiles[tile][row], static_cast<const char*>(base) + row * stride, state.config.row_bytes[tile]);
}

inline void store(int tile, void* base, int64_t stride) {
    const int rows = rows_of(tile);
    for (int row = 0; row < rows; row++)
        std::memcpy(static_cast<char*>(base) + row * stride, state.tiles[tile][row], state.config.row_bytes[tile]);
}

inline float widen(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
}

inline void multiply_bf16(int sums, int a, int b) {
    const int rows = rows_of(sums), columns = state.config.row_bytes[sums] / 4, pairs = state.config.row_bytes[a] / 4;
    require(rows_of(a) == rows && rows_of(b) == pairs && state.config.row_bytes[b] == 4 * columns);
    for (int row = 0; row < rows; row++) {
        uint16_t x[32], y[32];
        float even[16] = {}, odd[16] = {}, total[16];
        std::memcpy(x, state.tiles[a][row], sizeof(x));
        std::memcpy(total, state.tiles[sums][row], sizeof(total));
        for (int pair = 0; pair < pairs; pair++) {
            std::memcpy(y, state.tiles[b][pair], sizeof(y));
            for (int column = 0; column < 16; column++) {
                even[column] += widen(x[2 * pair]) * widen(y[2 * column]);
                odd[column] += widen(x[2 * pair + 1]) * widen(y[2 * column + 1]);
            }
        }
        for (int column = 0; column < columns; column++) total[column] += even[column] + odd[column];
        std::memcpy(state.tiles[sums][row], total, sizeof(total));
    }
}

}  // namespace amx_in_software

#undef _tile_zero  // the compiler has macros of these names, even where it does not know AMX
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) amx_in_software::load_config(from)
#define _tile_release() amx_in_software::release()
#define _tile_zero(tile) amx_in_software::zero(tile)
#define _tile_loadd(tile, base, stride) amx_in_software::load(tile, base, stride)
#define _tile_stored(tile, base, stride) amx_in_software::store(tile, base, stride)
#define _tile_dpbf16ps(sums, a, b) amx_in_software::multiply_bf16(sums, a, b)
