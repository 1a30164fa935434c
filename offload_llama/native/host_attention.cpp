// Attention of one token over cached rows in host memory: the C interface, the choice of the
// instruction set, and the division of the rows among threads.

#include "host_attention.h"

#include <new>

#include "team.h"
#include "vectors.h"

#if defined(HOST_ATTENTION_X86)
#include "vectors_x86.h"
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

#ifndef HOST_ATTENTION_SOURCE
#define HOST_ATTENTION_SOURCE "unknown"
#endif

namespace host_attention {

enum Status { done = 0, bad_argument = 1, no_memory = 2, not_on_this_cpu = 3 };

// Rows are cut into pieces by their number alone, and merged in order, so that the result has the
// same bits whatever the number of threads. A piece is about a megabyte: far more than its partial
// result, and little enough to be spread evenly.
constexpr int64_t piece_bytes = 1 << 20;
constexpr int64_t max_pieces = 64;

int64_t piece_rows(int64_t rows, const Layout &layout) {
    const int64_t by_bytes = piece_bytes / (2 * layout.row_bytes);
    const int64_t by_count = (rows + max_pieces - 1) / max_pieces;
    const int64_t wanted = std::max(by_bytes, by_count);
    return std::max<int64_t>(1, (wanted + block_rows - 1) / block_rows) * block_rows;
}

#if defined(HOST_ATTENTION_X86)
struct Registers {
    uint32_t a, b, c, d;
};

Registers cpuid(uint32_t leaf) {
#if defined(_MSC_VER)
    int r[4];
    __cpuidex(r, int(leaf), 0);
    return {uint32_t(r[0]), uint32_t(r[1]), uint32_t(r[2]), uint32_t(r[3])};
#else
    Registers r{};
    __get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d);
    return r;
#endif
}

// Which registers the operating system saves.
uint64_t saved_state() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low | uint64_t(high) << 32;
#endif
}

// Returns 2 for AVX-512, 1 for AVX2 with FMA and F16C, 0 for neither.
int x86_level() {
    const uint32_t fma = 1u << 12, xsave = 1u << 27, f16c = 1u << 29;
    const uint32_t avx2 = 1u << 5, avx512f = 1u << 16;
    const Registers basic = cpuid(1), extended = cpuid(7);
    const uint32_t wanted = fma | xsave | f16c;
    if ((basic.c & wanted) != wanted || !(extended.b & avx2)) return 0;
    const uint64_t state = saved_state();
    if ((state & 0x6) != 0x6) return 0;
    return (extended.b & avx512f) && (state & 0xe6) == 0xe6 ? 2 : 1;
}
#endif

// Returns the functions of an instruction set, null where this processor lacks it.
const Functions *functions_of(int instruction_set) {
    if (instruction_set == 0) return &portable::functions;
#if defined(HOST_ATTENTION_X86)
    static const int level = x86_level();
    if (instruction_set == 1 && level >= 1) return &avx2::functions;
    if (instruction_set == 2 && level >= 2) return &avx512::functions;
#endif
    return nullptr;
}

struct AttendJob final : Job {
    const Functions &functions;
    const Task &task;
    int64_t rows, rows_each;
    const std::vector<Partial> &partials;
    float *scratch;

    AttendJob(const Functions &f, const Task &t, int64_t n, int64_t each,
              const std::vector<Partial> &p, float *s)
        : functions(f), task(t), rows(n), rows_each(each), partials(p), scratch(s) {}

    void piece(int64_t index, int worker) override {
        const int64_t start = index * rows_each, stop = std::min(rows, start + rows_each);
        functions.attend[task.layout.element](
            task, start, stop, partials[size_t(index)],
            scratch + worker * padded(scratch_floats(task.layout)));
    }
};

struct ReadJob final : Job {
    const Functions &functions;
    const char *from;
    int64_t n_bytes;
    std::atomic<uint64_t> sum{0};

    ReadJob(const Functions &f, const char *p, int64_t n) : functions(f), from(p), n_bytes(n) {}

    void piece(int64_t index, int) override {
        const int64_t start = index * piece_bytes;
        sum ^= functions.read(from + start, std::min(piece_bytes, n_bytes - start));
    }
};

