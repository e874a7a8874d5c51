// Where the time of a call goes, for benchmarks: nanoseconds by stage, as the first thread has them. Included inside a namespace.
enum Stage { kRounding, kLinears, kAttention, kHeads, kMicroSteps };  // norms count as rounding; micro-steps are whole

struct StageClock {
  int64_t* spent;  // a number for each stage, added to; null: nothing is clocked
  int64_t last;

  StageClock(int64_t* to, const Share& share) : spent(share.thread == 0 ? to : nullptr), last(spent ? now() : 0) {}
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  // What has passed since the last mark was this stage.
  void mark(Stage stage) {
    if (!spent) return;
    const int64_t time = now();
    spent[stage] += time - last;
    last = time;
  }
};
