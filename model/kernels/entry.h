// The functions that Python calls, once for each instruction set: NAME(layers) is hb_layers_avx2, for example.
extern "C" {
void NAME(layers)(const Geometry* g, const Layer* layers, int count, void* const* kv, const Batch* batch, float* x,
                  uint8_t* memory) {
  if (batch->kv_is_float) SPACE::run_layers<float>(*g, layers, count, kv, *batch, x, memory);
  else SPACE::run_layers<Bf16>(*g, layers, count, kv, *batch, x, memory);
}
int64_t NAME(layers_memory)(const Geometry* g, int64_t rows) {
  SPACE::Workspace w;
  return SPACE::lay_out(*g, rows, nullptr, &w);
}
void NAME(linear)(const Weight* w, const float* x, int64_t rows, float* y, uint8_t* memory) {
  SPACE::linear(*w, x, rows, y, memory);
}
int64_t NAME(linear_memory)(const Weight* w, int64_t rows) { return SPACE::inputs_bytes(rows, w->inputs); }
void NAME(pack)(int bits, int is_float, const void* weight, int64_t outputs, int64_t inputs, uint8_t* to) {
  if (is_float) SPACE::pack(bits, static_cast<const float*>(weight), outputs, inputs, to);
  else SPACE::pack(bits, static_cast<const Bf16*>(weight), outputs, inputs, to);
}
}
