// What the kernels and Python (model/native.py) share: plain structs, the same for every instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

struct Bf16 { uint16_t bits; };

constexpr int kLanes = 16;  // outputs that one block of a packed weight holds
constexpr int kGroup = 32;  // inputs that share a scale

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
};

struct Geometry {
  int32_t hidden, heads, kv_heads, head_dim, intermediate;
  float eps;
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
};

inline int64_t group_bytes(int bits) { return bits == 4 ? 4 * 64 + 64 : 8 * 64 + 32; }
