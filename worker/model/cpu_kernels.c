/* The worker's products for CPUs, float32, and what else is small; called by cpu_kernels.py.
 *
 * Weights lie in panels of PANEL outputs: panel p holds, for each input k, the weights from k to its
 * outputs. A tile of a few rows keeps its sums in registers while the panel streams by. Each sum
 * is built in the order of k whatever the number of rows, so a row does not depend on its batch.
 */
#include "cpu_vec.h"

#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* A tile: ROWS rows of VECS vectors of sums, which with the weights and a factor fill most of the
 * registers. */
#if defined(__AVX512F__)
#define VECS 3
#define ROWS 8
#else /* there are half as many of them */
#define VECS 2
#define ROWS 6
#endif
#define PANEL (LANES * VECS)
#define UNROLLED _Pragma("GCC unroll 8")
#define OUTLINE __attribute__((noinline)) /* once, not in all of its callers: they take long to compile */
#define L2_FLOATS 98304 /* of x that stay in the second cache level beside a panel */
#define LINE 16 /* floats that memory gives at once */
#define LINES ((PANEL + LINE - 1) / LINE) /* of the weights of one input */
#define AHEAD 2048 /* floats */
#define MOST_SPREAD 4 /* passes */

/* Outputs of a panel. */
int64_t headwater_panel(void) { return PANEL; }

/* packed has room for ceil(outputs / PANEL) * PANEL * inputs floats */
void headwater_pack(const float *w, float *packed, int64_t outputs, int64_t inputs) {
    for (int64_t p = 0; p * PANEL < outputs; p++)
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t c = 0; c < PANEL; c++) {
                const int64_t n = p * PANEL + c;
                packed[(p * inputs + k) * PANEL + c] = n < outputs ? w[n * inputs + k] : 0;
            }
}

/* What was seen of a row of a product, by lane: the largest, the first vector that has it, and
 * whether anything was not a number. */
struct seen {
    vec high;
    ivec at, odd;
};

/* What is new of a row: `width` values, of which the first vector is number `first` of its row. They
 * have just been stored, so they are still at hand; vectors of a row come in ascending order. */
static void note(struct seen *seen, const float *made, int64_t width, int32_t first) {
    float padded[PANEL];
    if (width < PANEL) {
        for (int64_t c = 0; c < PANEL; c++) padded[c] = c < width ? made[c] : -INFINITY;
        made = padded;
    }
    for (int i = 0; i < VECS; i++) {
        const vec v = load(made + i * LANES);
        const ivec above = v > seen->high;
        seen->at = (((ivec){} + (first + i)) & above) | (seen->at & ~above);
        seen->high = larger(v, seen->high);
        seen->odd |= v != v;
    }
}

/* The largest of a row seen in parts and the first place that has it; NaN if one is not a number. */
static void conclude(const struct seen *seen, int64_t parts, int64_t stride, float *best, int64_t *where) {
    int odd = 0;
    *best = -INFINITY, *where = 0;
    for (int64_t part = 0; part < parts; part++, seen += stride) {
        odd |= any(seen->odd);
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t at = (int64_t)seen->at[lane] * LANES + lane;
            if (seen->high[lane] > *best || (seen->high[lane] == *best && at < *where))
                *best = seen->high[lane], *where = at;
        }
    }
    if (odd) *best = NAN;
}

/* What a pass over a panel fetches into the second cache level: left alone, a processor is the later
 * with the next weights the more rows they are multiplied with. */
struct fetch {
    const float *from;
    int64_t step; /* floats an input */
};

/* Of pass number `pass` of so many: a part of the next panel, so that memory never rests; or, if
 * that is too large for the cache or there are many passes, what comes next of this one. */
static struct fetch fetched(const float *w, int64_t inputs, int64_t pass, int64_t passes) {
    if (passes == 1 || passes > MOST_SPREAD || inputs * PANEL > L2_FLOATS)
        return (struct fetch){w + AHEAD, PANEL};
    const int64_t step = PANEL / passes;
    return (struct fetch){w + inputs * (PANEL + pass * step), step};
}

#ifndef __clang__
#pragma GCC push_options
#pragma GCC optimize("O2") /* -O3 keeps too much in registers: products of many rows take a tenth longer */
#endif

