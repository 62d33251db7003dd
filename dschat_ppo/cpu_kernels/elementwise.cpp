// Operations in one pass each, where PyTorch makes several passes or many small operations.
// Tensors are contiguous unless a stride is given; `operations.py` says what each function computes.
#include "number.h"

static const int64_t GRAIN = 32768; // numbers per call that justify a second thread, as in PyTorch

#ifdef __clang__
#define ROUND_PRODUCTS
#else
#define ROUND_PRODUCTS __attribute__((optimize("fp-contract=off")))
#endif

// x * cos + rotate_half(x) * sin of a head, in place. Products are rounded before they are added, as in training. The
// attribute does not reach the body of a parallel loop, so this is a function.
ROUND_PRODUCTS static void rotate_head(number *first, const number *cos, const number *sin, int64_t half) {
#ifdef __clang__
#pragma clang fp contract(off)
#endif
    number *second = first + half;
    for (int64_t i = 0; i < half; i++) {
        float a = wide(first[i]), b = wide(second[i]);
        first[i] = narrow(rounded(a * wide(cos[i])) + rounded(-b * wide(sin[i])));
        second[i] = narrow(rounded(b * wide(cos[half + i])) + rounded(a * wide(sin[half + i])));
    }
}

extern "C" {

// weight * (x / sqrt(mean(x^2) + eps)) of each row.
void rms_norm(const number *states, const number *weight, float eps, number *normal, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const number *x = states + row * width;
        number *y = normal + row * width;
        float squares = 0;
        for (int64_t i = 0; i < width; i++) squares += wide(x[i]) * wide(x[i]);
        float factor = 1.0f / sqrtf(squares / width + eps);
        for (int64_t i = 0; i < width; i++) y[i] = narrow(rounded(wide(x[i]) * factor) * wide(weight[i]));
    }
}

// The gradient of the states, and sums of that of the weight over each `chunk` rows, (chunks, width) fp32.
void rms_norm_backward(const number *states, const number *weight, const number *gradient, float eps, number *of_states,
                       float *of_weight, int64_t rows, int64_t width, int64_t chunk) {
#pragma omp parallel for if (rows * width > GRAIN)
    for (int64_t first = 0; first < rows; first += chunk) {
        float *sums = of_weight + first / chunk * width;
        for (int64_t i = 0; i < width; i++) sums[i] = 0;
        for (int64_t row = first; row < first + chunk && row < rows; row++) {
            const number *x = states + row * width, *g = gradient + row * width;
            number *dx = of_states + row * width;
            float squares = 0, inner = 0;
            for (int64_t i = 0; i < width; i++) {
                squares += wide(x[i]) * wide(x[i]);
                inner += wide(g[i]) * wide(weight[i]) * wide(x[i]);
            }
            float factor = 1.0f / sqrtf(squares / width + eps), mean = inner * factor / width;
            for (int64_t i = 0; i < width; i++) {
                float normal = wide(x[i]) * factor;
                dx[i] = narrow(factor * (wide(g[i]) * wide(weight[i]) - normal * mean));
                sums[i] += wide(g[i]) * normal;
            }
        }
    }
}

// Rotate the first `heads` of `all` heads in place: x * cos + rotate_half(x) * sin. Angles of row r are at r * stride.
void rotate(number *values, const number *cos, const number *sin, int64_t stride, int64_t rows, int64_t heads,
            int64_t all, int64_t dim) {
#pragma omp parallel for if (rows * heads * dim > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const number *c = cos + row * stride, *s = sin + row * stride;
        for (int64_t head = 0; head < heads; head++) rotate_head(values + (row * all + head) * dim, c, s, dim / 2);
    }
}

// silu(gate) * up of each row. The rows of gate and up are `stride` numbers apart, those of the product `width`.
void swiglu(const number *gate, const number *up, number *product, int64_t rows, int64_t width, int64_t stride) {
#pragma omp parallel for if (rows * width > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const number *a = gate + row * stride, *b = up + row * stride;
        number *p = product + row * width;
        for (int64_t i = 0; i < width; i++) {
            float x = wide(a[i]);
            p[i] = narrow(rounded(x / (1.0f + fast_exp(-x))) * wide(b[i]));
        }
    }
}

// The gradients of gate and up, all tensors contiguous.
void swiglu_backward(const number *gate, const number *up, const number *gradient, number *of_gate, number *of_up,
                     int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = row * width;
        const number *a = gate + first, *b = up + first, *g = gradient + first;
        number *da = of_gate + first, *db = of_up + first;
        for (int64_t i = 0; i < width; i++) {
            float x = wide(a[i]), s = 1.0f / (1.0f + fast_exp(-x));
            da[i] = narrow(wide(g[i]) * wide(b[i]) * s * (1.0f + x * (1.0f - s)));
            db[i] = narrow(wide(g[i]) * x * s);
        }
    }
}

} // extern "C"
