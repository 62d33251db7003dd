// Sums here have one order, whoever calls: compilers may not choose another one, and inline nothing elsewhere.
#ifdef __clang__
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math")
#endif
#include "attention_scores.h"

#include <algorithm>

static inline lanes load(const number *x, int64_t count) {
    lanes vector = {};
    for (int64_t i = 0; i < count; i++) vector[i] = wide(x[i]);
    return vector;
}

static inline lanes load_fp32(const float *x, int64_t count) {
    lanes vector = {};
    memcpy(&vector, x, count * sizeof(float));
    return vector;
}

// The sum of a vector: halves are added to each other.
static inline float sum_of(lanes vector) {
    typedef float half_vector __attribute__((vector_size(32)));
    typedef float quarter_vector __attribute__((vector_size(16)));
    half_vector halves[2];
    memcpy(halves, &vector, sizeof(halves));
    half_vector half = halves[0] + halves[1];
    quarter_vector quarters[2];
    memcpy(quarters, &half, sizeof(quarters));
    quarter_vector quarter = quarters[0] + quarters[1];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// VECTORS of a key stay in registers for all queries; 0: keys of any width.
template <int VECTORS>
static void scores_of(const float *queries, int64_t query_stride, int64_t count, const Keys &keys, float *scores,
                      int64_t score_stride) {
    for (int64_t n = 0; n < keys.count; n++) {
        const number *key = keys.data + n * keys.stride;
        lanes vectors[VECTORS ? VECTORS : 1];
        for (int v = 0; v < VECTORS; v++) vectors[v] = load(key + v * LANES, LANES);
        for (int64_t g = 0; g < count; g++) {
            const float *query = queries + g * query_stride;
            lanes sum = {};
            for (int v = 0; v < VECTORS; v++) sum += *(const lanes *)(query + v * LANES) * vectors[v];
            for (int64_t i = VECTORS * LANES; i < keys.width; i += LANES) {
                int64_t rest = std::min(LANES, keys.width - i);
                sum += load_fp32(query + i, rest) * load(key + i, rest);
            }
            scores[g * score_stride + n] = sum_of(sum);
        }
    }
}

void attention_scores(const float *queries, int64_t query_stride, int64_t count, const Keys &keys, float *scores,
                      int64_t score_stride) {
    int64_t width = keys.width;
    auto *scores_by_width = width == 32    ? scores_of<2>
                            : width == 64  ? scores_of<4>
                            : width == 96  ? scores_of<6>
                            : width == 128 ? scores_of<8>
                                           : scores_of<0>;
    scores_by_width(queries, query_stride, count, keys, scores, score_stride);
}

// exp(x - top) of a vector of numbers, in place, and their sums.
__attribute__((noinline)) static void raise(float *x, float top, lanes &sums) {
    for (int64_t i = 0; i < LANES; i++) x[i] = fast_exp(x[i] - top);
    sums += *(const lanes *)x;
}

float attention_softmax(float *x, int64_t count) {
    float top = largest(x, count);
    lanes sums = {};
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) raise(x + n, top, sums);
    if (n < count) {
        float rest[LANES];
        std::fill(rest, rest + LANES, -INFINITY);
        memcpy(rest, x + n, (count - n) * sizeof(float));
        raise(rest, top, sums);
        memcpy(x + n, rest, (count - n) * sizeof(float));
    }
    float total = sum_of(sums);
    for (n = 0; n < count; n++) x[n] /= total;
    return top + logf(total);
}
