// What decoding and training compute alike, to the last bit: scores of queries with keys, and their softmax.
#pragma once
#include "number.h"

typedef float lanes __attribute__((vector_size(64), aligned(4)));
static const int64_t LANES = 16; // numbers of a vector

// Keys of `width` numbers each: key n is at data[n * stride].
struct Keys {
    const number *data;
    int64_t stride, count, width;
};

// Dot products of `count` queries, query g at queries[g * query_stride], with keys: that with key n goes to
// scores[g * score_stride + n].
void attention_scores(const float *queries, int64_t query_stride, int64_t count, const Keys &keys, float *scores,
                      int64_t score_stride);

// exp(x - largest) / sum of these, in place, of at least one number. Returns the log of the sum of exponentials of x.
float attention_softmax(float *x, int64_t count);
