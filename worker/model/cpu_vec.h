/* Vectors of floats, each one register, in GCC's and Clang's own terms. Wider ones would do as well
 * for sums and products, but their shuffles come out a float at a time. */
#ifndef HEADWATER_VEC_H
#define HEADWATER_VEC_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

INLINE vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

/* b where one of them is not a number */
INLINE vec larger(vec a, vec b) {
#if LANES == 8
    return __builtin_ia32_maxps256(a, b);
#else
    ivec first = a > b;
    return (vec)(((ivec)a & first) | ((ivec)b & ~first));
#endif
}

/* combine(v, v with its halves, then quarters, and so on exchanged): the same in all lanes */
#define TURNED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#if LANES == 16
#define ACROSS(v, combine)                                                            \
    v = combine(v, TURNED(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));  \
    v = combine(v, TURNED(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));  \
    v = combine(v, TURNED(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));  \
    v = combine(v, TURNED(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))
#elif LANES == 8
#define ACROSS(v, combine)                                \
    v = combine(v, TURNED(v, 4, 5, 6, 7, 0, 1, 2, 3));    \
    v = combine(v, TURNED(v, 2, 3, 0, 1, 6, 7, 4, 5));    \
    v = combine(v, TURNED(v, 1, 0, 3, 2, 5, 4, 7, 6))
#else
#define ACROSS(v, combine)                    \
    v = combine(v, TURNED(v, 2, 3, 0, 1));    \
    v = combine(v, TURNED(v, 1, 0, 3, 2))
#endif

INLINE vec plus(vec a, vec b) { return a + b; }

INLINE float sum_of(vec v) {
    ACROSS(v, plus);
    return v[0];
}

/* All lanes of the result are the largest of v. */
INLINE vec largest_of(vec v) {
    ACROSS(v, larger);
    return v;
}

/* Whether any lane of the outcome of a comparison is true. */
INLINE int any(ivec v) {
#if LANES == 8
    return __builtin_ia32_movmskps256((vec)v) != 0;
#else
#if LANES == 16
    v |= TURNED(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v |= TURNED(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#endif
    int64_t pair[2], found = 0;
    memcpy(pair, &v, sizeof pair);
    for (int i = 0; i < 2; i++) found |= pair[i];
    return found != 0;
#endif
}

/* exp(r) * 2^whole for |r| up to ln(2) / 2 */
INLINE vec exp_of_rest(vec r, ivec whole) {
    vec p = (vec){} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((whole + 127) << 23);
}

/* exp, relative error about 1e-7; at most 88, and below -87 it is 0 for all purposes */
INLINE vec exp_of(vec x) {
    const vec lowest = (vec){} - 87.0f, highest = (vec){} + 88.0f;
    ivec low = x < lowest, high = x > highest; /* false for what is not a number, and stays so */
    x = (vec)(((ivec)lowest & low) | ((ivec)highest & high) | ((ivec)x & ~(low | high)));
    /* to the nearest whole number: at this size the last bits of the sum are those of 1 */
    const vec shifter = (vec){} + 12582912.0f;
    vec n = (x * 1.44269504088896341f + shifter) - shifter;
    return exp_of_rest((x - n * 0.693359375f) + n * 2.12194440e-4f, __builtin_convertvector(n, ivec));
}

/* exp of what is not above 0, as exp_of; what is not a number stays so. */
INLINE vec exp_below(vec x) {
    x = larger((vec){} - 87.0f, x);
    const vec shifter = (vec){} + 12582912.0f;
    const vec shifted = x * 1.44269504088896341f + shifter, n = shifted - shifter;
    return exp_of_rest((x - n * 0.693359375f) + n * 2.12194440e-4f, __builtin_convertvector(n, ivec));
}

#endif
