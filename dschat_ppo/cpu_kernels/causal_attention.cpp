// Causal attention inside parts of rows, and its backward pass, in fp32: a block of queries with all keys that they see.
// The weights are computed again in the backward pass, as in FlashAttention (Dao et al. 2022, appendix B.2):
//
//     P = softmax(scale Q K^T)    dV = P^T dO    dS = P * (dO V^T - rowsum(dO * O))
//     dQ = scale dS K             dK = scale dS^T Q
#include "attention_scores.h"

#include <algorithm>

static const int64_t TILE = 4;   // rows of a register tile, which divide the numbers of a vector
static const int64_t BLOCK = 32; // queries of a block, a multiple of LANES
typedef std::vector<float> buffer;

// Without it, GCC loads a vector again for each product that uses it.
#ifdef __AVX512F__
#define KEEP_IN_REGISTER(x) asm("" : "+v"(x))
#else
#define KEEP_IN_REGISTER(x)
#endif

static inline int64_t padded(int64_t count, int64_t grain) { return (count + grain - 1) / grain * grain; }

// Numbers of a matrix: element (i, k) is at data[i * row + k * column].
struct Left {
    const float *data;
    int64_t row, column;
};

// TILE x (WIDTH vectors) of c = a b, or c += a b.
template <int WIDTH>
static inline void tile(Left a, const float *b, int64_t b_row, float *c, int64_t c_row, int64_t inner, bool add) {
    lanes sum[TILE][WIDTH];
    for (int r = 0; r < TILE; r++)
        for (int v = 0; v < WIDTH; v++) sum[r][v] = add ? *(const lanes *)(c + r * c_row + v * LANES) : lanes{};
    for (int64_t k = 0; k < inner; k++) {
        lanes right[WIDTH];
        for (int v = 0; v < WIDTH; v++) {
            right[v] = *(const lanes *)(b + k * b_row + v * LANES);
            KEEP_IN_REGISTER(right[v]);
        }
        for (int r = 0; r < TILE; r++) {
            float left = a.data[r * a.row + k * a.column];
            for (int v = 0; v < WIDTH; v++) sum[r][v] += left * right[v];
        }
    }
    for (int r = 0; r < TILE; r++)
        for (int v = 0; v < WIDTH; v++) *(lanes *)(c + r * c_row + v * LANES) = sum[r][v];
}

// c (rows, columns) = a (rows, inner) b (inner, columns), or c += a b. Multiples of TILE rows and LANES columns.
static void multiply(Left a, const float *b, int64_t b_row, float *c, int64_t c_row, int64_t rows, int64_t inner,
                     int64_t columns, bool add) {
    for (int64_t j = 0; j < columns;) {
        int64_t vectors = std::min<int64_t>((columns - j) / LANES, 4);
        for (int64_t i = 0; i < rows; i += TILE) {
            Left part = {a.data + i * a.row, a.row, a.column};
            float *to = c + i * c_row + j;
            if (vectors == 4) tile<4>(part, b + j, b_row, to, c_row, inner, add);
            if (vectors == 3) tile<3>(part, b + j, b_row, to, c_row, inner, add);
            if (vectors == 2) tile<2>(part, b + j, b_row, to, c_row, inner, add);
            if (vectors == 1) tile<1>(part, b + j, b_row, to, c_row, inner, add);
        }
        j += vectors * LANES;
    }
}

// A tensor (rows, heads, T, width) whose last dimension is contiguous.
struct Tensor {
    number *data;
    int64_t row, head, token;

    number *at(int64_t r, int64_t h, int64_t t) const { return data + r * row + h * head + t * token; }
};

// Columns that attend to themselves, `start` to `end`, and before them to the columns `seen_start` to `seen_end`.
struct Part {
    int64_t start, end, seen_start, seen_end;

    int64_t seen() const { return seen_end - seen_start; }
    int64_t keys() const { return seen() + end - start; }
    int64_t column(int64_t key) const { return key < seen() ? seen_start + key : start + key - seen(); }
};

