// What the parts of the kernel share: the C interface's structures, and the table of functions
// that every instruction set fills in. Plain C types only, so that no version of torch or Python matters.
//
//   S  rows (cached tokens)    KH  key/value heads    G  query heads of each    H = KH * G
//   D  head size               P  D rounded up to a whole number of vectors of any instruction set
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define HOST_ATTENTION_X86 1
#endif

#if defined(_WIN32)
#define HOST_ATTENTION_EXPORT extern "C" __declspec(dllexport)
#else
#define HOST_ATTENTION_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#if defined(_MSC_VER)
#define HOST_ATTENTION_INLINE __forceinline
#else
#define HOST_ATTENTION_INLINE inline __attribute__((always_inline))
#endif

// Neighbouring rows in memory: keys and values of `rows` tokens, each row KH heads of D elements.
struct Run {
    const void *keys;
    const void *values;
    int64_t rows;
};

// How a row is laid out. Rows are `row_bytes` apart and heads `head_bytes`, so that an element type
// whose scales stand beside its codes needs a new `element` and no new interface.
struct Layout {
    int32_t element;  // 0 float32, 1 float16, 2 bfloat16
    int32_t n_kv_heads;
    int32_t groups;
    int32_t head_dim;
    int64_t row_bytes;
    int64_t head_bytes;
};

namespace host_attention {

constexpr int n_elements = 3;
constexpr int vector_floats = 16;
constexpr int block_rows = 24;
constexpr int64_t block_bytes = 96 << 10;
constexpr int score_stride = (block_rows + vector_floats - 1) / vector_floats * vector_floats;
constexpr int line_bytes = 64;

inline int64_t padded(int64_t n) { return (n + vector_floats - 1) / vector_floats * vector_floats; }

// Returns the rows of one block: its keys are fetched into the second-level cache while the values
// of the block before are summed, so both must fit there. A multiple of the rows of any tile.
inline int64_t rows_of_block(const Layout &layout) {
    return layout.row_bytes * block_rows <= block_bytes ? block_rows : block_rows / 2;
}

// Attention over some of the rows, not normalised. Scores are in base 2: exp2(score - highest).
struct Partial {
    float *highest;  // (H)
    double *total;   // (H), sum of the weights
    float *sum;      // (H, P), sum of weighted values
};

struct Task {
    const float *queries;  // (H, P), times scale and log2(e), zeros behind D
    const Run *runs;
    int64_t n_runs;
    Layout layout;
};

// One instruction set's functions. `scratch` holds (H, score_stride) weights and (H) factors.
struct Functions {
    void (*attend[n_elements])(
        const Task &task, int64_t start, int64_t stop, const Partial &result, float *scratch);
    void (*combine)(
        const Partial *partials, int64_t n, const Layout &layout, float *out, float *lse);
    uint64_t (*read)(const void *from, int64_t n_bytes);
};

inline int64_t scratch_floats(const Layout &layout) {
    return int64_t(layout.n_kv_heads) * layout.groups * (score_stride + 1);
}

}  // namespace host_attention