// Cuts one buffer into partial results. Totals are doubles: two floats each.
void lay_out(const Layout &layout, int64_t n, Buffer &buffer, std::vector<Partial> &partials) {
    const int64_t heads = padded(int64_t(layout.n_kv_heads) * layout.groups);
    const int64_t each = heads * 3 + heads * padded(layout.head_dim);
    float *at = buffer.floats(n * each);
    partials.resize(size_t(n));
    for (auto &partial : partials) {
        partial = {at, reinterpret_cast<double *>(at + heads), at + 3 * heads};
        at += each;
    }
}

int attend(
    const float *q, const Run *runs, int64_t n_runs, const Layout &layout, float scale,
    int n_threads, const Functions &functions, float *out, float *lse) {
    const int64_t n_heads = int64_t(layout.n_kv_heads) * layout.groups;
    int64_t rows = 0;
    for (int64_t i = 0; i < n_runs; i++) rows += runs[i].rows;
    if (rows == 0) {
        std::fill_n(out, n_heads * layout.head_dim, 0.0f);
        std::fill_n(lse, n_heads, -INFINITY);
        return done;
    }
    const int64_t each = piece_rows(rows, layout), n_pieces = (rows + each - 1) / each;
    const int64_t stride = padded(layout.head_dim);
    n_threads = int(std::min<int64_t>(n_threads, n_pieces));
    Borrowed borrowed;
    Team &team = borrowed.team;
    lay_out(layout, n_pieces, team.memory, team.partials);
    float *queries = team.queries.floats(n_heads * stride);
    std::fill_n(queries, n_heads * stride, 0.0f);
    const float factor = scale * 1.44269504088896340736f;
    for (int64_t i = 0; i < n_heads; i++)
        for (int64_t d = 0; d < layout.head_dim; d++)
            queries[i * stride + d] = q[i * layout.head_dim + d] * factor;
    const Task task{queries, runs, n_runs, layout};
    float *scratch = team.scratch.floats(n_threads * padded(scratch_floats(layout)));
    AttendJob job(functions, task, rows, each, team.partials, scratch);
    team.run(job, n_pieces, n_threads);
    functions.combine(team.partials.data(), n_pieces, layout, out, lse);
    return done;
}

}  // namespace host_attention

// The sources this was built from, so that a stale build is noticed.
HOST_ATTENTION_EXPORT const char *host_attention_source() { return HOST_ATTENTION_SOURCE; }

// Returns 1 where this processor has an instruction set: 0 portable, 1 AVX2, 2 AVX-512.
HOST_ATTENTION_EXPORT int32_t host_attention_has(int32_t instruction_set) {
    return host_attention::functions_of(instruction_set) != nullptr;
}

// Attention of queries (KH, G, D) over all rows of the runs.
//
// Writes the normalised output (KH, G, D) and the log-sum-exp (KH, G) of the scaled scores; without
// rows these are zeros and -infinity. May be called from several threads. Returns 0, or 1 for an
// argument that is not possible, 2 without memory, 3 for instructions this processor lacks.
HOST_ATTENTION_EXPORT int32_t host_attention_attend(
    const float *q, const Run *runs, int64_t n_runs, const Layout *layout, float scale,
    int32_t n_threads, int32_t instruction_set, float *out, float *lse) {
    using namespace host_attention;
    const auto *functions = functions_of(instruction_set);
    if (!functions) return not_on_this_cpu;
    if (layout->element < 0 || layout->element >= n_elements || layout->n_kv_heads < 1 ||
        layout->groups < 1 || layout->head_dim < 1 || layout->row_bytes < 1 || n_threads < 1)
        return bad_argument;
    try {
        return attend(q, runs, n_runs, *layout, scale, n_threads, *functions, out, lse);
    } catch (const std::bad_alloc &) {
        return no_memory;
    }
}

// Reads memory with the same threads and does nothing with it: what attention is measured against.
HOST_ATTENTION_EXPORT uint64_t host_attention_read(
    const void *from, int64_t n_bytes, int32_t n_threads, int32_t instruction_set) {
    using namespace host_attention;
    const auto *functions = functions_of(instruction_set);
    if (!functions) return 0;
    Borrowed borrowed;
    ReadJob job(*functions, static_cast<const char *>(from), n_bytes);
    borrowed.team.run(job, (n_bytes + piece_bytes - 1) / piece_bytes, n_threads);
    return job.sum;
}
