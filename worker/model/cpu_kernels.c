/* The worker's two kernels for CPUs, float32; compiled and called by cpu_kernels.py.
 *
 * ---- attention of single queries over paged keys and values ----
 *
 * One call serves every decoding sequence of a step in one layer. A sequence's KV is given as runs
 * of consecutive slots, so it is read where it lies, at the speed of memory, however scattered its
 * blocks are. Softmax is computed online (Milakov and Gimelshein 2018), a tile of keys at a time.
 *
 *   q, out   [sequences][kv_heads * group][dim], rows `stride` floats apart
 *   k, v     [kv_heads][slots][dim]
 *   runs     pairs (first slot, length); sequence s owns pairs first_run[s] .. first_run[s+1]-1
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TILE 32 /* keys */
#define MAX_GROUP 8
#define MAX_LANES 16 /* vectors of 16 floats in a head: dim <= 256 */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));

INLINE vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

#define FOLD(a, b, keep, step)                                                                  \
    ({                                                                                          \
        const vec one_ = (a), two_ = (b);                                                       \
        __builtin_shufflevector(one_, two_, keep(0)) +                                          \
            __builtin_shufflevector(one_, two_, keep(step));                                    \
    })
#define HALVES(o) o, o+1, o+2, o+3, o+4, o+5, o+6, o+7, o+16, o+17, o+18, o+19, o+20, o+21, o+22, o+23
#define QUARTERS(o) o, o+1, o+2, o+3, o+16, o+17, o+18, o+19, o+8, o+9, o+10, o+11, o+24, o+25, o+26, o+27
#define PAIRS(o) o, o+1, o+16, o+17, o+4, o+5, o+20, o+21, o+8, o+9, o+24, o+25, o+12, o+13, o+28, o+29
#define SINGLES(o) o, o+16, o+2, o+18, o+4, o+20, o+6, o+22, o+8, o+24, o+10, o+26, o+12, o+28, o+14, o+30

INLINE vec dot(const vec *query, const float *row, const int lanes) {
    vec sum = query[0] * load(row);
    for (int i = 1; i < lanes; i++) sum += query[i] * load(row + i * 16);
    return sum;
}

/* Lane j of the result is the product of query and row j: sixteen sums over lanes at once, folded
 * as they come, so that few wait in registers. */
#define DOT(i) dot(query, row[i], lanes)
#define DOTS_2(i) FOLD(DOT(i), DOT((i) + 8), HALVES, 8)
#define DOTS_4(i) FOLD(DOTS_2(i), DOTS_2((i) + 4), QUARTERS, 4)
#define DOTS_8(i) FOLD(DOTS_4(i), DOTS_4((i) + 2), PAIRS, 2)
INLINE vec dots(const vec *query, const float *const row[16], const int lanes) {
    return FOLD(DOTS_8(0), DOTS_8(1), SINGLES, 1);
}

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

/* exp for x <= 0, relative error about 1e-7; below -87 it is 0 for all purposes */
INLINE vec exp_of(vec x) {
    const vec lowest = (vec){} - 87.0f;
    ivec low = x < lowest; /* false for what is not a number, which must stay so */
    x = (vec)(((ivec)lowest & low) | ((ivec)x & ~low));
    ivec whole = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, ivec); /* x <= 0 */
    vec n = __builtin_convertvector(whole, vec);
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = (vec){} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((whole + 127) << 23);
}

/* The slots of one sequence in their order, a tile at a time, whatever runs they lie in. */
typedef struct {
    const int64_t *run;
    int64_t runs, at;
} walk;

INLINE int next_tile(walk *from, int64_t slot[TILE]) {
    int n = 0;
    while (from->runs && n < TILE) {
        int64_t take = from->run[1] - from->at;
        if (take > TILE - n) take = TILE - n;
        for (int64_t i = 0; i < take; i++) slot[n++] = from->run[0] + from->at + i;
        from->at += take;
        if (from->at == from->run[1]) {
            from->run += 2;
            from->runs--;
            from->at = 0;
        }
    }
    return n;
}

/* Queries of one KV head against one sequence. `group` and `lanes` are constants where it matters.
 * While keys are read, the values of the same slots are fetched, and the next keys meanwhile. */
