/* Attention of a chunk of queries over paged keys and values, float32; called by cpu_kernels.py.
 *
 * The queries of a KV head are rows of two products: with its keys, whose result becomes weights,
 * and of those with its values. Keys and values are brought together a block at a time, wherever
 * their slots lie, and stay in the cache for all rows. Softmax is computed
 * online (Milakov and Gimelshein 2018), block by block.
 *
 *   q, out   row i of query head h begins at i * row_stride + h * head_stride
 *   k, v     slot s of KV head h begins at s * slot_stride + h * kv_head_stride
 *   slots    of positions 0, 1, ...; NULL: they follow one another from first_slot on
 */
#include "cpu_vec.h"

#include <stdlib.h>

#if defined(__AVX512F__)
#define ROWS 8
#define PANEL_VECS 3 /* vectors of scores of a row that are summed at once ... */
#else
#define ROWS 6
#define PANEL_VECS 2
#endif
#define VALUE_VECS 2 /* ... and of values */
#define PANEL (PANEL_VECS * LANES)
#define BLOCK 144 /* keys that are brought together: some panels, in the first level of the cache */
#define MAX_DIM 256
#define UNROLLED _Pragma("GCC unroll 16")

struct call {
    const float *q, *k, *v;
    float *out;
    const int64_t *slots;
    int64_t q_row_stride, q_head_stride, out_row_stride, out_head_stride;
    int64_t slot_stride, kv_head_stride, first_slot;
    int64_t start;  /* position of row 0 */
    int64_t window; /* positions a query sees, its own included; 0: all before it */
    int64_t group, dim;
    float scale;
};

/* What one job works with; rows are ordered by position, then by query head. They are filled up to a
 * multiple of ROWS with queries of nothing: some of them cost less than a row alone. */
struct space {
    float *query;  /* [rows][dim], scaled */
    float *sum;    /* [rows][dim] of weighted values */
    float *highest, *total; /* [rows] */
    float *keys;   /* [BLOCK / PANEL][dim][PANEL] */
    float *values; /* [BLOCK][dim] */
    float score[ROWS][BLOCK];
};

#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

/* Rows become columns: each pass shuffles the first half of the rows into the second like cards. */
INLINE void turn(vec *row) {
    UNROLLED for (int pass = 1; pass < LANES; pass *= 2) {
        vec to[LANES];
        UNROLLED for (int i = 0; i < LANES / 2; i++) {
            to[2 * i] = __builtin_shufflevector(row[i], row[i + LANES / 2], LOW);
            to[2 * i + 1] = __builtin_shufflevector(row[i], row[i + LANES / 2], HIGH);
        }
        UNROLLED for (int i = 0; i < LANES; i++) row[i] = to[i];
    }
}

/* Keys and values of `n` positions from `first` on; behind them the last key again, up to a whole
 * vector of keys. */
static void bring(const struct call *call, const struct space *space, int64_t head, int64_t first, int64_t n) {
    const int64_t dim = call->dim;
    for (int64_t j = 0; j < n; j += LANES) {
        const float *from[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            const int64_t position = first + (j + i < n ? j + i : n - 1);
            const int64_t slot = call->slots ? call->slots[position] : call->first_slot + position;
            const int64_t at = slot * call->slot_stride + head * call->kv_head_stride;
            from[i] = call->k + at;
            if (j + i < n) memcpy(space->values + (j + i) * dim, call->v + at, (size_t)dim * sizeof(float));
        }
        float *key = space->keys + j / PANEL * dim * PANEL + j % PANEL;
        for (int64_t d = 0; d < dim; d += LANES) {
            vec row[LANES];
            UNROLLED for (int i = 0; i < LANES; i++) row[i] = load(from[i] + d);
            turn(row);
            UNROLLED for (int i = 0; i < LANES; i++) store(key + (d + i) * PANEL, row[i]);
        }
    }
}

/* Scores of ROWS rows with the keys of one panel. */
INLINE void score_panel(const float *query, const float *keys, float *score, int64_t dim) {
    vec sum[ROWS][PANEL_VECS];
    UNROLLED for (int m = 0; m < ROWS; m++)
        UNROLLED for (int i = 0; i < PANEL_VECS; i++) sum[m][i] = (vec){};
    for (int64_t d = 0; d < dim; d++) {
        vec key[PANEL_VECS];
        UNROLLED for (int i = 0; i < PANEL_VECS; i++) key[i] = load(keys + d * PANEL + i * LANES);
        UNROLLED for (int m = 0; m < ROWS; m++) {
            const float factor = query[m * dim + d];
            UNROLLED for (int i = 0; i < PANEL_VECS; i++) sum[m][i] += factor * key[i];
        }
    }
    UNROLLED for (int m = 0; m < ROWS; m++)
        UNROLLED for (int i = 0; i < PANEL_VECS; i++) store(score + m * BLOCK + i * LANES, sum[m][i]);
}

