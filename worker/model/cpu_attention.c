/* Attention of single queries over paged keys and values, float32; called by cpu_kernels.py.
 *
 * One call serves every decoding sequence of a step in one layer. A sequence's KV is given as runs
 * of consecutive slots, so it is read where it lies, however scattered its blocks are. Softmax is
 * computed online (Milakov and Gimelshein 2018).
 *
 * What decides is the order in which memory is read. A processor reads ahead along addresses that
 * it sees grow, and loses its way at the end of every block. So a tile of a sequence is read as
 * PIECES stretches side by side, some slots of each in turn, all heads of a slot together (their
 * keys and values are neighbours, kvcache.py), while the same places of the next tile are fetched.
 *
 *   q, out   [sequences][kv_heads * group][dim], rows `stride` floats apart
 *   k, v     slot s of head h begins at s * slot_stride + h * head_stride
 *   runs     pairs (first slot, length); sequence s owns pairs first_run[s] .. first_run[s+1]-1
 */
#include "cpu_vec.h"

#define UNIT 16 /* keys whose scores are one vector */
#define PIECES 4
#define TURN (UNIT / PIECES) /* slots of each piece that make a unit */
#define TILE (UNIT * PIECES)
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

/* Rows come from the cache for each query: kept, they would go to the stack and back. */
#define REREAD asm volatile("" ::: "memory")

/* What is asked. */
struct call {
    const float *q, *k, *v;
    float *out;
    const int64_t *runs, *first_run;
    int64_t q_stride, out_stride, slot_stride, head_stride;
    float scale;
};

/* Where the next tile of the sequences `at` .. `end` begins. */
struct walk {
    int64_t at, end, run, in_run;
    int64_t left; /* slots of the sequence; 0 before it begins */
};

/* Up to TILE keys of one sequence: `rows` of each piece. */
struct tile {
    int64_t sequence, n, rows; /* n = 0 behind the last tile */
    int first, last;           /* of its sequence */
    int64_t at[UNIT * PIECES]; /* [rows][PIECES] where a slot begins, in floats; padded with the last */
};

static void next_tile(const struct call *call, struct walk *walk, struct tile *tile) {
    tile->n = tile->rows = 0;
    if (walk->at == walk->end) return;
    tile->first = !walk->left;
    if (tile->first) {
        walk->run = call->first_run[walk->at];
        walk->in_run = 0;
        for (int64_t r = walk->run; r < call->first_run[walk->at + 1]; r++)
            walk->left += call->runs[2 * r + 1];
    }
    tile->sequence = walk->at;
    tile->n = walk->left < TILE ? walk->left : TILE;
    tile->rows = (tile->n + PIECES - 1) / PIECES;
    int64_t slot = 0;
    for (int64_t piece = 0, n = 0; piece < PIECES; piece++) {
        for (int64_t row = 0; row < tile->rows; row++, n++) {
            if (n < tile->n) {
                const int64_t *run = call->runs + 2 * walk->run;
                slot = run[0] + walk->in_run++;
                if (walk->in_run == run[1]) {
                    walk->run++;
                    walk->in_run = 0;
                }
            }
            tile->at[row * PIECES + piece] = slot * call->slot_stride;
        }
        for (int64_t row = tile->rows; row < UNIT; row++) tile->at[row * PIECES + piece] = slot * call->slot_stride;
    }
    walk->left -= tile->n;
    tile->last = !walk->left;
    walk->at += tile->last;
}

/* The queries of one KV head, and what they have seen so far. */
struct seen {
    float highest[MAX_GROUP];
    vec total[MAX_GROUP]; /* weights, by lane */
    vec query[MAX_GROUP * MAX_LANES], sum[MAX_GROUP * MAX_LANES]; /* [group][lanes] */
};

INLINE void begin(const struct call *call, int64_t sequence, int64_t head, struct seen *seen,
                  const int group, const int lanes) {
    const float *q = call->q + sequence * call->q_stride + head * group * lanes * 16;
    for (int i = 0; i < group * lanes; i++) {
        seen->query[i] = load(q + i * 16) * call->scale;
        seen->sum[i] = (vec){};
    }
    for (int g = 0; g < group; g++) {
        seen->highest[g] = -INFINITY;
        seen->total[g] = (vec){};
    }
}

INLINE void finish(const struct call *call, int64_t sequence, int64_t head, const struct seen *seen,
                   const int group, const int lanes) {
    float *out = call->out + sequence * call->out_stride + head * group * lanes * 16;
    for (int g = 0; g < group; g++) {
        const float total = sum_of(seen->total[g]);
        for (int i = 0; i < lanes; i++)
            store(out + (g * lanes + i) * 16, seen->sum[g * lanes + i] / total);
    }
}

INLINE void fetch(const float *row, const int lanes) {
    for (int i = 0; i < lanes; i++) __builtin_prefetch(row + i * 16, 0, 2);
}

/* Weights of 16 keys from their scores. */
INLINE vec weights(struct seen *seen, vec score, int g, const int lanes) {
    const float high = largest_of(score)[0];
    if (high > seen->highest[g]) {
        const float shrink = exp_of((vec){} + (seen->highest[g] - high))[0];
        seen->highest[g] = high;
        seen->total[g] *= shrink;
        for (int i = 0; i < lanes; i++) seen->sum[g * lanes + i] *= shrink;
    }
    score = exp_below(score - seen->highest[g]);
    seen->total[g] += score;
    return score;
}