struct Shape {
    int64_t rows, heads, key_heads, tokens, width, value_width, window;
    float scale;
};

// fp32 copies of the keys or values that a part sees: (keys, width) and transposed, with zeros up to full tiles.
struct Columns {
    int64_t count, width, count_padded, width_padded;
    buffer straight, transposed;

    void read(const Tensor &from, const Part &part, int64_t row, int64_t head, int64_t width_, bool flip) {
        count = part.keys(), width = width_;
        count_padded = padded(count, LANES), width_padded = padded(width, LANES);
        straight.assign(count_padded * width_padded, 0);
        for (int64_t key = 0; key < count; key++) {
            const number *x = from.at(row, head, part.column(key));
            float *to = straight.data() + key * width_padded;
            for (int64_t i = 0; i < width; i++) to[i] = wide(x[i]);
        }
        if (!flip) return;
        transposed.resize(width * count_padded);
        for (int64_t first = 0; first < count_padded; first += LANES)
            for (int64_t i = 0; i < width; i++)
                for (int64_t key = first; key < first + LANES; key++)
                    transposed[i * count_padded + key] = straight[key * width_padded + i];
    }
};

// A block of queries of a part: their rows as fp32, and the keys that they see.
struct Block {
    int64_t start, count;      // queries, among those of the part
    int64_t first, last, span; // keys that some of them see, and how many, in full tiles

    Block(const Part &part, int64_t start_, int64_t window) : start(start_) {
        count = std::min(BLOCK, part.end - part.start - start);
        last = part.seen() + start + count;
        first = std::max<int64_t>(0, part.seen() + start + 1 - window) / LANES * LANES;
        span = padded(last - first, LANES);
    }

    // The keys, from `first` on, that a query sees.
    int64_t from(const Part &part, int64_t query, int64_t window) const {
        return std::max<int64_t>(0, part.seen() + start + query + 1 - window) - first;
    }
    int64_t to(const Part &part, int64_t query) const { return part.seen() + start + query + 1 - first; }
};

static void read_rows(buffer &to, const Tensor &from, const Part &part, const Block &block, int64_t row, int64_t head,
                      int64_t width, float factor) {
    int64_t stride = padded(width, LANES);
    to.assign(BLOCK * stride, 0);
    for (int64_t query = 0; query < block.count; query++) {
        const number *x = from.at(row, head, part.start + block.start + query);
        for (int64_t i = 0; i < width; i++) to[query * stride + i] = wide(x[i]) * factor;
    }
}

static void write_rows(const buffer &from, const Tensor &to, const Part &part, const Block &block, int64_t row,
                       int64_t head, int64_t width, float factor) {
    int64_t stride = padded(width, LANES);
    for (int64_t query = 0; query < block.count; query++) {
        number *x = to.at(row, head, part.start + block.start + query);
        for (int64_t i = 0; i < width; i++) x[i] = narrow(from[query * stride + i] * factor);
    }
}

// Scores of a block of queries with the keys that it sees, in the order of additions of decoding.
static void score(const buffer &q, const Tensor &key, const Part &part, const Block &block, const Shape &s, int64_t row,
                  int64_t head, float *scores) {
    int64_t stride = padded(s.width, LANES);
    for (int64_t n = block.first; n < block.last;) {
        int64_t end = n < part.seen() ? std::min(part.seen(), block.last) : block.last;
        Keys keys = {key.at(row, head, part.column(n)), key.token, end - n, s.width};
        attention_scores(q.data(), stride, block.count, keys, scores + n - block.first, block.span);
        n = end;
    }
}

