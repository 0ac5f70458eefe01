// The arguments of each function, field by field as in the Python file of the same name.
//
// "T" is float, or bfloat16 where a function's last argument says so. Rows lie next to each other unless a stride is given,
// in elements.
#pragma once

#include <cstdint>

#include "simd.h"

namespace radixkv {

struct Norm {
    const void* x;              // [rows, groups, dim] T, rows `stride` apart
    const float* weight;        // [dim], what a normalised vector is multiplied by
    void* out;                  // as x, and may be x
    int64_t rows, groups, dim;  // a row is `groups` vectors, normalised apart, with the same weight
    int64_t stride;
    float epsilon;
};

struct Rope {
    void* query;      // [rows, query heads, dim] T, turned in place, rows `row_stride` apart
    void* key;        // [rows, kv heads, dim] T, likewise
    const void* cos;  // [rows, rotary dim] T
    const void* sin;
    int64_t rows, num_query_heads, num_kv_heads, dim, rotary_dim;
    int64_t row_stride;
};

struct Write {
    const void* key;       // [rows, kv heads, key dim] T, by strides
    const void* value;     // [rows, kv heads, value dim] T, by strides
    void* keys;            // [slots, kv heads, key dim] T
    void* values;          // [slots, kv heads, value dim] T
    const int64_t* slots;  // [rows]
    int64_t rows, num_kv_heads;
    int64_t key_bytes, value_bytes;                                                // of one head
    int64_t key_row_stride, key_head_stride, value_row_stride, value_head_stride;  // bytes
};

// A block's row is its parts, one after the other.
struct Rows {
    char* const* parts;         // [parts] of [blocks, bytes of the part]
    const int64_t* part_bytes;  // [parts]
    char* rows;                 // [rows, row bytes]
    const int32_t* block_ids;   // [rows]
    int64_t num_parts, num_rows, row_bytes;
    int32_t in_parallel;
};

// A record is a header at the beginning of its slot and a row at the end of it; bytes between them are ignored.
struct Records {
    const int32_t* files;    // [records], descriptors
    const int64_t* offsets;  // [records], of slots in their files
    const char* headers;     // [records, header bytes]: the expected ones; their checksums are ignored
    char* rows;              // [records, row bytes]
    int32_t* outcomes;       // [records], of records.cpp
    int64_t num_records, slot_bytes, header_bytes, row_bytes;
};

enum class Activation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3, kRelu = 4 };

// How weights are stored: as floats in T, or in a format of quantised.h.
enum class Format : int32_t { kFloat = 0, kInt8 = 1, kInt4 = 2, kHalf8 = 3, kHalf4 = 4, kFloat4 = 5, kFloat8 = 6, kScaled8 = 7, kE4M3 = 8 };

struct Linear {
    const void* x;         // [rows, inputs] T
    const void* weight;    // packed
    const void* bias;      // [outputs] T, or null
    const void* residual;  // [rows, outputs] T, added to the result, or null; may be out
    void* out;             // [rows, outputs] T
    int64_t rows, inputs, outputs;
    // If there is one, panels alternate between gate and up, and the result is activation(gate) * up.
    Activation activation;
    Format format;
    // [num_decoding], ascending: the decoding rows, which a token of the answer follows. Their products and those of a prompt's
    // rows may be added in different orders. num_decoding below 0 means unknown: all are added in one order.
    const int64_t* decoding;
    int64_t num_decoding;
};

// A gated MLP for each expert, one behind the other; see experts.cpp.
struct Experts {
    const void* x;          // [rows, width] T
    const int64_t* chosen;  // [rows, per_row]: numbers of experts; other numbers are ignored
    const float* weights;   // [rows, per_row]
    void* out;              // [rows, width] T, not x
    int64_t rows, per_row, num_experts;
    const Linear *gate_up, *down;  // of these, weight, inputs, outputs, activation and format; an expert's outputs fill panels
};

// The rows of a range: of several sequences; of one sequence's prompt; or one sequence's last known token and its drafts.
enum class RowKind : int8_t { kShared = 0, kPrompt = 1, kDecoding = 2 };

struct Attention {
    const void* query;         // [rows, query heads, key dim] T, by strides
    const void* keys;          // [blocks, block size, kv heads, key dim] T
    const void* values;        // [blocks, block size, kv heads, value dim] T
    void* out;                 // [rows, query heads, value dim] T
    const float* sinks;        // [query heads], or null
    const int32_t* block_ids;  // [tables, blocks]
    const int64_t* positions;  // [rows]
    const int64_t *row_start, *row_stop, *table, *key_start, *key_stop;  // [ranges]
    const RowKind* kinds;  // [ranges]
    int64_t num_ranges, num_rows, blocks_per_table, block_size;
    int64_t num_query_heads, num_kv_heads, key_dim, value_dim;
    int64_t query_row_stride, query_head_stride, out_row_stride;
    int64_t window;  // how many keys up to its own a row sees; 0: all
    float scale, softcap;  // softcap 0: none
};

