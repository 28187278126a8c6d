/* Attention of single queries over paged keys and values, float32; called by cpu_kernels.py.
 *
 * One call serves every decoding sequence of a step in one layer. A sequence's KV is given as runs
 * of consecutive slots, so it is read where it lies, however scattered its blocks are. Softmax is
 * computed online (Milakov and Gimelshein 2018).
 *
 * What decides is how memory is read. A sequence is read as STREAMS stretches side by side, some
 * slots of each in turn, all heads of a slot together (their keys and values are neighbours,
 * kvcache.py): where one stretch comes to the end of a block, the others go on. What is read next is
 * fetched, and more than once: a processor that waits for as many lines as it can drops what else
 * is to be fetched, so each line is asked for two units ahead and one unit ahead into the second
 * level of the cache, and a head ahead into the first. Evenly: in a burst most is dropped.
 *
 *   q, out   [sequences][kv_heads * group][dim], rows `stride` floats apart
 *   k, v     slot s of head h begins at s * slot_stride + h * head_stride
 *   runs     pairs (first slot, length); sequence s owns pairs first_run[s] .. first_run[s+1]-1
 */
#include "cpu_vec.h"

#define UNIT 16 /* keys whose scores are one vector */
#define STREAMS 4
#define TURN (UNIT / STREAMS) /* slots of each stretch that make a unit */
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

/* What is asked. */
struct call {
    const float *q, *k, *v;
    float *out;
    const int64_t *runs, *first_run;
    int64_t q_stride, out_stride, slot_stride, head_stride;
    float scale;
};

/* A slot, as a place in the runs. */
struct place {
    int64_t run, in_run;
};

/* Which unit of the sequences `at` .. `end` comes next. */
struct walk {
    int64_t at, end, n;
    int64_t row, rows; /* slots of each stretch that were read, and all of them; row 0: not begun */
    struct place place[STREAMS];
};

/* UNIT keys of one sequence, or copies of others of its keys where there are not so many. */
struct unit {
    int64_t sequence; /* -1 behind the last */
    int64_t at[UNIT]; /* where a slot begins, in floats */
    int first, last;  /* of its sequence */
    int padded;       /* whether there are copies */
    float hidden[UNIT]; /* -infinity for copies, 0 for others */
};

static void begin_sequence(const struct call *call, struct walk *walk) {
    int64_t run = call->first_run[walk->at], before = 0;
    walk->n = 0;
    for (int64_t r = run; r < call->first_run[walk->at + 1]; r++) walk->n += call->runs[2 * r + 1];
    walk->rows = (walk->n + STREAMS - 1) / STREAMS;
    for (int64_t s = 0; s < STREAMS; s++) {
        const int64_t from = s * walk->rows < walk->n ? s * walk->rows : walk->n - 1;
        while (before + call->runs[2 * run + 1] <= from) before += call->runs[2 * run++ + 1];
        walk->place[s] = (struct place){run, from - before};
    }
}

static void next_unit(const struct call *call, struct walk *walk, struct unit *unit) {
    unit->sequence = -1;
    if (walk->at == walk->end) return;
    unit->first = !walk->row;
    if (unit->first) begin_sequence(call, walk);
    unit->sequence = walk->at;
    unit->padded = 0;
    for (int64_t s = 0, j = 0; s < STREAMS; s++) {
        struct place *place = &walk->place[s];
        for (int64_t row = walk->row; row < walk->row + TURN; row++, j++) {
            const int64_t position = s * walk->rows + row, *run = call->runs + 2 * place->run;
            const int copied = row >= walk->rows || position >= walk->n;
            unit->at[j] = (run[0] + place->in_run) * call->slot_stride;
            unit->hidden[j] = copied ? -INFINITY : 0.0f;
            unit->padded |= copied;
            if (position + 1 < walk->n && ++place->in_run == run[1])
                *place = (struct place){place->run + 1, 0};
        }
    }
    walk->row += TURN;
    unit->last = walk->row >= walk->rows;
    if (unit->last) walk->row = 0, walk->at++;
}

/* What is fetched while a head of a unit is attended to, as far as keys or values are concerned. */
struct ahead {
    const float *now, *soon;                 /* this head, and the one that comes next */
    const int64_t *next, *after_next, *near; /* slots one and two units on; those of the other head */
};

INLINE void fetch(const struct ahead *ahead, int j, const int lanes) {
    for (int i = 0; i < lanes; i++) {
        __builtin_prefetch(ahead->now + ahead->after_next[j] + i * 16, 0, 2);
        __builtin_prefetch(ahead->now + ahead->next[j] + i * 16, 0, 2);
        __builtin_prefetch(ahead->soon + ahead->near[j] + i * 16, 0, 3);
    }
}

/* The product of a query, query number g of its group, with key j; each key is fetched for once. */
INLINE vec dot(const vec *query, const int64_t *at, const struct ahead *ahead, int j, int g, const int group,
               const int lanes) {
    const float *row = ahead->now + at[j];
    if (j % group == g) fetch(ahead, j, lanes);
    vec sum = query[0] * load(row);
    for (int i = 1; i < lanes; i++) sum += query[i] * load(row + i * 16);
    return sum;
}