static void attend(const Part &part, const Tensor &key, const Columns &values, const Tensor &query,
                   const Tensor &output, float *log_sums, const Shape &s, int64_t row, int64_t head) {
    static thread_local buffer q, weights, mixed;
    int64_t stride = values.width_padded;
    mixed.resize(BLOCK * stride);
    for (int64_t start = 0; start < part.end - part.start; start += BLOCK) {
        Block block(part, start, s.window);
        weights.resize(BLOCK * block.span);
        read_rows(q, query, part, block, row, head, s.width, s.scale);
        int64_t rows = padded(block.count, TILE);
        score(q, key, part, block, s, row, head / (s.heads / s.key_heads), weights.data());
        for (int64_t i = 0; i < block.count; i++) {
            float *w = weights.data() + i * block.span;
            int64_t from = block.from(part, i, s.window), to = block.to(part, i);
            log_sums[part.start + start + i] = attention_softmax(w + from, to - from);
            std::fill(w, w + from, 0.0f);
            std::fill(w + to, w + block.span, 0.0f);
        }
        multiply({weights.data(), block.span, 1}, values.straight.data() + block.first * stride, stride, mixed.data(),
                 stride, rows, block.last - block.first, stride, false);
        write_rows(mixed, output, part, block, row, head, s.value_width, 1);
    }
}

// Adds the gradients of the keys and values that the part sees; writes those of its queries.
static void attend_backward(const Part &part, const Columns &keys, const Columns &values, const Tensor &query,
                            const Tensor &output, const Tensor &gradient, const Tensor &of_query, buffer &of_keys,
                            buffer &of_values, const float *log_sums, const Shape &s, int64_t row, int64_t head) {
    static thread_local buffer q, o, d, weights, of_logits, found;
    found.resize(BLOCK * keys.width_padded);
    for (int64_t start = 0; start < part.end - part.start; start += BLOCK) {
        Block block(part, start, s.window);
        weights.resize(BLOCK * block.span), of_logits.resize(BLOCK * block.span);
        read_rows(q, query, part, block, row, head, s.width, s.scale);
        read_rows(o, output, part, block, row, head, s.value_width, 1);
        read_rows(d, gradient, part, block, row, head, s.value_width, 1);
        int64_t rows = padded(block.count, TILE), wide_keys = keys.width_padded, wide_values = values.width_padded;
        multiply({q.data(), wide_keys, 1}, keys.transposed.data() + block.first, keys.count_padded, weights.data(),
                 block.span, rows, s.width, block.span, false);
        multiply({d.data(), wide_values, 1}, values.transposed.data() + block.first, values.count_padded,
                 of_logits.data(), block.span, rows, s.value_width, block.span, false);
        for (int64_t i = 0; i < rows; i++) {
            float *w = weights.data() + i * block.span, *l = of_logits.data() + i * block.span;
            int64_t from = 0, to = 0;
            if (i < block.count) {
                from = block.from(part, i, s.window), to = block.to(part, i);
                float log_sum = log_sums[part.start + start + i], inner = 0;
                for (int64_t n = 0; n < s.value_width; n++) inner += d[i * wide_values + n] * o[i * wide_values + n];
                for (int64_t key = from; key < to; key++) {
                    w[key] = fast_exp(w[key] - log_sum);
                    l[key] = w[key] * (l[key] - inner);
                }
            }
            for (float *x : {w, l}) {
                std::fill(x, x + from, 0.0f);
                std::fill(x + to, x + block.span, 0.0f);
            }
        }
        multiply({of_logits.data(), block.span, 1}, keys.straight.data() + block.first * wide_keys, wide_keys,
                 found.data(), wide_keys, rows, block.last - block.first, wide_keys, false);
        write_rows(found, of_query, part, block, row, head, s.width, s.scale);
        multiply({of_logits.data(), 1, block.span}, q.data(), wide_keys, of_keys.data() + block.first * wide_keys,
                 wide_keys, block.span, block.count, wide_keys, true);
        multiply({weights.data(), 1, block.span}, d.data(), wide_values,
                 of_values.data() + block.first * wide_values, wide_values, block.span, block.count, wide_values, true);
    }
}