// A decoder layer, x += attention(norm(x)), x += mlp(norm(x)), and its part of the cache. Queries, keys and values have `head_dim`
// dimensions per head. If the MLP is of another kind, gate_up and down are null, and the caller adds its output.
struct Layer {
    int64_t width;
    const float *input_norm, *post_norm;  // [width]
    const float *query_norm, *key_norm;   // [head dim], or both null
    // [width], or both null: of the outputs of attention and the MLP, before they are added.
    const float *attention_norm, *mlp_norm;
    float input_epsilon, post_epsilon, query_epsilon, key_epsilon, attention_epsilon, mlp_epsilon;

    // Of these, weight, bias, inputs, outputs, activation and format.
    const Linear *project, *project_back, *gate_up, *down;

    int64_t num_query_heads, num_kv_heads, head_dim;
    void *keys, *values;  // [blocks, block size, kv heads, head dim] T
    const float* sinks;   // [query heads], or null
    int64_t window;
    float scale, softcap;
};

// Layers of one width, one after the other. A layer whose MLP is of another kind must be the only one.
struct Layers {
    const Layer* layers;  // [num_layers]
    const void* x;        // [rows, width] T
    void* out;            // [kept rows, width] T
    void* normed;         // likewise: the input of an MLP of another kind; else null
    const int64_t* kept;  // [kept rows], ascending: the rows that the last layer computes to the end; null: all
    const int64_t* decoding;  // [num_decoding]: of all rows, as in `Linear`
    int64_t num_layers, rows, num_decoding, rotary_dim;
    const void *cos, *sin;  // [rows, rotary dim] T
    const int64_t* slots;   // [rows]
    // Over all rows, and for the last layer over the kept rows; only the fields from block_ids to block_size.
    const Attention *attention, *last_attention;
};

// A word is a number in float32, and two inputs in bfloat16.
struct Features {
    const uint32_t* panels;   // [features / 32][words][32]
    const int64_t* features;  // [rows]
    uint32_t* out;            // [rows, words]
    int64_t rows, words;
};

struct Draw {
    const float* logits;                           // [rows, vocabulary]
    const float* temperatures;                     // [rows], above 0
    const uint64_t* states;                        // [rows], at which each row's variates begin
    const int64_t* top_k;                          // [rows], at least 1
    const float *top_p, *min_p;                    // [rows]
    int64_t* token_ids;                            // [rows]
    int64_t rows, vocab_size;
};

struct Logprobs {
    const float* logits;       // [rows, vocabulary]
    const int64_t* token_ids;  // [rows]: one token of each
    float* totals;             // [rows]: their log-sum-exp
    int64_t* ranks;            // [rows]: of the token, from 1
    int64_t* top_ids;          // [rows, count]: the likeliest tokens, the likeliest first
    float* top_logits;         // [rows, count]
    int64_t rows, vocab_size, count;
};

}  // namespace radixkv

// The last argument says whether T is bfloat16.
RADIXKV_API void radixkv_rms_norm(const radixkv::Norm* call, int32_t is_bf16);
RADIXKV_API void radixkv_rope(const radixkv::Rope* call, int32_t is_bf16);
RADIXKV_API void radixkv_write(const radixkv::Write* call, int32_t is_bf16);
// The last argument says whether blocks become rows, or rows blocks.
RADIXKV_API void radixkv_rows(const radixkv::Rows* call, int32_t into_rows);
RADIXKV_API void radixkv_linear(const radixkv::Linear* call, int32_t is_bf16);
RADIXKV_API void radixkv_experts(const radixkv::Experts* call, int32_t is_bf16);
RADIXKV_API void radixkv_attention(const radixkv::Attention* call, int32_t is_bf16);
// The last argument says whether top_k, top_p and min_p apply.
RADIXKV_API void radixkv_draw(const radixkv::Draw* call, int32_t truncates);
// The last argument is unused.
RADIXKV_API void radixkv_features(const radixkv::Features* call, int32_t);
RADIXKV_API void radixkv_logprobs(const radixkv::Logprobs* call, int32_t);
RADIXKV_API void radixkv_layers(const radixkv::Layers* call, int32_t is_bf16);
