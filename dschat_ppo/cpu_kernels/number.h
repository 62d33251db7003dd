// Numbers in memory, fp32 or bfloat16, and functions that compilers can vectorise.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef FP32
typedef float number;

static inline float wide(number x) { return x; }

static inline number narrow(float value) { return value; }
#else
typedef uint16_t number; // bfloat16

static inline float wide(number x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Round to the nearest bfloat16, ties to even. NaN stays NaN: rounding up would carry into its sign.
static inline number narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}
#endif

static inline float rounded(float value) { return wide(narrow(value)); }

// The largest of at least one number. Each of 16 lanes has its own, because NaN keeps compilers from reordering.
static inline float largest(const float *x, int64_t count) {
    float most[16], found = x[0];
    for (int i = 0; i < 16; i++) most[i] = x[0];
    int64_t n = 0;
    for (; n + 16 <= count; n += 16)
        for (int i = 0; i < 16; i++) most[i] = x[n + i] > most[i] ? x[n + i] : most[i];
    for (; n < count; n++) found = x[n] > found ? x[n] : found;
    for (int i = 0; i < 16; i++) found = most[i] > found ? most[i] : found;
    return found;
}

// exp by 2^n times a polynomial of the rest (Cephes' expf), because compilers vectorise it and not the library's.
// Relative error below 2e-7 from -86 to 88.7; 0 below, infinity above. NaN stays NaN.
static inline float fast_exp(float x) {
    float n = floorf(x * 1.44269504f + 0.5f);
    // ln 2 in two parts, of which n times the first is exact; fmaf, because compilers may reorder sums and products
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits; // the exponent of p, from 0.7 to 1.5, grows by n; a product with 2^n could overflow where n is 128
    memcpy(&bits, &p, 4);
    bits += (uint32_t)(int32_t)n << 23; // of NaN nothing is added
    float power;
    memcpy(&power, &bits, 4);
    return x < -86.0f ? 0.0f : x > 88.722f ? INFINITY : power;
}