INLINE void attend(const float *q, const float *k, const float *v, const int64_t *runs, int64_t n_runs,
                   float *out, float scale, const int group, const int lanes) {
    const int dim = lanes * 16;
    vec query[MAX_GROUP][MAX_LANES], acc[MAX_GROUP][MAX_LANES];
    float highest[MAX_GROUP], total[MAX_GROUP], score[MAX_GROUP][TILE];
    int64_t slots[2][TILE];
    walk from = {runs, n_runs, 0};
    for (int g = 0; g < group; g++) {
        highest[g] = -INFINITY;
        total[g] = 0;
        for (int i = 0; i < lanes; i++) {
            query[g][i] = load(q + g * dim + i * 16) * scale;
            acc[g][i] = (vec){};
        }
    }
    int n = next_tile(&from, slots[0]);
    for (int turn = 0; n; turn ^= 1) {
        const int64_t *slot = slots[turn], *later = slots[turn ^ 1];
        const int n_later = next_tile(&from, slots[turn ^ 1]);
        for (int j = 0; j < n; j += 16) {
            const float *row[16];
            for (int c = 0; c < 16; c++) {
                /* beyond the end the last key is read again, and not counted below */
                const int64_t at = slot[j + c < n ? j + c : n - 1] * dim;
                row[c] = k + at;
                for (int i = 0; i < lanes; i++) __builtin_prefetch(v + at + i * 16, 0, 2);
            }
            for (int g = 0; g < group; g++) store(score[g] + j, dots(query[g], row, lanes));
        }
        const int end = (n + 15) / 16 * 16;
        for (int g = 0; g < group; g++) {
            for (int j = n; j < end; j++) score[g][j] = -INFINITY;
            vec high = (vec){} + highest[g];
            for (int j = 0; j < end; j += 16) high = larger(load(score[g] + j), high);
            high = largest_of(high);
            vec weights = (vec){};
            for (int j = 0; j < end; j += 16) {
                vec w = exp_of(load(score[g] + j) - high);
                store(score[g] + j, w);
                weights += w;
            }
            const float shrink = exp_of(highest[g] - high)[0];
            highest[g] = high[0];
            /* padding of the last vector weighs 1e-38 each: nothing */
            total[g] = total[g] * shrink + sum_of(weights);
            for (int i = 0; i < lanes; i++) acc[g][i] *= shrink;
        }
        for (int j = 0; j < n; j++) {
            const float *row = v + slot[j] * dim;
            if (j < n_later)
                for (int i = 0; i < lanes; i++)
                    __builtin_prefetch(k + later[j] * dim + i * 16, 0, 2);
            for (int i = 0; i < lanes; i++) {
                const vec value = load(row + i * 16);
                for (int g = 0; g < group; g++) acc[g][i] += score[g][j] * value;
            }
        }
        n = n_later;
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < lanes; i++) store(out + g * dim + i * 16, acc[g][i] / total[g]);
}

#define CASE(G, L)                                                                  \
    if (group == (G) && lanes == (L)) {                                             \
        attend(q, k, v, runs, n_runs, out, scale, (G), (L));                        \
        return;                                                                     \
    }

static void attend_any(const float *q, const float *k, const float *v, const int64_t *runs,
                       int64_t n_runs, float *out, float scale, int group, int lanes) {
    CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(1, 8) CASE(2, 8) CASE(3, 8) CASE(4, 8)
    attend(q, k, v, runs, n_runs, out, scale, group, lanes);
}

/* Returns 0, or 1 if the shapes are beyond what is compiled in. */
int headwater_decode(const float *q, int64_t q_stride, const float *k, const float *v, int64_t slots,
                     const int64_t *runs, const int64_t *first_run, float *out, int64_t out_stride,
                     int64_t sequences, int64_t kv_heads, int64_t group, int64_t dim, float scale,
                     int threads) {
    if (group > MAX_GROUP || dim % 16 || dim > 16 * MAX_LANES) return 1;
    const int64_t jobs = sequences * kv_heads;
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
#endif
    for (int64_t job = 0; job < jobs; job++) {
        const int64_t s = job / kv_heads, h = job % kv_heads;
        attend_any(q + s * q_stride + h * group * dim, k + h * slots * dim, v + h * slots * dim,
                   runs + 2 * first_run[s], first_run[s + 1] - first_run[s],
                   out + s * out_stride + h * group * dim, scale, (int)group, (int)(dim / 16));
    }
    return 0;
}

/* ---- products with packed weights ----
 *
 * Weights lie in panels of PANEL outputs: panel p holds, for each input k, the weights from k to its
 * outputs. A tile of a few rows keeps its sums in registers while the panel streams by. Each sum
 * is built in the order of k whatever the number of rows, so a row does not depend on its batch.
 */

/* A tile is ROWS rows of VECS vectors of 16 sums, which fill three quarters of the registers. */
#ifdef __AVX512F__
#define VECS 3
#define ROWS 8
#else /* a vector takes two registers or more, and there are fewer of them */
#define VECS 1
#define ROWS 6
#endif
#define PANEL (16 * VECS)
#define L2_FLOATS 98304 /* of x that stay in the second cache level beside a panel */

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

