// Compiled for any x86-64: what this file's structs are, and which of the others this processor can run.
extern "C" int hb_format() { return 5; }

extern "C" int hb_supports(int wide) {
  __builtin_cpu_init();
  if (wide)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
