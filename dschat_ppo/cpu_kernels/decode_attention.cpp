// Attention of one new token of each row over the KV cache.
#include "attention_scores.h"

#include <algorithm>

static const int64_t GRAIN = 32768; // products per call that justify a second thread

static inline lanes load(const number *x) {
    lanes found;
    for (int64_t i = 0; i < LANES; i++) found[i] = wide(x[i]);
    return found;
}

// The tokens of a row: token t is on line t + before while t < shared, then on line t + after.
struct Lines {
    int64_t before, after, shared, dim;

    const number *at(const number *cached, int64_t token) const {
        return cached + (token + (token < shared ? before : after)) * dim;
    }
};

// Scores of queries (group, dim) with the keys of tokens `first` to `first + count` -> (group, count).
static void score(const float *queries, const number *cached, const Lines &lines, int64_t first, int64_t count,
                  int64_t group, float *scores) {
    int64_t dim = lines.dim, shared = std::min(count, std::max<int64_t>(0, lines.shared - first));
    Keys before = {lines.at(cached, first), dim, shared, dim};
    Keys after = {lines.at(cached, first + shared), dim, count - shared, dim};
    attention_scores(queries, dim, group, before, scores, count);
    attention_scores(queries, dim, group, after, scores + shared, count);
}

// Sums of the values of these tokens, weighted (ROWS, count) -> mixed (ROWS, dim).
template <int VECTORS, int ROWS>
static void mix_rows(const float *weights, const number *values, const Lines &lines, int64_t first, int64_t count,
                     number *mixed) {
    lanes sums[ROWS][VECTORS] = {};
    for (int64_t n = 0; n < count; n++) {
        const number *x = lines.at(values, first + n);
        for (int v = 0; v < VECTORS; v++) {
            lanes part = load(x + v * LANES);
            for (int r = 0; r < ROWS; r++) sums[r][v] += weights[r * count + n] * part;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            for (int64_t i = 0; i < LANES; i++) mixed[r * VECTORS * LANES + v * LANES + i] = narrow(sums[r][v][i]);
}

template <int VECTORS>
static void mix(const float *weights, const number *values, const Lines &lines, int64_t first, int64_t count,
                int64_t group, number *mixed) {
    int64_t g = 0, dim = lines.dim;
    for (; g + 4 <= group; g += 4)
        mix_rows<VECTORS, 4>(weights + g * count, values, lines, first, count, mixed + g * dim);
    for (; g < group; g++) mix_rows<VECTORS, 1>(weights + g * count, values, lines, first, count, mixed + g * dim);
}

template <>
void mix<0>(const float *weights, const number *values, const Lines &lines, int64_t first, int64_t count,
            int64_t group, number *mixed) {
    std::vector<float> sums(lines.dim);
    for (int64_t g = 0; g < group; g++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t n = 0; n < count; n++) {
            const number *x = lines.at(values, first + n);
            for (int64_t i = 0; i < lines.dim; i++) sums[i] += weights[g * count + n] * wide(x[i]);
        }
        for (int64_t i = 0; i < lines.dim; i++) mixed[g * lines.dim + i] = narrow(sums[i]);
    }
}

extern "C" {

// Write one token of each row into the KV cache, and attend from it to the tokens of its row up to its own, at most
// `window` of them. The cache is lines of `dim` numbers; each key head has `capacity` of them for a row, the next head
// the next ones. `places` (4, rows): the number of own tokens before the new one, the line of the first own token, and
// for tokens before these, which rows may share, the line of the first and their number. Strides are numbers between
// rows of query, key and value.
void decode_attention(const number *query, const number *key, const number *value, int64_t query_stride,
                      int64_t key_stride, int64_t value_stride, number *keys, number *values, const int64_t *places,
                      number *mixed, int64_t rows, int64_t heads, int64_t kv_heads, int64_t capacity, int64_t dim,
                      int64_t window, float scale) {
    const int64_t *own = places, *starts = own + rows, *shared = starts + rows, *lengths = shared + rows;
    int64_t group = heads / kv_heads, total = 0, most = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t count = lengths[row] + own[row] + 1;
        total += count, most = count > most ? count : most;
    }
    auto *mixes = dim == 32 ? mix<2> : dim == 64 ? mix<4> : dim == 96 ? mix<6> : dim == 128 ? mix<8> : mix<0>;
#pragma omp parallel if (total * heads * dim > GRAIN)
    {
        std::vector<float> q(group * dim), scores(group * most);
#pragma omp for collapse(2) schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < kv_heads; head++) {
                int64_t last = lengths[row] + own[row], first = last + 1 > window ? last + 1 - window : 0;
                int64_t count = last + 1 - first, plane = head * capacity;
                Lines lines = {plane + shared[row], plane + starts[row] - lengths[row], lengths[row], dim};
                memcpy(keys + (last + lines.after) * dim, key + row * key_stride + head * dim, dim * sizeof(number));
                memcpy(values + (last + lines.after) * dim, value + row * value_stride + head * dim,
                       dim * sizeof(number));
                const number *given = query + row * query_stride + head * group * dim;
                for (int64_t i = 0; i < group * dim; i++) q[i] = wide(given[i]) * scale;
                score(q.data(), keys, lines, first, count, group, scores.data());
                for (int64_t g = 0; g < group; g++) attention_softmax(scores.data() + g * count, count);
                mixes(scores.data(), values, lines, first, count, group, mixed + (row * heads + head * group) * dim);
            }
    }
}

} // extern "C"
