// What is the same for every instruction set: the structs that Python passes, and the format of weights.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

struct Bf16 { uint16_t bits; };
struct Int8 { int8_t code; };  // its value is the code times a scale

#define KNOWS_BF16 (__GNUC__ >= 11)  // the compiler, and how to ask for it

constexpr int kLanes = 16;  // outputs that one block of a packed weight holds
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kMaxGroup = 64;  // tokens that one slot merges

#define STRUCT(name) struct name {
#define FIELD(type, name, ...) type name __VA_ARGS__;
#define END };
#include "structs.h"
#undef STRUCT
#undef FIELD
#undef END

inline int64_t group_bytes(int bits) { return bits == 4 ? 4 * 64 + 64 : 8 * 64 + 32; }