/* Lane j of the result is the product of query and key j: sixteen sums over lanes at once, folded
 * as they come, so that few wait in registers. */
#define DOT(j) dot(query, at, ahead, j, g, group, lanes)
#define DOTS_2(j) FOLD(DOT(j), DOT((j) + 8), HALVES, 8)
#define DOTS_4(j) FOLD(DOTS_2(j), DOTS_2((j) + 4), QUARTERS, 4)
#define DOTS_8(j) FOLD(DOTS_4(j), DOTS_4((j) + 2), PAIRS, 2)
INLINE vec dots(const vec *query, const int64_t *at, const struct ahead *ahead, int g, const int group,
                const int lanes) {
    return FOLD(DOTS_8(0), DOTS_8(1), SINGLES, 1);
}

/* Rows come from the cache for each query: kept, they would go to the stack and back. */
#define REREAD asm volatile("" ::: "memory")

/* The queries of one KV head, and what they have seen so far. */
struct seen {
    vec highest[MAX_GROUP]; /* in all lanes the same */
    vec total[MAX_GROUP];   /* weights, by lane */
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
        seen->highest[g] = (vec){} - INFINITY;
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

/* Weights of 16 keys from their scores; those of copies are 1e-38, which is nothing. A new highest
 * score is rare: so long as none is, nobody waits for the largest of a vector. */
INLINE vec weights(struct seen *seen, vec score, int g, const int lanes) {
    if (any(score > seen->highest[g])) {
        const vec high = largest_of(score);
        const float shrink = exp_of(seen->highest[g] - high)[0];
        seen->highest[g] = high;
        seen->total[g] *= shrink;
        for (int i = 0; i < lanes; i++) seen->sum[g * lanes + i] *= shrink;
    }
    score = exp_below(score - seen->highest[g]);
    seen->total[g] += score;
    return score;
}

/* One KV head of a unit. `group` and `lanes` are constants where it matters. */
INLINE void attend(const struct unit *unit, const struct ahead *keys, const struct ahead *values,
                   struct seen *seen, const int group, const int lanes) {
    float weight[MAX_GROUP][UNIT];
    for (int g = 0; g < group; g++) {
        REREAD;
        vec score = dots(seen->query + g * lanes, unit->at, keys, g, group, lanes);
        if (unit->padded) score += load(unit->hidden);
        store(weight[g], weights(seen, score, g, lanes));
    }
    vec sum[MAX_GROUP][MAX_LANES];
    for (int g = 0; g < group; g++)
        for (int i = 0; i < lanes; i++) sum[g][i] = seen->sum[g * lanes + i];
    for (int j = 0; j < UNIT; j++) {
        fetch(values, j, lanes);
        for (int i = 0; i < lanes; i++) {
            const vec value = load(values->now + unit->at[j] + i * 16);
            for (int g = 0; g < group; g++) sum[g][i] += weight[g][j] * value;
        }
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < lanes; i++) seen->sum[g * lanes + i] = sum[g][i];
}

/* Heads `first` .. `first + heads` of the sequences of `walk`. */
INLINE void attend_all(const struct call *call, struct walk walk, int64_t first, int64_t heads,
                       const int group, const int lanes) {
    struct unit units[3];
    struct seen seen[heads];
    next_unit(call, &walk, &units[0]);
    next_unit(call, &walk, &units[1]);
    for (int turn = 0; units[turn].sequence >= 0; turn = (turn + 1) % 3) {
        const struct unit *unit = &units[turn], *next = &units[(turn + 1) % 3];
        const struct unit *after_next = &units[(turn + 2) % 3];
        next_unit(call, &walk, &units[(turn + 2) % 3]);
        if (next->sequence < 0) next = unit;
        if (after_next->sequence < 0) after_next = next;
        if (unit->first)
            for (int64_t h = 0; h < heads; h++) begin(call, unit->sequence, first + h, &seen[h], group, lanes);
        for (int64_t h = 0; h < heads; h++) {
            const int64_t *near = h + 1 < heads ? unit->at : next->at;
            const int64_t now = (first + h) * call->head_stride;
            const int64_t soon = (first + (h + 1) % heads) * call->head_stride;
            const struct ahead keys = {call->k + now, call->k + soon, next->at, after_next->at, near};
            const struct ahead values = {call->v + now, call->v + soon, next->at, after_next->at, near};
            attend(unit, &keys, &values, &seen[h], group, lanes);
        }
        if (unit->last)
            for (int64_t h = 0; h < heads; h++) finish(call, unit->sequence, first + h, &seen[h], group, lanes);
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
        const struct walk walk = {.at = s, .end = s + together};
        attend_any(&call, walk, job % parts * heads, heads, (int)group, (int)(dim / 16));
    }
    return 0;
}
