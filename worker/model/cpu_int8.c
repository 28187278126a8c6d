/* The worker's int8 products for CPUs with AVX512-VNNI or AVX2; compiled and called by cpu_int8.py.
 *
 * Rows of float32 are rounded here, each with a scale of its own, to -127 .. 127. With VNNI they are
 * bytes 1 .. 255 that stand for it: the instruction multiplies unsigned with signed bytes. What the
 * 128 too much adds is the same for every row, 128 times the sum of a channel's weights, and is taken
 * off at the start. AVX2's product of bytes saturates at 16 bits, so there both are widened to 16.
 *
 * Weights lie in panels of PANEL outputs: panel p holds, for each GROUP inputs, their weights to
 * output 0, then to output 1, and so on, so a vector feeds WIDTH sums. A tile of up to six rows
 * keeps its sums in registers while the panel streams by. Sums are exact, so a row does not depend
 * on its batch.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define WIDTH 16 /* sums of a vector */
#define VECS 4   /* vectors of sums a row: with six rows they fill 24 of 32 registers */
#define GROUP 4
#define MIDDLE 128
typedef uint8_t level;
#else
#define WIDTH 8
#define VECS 2 /* 12 of 16 */
#define GROUP 2
#define MIDDLE 0
typedef int16_t level;
#endif
#define PANEL (WIDTH * VECS)
#define ROWS 6
#define LEVELS 127
#define TINY 1e-30f      /* in place of the peak of a row of zeros */
#define L2_BYTES 393216  /* of rounded rows that stay in the second cache level beside a panel */
#define AHEAD 8192       /* bytes of weights: left alone, a processor fetches them later the more rows there are */
#define UNROLLED _Pragma("GCC unroll 6") /* or sums would lie in memory */
#define INLINE static inline __attribute__((always_inline))

/* What belongs to the weights. Arrays are as long as the outputs of all panels. */
struct layer {
    const int8_t *weights;
    const int32_t *offsets;
    const float *scales, *bias;
    int64_t outputs, inputs;
};

/* Outputs of a panel. */
int64_t headwater_int8_panel(void) { return PANEL; }

/* w [outputs][inputs]; packed and offsets are zeros before */
void headwater_int8_pack(const int8_t *w, int8_t *packed, int32_t *offsets, int64_t outputs,
                         int64_t inputs) {
    const int64_t depth = (inputs + 3) / 4 * 4;
    for (int64_t n = 0; n < outputs; n++)
        for (int64_t k = 0; k < inputs; k++) {
            const int8_t weight = w[n * inputs + k];
            packed[n / PANEL * PANEL * depth + k / GROUP * GROUP * PANEL + n % PANEL * GROUP + k % GROUP] = weight;
            offsets[n] -= MIDDLE * weight;
        }
}

#ifdef __AVX2__
#include <immintrin.h>

/* Whether this CPU has the instructions. */
int headwater_int8_possible(void) { return 1; }

#if WIDTH == 16

/* Those of 16 that are among `left` more. */
INLINE __mmask16 lanes(int64_t left) {
    return left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

/* Rounds a row to bytes and returns the size of a step; not a number if one of them is none. */
static float rounded(const float *x, uint8_t *to, int64_t inputs, int64_t depth) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), middle = _mm512_set1_epi32(MIDDLE);
    /* magnitudes are in the order of their bits, and what is no number comes last */
    __m512i high = _mm512_setzero_si512();
    for (int64_t k = 0; k < inputs; k += 16) {
        const __m512 part = _mm512_maskz_loadu_ps(lanes(inputs - k), x + k);
        high = _mm512_max_epi32(high, _mm512_and_si512(_mm512_castps_si512(part), magnitude));
    }
    const int32_t bits = _mm512_reduce_max_epi32(high);
    float peak;
    memcpy(&peak, &bits, sizeof peak);
    if (!(peak < INFINITY)) {
        memset(to, MIDDLE, (size_t)depth);
        return NAN;
    }
    if (peak < TINY) peak = TINY;
    const __m512 factor = _mm512_set1_ps(LEVELS / peak);
    for (int64_t k = 0; k < inputs; k += 16) {
        const __mmask16 used = lanes(inputs - k);
        const __m512 part = _mm512_mul_ps(_mm512_maskz_loadu_ps(used, x + k), factor);
        const __m512i level =
            _mm512_cvt_roundps_epi32(part, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm512_mask_cvtepi32_storeu_epi8(to + k, used, _mm512_add_epi32(level, middle));
    }
    memset(to + inputs, MIDDLE, (size_t)(depth - inputs));
    return peak / LEVELS;
}