OUTLINE static void put(float *to, const float *made, const float *bias, int64_t width) {
    for (int64_t c = 0; c < width; c++) to[c] = made[c] + (bias ? bias[c] : 0);
}

INLINE void multiply(const float *x, int64_t x_stride, const float *w, const float *bias, float *out,
                     int64_t out_stride, int64_t inputs, int64_t width, struct fetch fetch, const int lines,
                     const int rows) {
    vec sum[ROWS][VECS];
    UNROLLED for (int m = 0; m < rows; m++)
        UNROLLED for (int i = 0; i < VECS; i++) sum[m][i] = (vec){};
    for (int64_t k = 0; k < inputs; k++) {
        vec weight[VECS];
        UNROLLED for (int i = 0; i < VECS; i++) weight[i] = load(w + k * PANEL + LANES * i);
        UNROLLED for (int i = 0; i < lines; i++) __builtin_prefetch(fetch.from + i * LINE, 0, 2);
        fetch.from += fetch.step;
        UNROLLED for (int m = 0; m < rows; m++) {
            const float factor = x[m * x_stride + k];
            UNROLLED for (int i = 0; i < VECS; i++) sum[m][i] += factor * weight[i];
        }
    }
    UNROLLED for (int m = 0; m < rows; m++) {
        float *to = out + m * out_stride;
        if (width == PANEL && !bias) {
            memcpy(to, sum[m], sizeof sum[m]);
            continue;
        }
        float made[PANEL];
        memcpy(made, sum[m], sizeof made);
        put(to, made, bias, width);
    }
}

/* `seen` is NULL or [threads][rows]: each thread sees some of the columns. */
OUTLINE static void linear(const float *x, int64_t x_stride, const float *packed, const float *bias, float *out,
                           int64_t rows, int64_t outputs, int64_t inputs, int threads, struct seen *seen) {
    int64_t block = L2_FLOATS / inputs / ROWS * ROWS;
    if (block < ROWS) block = ROWS;
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    (void)threads;
    for (int64_t first = 0; first < rows; first += block) {
        const int64_t end = first + block < rows ? first + block : rows;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
        for (int64_t p = 0; p < panels; p++) {
            const float *w = packed + p * inputs * PANEL, *b = bias ? bias + p * PANEL : NULL;
            const int64_t width = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
            struct seen *mine = seen;
#ifdef _OPENMP
            if (seen) mine += omp_get_thread_num() * rows;
#endif
            const int64_t passes = (end - first + ROWS - 1) / ROWS;
            for (int64_t m = first; m < end; m += ROWS) {
                const float *from = x + m * x_stride;
                float *to = out + m * outputs + p * PANEL;
                const struct fetch fetch = fetched(w, inputs, (m - first) / ROWS, passes);
#define MULTIPLY(stride, lines, rows) \
    multiply(from, stride, w, b, to, outputs, inputs, width, fetch, lines, rows)
                switch (end - m) {
                case 1: /* twice the same row: one alone reads memory more slowly */
                    multiply(from, 0, w, b, to, 0, inputs, width, fetch, LINES, 2);
                    break;
                case 2: MULTIPLY(x_stride, LINES, 2); break;
                case 3: MULTIPLY(x_stride, LINES, 3); break;
                case 4: MULTIPLY(x_stride, LINES, 4); break;
                case 5: MULTIPLY(x_stride, LINES, 5); break;
#if ROWS > 6
                case 6: MULTIPLY(x_stride, LINES, 6); break;
                case 7: MULTIPLY(x_stride, LINES, 7); break;
#endif
                default:
                    if (fetch.step > 2 * LINE)
                        MULTIPLY(x_stride, LINES, ROWS);
                    else if (fetch.step > LINE)
                        MULTIPLY(x_stride, 2, ROWS);
                    else
                        MULTIPLY(x_stride, 1, ROWS);
                }
#undef MULTIPLY
                for (int64_t r = m; mine && r < m + ROWS && r < end; r++)
                    note(mine + r, to + (r - m) * outputs, width, (int32_t)(p * VECS));
            }
        }
    }
}

#ifndef __clang__
#pragma GCC pop_options
#endif

