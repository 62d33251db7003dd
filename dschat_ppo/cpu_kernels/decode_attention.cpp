// Attention of one new token of each row over the KV cache.
#include "bf16.h"

static const int64_t GRAIN = 32768; // products per call that justify a second thread

extern "C" {

// Write one token of each row into its slot of the KV cache (rows, kv_heads, capacity, dim), and attend from it to the
// slots up to its own, at most `window` of them. Strides are numbers between rows of query, key and value.
void decode_attention(const bf16 *query, const bf16 *key, const bf16 *value, int64_t query_stride, int64_t key_stride,
                      int64_t value_stride, bf16 *keys, bf16 *values, const int64_t *slots, bf16 *mixed, int64_t rows,
                      int64_t heads, int64_t kv_heads, int64_t capacity, int64_t dim, int64_t window, float scale) {
    int64_t group = heads / kv_heads, most = 0;
    for (int64_t row = 0; row < rows; row++) most += (slots[row] + 1) * heads * dim;
#pragma omp parallel if (most > GRAIN)
    {
        std::vector<float> q(group * dim), sums(group * dim), scores(group * capacity);
#pragma omp for collapse(2) schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < kv_heads; head++) {
                int64_t last = slots[row], first = last + 1 > window ? last + 1 - window : 0, count = last + 1 - first;
                bf16 *k = keys + (row * kv_heads + head) * capacity * dim;
                bf16 *v = values + (row * kv_heads + head) * capacity * dim;
                memcpy(k + last * dim, key + row * key_stride + head * dim, dim * sizeof(bf16));
                memcpy(v + last * dim, value + row * value_stride + head * dim, dim * sizeof(bf16));
                k += first * dim, v += first * dim;
                const bf16 *own = query + row * query_stride + head * group * dim;
                for (int64_t i = 0; i < group * dim; i++) q[i] = wide(own[i]) * scale, sums[i] = 0;
                for (int64_t slot = 0; slot < count; slot++)
                    for (int64_t g = 0; g < group; g++) {
                        float score = 0;
                        for (int64_t i = 0; i < dim; i++) score += q[g * dim + i] * wide(k[slot * dim + i]);
                        scores[g * count + slot] = score;
                    }
                for (int64_t g = 0; g < group; g++) {
                    float *s = scores.data() + g * count, top = s[0], total = 0;
                    for (int64_t slot = 1; slot < count; slot++) top = s[slot] > top ? s[slot] : top;
                    for (int64_t slot = 0; slot < count; slot++) total += s[slot] = fast_exp(s[slot] - top);
                    for (int64_t slot = 0; slot < count; slot++) s[slot] /= total;
                }
                for (int64_t slot = 0; slot < count; slot++)
                    for (int64_t g = 0; g < group; g++) {
                        float weight = scores[g * count + slot];
                        for (int64_t i = 0; i < dim; i++) sums[g * dim + i] += weight * wide(v[slot * dim + i]);
                    }
                bf16 *result = mixed + (row * heads + head * group) * dim;
                for (int64_t i = 0; i < group * dim; i++) result[i] = narrow(sums[i]);
            }
    }
}

} // extern "C"