INLINE void multiply(const float *x, int64_t x_stride, const float *w, const float *bias, float *out,
                     int64_t out_stride, int64_t inputs, int64_t width, const int rows) {
    vec sum[ROWS][VECS];
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < VECS; i++) sum[m][i] = (vec){};
    for (int64_t k = 0; k < inputs; k++) {
        vec weight[VECS];
        for (int i = 0; i < VECS; i++) weight[i] = load(w + k * PANEL + 16 * i);
        for (int m = 0; m < rows; m++) {
            const float factor = x[m * x_stride + k];
            for (int i = 0; i < VECS; i++) sum[m][i] += factor * weight[i];
        }
    }
    for (int m = 0; m < rows; m++) {
        float *to = out + m * out_stride;
        if (width == PANEL && !bias) {
            for (int i = 0; i < VECS; i++) store(to + 16 * i, sum[m][i]);
            continue;
        }
        float made[PANEL];
        memcpy(made, sum[m], sizeof made);
        for (int64_t c = 0; c < width; c++) to[c] = made[c] + (bias ? bias[c] : 0);
    }
}

/* out[rows][outputs] = x[rows][inputs] . w^T + bias; bias may be NULL */
void headwater_linear(const float *x, int64_t x_stride, const float *packed, const float *bias,
                      float *out, int64_t rows, int64_t outputs, int64_t inputs, int threads) {
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
            for (int64_t m = first; m < end; m += ROWS) {
                const float *from = x + m * x_stride;
                float *to = out + m * outputs + p * PANEL;
                switch (end - m) {
                case 1: /* twice the same row: one alone reads memory more slowly */
                    multiply(from, 0, w, b, to, 0, inputs, width, 2);
                    break;
                case 2: multiply(from, x_stride, w, b, to, outputs, inputs, width, 2); break;
                case 3: multiply(from, x_stride, w, b, to, outputs, inputs, width, 3); break;
                case 4: multiply(from, x_stride, w, b, to, outputs, inputs, width, 4); break;
                case 5: multiply(from, x_stride, w, b, to, outputs, inputs, width, 5); break;
#if ROWS > 6
                case 6: multiply(from, x_stride, w, b, to, outputs, inputs, width, 6); break;
                case 7: multiply(from, x_stride, w, b, to, outputs, inputs, width, 7); break;
#endif
                default: multiply(from, x_stride, w, b, to, outputs, inputs, width, ROWS);
                }
            }
        }
    }
}

/* ---- what is small, and called for every layer ---- */

/* out = x / sqrt(mean(x^2) + eps) * (offset + weight), a row at a time; rows of `out` are dense */
void headwater_norm(const float *x, int64_t x_stride, const float *weight, float *out, int64_t rows,
                    int64_t size, float eps, float offset) {
    for (int64_t r = 0; r < rows; r++, x += x_stride, out += size) {
        vec squares = (vec){};
        int64_t i = 0;
        for (; i + 16 <= size; i += 16) squares += load(x + i) * load(x + i);
        float sum = sum_of(squares);
        for (; i < size; i++) sum += x[i] * x[i];
        const float factor = 1.0f / sqrtf(sum / (float)size + eps);
        for (i = 0; i < size; i++) out[i] = x[i] * factor * (offset + weight[i]);
    }
}

/* cache[head][slot[t]][dim] = new[head][t][dim], with the strides of `new` */
void headwater_store(float *cache, int64_t slots, const float *new, int64_t head_stride,
                     int64_t row_stride, const int64_t *slot, int64_t rows, int64_t heads,
                     int64_t dim) {
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < rows; t++)
            memcpy(cache + (h * slots + slot[t]) * dim, new + h * head_stride + t * row_stride,
                   (size_t)dim * sizeof(float));
}

/* best[r] is the largest of row r and where[r] the first place it has; not a number if one is not */
void headwater_argmax(const float *x, int64_t x_stride, int64_t rows, int64_t size, float *best,
                      int64_t *where) {
    for (int64_t r = 0; r < rows; r++, x += x_stride) {
        vec high = (vec){} - INFINITY;
        ivec odd = (ivec){};
        int64_t i = 0;
        for (; i + 16 <= size; i += 16) {
            const vec v = load(x + i);
            high = larger(v, high);
            odd |= v != v;
        }
        float top = largest_of(high)[0];
        int strange = 0;
        for (int lane = 0; lane < 16; lane++) strange |= odd[lane];
        for (; i < size; i++) {
            top = x[i] > top ? x[i] : top;
            strange |= x[i] != x[i];
        }
        int64_t at = 0;
        while (at + 1 < size && x[at] != top) at++;
        best[r] = strange ? NAN : top;
        where[r] = at;
    }
}
