// Compiled for any x86-64: what library.py asks before it uses the other files, and which of them this processor can run.
#include <cstddef>
#include <cstdio>

#include "common.h"

extern "C" int hb_format() { return 20; }

// Writes a line for each field and, behind its fields, for each struct, as structs.py does: "Weight.bias: 8 bytes at 8",
// "Weight: 32 bytes". Without std::string: the linker may take its functions from the files that not every processor can run.
extern "C" void hb_layouts(char* text, int64_t size) {
  const auto add = [&](int length) {
    if (length < size) text += length, size -= length;
  };
#define STRUCT(name) { using Of = name; const char* const of = #name;
#define FIELD(type, name, ...) add(std::snprintf(text, size, "%s." #name ": %zu bytes at %zu\n", of, sizeof(Of::name), offsetof(Of, name)));
#define END add(std::snprintf(text, size, "%s: %zu bytes\n", of, sizeof(Of))); }
#include "structs.h"
}

extern "C" int hb_supports(const char* instructions) {
  __builtin_cpu_init();
  const bool narrow = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool wide = narrow && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#if KNOWS_BF16
  if (!std::strcmp(instructions, "avx512bf16")) return wide && __builtin_cpu_supports("avx512bf16");
#endif
  if (!std::strcmp(instructions, "avx512")) return wide;
  return !std::strcmp(instructions, "avx2") && narrow;
}
