// What the kernels and Python (model/cpu/library.py) share: plain structs, the same for every instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

struct Bf16 { uint16_t bits; };

constexpr int kLanes = 16;  // outputs that one block of a packed weight holds
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kMaxGroup = 64;  // tokens that one slot merges

// y = W x + bias, W [outputs, inputs] in blocks of 16 outputs; for each group of 32 inputs a block holds
//   4 bits: 4 x 64 bytes of codes 0 to 15, then 16 scales and 16 zeros in half precision: w = code * scale + zero
//   8 bits: 8 x 64 bytes of codes 1 to 255, then 16 scales: w = (code - 128) * scale
// Byte (i, lane, t) of an 8-bit group is input 4 i + t of output `lane`; in a 4-bit group its low half is input
// 8 i + t and its high half input 8 i + 4 + t.
struct Weight {
  const uint8_t* data;
  const float* bias;  // or null
  int32_t outputs, inputs, bits;
};

struct Layer {
  const float *attn_norm, *mlp_norm;  // [D]
  const float *q_norm, *k_norm;       // [head_dim], or null
  Weight qkv, o, gate_up, down;
  int32_t window;  // slots that a slot sees, itself included; 0: all before it
  struct { Weight down, up; } adapters[4];  // of qkv, o, gate_up and down, for merged slots; or without data
};

struct Geometry {
  int32_t hidden, heads, kv_heads, head_dim, intermediate;
  float eps;
};

// The slots of several tokens, which pass the layers' adapters (adapter.py).
struct Merged {
  int64_t count;        // N; 0: none, or no adapters
  const int64_t* rows;  // [N], their places in T
  int64_t rank;
};

// T new slots of B sequences, as ForwardBatch has them (batch.py).
struct Batch {
  int64_t slots, sequences;
  const float *cos, *sin;         // [T, head_dim], laid out as rotary.py does
  const int64_t* write_slots;     // [T]
  const int64_t* block_tables;    // [B, table_width]
  const int64_t* context_slots;   // [B]
  const int64_t* query_slots;     // [B]
  int64_t table_width, block_size;
  int32_t kv_is_float;            // else bfloat16
  const int64_t* emit;            // [M], the slots whose states are read between layers
  int64_t emitting;
  float* const* features;         // of each layer [M, D], to be written, or null; null: none at all
  const float* norm;              // [D], the final norm
  const int64_t* read;            // [S], the slots whose final states are read
  int64_t reading;
  float* states;                  // [S, D], to be written: those states, normed
  Merged merged;
};

// The compositional embedder. pos: [most tokens of a group, D / 2].
struct Merger {
  Weight q, k, v, out;
  const float* pos;
  int32_t hidden, heads;
};

// [V, D], bfloat16 or float.
struct Embedding {
  const void* rows;
  int32_t is_float, width;
};

// A head in 8 bits, its copy in 4 bits, and what that is off by (head.h).
struct Head {
  Weight weight, coarse;
  const float* errors;  // [outputs, to a whole block]
};

// What emits groups: the head, and where there is a graft (count > 0) its stop head and micro decoder.
struct Graft {
  Geometry geometry;
  Head head;                    // of first tokens
  const Layer* layers;          // the micro decoder's
  int32_t count, features, positions, fused;  // positions: that a group has at most in the micro decoder
  const float *feature_norm;    // [features, D]; null unless fused, as the next three
  const float *embedding_norm;  // [D]
  Weight feature_proj, embedding_proj;
  const float* norm;            // [D], or null
  Weight stop[3];
  const float *stop_scale, *stop_bias;  // [most tokens of a group]
  Head micro_head;              // of further tokens
  const int64_t* short_list;    // the ids that micro_head chooses from, ascending; null: all
  Embedding embedding;
  const float *cos, *sin;       // [positions, head_dim]
};

// M rows that emit. thresholds: a group goes on while -stop >= threshold. temperatures: null where all are greedy, as then the
// next four.
struct Emission {
  int64_t rows, width, ends;       // width: most tokens of a group; ends: of each row
  const float* hidden;             // [M, D]
  const float* const* features;    // of each feature layer [M, D]
  const int64_t* limits;           // [M]
  const float* thresholds;         // [M]
  const int64_t* end_ids;          // [M, ends]
  const float* temperatures;       // [M]
  const int64_t* top_k;            // [M]
  const float *top_p, *min_p;      // [M]
  const double* u;                 // [M, width]
  int64_t *token_ids, *sizes;      // [M, width], zeros; [M]
  float* stops;                    // [M, width], the stop logits; -inf where there is no token
};

inline int64_t group_bytes(int bits) { return bits == 4 ? 4 * 64 + 64 : 8 * 64 + 32; }