/* sum += bytes . weights. GCC 12 keeps copies of the sums on the stack with the intrinsic. */
INLINE void add_products(__m512i *sum, __m512i bytes, __m512i weights) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(bytes), "v"(weights));
}

/* `rows` rows of one panel; `out` is where its first output goes. With `apart` 0 instead of 1 they
 * are all the same row. */
INLINE void multiply(const uint8_t *x, const float *steps, const struct layer *layer, int64_t panel,
                     float *out, const int rows, const int apart) {
    const int64_t depth = (layer->inputs + 3) / 4 * 4, first = panel * PANEL;
    const int8_t *w = layer->weights + first * depth;
    __m512i sum[ROWS][VECS];
    UNROLLED for (int m = 0; m < rows; m++)
        UNROLLED for (int i = 0; i < VECS; i++) sum[m][i] = _mm512_loadu_si512(layer->offsets + first + 16 * i);
    for (int64_t k = 0; k < depth; k += 4, w += 4 * PANEL) {
        __m512i weight[VECS];
        UNROLLED for (int i = 0; i < VECS; i++) weight[i] = _mm512_loadu_si512(w + 64 * i);
        UNROLLED for (int i = 0; i < VECS; i++) __builtin_prefetch(w + 64 * i + AHEAD, 0, 2);
        UNROLLED for (int m = 0; m < rows; m++) {
            int32_t four;
            memcpy(&four, x + m * apart * depth + k, sizeof four);
            const __m512i bytes = _mm512_set1_epi32(four);
            UNROLLED for (int i = 0; i < VECS; i++) add_products(&sum[m][i], bytes, weight[i]);
        }
    }
    UNROLLED for (int m = 0; m < rows; m++) {
        const __m512 step = _mm512_set1_ps(steps[m * apart]);
        UNROLLED for (int i = 0; i < VECS; i++) {
            const int64_t at = first + 16 * i;
            const __m512 made = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[m][i]),
                                              _mm512_loadu_ps(layer->scales + at));
            _mm512_mask_storeu_ps(out + m * apart * layer->outputs + 16 * i,
                                  lanes(layer->outputs - at),
                                  _mm512_fmadd_ps(made, step, _mm512_loadu_ps(layer->bias + at)));
        }
    }
}

#else

/* Rounds a row and returns the size of a step; not a number if one of them is none. */
static float rounded(const float *x, level *to, int64_t inputs, int64_t depth) {
    int32_t high = 0; /* magnitudes are in the order of their bits, and what is no number comes last */
    for (int64_t k = 0; k < inputs; k++) {
        int32_t bits;
        memcpy(&bits, x + k, sizeof bits);
        bits &= 0x7fffffff;
        high = bits > high ? bits : high;
    }
    float peak;
    memcpy(&peak, &high, sizeof peak);
    memset(to, 0, (size_t)depth * sizeof *to);
    if (!(peak < INFINITY)) return NAN;
    if (peak < TINY) peak = TINY;
    const float factor = LEVELS / peak, shifter = 12582912.0f; /* whose last bit is that of 1 */
    for (int64_t k = 0; k < inputs; k++) {
        const float shifted = x[k] * factor + shifter;
        to[k] = (level)(int32_t)(shifted - shifter);
    }
    return peak / LEVELS;
}

typedef int32_t two_levels __attribute__((may_alias, aligned(2)));

/* sum += levels . weights. In the order written: GCC 12 would load all levels of a tile first, and
 * keep sums on the stack. */
INLINE void add_products(__m256i *sum, __m256i levels, __m256i weights) {
    __m256i products;
    __asm__ volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
                     : "+x"(*sum), "=&x"(products)
                     : "x"(levels), "x"(weights));
}

