// Attention over rows of keys and values, written once for all instruction sets. It is included
// inside a namespace that defines `Vec`, its width and the operations on it; TARGET is the attribute
// that lets a function use the instructions, whatever the rest of the file is compiled for.
//
// A block of rows at a time: scores of all heads, their weights, the weighted values. Each key and
// value comes from memory once, for all query heads of its group.

// Rows whose scores are computed together, and vectors of values that are summed together, for NG
// query heads. The sums, NG times these, must fit the registers: 16, or 32 where there are many.
template <int NG>
constexpr int score_rows = many_registers || NG <= 2 ? 4 : 3;
template <int NG>
constexpr int value_vectors = NG == 1 ? 8 : (many_registers ? (NG == 2 ? 8 : 4) : (NG == 2 ? 4 : 3));

// Memory that is needed soon, fetched a little with every step of the work on what is here.
struct Ahead {
    const char *at;
    TARGET HOST_ATTENTION_INLINE void fetch(int n_bytes) {
        for (int i = 0; i < n_bytes; i += line_bytes) prefetch(at + i);
        at += n_bytes;
    }
};

// One step of the scores: `width` elements of R rows for NG query heads.
template <int NG, int R>
TARGET HOST_ATTENTION_INLINE void score_step(
    const float *queries, int64_t query_stride, const Vec (&key)[R], Vec (&sums)[NG * R]) {
    for (int g = 0; g < NG; g++) {
        const Vec query = load_float(queries + g * query_stride);
        for (int r = 0; r < R; r++) sums[g * R + r] = multiply_add(query, key[r], sums[g * R + r]);
    }
}

// Scores of R rows for NG query heads of one KV head.
template <class E, int NG, int R>
TARGET HOST_ATTENTION_INLINE void score_tile(
    const float *queries, int64_t query_stride, const char *keys, int64_t row_bytes, int head_dim,
    float *scores, Ahead &ahead) {
    Vec sums[NG * R], key[R];
    for (int i = 0; i < NG * R; i++) sums[i] = zeros();
    int d = 0;
    for (; d + width <= head_dim; d += width) {
        for (int r = 0; r < R; r++)
            key[r] = load(reinterpret_cast<const E *>(keys + r * row_bytes) + d);
        ahead.fetch(R * width * int(sizeof(E)));
        score_step<NG, R>(queries + d, query_stride, key, sums);
    }
    if (d < head_dim) {
        for (int r = 0; r < R; r++)
            key[r] = load_part(reinterpret_cast<const E *>(keys + r * row_bytes) + d, head_dim - d);
        score_step<NG, R>(queries + d, query_stride, key, sums);
    }
    store_sums<NG, R>(sums, scores);
}

// Adds `n` rows of values, weighted, to NV vectors of NG sums; `keep` scales what they held before.
template <class E, int NG, int NV, bool part>
TARGET HOST_ATTENTION_INLINE void value_tile(
    const float *weights, const char *values, int64_t row_bytes, int n, const float *keep,
    float *sums, int64_t sum_stride, int n_left, Ahead &ahead) {
    Vec added[NG][NV];
    for (int g = 0; g < NG; g++)
        for (int j = 0; j < NV; j++) added[g][j] = zeros();
    for (int r = 0; r < n; r++) {
        const E *row = reinterpret_cast<const E *>(values + r * row_bytes);
        Vec value[NV];
        for (int j = 0; j < NV; j++)
            value[j] = part ? load_part(row, n_left) : load(row + j * width);
        ahead.fetch(NV * width * int(sizeof(E)));
        for (int g = 0; g < NG; g++) {
            const Vec weight = spread(weights + g * score_stride + r);
            for (int j = 0; j < NV; j++) added[g][j] = multiply_add(weight, value[j], added[g][j]);
        }
    }
    for (int g = 0; g < NG; g++) {
        const Vec kept = spread(keep + g);
        for (int j = 0; j < NV; j++) {
            float *sum = sums + g * sum_stride + j * width;
            store_float(sum, multiply_add(load_float(sum), kept, added[g][j]));
        }
    }
}