/* out[rows][outputs] = x[rows][inputs] . w^T + bias; bias may be NULL. With `best` and `where` also the
 * largest of each row (as headwater_argmax), while it is at hand. Returns 1 if there is no memory. */
int headwater_linear(const float *x, int64_t x_stride, const float *packed, const float *bias, float *out,
                     int64_t rows, int64_t outputs, int64_t inputs, int threads, float *best, int64_t *where) {
    if (!rows) return 0; /* nothing may also be what an allocation of nothing returns */
    const int64_t parts = threads > 1 ? threads : 1;
    struct seen *seen = best ? aligned_alloc(sizeof(vec), (size_t)(parts * rows) * sizeof *seen) : NULL;
    if (best && !seen) return 1;
    for (int64_t i = 0; seen && i < parts * rows; i++) seen[i] = (struct seen){.high = (vec){} - INFINITY};
    linear(x, x_stride, packed, bias, out, rows, outputs, inputs, threads, seen);
    for (int64_t r = 0; seen && r < rows; r++) conclude(seen + r, parts, rows, best + r, where + r);
    free(seen);
    return 0;
}

/* Weights as a decoder layer knows them (cpu_layer.c). */
struct packed {
    const float *weights, *bias;
    int64_t outputs, inputs;
};

/* Returns 0. */
int headwater_packed(const void *weights, const float *x, int64_t x_stride, float *out, int64_t rows,
                     int threads) {
    const struct packed *w = weights;
    return headwater_linear(x, x_stride, w->weights, w->bias, out, rows, w->outputs, w->inputs, threads, NULL,
                            NULL);
}

/* ---- what is small, and called for every layer ---- */

/* out = x / sqrt(mean(x^2) + eps) * (offset + weight), a row at a time; rows of `out` are dense */
void headwater_norm(const float *x, int64_t x_stride, const float *weight, float *out, int64_t rows,
                    int64_t size, float eps, float offset) {
    for (int64_t r = 0; r < rows; r++, x += x_stride, out += size) {
        vec squares = (vec){};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
        float sum = sum_of(squares);
        for (; i < size; i++) sum += x[i] * x[i];
        const float factor = 1.0f / sqrtf(sum / (float)size + eps);
        for (i = 0; i < size; i++) out[i] = x[i] * factor * (offset + weight[i]);
    }
}

/* cache[head][slot[t]][dim] = new[head][t][dim], with the strides of `new` */
void headwater_store(float *cache, int64_t slot_stride, int64_t cache_head_stride, const float *new,
                     int64_t head_stride, int64_t row_stride, const int64_t *slot, int64_t rows,
                     int64_t heads, int64_t dim) {
    for (int64_t t = 0; t < rows; t++)
        for (int64_t h = 0; h < heads; h++)
            memcpy(cache + slot[t] * slot_stride + h * cache_head_stride,
                   new + h * head_stride + t * row_stride, (size_t)dim * sizeof(float));
}

#define STRETCH 512

/* best[r] is the largest of row r and where[r] the first place it has; not a number if one is not */
void headwater_argmax(const float *x, int64_t x_stride, int64_t rows, int64_t size, float *best,
                      int64_t *where) {
    for (int64_t r = 0; r < rows; r++, x += x_stride) {
        float top = -INFINITY;
        int64_t first = 0; /* of the stretch with the largest */
        int strange = 0;
        for (int64_t start = 0; start < size; start += STRETCH) {
            const int64_t end = start + STRETCH < size ? start + STRETCH : size;
            vec high = (vec){} - INFINITY;
            ivec odd = (ivec){};
            int64_t i = start;
            for (; i + LANES <= end; i += LANES) {
                const vec v = load(x + i);
                high = larger(v, high);
                odd |= v != v;
            }
            float here = -INFINITY;
            for (int lane = 0; lane < LANES; lane++) {
                here = high[lane] > here ? high[lane] : here;
                strange |= odd[lane];
            }
            for (; i < end; i++) {
                here = x[i] > here ? x[i] : here;
                strange |= x[i] != x[i];
            }
            if (here > top) top = here, first = start;
        }
        while (first + 1 < size && x[first] != top) first++;
        best[r] = strange ? NAN : top;
        where[r] = first;
    }
}