/* sum += weights . values, for `vecs` vectors of each row */
INLINE void add_values(const float *weight, const float *values, float *sum, int64_t n, int64_t dim,
                       const int vecs) {
    vec part[ROWS][VALUE_VECS];
    UNROLLED for (int m = 0; m < ROWS; m++)
        UNROLLED for (int i = 0; i < vecs; i++) part[m][i] = load(sum + m * dim + i * LANES);
    for (int64_t j = 0; j < n; j++) {
        vec value[VALUE_VECS];
        UNROLLED for (int i = 0; i < vecs; i++) value[i] = load(values + j * dim + i * LANES);
        UNROLLED for (int m = 0; m < ROWS; m++) {
            const float factor = weight[m * BLOCK + j];
            UNROLLED for (int i = 0; i < vecs; i++) part[m][i] += factor * value[i];
        }
    }
    UNROLLED for (int m = 0; m < ROWS; m++)
        UNROLLED for (int i = 0; i < vecs; i++) store(sum + m * dim + i * LANES, part[m][i]);
}

/* Scores `from` .. `to` of a row become weights; those of other keys up to `n` are nothing. */
static void weigh(float *score, int64_t from, int64_t to, int64_t n, float *highest, float *total, float *sum,
                  int64_t dim) {
    const int64_t end = (n + LANES - 1) / LANES * LANES;
    for (int64_t j = 0; j < from; j++) score[j] = -INFINITY;
    for (int64_t j = to > from ? to : from; j < end; j++) score[j] = -INFINITY;
    if (to > from) {
        vec high = (vec){} - INFINITY;
        for (int64_t j = 0; j < end; j += LANES) high = larger(load(score + j), high);
        const float top = largest_of(high)[0];
        if (top > *highest) {
            const float shrink = exp_of((vec){} + (*highest - top))[0];
            *highest = top;
            *total *= shrink;
            for (int64_t d = 0; d < dim; d++) sum[d] *= shrink;
        }
        vec added = (vec){};
        for (int64_t j = 0; j < end; j += LANES) {
            const vec weight = exp_below(load(score + j) - *highest);
            store(score + j, weight);
            added += weight;
        }
        *total += sum_of(added);
    }
    /* exactly: a hidden value may be large */
    for (int64_t j = 0; j < from; j++) score[j] = 0;
    for (int64_t j = to > from ? to : from; j < end; j++) score[j] = 0;
}

/* ROWS queries from `first` on meet the n keys of the block that begins at position `block`. */
static void meet(const struct call *call, struct space *space, int64_t first, int64_t block, int64_t n) {
    const int64_t dim = call->dim;
    /* positions that the last row sees, and the first one at least */
    const int64_t end = call->start + (first + ROWS - 1) / call->group + 1 - block;
    const int64_t begin = call->window ? call->start + first / call->group + 1 - call->window - block : 0;
    const int64_t most = end < n ? end : n, least = begin > 0 ? begin : 0;
    if (most <= least) return;
    for (int64_t p = least / PANEL; p * PANEL < most; p++)
        score_panel(space->query + first * dim, space->keys + p * dim * PANEL, space->score[0] + p * PANEL, dim);
    for (int m = 0; m < ROWS; m++) {
        const int64_t position = call->start + (first + m) / call->group - block;
        const int64_t to = position + 1 < most ? position + 1 : most;
        const int64_t from = call->window && position + 1 > call->window ? position + 1 - call->window : 0;
        weigh(space->score[m], from < most ? from : most, to, most, space->highest + first + m,
              space->total + first + m, space->sum + (first + m) * dim, dim);
    }
    const float *values = space->values + least * dim, *weight = space->score[0] + least;
    float *sum = space->sum + first * dim;
    int64_t d = 0;
    for (; d + VALUE_VECS * LANES <= dim; d += VALUE_VECS * LANES)
        add_values(weight, values + d, sum + d, most - least, dim, VALUE_VECS);
    for (; d < dim; d += LANES) add_values(weight, values + d, sum + d, most - least, dim, 1);
}