extern "C" {

// Tensors are (rows, heads, T, width); `strides` has the first three strides of each, in the order of the arguments.
// `parts` (count, 4) has the fields of `Part`; `shape` those of `Shape` but the scale. `log_sums` is (rows, heads, T).
void causal_attention(const number *query, const number *key, const number *value, number *output,
                      const int64_t *strides, float *log_sums, const int64_t *parts, int64_t count,
                      const int64_t *shape, float scale) {
    Shape s = {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], scale};
    auto tensor = [&](const number *data, int n) {
        return Tensor{(number *)data, strides[3 * n], strides[3 * n + 1], strides[3 * n + 2]};
    };
    Tensor q = tensor(query, 0), k = tensor(key, 1), v = tensor(value, 2), o = tensor(output, 3);
    int64_t group = s.heads / s.key_heads;
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int64_t row = 0; row < s.rows; row++)
        for (int64_t head = 0; head < s.key_heads; head++)
            for (int64_t p = 0; p < count; p++) {
                static thread_local Columns values;
                const Part &part = ((const Part *)parts)[p];
                values.read(v, part, row, head, s.value_width, false);
                for (int64_t h = head * group; h < (head + 1) * group; h++)
                    attend(part, k, values, q, o, log_sums + (row * s.heads + h) * s.tokens, s, row, h);
            }
}

// The arguments of `causal_attention`, and three more tensors: the gradients that are written. `groups` (count + 1,) has
// the first part of each group, and the number of parts. Parts of a group see columns of that group only.
void causal_attention_backward(const number *query, const number *key, const number *value, const number *output,
                               const number *gradient, number *of_query, number *of_key, number *of_value,
                               const int64_t *strides, const float *log_sums, const int64_t *parts,
                               const int64_t *groups, int64_t count, const int64_t *shape, float scale) {
    Shape s = {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], scale};
    auto tensor = [&](const number *data, int n) {
        return Tensor{(number *)data, strides[3 * n], strides[3 * n + 1], strides[3 * n + 2]};
    };
    Tensor q = tensor(query, 0), k = tensor(key, 1), v = tensor(value, 2), o = tensor(output, 3);
    Tensor d = tensor(gradient, 4), dq = tensor(of_query, 5), dk = tensor(of_key, 6), dv = tensor(of_value, 7);
    int64_t group = s.heads / s.key_heads;
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int64_t row = 0; row < s.rows; row++)
        for (int64_t head = 0; head < s.key_heads; head++)
            for (int64_t g = 0; g < count; g++) {
                static thread_local Columns keys, values;
                static thread_local buffer of_keys, of_values, all_keys, all_values;
                const Part *first = (const Part *)parts + groups[g], *last = (const Part *)parts + groups[g + 1];
                int64_t start = first->start, length = (last - 1)->end - start;
                int64_t wide_keys = padded(s.width, LANES), wide_values = padded(s.value_width, LANES);
                all_keys.assign(length * wide_keys, 0), all_values.assign(length * wide_values, 0);
                for (const Part *part = first; part < last; part++) {
                    keys.read(k, *part, row, head, s.width, true);
                    values.read(v, *part, row, head, s.value_width, true);
                    of_keys.assign(keys.count_padded * wide_keys, 0);
                    of_values.assign(keys.count_padded * wide_values, 0);
                    for (int64_t h = head * group; h < (head + 1) * group; h++)
                        attend_backward(*part, keys, values, q, o, d, dq, of_keys, of_values,
                                        log_sums + (row * s.heads + h) * s.tokens, s, row, h);
                    for (int64_t i = 0; i < keys.count; i++) {
                        int64_t column = part->column(i) - start;
                        for (int64_t n = 0; n < wide_keys; n++)
                            all_keys[column * wide_keys + n] += of_keys[i * wide_keys + n];
                        for (int64_t n = 0; n < wide_values; n++)
                            all_values[column * wide_values + n] += of_values[i * wide_values + n];
                    }
                }
                for (int64_t i = 0; i < length; i++) {
                    number *to_key = dk.at(row, head, start + i), *to_value = dv.at(row, head, start + i);
                    for (int64_t n = 0; n < s.width; n++) to_key[n] = narrow(all_keys[i * wide_keys + n]);
                    for (int64_t n = 0; n < s.value_width; n++) to_value[n] = narrow(all_values[i * wide_values + n]);
                }
            }
}

} // extern "C"
