/* Vectors of 16 floats, in GCC's and Clang's own terms: one register with AVX-512, several without. */
#ifndef HEADWATER_VEC_H
#define HEADWATER_VEC_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));

INLINE vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

INLINE vec larger(vec a, vec b) {
    ivec first = a > b;
    return (vec)(((ivec)a & first) | ((ivec)b & ~first));
}

#define TURN_8 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define TURN_4 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define TURN_2 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#define TURN_1 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14

INLINE float sum_of(vec v) {
    v += __builtin_shufflevector(v, v, TURN_8);
    v += __builtin_shufflevector(v, v, TURN_4);
    v += __builtin_shufflevector(v, v, TURN_2);
    v += __builtin_shufflevector(v, v, TURN_1);
    return v[0];
}

/* All lanes of the result are the largest of v. */
INLINE vec largest_of(vec v) {
    v = larger(v, __builtin_shufflevector(v, v, TURN_8));
    v = larger(v, __builtin_shufflevector(v, v, TURN_4));
    v = larger(v, __builtin_shufflevector(v, v, TURN_2));
    return larger(v, __builtin_shufflevector(v, v, TURN_1));
}

/* Whether any lane is not 0. */
INLINE int any(ivec v) {
    v |= __builtin_shufflevector(v, v, TURN_8);
    v |= __builtin_shufflevector(v, v, TURN_4);
    int64_t halves[2];
    memcpy(halves, &v, sizeof halves);
    return (halves[0] | halves[1]) != 0;
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