/* So many rows are worked on. */
static int64_t full(int64_t rows) { return (rows + ROWS - 1) / ROWS * ROWS; }

/* Rows first .. first + n of one KV head. */
static void attend(const struct call *call, struct space *space, int64_t head, int64_t first, int64_t n) {
    const int64_t dim = call->dim, group = call->group;
    for (int64_t r = 0; r < full(n); r++) {
        const int64_t row = (first + r) / group, q_head = head * group + (first + r) % group;
        const float *from = call->q + row * call->q_row_stride + q_head * call->q_head_stride;
        for (int64_t d = 0; d < dim; d++) space->query[r * dim + d] = r < n ? from[d] * call->scale : 0;
        memset(space->sum + r * dim, 0, (size_t)dim * sizeof(float));
        space->highest[r] = -INFINITY;
        space->total[r] = 0;
    }
    /* from here on rows are counted from `first`, which begins a position */
    struct call own = *call;
    own.start += first / group;
    const int64_t end = own.start + (n - 1) / group + 1;
    const int64_t begin = own.window && own.start + 1 > own.window ? own.start + 1 - own.window : 0;
    for (int64_t block = begin; block < end; block += BLOCK) {
        const int64_t keys = end - block < BLOCK ? end - block : BLOCK;
        bring(&own, space, head, block, keys);
        for (int64_t r = 0; r < n; r += ROWS) meet(&own, space, r, block, keys);
    }
    for (int64_t r = 0; r < n; r++) {
        const int64_t row = (first + r) / group, q_head = head * group + (first + r) % group;
        float *to = call->out + row * call->out_row_stride + q_head * call->out_head_stride;
        for (int64_t d = 0; d < dim; d++) to[d] = space->sum[r * dim + d] / space->total[r];
    }
}

/* Memory for `rows` rows; NULL if there is none. One piece, freed as one. */
static struct space *new_space(int64_t rows, int64_t dim) {
    const int64_t floats = 2 * rows * dim + 2 * rows + 2 * BLOCK * dim;
    struct space *space = malloc(sizeof *space + (size_t)floats * sizeof(float));
    if (!space) return NULL;
    space->query = (float *)(space + 1);
    space->sum = space->query + rows * dim;
    space->keys = space->sum + rows * dim;
    space->values = space->keys + BLOCK * dim;
    space->highest = space->values + BLOCK * dim;
    space->total = space->highest + rows;
    return space;
}

/* Whether this is faster than torch's kernel: with fewer or narrower registers it is not. */
int headwater_chunk_pays(void) { return LANES == 16; }

/* Row i is position start + i and sees positions 0 .. start + i, or the last `window` of them.
 * Returns 0, 1 if the shapes are beyond what is compiled in, 2 without memory. */
int headwater_chunk(const float *q, int64_t q_row_stride, int64_t q_head_stride, const float *k, const float *v,
                    int64_t slot_stride, int64_t kv_head_stride, const int64_t *slots, int64_t first_slot,
                    float *out, int64_t out_row_stride, int64_t out_head_stride, int64_t rows, int64_t start,
                    int64_t window, int64_t kv_heads, int64_t group, int64_t dim, float scale, int threads) {
    if (dim % LANES || dim > MAX_DIM) return 1;
    const struct call call = {q,
                              k,
                              v,
                              out,
                              slots,
                              q_row_stride,
                              q_head_stride,
                              out_row_stride,
                              out_head_stride,
                              slot_stride,
                              kv_head_stride,
                              first_slot,
                              start,
                              window,
                              group,
                              dim,
                              scale};
    /* each head as a whole, or positions shared out, too, where there are more threads */
    int64_t parts = threads > 1 ? (2 * threads + kv_heads - 1) / kv_heads : 1;
    if (parts > rows) parts = rows;
    const int64_t each = (rows + parts - 1) / parts;
    int failed = 0;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
#endif
    for (int64_t job = 0; job < kv_heads * parts; job++) {
        const int64_t first = job % parts * each, n = rows - first < each ? rows - first : each;
        if (n <= 0) continue;
        struct space *space = new_space(full(n * group), dim);
        if (space) {
            attend(&call, space, job / parts, first * group, n * group);
            free(space);
        } else {
            failed = 2;
        }
    }
    (void)threads;
    return failed;
}
