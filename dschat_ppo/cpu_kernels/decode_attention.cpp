// Attention of one new token of each row over the KV cache.
#include "number.h"

static const int64_t GRAIN = 32768; // products per call that justify a second thread

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
    int64_t group = heads / kv_heads, total_keys = 0, most = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t count = lengths[row] + own[row] + 1;
        total_keys += count, most = count > most ? count : most;
    }
#pragma omp parallel if (total_keys * heads * dim > GRAIN)
    {
        std::vector<float> q(group * dim), sums(group * dim), scores(group * most);
#pragma omp for collapse(2) schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < kv_heads; head++) {
                // token t of the row is on line t + before while t < lengths[row], then on line t + after
                int64_t last = lengths[row] + own[row], first = last + 1 > window ? last + 1 - window : 0;
                int64_t count = last + 1 - first, plane = head * capacity;
                int64_t before = plane + shared[row], after = plane + starts[row] - lengths[row];
                memcpy(keys + (last + after) * dim, key + row * key_stride + head * dim, dim * sizeof(number));
                memcpy(values + (last + after) * dim, value + row * value_stride + head * dim, dim * sizeof(number));
                auto at = [&](const number *cached, int64_t n) {
                    int64_t token = first + n;
                    return cached + (token + (token < lengths[row] ? before : after)) * dim;
                };
                const number *given = query + row * query_stride + head * group * dim;
                for (int64_t i = 0; i < group * dim; i++) q[i] = wide(given[i]) * scale, sums[i] = 0;
                for (int64_t n = 0; n < count; n++) {
                    const number *k = at(keys, n);
                    for (int64_t g = 0; g < group; g++) {
                        float score = 0;
                        for (int64_t i = 0; i < dim; i++) score += q[g * dim + i] * wide(k[i]);
                        scores[g * count + n] = score;
                    }
                }
                for (int64_t g = 0; g < group; g++) {
                    float *s = scores.data() + g * count, top = s[0], total = 0;
                    for (int64_t n = 1; n < count; n++) top = s[n] > top ? s[n] : top;
                    for (int64_t n = 0; n < count; n++) total += s[n] = fast_exp(s[n] - top);
                    for (int64_t n = 0; n < count; n++) s[n] /= total;
                }
                for (int64_t n = 0; n < count; n++) {
                    const number *v = at(values, n);
                    for (int64_t g = 0; g < group; g++) {
                        float weight = scores[g * count + n];
                        for (int64_t i = 0; i < dim; i++) sums[g * dim + i] += weight * wide(v[i]);
                    }
                }
                number *result = mixed + (row * heads + head * group) * dim;
                for (int64_t i = 0; i < group * dim; i++) result[i] = narrow(sums[i]);
            }
    }
}

} // extern "C"