template <class E, int NG, int NV>
TARGET HOST_ATTENTION_INLINE int value_tiles(
    const float *weights, const char *values, int64_t row_bytes, int n, const float *keep,
    float *sums, int64_t sum_stride, int head_dim, int d, Ahead &ahead) {
    for (; d + NV * width <= head_dim; d += NV * width)
        value_tile<E, NG, NV, false>(
            weights, values + d * int(sizeof(E)), row_bytes, n, keep, sums + d, sum_stride, 0,
            ahead);
    if constexpr (NV > 1)
        return value_tiles<E, NG, (NV + 1) / 2>(
            weights, values, row_bytes, n, keep, sums, sum_stride, head_dim, d, ahead);
    return d;
}

template <class E, int NG>
TARGET void head_scores(
    const float *queries, int64_t query_stride, const char *keys, const Layout &layout, int n,
    float *scores, Ahead &ahead) {
    Ahead local = ahead;
    int r = 0;
    for (; r + score_rows<NG> <= n; r += score_rows<NG>)
        score_tile<E, NG, score_rows<NG>>(
            queries, query_stride, keys + r * layout.row_bytes, layout.row_bytes, layout.head_dim,
            scores + r, local);
    for (; r < n; r++)
        score_tile<E, NG, 1>(
            queries, query_stride, keys + r * layout.row_bytes, layout.row_bytes, layout.head_dim,
            scores + r, local);
    ahead = local;
}

template <class E, int NG>
TARGET void head_values(
    const float *weights, const char *values, const Layout &layout, int n, const float *keep,
    float *sums, int64_t sum_stride, Ahead &ahead) {
    Ahead local = ahead;
    const int d = value_tiles<E, NG, value_vectors<NG>>(
        weights, values, layout.row_bytes, n, keep, sums, sum_stride, layout.head_dim, 0, local);
    if (d < layout.head_dim)
        value_tile<E, NG, 1, true>(
            weights, values + d * int(sizeof(E)), layout.row_bytes, n, keep, sums + d, sum_stride,
            layout.head_dim - d, local);
    ahead = local;
}

// Turns the scores of one query head into weights; returns the factor for what was summed before.
// Scores behind the n rows are filled up to whole vectors, and weigh nothing.
TARGET inline float weigh(float *scores, int n, float &highest, double &total) {
    for (int r = n; r % width; r++) scores[r] = -INFINITY;
    Vec high = load_float(scores);
    for (int r = width; r < n; r += width) high = maximum(high, load_float(scores + r));
    const float before = highest;
    const float now = std::max(before, highest_lane(high));
    const Vec offset = spread(&now);
    Vec sum = zeros();
    for (int r = 0; r < n; r += width) {
        const Vec weight = power_of_two(subtract(load_float(scores + r), offset));
        store_float(scores + r, weight);
        sum = add(sum, weight);
    }
    const float keep = now == before ? 1.0f : std::exp2(before - now);
    highest = now;
    total = total * double(keep) + double(sum_lanes(sum));
    return keep;
}

// Applies `F<NG>` to at most four query heads of a KV head at a time.
#define BY_GROUPS(CALL)                          \
    for (int g = 0; g < layout.groups; g += 4) { \
        switch (layout.groups - g) {             \
            case 1: CALL(1); break;              \
            case 2: CALL(2); break;              \
            case 3: CALL(3); break;              \
            default: CALL(4); break;             \
        }                                        \
    }

// One block of neighbouring rows.
struct Block {
    const char *keys, *values;
    int n;
};

// Yields rows [start, stop) of all runs together as blocks.
class Blocks {
  public:
    Blocks(const Task &task, int64_t start, int64_t stop)
        : run_(task.runs),
          row_(start),
          left_(stop - start),
          row_bytes_(task.layout.row_bytes),
          most_(rows_of_block(task.layout)) {
        skip();
    }
    Block next() {
        if (left_ == 0) return {nullptr, nullptr, 0};
        const int64_t n = std::min({most_, left_, run_->rows - row_});
        const int64_t at = row_ * row_bytes_;
        const Block block{static_cast<const char *>(run_->keys) + at,
                          static_cast<const char *>(run_->values) + at, int(n)};
        row_ += n;
        left_ -= n;
        skip();
        return block;
    }

