/* Attention of single queries over paged keys and values, float32; called by cpu_kernels.py.
 *
 * One call serves every decoding sequence of a step in one layer. A sequence's KV is given as runs
 * of consecutive slots, so it is read where it lies, at the speed of memory, however scattered its
 * blocks are. Softmax is computed online (Milakov and Gimelshein 2018), a tile of keys at a time.
 *
 *   q, out   [sequences][kv_heads * group][dim], rows `stride` floats apart
 *   k, v     [kv_heads][slots][dim]
 *   runs     pairs (first slot, length); sequence s owns pairs first_run[s] .. first_run[s+1]-1
 */
#include "cpu_vec.h"

#define TILE 32 /* keys */
#define MAX_GROUP 8
#define MAX_LANES 16 /* vectors of 16 floats in a head: dim <= 256 */


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

