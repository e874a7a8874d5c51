// The functions that Python calls, once for each instruction set: NAME(layers) is hb_layers_avx2, for example.
extern "C" {
void NAME(layers)(const Geometry* g, const Layer* layers, int count, void* const* kv, const Batch* batch, float* x,
                  uint8_t* memory) {
  if (batch->kv_bits == 32) SPACE::run_layers<float>(*g, layers, count, kv, *batch, x, memory);
  else if (batch->kv_bits == 16) SPACE::run_layers<Bf16>(*g, layers, count, kv, *batch, x, memory);
  else SPACE::run_layers<Int8>(*g, layers, count, kv, *batch, x, memory);
}
int64_t NAME(layers_memory)(const Geometry* g, int64_t rows, int64_t rank) {
  SPACE::Workspace w;
  return SPACE::lay_out(*g, rows, nullptr, &w, rank);
}
void NAME(linear)(const Weight* w, const float* x, int64_t rows, float* y, uint8_t* memory) {
  SPACE::linear(*w, x, rows, y, memory);
}
int64_t NAME(linear_memory)(const Weight* w, int64_t rows) { return SPACE::inputs_bytes(rows, w->inputs); }
void NAME(pack)(int bits, int is_float, const void* weight, int64_t outputs, int64_t inputs, uint8_t* to) {
  if (is_float) SPACE::pack(bits, static_cast<const float*>(weight), outputs, inputs, to);
  else SPACE::pack(bits, static_cast<const Bf16*>(weight), outputs, inputs, to);
}
void NAME(head_errors)(const Head* head, float* errors) { SPACE::head_errors(*head, errors); }
int64_t NAME(emit_memory)(const Graft* graft, int64_t rows) { return SPACE::emit_memory(*graft, rows); }
void NAME(emit)(const Graft* graft, const Emission* emission, uint8_t* memory) { SPACE::emit(*graft, *emission, memory); }
void NAME(choose)(const Graft* graft, const Emission* e, int64_t index, const int64_t* rows, int64_t count, const float* states,
                  int64_t* tokens, float* chances, bool* possible, uint8_t* memory) {
  SPACE::choose(*graft, *e, index, rows, count, states, tokens, chances, possible, memory);
}
// Of all rows, what emit() asks of one (goes_on in graft/decide.h): for tests.
void NAME(goes_on)(const Emission* e, int64_t index, const int64_t* tokens, const bool* likeliest, const float* stops, bool* on) {
  for (int64_t row = 0; row < e->rows; row++) on[row] = SPACE::goes_on(*e, row, index, tokens[row], likeliest[row], stops[row]);
}
void NAME(draw)(const float* y, int64_t rows, int64_t outputs, const float* temperatures, const int64_t* top_k, const float* top_p,
                const float* min_p, const int64_t* keys, int64_t* tokens) {
  SPACE::draw_rows(y, rows, outputs, temperatures, top_k, top_p, min_p, keys, tokens);
}
void NAME(logprobs)(const float* y, int64_t rows, int64_t outputs, const int64_t* tokens, int64_t k, float* chosen, int64_t* ranks,
                    int64_t* top_ids, float* top) {
  SPACE::logprobs(y, rows, outputs, tokens, k, chosen, ranks, top_ids, top);
}
// The parts of emit() for rows that choose otherwise; memory is as large.
void NAME(stop_logits)(const Graft* graft, const float* states, int64_t rows, float* stops, uint8_t* memory) {
  SPACE::stop_logits(*graft, states, rows, stops, memory);
}
void NAME(micro_begin)(const Graft* graft, const float* const* features, int64_t rows, float* context, uint8_t* memory) {
  SPACE::micro_begin(*graft, features, rows, context, memory);
}
void NAME(micro_state)(const Graft* graft, const float* context, const float* embedded, const int64_t* blocks, int64_t rows,
                       int64_t held, float* const* kv, float* states, uint8_t* memory) {
  SPACE::micro_state(*graft, context, embedded, blocks, rows, held, kv, states, memory);
}
int64_t NAME(embed_memory)(const Merger* m, int64_t composed, int64_t width) { return SPACE::embed_memory(*m, composed, width); }
void NAME(embed)(const Embedding* table, const Merger* m, const int64_t* tokens, const int64_t* sizes, int64_t slots, int64_t width,
                 float* x, int64_t* composed, int64_t* count, uint8_t* memory) {
  *count = SPACE::embed_slots(*table, *m, tokens, sizes, slots, width, x, composed, memory);
}
void NAME(settle)(const Settling* s, void* const* kv) {
  if (s->kv_bits == 32) SPACE::settle<float>(*s, kv);
  else if (s->kv_bits == 16) SPACE::settle<Bf16>(*s, kv);
  else SPACE::settle<Int8>(*s, kv);
}
// The calling thread's team but for itself: thread i, from 1, runs on core cpus[i - 1] alone from now on.
void NAME(tie_threads)(const int64_t* cpus, int64_t count) {
#ifdef __linux__
#pragma omp parallel num_threads(static_cast<int>(count) + 1)
  if (const int thread = omp_get_thread_num(); thread > 0 && cpus[thread - 1] < CPU_SETSIZE) {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cpus[thread - 1], &own);
    sched_setaffinity(0, sizeof own, &own);  // of this thread; where it is refused, all is as it was
  }
#endif
}
}