  private:
    const Run *run_;
    int64_t row_, left_, row_bytes_, most_;

    void skip() {
        while (left_ && row_ >= run_->rows) row_ -= (run_++)->rows;
    }
};

template <class E>
TARGET void attend_block(
    const Task &task, const Block &block, const Block &next, const Partial &result,
    float *scratch) {
    const Layout &layout = task.layout;
    const int64_t stride = padded(layout.head_dim);
    const int n_heads = layout.n_kv_heads * layout.groups;
    float *keep = scratch + int64_t(n_heads) * score_stride;
    Ahead ahead{block.values};
    for (int h = 0; h < layout.n_kv_heads; h++) {
#define SCORES(NG)                                                                              \
    head_scores<E, NG>(                                                                         \
        task.queries + (h * layout.groups + g) * stride, stride,                                \
        block.keys + h * layout.head_bytes, layout, block.n,                                    \
        scratch + int64_t(h * layout.groups + g) * score_stride, ahead)
        BY_GROUPS(SCORES)
#undef SCORES
    }
    for (int i = 0; i < n_heads; i++)
        keep[i] = weigh(
            scratch + int64_t(i) * score_stride, block.n, result.highest[i], result.total[i]);
    ahead.at = next.keys ? next.keys : block.keys;
    for (int h = 0; h < layout.n_kv_heads; h++) {
#define VALUES(NG)                                                                              \
    head_values<E, NG>(                                                                         \
        scratch + int64_t(h * layout.groups + g) * score_stride,                                  \
        block.values + h * layout.head_bytes, layout, block.n, keep + h * layout.groups + g,    \
        result.sum + (h * layout.groups + g) * stride, stride, ahead)
        BY_GROUPS(VALUES)
#undef VALUES
    }
}
#undef BY_GROUPS

// Attention over rows [start, stop) of all runs together; `result` is written, not added to.
template <class E>
TARGET void attend(
    const Task &task, int64_t start, int64_t stop, const Partial &result, float *scratch) {
    const Layout &layout = task.layout;
    const int64_t n_heads = int64_t(layout.n_kv_heads) * layout.groups;
    std::fill_n(result.highest, n_heads, -INFINITY);
    std::fill_n(result.total, n_heads, 0.0);
    std::fill_n(result.sum, n_heads * padded(layout.head_dim), 0.0f);
    Blocks blocks(task, start, stop);
    for (Block block = blocks.next(); block.n;) {
        const Block next = blocks.next();
        attend_block<E>(task, block, next, result, scratch);
        block = next;
    }
}

// Merges partial results by their log-sum-exp and normalises: out (H, D), lse (H), base e.
// The first partial's sums are overwritten.
TARGET inline void combine(
    const Partial *partials, int64_t n, const Layout &layout, float *out, float *lse) {
    const int64_t stride = padded(layout.head_dim);
    for (int64_t i = 0; i < int64_t(layout.n_kv_heads) * layout.groups; i++) {
        float highest = -INFINITY;
        for (int64_t p = 0; p < n; p++) highest = std::max(highest, partials[p].highest[i]);
        double total = 0;
        for (int64_t p = 0; p < n; p++)
            total += partials[p].total[i] * std::exp2(double(partials[p].highest[i] - highest));
        lse[i] = float((double(highest) + std::log2(total)) * 0.69314718055994530942);
        float *merged = partials[0].sum + i * stride;
        for (int64_t p = 0; p < n; p++) {
            const double share = std::exp2(double(partials[p].highest[i] - highest)) / total;
            const float weight = float(share);
            const Vec factor = spread(&weight);
            const float *sum = partials[p].sum + i * stride;
            for (int64_t d = 0; d < stride; d += width) {
                const Vec so_far = p ? load_float(merged + d) : zeros();
                store_float(merged + d, multiply_add(factor, load_float(sum + d), so_far));
            }
        }
        std::copy_n(merged, layout.head_dim, out + i * layout.head_dim);
    }
}

const Functions functions = {{attend<Float32>, attend<Float16>, attend<BFloat16>}, combine, read};
