#include <omp.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "common.h"
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "share.h"
#include "clock.h"
#include "vec_avx2.h"
#include "linear.h"
#include "attention.h"
#include "draw.h"
#include "inputs.h"
#include "experts.h"
#include "layers.h"
#include "settle.h"
#include "merge.h"
#include "head.h"
#include "micro.h"
#include "decide.h"
#include "emit.h"
}  // namespace avx2
#define SPACE avx2
#define NAME(function) hb_##function##_avx2
#include "entry.h"