/* As the other. */
INLINE void multiply(const level *x, const float *steps, const struct layer *layer, int64_t panel,
                     float *out, const int rows, const int apart) {
    const int64_t depth = (layer->inputs + 3) / 4 * 4, first = panel * PANEL;
    const int8_t *w = layer->weights + first * depth;
    __m256i sum[ROWS][VECS];
    UNROLLED for (int m = 0; m < rows; m++)
        UNROLLED for (int i = 0; i < VECS; i++) sum[m][i] = _mm256_setzero_si256();
    for (int64_t k = 0; k < depth; k += GROUP, w += GROUP * PANEL) {
        __m256i weight[VECS];
        UNROLLED for (int i = 0; i < VECS; i++)
            weight[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + GROUP * WIDTH * i)));
        __builtin_prefetch(w + AHEAD, 0, 2);
        UNROLLED for (int m = 0; m < rows; m++) {
            __m256i levels;
            const two_levels *two = (const void *)(x + m * apart * depth + k);
            __asm__ volatile("vpbroadcastd %1, %0" : "=x"(levels) : "m"(*two));
            UNROLLED for (int i = 0; i < VECS; i++) add_products(&sum[m][i], levels, weight[i]);
        }
    }
    UNROLLED for (int m = 0; m < rows; m++) {
        const __m256 step = _mm256_set1_ps(steps[m * apart]);
        UNROLLED for (int i = 0; i < VECS; i++) {
            const int64_t at = first + WIDTH * i, left = layer->outputs - at;
            const __m256 made = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[m][i]), _mm256_loadu_ps(layer->scales + at));
            const __m256 moved = _mm256_add_ps(_mm256_mul_ps(made, step), _mm256_loadu_ps(layer->bias + at));
            float *to = out + m * apart * layer->outputs + WIDTH * i;
            if (left >= WIDTH) _mm256_storeu_ps(to, moved);
            else if (left > 0) memcpy(to, &moved, (size_t)left * sizeof(float));
        }
    }
}

#endif

static void multiply_any(const level *x, const float *steps, const struct layer *layer,
                         int64_t panel, float *out, int64_t rows) {
    switch (rows) {
    case 1: /* twice the same row: one alone reads memory more slowly */
        multiply(x, steps, layer, panel, out, 2, 0);
        break;
    case 2: multiply(x, steps, layer, panel, out, 2, 1); break;
    case 3: multiply(x, steps, layer, panel, out, 3, 1); break;
    case 4: multiply(x, steps, layer, panel, out, 4, 1); break;
    case 5: multiply(x, steps, layer, panel, out, 5, 1); break;
    default: multiply(x, steps, layer, panel, out, 6, 1);
    }
}

/* out[rows][outputs] = x[rows][inputs] . w^T + bias; rows of x lie x_stride floats apart.
 * Returns 0, or 1 without memory. */
int headwater_int8_linear(const void *weights, const float *x, int64_t x_stride, float *out,
                          int64_t rows, int threads) {
    const struct layer *layer = weights;
    const int64_t inputs = layer->inputs, outputs = layer->outputs, depth = (inputs + 3) / 4 * 4;
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    int64_t block = L2_BYTES / (int64_t)sizeof(level) / depth / ROWS * ROWS;
    if (block < ROWS) block = ROWS;
    if (block > rows) block = rows;
    level *levels = malloc((size_t)(block * depth) * sizeof *levels);
    float *steps = malloc((size_t)block * sizeof(float));
    const int failed = block && !(levels && steps);
    (void)threads;
    for (int64_t first = 0; first < rows && !failed; first += block) {
        const int64_t n = first + block < rows ? block : rows - first;
        const float *from = x + first * x_stride;
        float *to = out + first * outputs;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n > ROWS)
#endif
        for (int64_t m = 0; m < n; m++)
            steps[m] = rounded(from + m * x_stride, levels + m * depth, inputs, depth);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
        for (int64_t p = 0; p < panels; p++)
            for (int64_t m = 0; m < n; m += ROWS)
                multiply_any(levels + m * depth, steps + m, layer, p, to + m * outputs + p * PANEL,
                             n - m);
    }
    free(levels);
    free(steps);
    return failed;
}

#else

int headwater_int8_possible(void) { return 0; }

int headwater_int8_linear(const void *weights, const float *x, int64_t x_stride, float *out,
                          int64_t rows, int threads) {
    (void)weights, (void)x, (void)x_stride, (void)out, (void)rows, (void)threads;
    return 1;
}

#endif