/* -infinity for keys behind the end of a sequence: they then weigh 1e-38 each, which is nothing. */
static vec without_padding(vec score, const struct tile *tile, int64_t from) {
    for (int64_t j = 0; j < UNIT; j++) {
        const int64_t row = from + j / PIECES;
        if (row >= tile->rows || j % PIECES * tile->rows + row >= tile->n) score[j] = -INFINITY;
    }
    return score;
}

/* TURN slots of each piece from row `from` on, one KV head; the same of `next` is fetched.
 * `group` and `lanes` are constants where it matters. */
INLINE void attend(const struct call *call, const struct tile *tile, const struct tile *next, int64_t from,
                   int64_t head, struct seen *seen, const int group, const int lanes) {
    const float *k = call->k + head * call->head_stride, *v = call->v + head * call->head_stride;
    const int padded = tile->n < TILE && (from + TURN > tile->rows || tile->n < tile->rows * PIECES);
    const int64_t *at = tile->at + from * PIECES, *later = next->at + from * PIECES;
    float weight[MAX_GROUP][UNIT];
    const float *row[UNIT];
    for (int j = 0; j < UNIT; j++) row[j] = k + at[j];
    for (int g = 0; g < group; g++) {
        for (int j = g; j < UNIT; j += group) fetch(k + later[j], lanes);
        REREAD;
        vec score = dots(seen->query + g * lanes, row, lanes);
        if (padded) score = without_padding(score, tile, from);
        store(weight[g], weights(seen, score, g, lanes));
    }
    vec sum[MAX_GROUP][MAX_LANES];
    for (int g = 0; g < group; g++)
        for (int i = 0; i < lanes; i++) sum[g][i] = seen->sum[g * lanes + i];
    for (int j = 0; j < UNIT; j++) {
        fetch(v + later[j], lanes);
        for (int i = 0; i < lanes; i++) {
            const vec value = load(v + at[j] + i * 16);
            for (int g = 0; g < group; g++) sum[g][i] += weight[g][j] * value;
        }
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < lanes; i++) seen->sum[g * lanes + i] = sum[g][i];
}

/* Heads `first` .. `first + heads` of the sequences of `walk`. */
INLINE void attend_all(const struct call *call, struct walk walk, int64_t first, int64_t heads,
                       const int group, const int lanes) {
    struct tile tiles[2] = {0};
    struct seen seen[heads];
    next_tile(call, &walk, &tiles[0]);
    for (int turn = 0; tiles[turn].n; turn ^= 1) {
        const struct tile *tile = &tiles[turn], *next = &tiles[turn ^ 1];
        next_tile(call, &walk, &tiles[turn ^ 1]);
        if (tile->first)
            for (int64_t h = 0; h < heads; h++) begin(call, tile->sequence, first + h, &seen[h], group, lanes);
        int64_t from = 0;
        for (; from < tile->rows; from += TURN)
            for (int64_t h = 0; h < heads; h++)
                attend(call, tile, next, from, first + h, &seen[h], group, lanes);
        if (tile->last)
            for (int64_t h = 0; h < heads; h++) finish(call, tile->sequence, first + h, &seen[h], group, lanes);
        for (; from < next->rows; from += TURN) /* the next tile is the longer one */
            for (int64_t h = first; h < first + heads; h++)
                for (int j = 0; j < UNIT; j++) {
                    fetch(call->k + next->at[from * PIECES + j] + h * call->head_stride, lanes);
                    fetch(call->v + next->at[from * PIECES + j] + h * call->head_stride, lanes);
                }
    }
}

#define CASE(G, L)                                                                  \
    if (group == (G) && lanes == (L)) {                                             \
        attend_all(call, walk, first, heads, (G), (L));                             \
        return;                                                                     \
    }

static void attend_any(const struct call *call, struct walk walk, int64_t first, int64_t heads, int group,
                       int lanes) {
    CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(1, 8) CASE(2, 8) CASE(3, 8) CASE(4, 8)
    attend_all(call, walk, first, heads, group, lanes);
}

/* Returns 0, or 1 if the shapes are beyond what is compiled in. One thread reads all sequences as
 * one stream; several share them out, or the heads where there are few. */
int headwater_decode(const float *q, int64_t q_stride, const float *k, const float *v, int64_t slot_stride,
                     int64_t head_stride, const int64_t *runs, const int64_t *first_run, float *out,
                     int64_t out_stride, int64_t sequences, int64_t kv_heads, int64_t group, int64_t dim,
                     float scale, int threads) {
    if (group > MAX_GROUP || dim % 16 || dim > 16 * MAX_LANES) return 1;
    const struct call call = {q,        k,          v,           out,         runs, first_run,
                              q_stride, out_stride, slot_stride, head_stride, scale};
    const int64_t together = threads > 1 ? 1 : sequences;
    const int64_t heads = threads > 1 && sequences < 2 * threads ? 1 : kv_heads;
    const int64_t parts = kv_heads / heads, jobs = sequences / together * parts;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
#endif
    for (int64_t job = 0; job < jobs; job++) {
        const int64_t s = job / parts * together;
        const struct walk walk = {s, s + together, 0, 0, 0};
        attend_any(&call, walk, job % parts * heads, heads, (int)group, (int)(dim / 16));
    }
    return 0;
}
