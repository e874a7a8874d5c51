#include <omp.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "common.h"
#if KNOWS_BF16
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")
namespace avx512bf16 {
#include "share.h"
#include "clock.h"
#include "vec_avx512.h"
#include "vec_bf16.h"
#include "linear.h"
#include "functions.h"
#include "attention/scratch.h"
#include "attention/together.h"
#include "places.h"
#include "attention/plan.h"
#include "attention/scores.h"
#include "attention/values.h"
#include "attention/dots.h"
#include "attention/attend.h"
#include "inputs.h"
#include "layers/experts.h"
#include "layers/workspace.h"
#include "layers/new_slots.h"
#include "layers/project.h"
#include "layers/layers.h"
#include "pack.h"
#include "settle.h"
#include "graft/merge.h"
#include "graft/draw.h"
#include "graft/changes.h"
#include "graft/logprobs.h"
#include "graft/head.h"
#include "graft/micro.h"
#include "graft/decide.h"
#include "graft/emit.h"
}  // namespace avx512bf16
#define SPACE avx512bf16
#define NAME(function) hb_##function##_avx512bf16
#include "entry.h"
#endif
