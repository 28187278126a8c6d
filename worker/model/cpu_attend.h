/* The arithmetic of cpu_attention.c: the queries of one KV head against a unit of its keys and
 * values. With AVX-512 a query keeps its registers while keys come to it one by one. Fewer and
 * narrower registers are for the sums of a few queries with a few keys. */
#ifndef HEADWATER_ATTEND_H
#define HEADWATER_ATTEND_H

#define LINE 16 /* floats of a line of the cache */
#define SUMS (LANES == 16 ? 24 : 12)     /* vectors that are kept in registers */

#define FOLD(a, b, keep, step)                                                                  \
    ({                                                                                          \
        const vec one_ = (a), two_ = (b);                                                       \
        __builtin_shufflevector(one_, two_, keep(0)) +                                          \
            __builtin_shufflevector(one_, two_, keep(step));                                    \
    })

/* The queries of one KV head, and what they have seen so far. */
struct seen {
    vec highest[MAX_GROUP]; /* in all lanes the same */
    vec total[MAX_GROUP];   /* weights, by lane */
    vec query[MAX_GROUP * MAX_VECS], sum[MAX_GROUP * MAX_VECS]; /* [group][vecs] */
};

INLINE void begin(const struct call *call, int64_t sequence, int64_t head, struct seen *seen,
                  const int group, const int vecs) {
    const float *q = call->q + sequence * call->q_stride + head * group * vecs * LANES;
    for (int i = 0; i < group * vecs; i++) {
        seen->query[i] = load(q + i * LANES) * call->scale;
        seen->sum[i] = (vec){};
    }
    for (int g = 0; g < group; g++) {
        seen->highest[g] = (vec){} - INFINITY;
        seen->total[g] = (vec){};
    }
}

INLINE void finish(const struct call *call, int64_t sequence, int64_t head, const struct seen *seen,
                   const int group, const int vecs) {
    float *out = call->out + sequence * call->out_stride + head * group * vecs * LANES;
    for (int g = 0; g < group; g++) {
        const float total = sum_of(seen->total[g]);
        for (int i = 0; i < vecs; i++)
            store(out + (g * vecs + i) * LANES, seen->sum[g * vecs + i] / total);
    }
}

#define PARTS (UNIT / LANES) /* vectors of the scores of a unit */

/* Scores become weights; those of copies are 1e-38, which is nothing. A new highest score is rare:
 * so long as none is, nobody waits for the largest of a vector. */
INLINE void weigh(struct seen *seen, const struct unit *unit, vec *score, int g, const int vecs) {
    ivec above = (ivec){};
    for (int p = 0; p < PARTS; p++) {
        if (unit->padded) score[p] += load(unit->hidden + p * LANES);
        above |= score[p] > seen->highest[g];
    }
    if (any(above)) {
        vec high = score[0];
        for (int p = 1; p < PARTS; p++) high = larger(high, score[p]);
        high = largest_of(high);
        const float shrink = exp_of(seen->highest[g] - high)[0];
        seen->highest[g] = high;
        seen->total[g] *= shrink;
        for (int i = 0; i < vecs; i++) seen->sum[g * vecs + i] *= shrink;
    }
    for (int p = 0; p < PARTS; p++) {
        score[p] = exp_below(score[p] - seen->highest[g]);
        seen->total[g] += score[p];
    }
}

#if LANES == 16

#define HALVES(o) o, o+1, o+2, o+3, o+4, o+5, o+6, o+7, o+16, o+17, o+18, o+19, o+20, o+21, o+22, o+23
#define QUARTERS(o) o, o+1, o+2, o+3, o+16, o+17, o+18, o+19, o+8, o+9, o+10, o+11, o+24, o+25, o+26, o+27
#define PAIRS(o) o, o+1, o+16, o+17, o+4, o+5, o+20, o+21, o+8, o+9, o+24, o+25, o+12, o+13, o+28, o+29
#define SINGLES(o) o, o+16, o+2, o+18, o+4, o+20, o+6, o+22, o+8, o+24, o+10, o+26, o+12, o+28, o+14, o+30

/* Zen drops fetches it has no room for, so there lines are asked for again. Others drop few, and
 * each fetch takes the place of a load. */
#if defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
#define AGAIN 1
#else
#define AGAIN 0
#endif

/* What is fetched while a head of a unit is attended to: each line a unit ahead (with AGAIN two
 * units, too) into the second level of the cache, and a head ahead into the first. */
struct ahead {
    const float *key, *soon_key, *value, *soon_value; /* of this head, and the one that comes next */
    const int64_t *next, *after_next, *near; /* slots one and two units on; those of the other head */
};
#define NEW_AHEAD(name, heads) struct ahead name

INLINE void aim(struct ahead *ahead, const struct call *call, const struct unit *unit,
                const struct unit *next, const struct unit *after_next, int64_t first, int64_t h,
                int64_t heads, const int vecs) {
    (void)vecs;
    const int64_t now = (first + h) * call->head_stride;
    const int64_t soon = (first + (h + 1) % heads) * call->head_stride;
    *ahead = (struct ahead){call->k + now, call->k + soon, call->v + now,     call->v + soon,
                            next->at,      after_next->at, h + 1 < heads ? unit->at : next->at};
}

INLINE void fetch(const struct ahead *ahead, const float *now, const float *soon, int j, const int vecs) {
    for (int i = 0; i < vecs * LANES; i += LINE) {
        if (AGAIN) __builtin_prefetch(now + ahead->after_next[j] + i, 0, 2);
        __builtin_prefetch(now + ahead->next[j] + i, 0, 2);
        __builtin_prefetch(soon + ahead->near[j] + i, 0, 3);
    }
}

/* While all values of key j are met. */
INLINE void fetch_for_values(struct ahead *ahead, int j, int from, const int n, const int vecs) {
    (void)n;
    if (!from) fetch(ahead, ahead->value, ahead->soon_value, j, vecs);
}

/* The product of a query, query number g of its group, with key j; each key is fetched for once. */
INLINE vec dot(const vec *query, const int64_t *at, const struct ahead *ahead, int j, int g, const int group,
               const int vecs) {
    const float *row = ahead->key + at[j];
    if (j % group == g) fetch(ahead, ahead->key, ahead->soon_key, j, vecs);
    vec sum = query[0] * load(row);
    for (int i = 1; i < vecs; i++) sum += query[i] * load(row + i * LANES);
    return sum;
}

/* Lane j of the result is the product of query and key j: sixteen sums over lanes at once, folded
 * as they come, so that few wait in registers. */
#define DOT(j) dot(query, at, ahead, j, g, group, vecs)
#define DOTS_2(j) FOLD(DOT(j), DOT((j) + 8), HALVES, 8)
#define DOTS_4(j) FOLD(DOTS_2(j), DOTS_2((j) + 4), QUARTERS, 4)
#define DOTS_8(j) FOLD(DOTS_4(j), DOTS_4((j) + 2), PAIRS, 2)
INLINE vec dots(const vec *query, const int64_t *at, const struct ahead *ahead, int g, const int group,
                const int vecs) {
    return FOLD(DOTS_8(0), DOTS_8(1), SINGLES, 1);
}

/* Rows come from the cache for each query: kept, they would go to the stack and back. */
#define REREAD asm volatile("" ::: "memory")

INLINE void find_weights(const struct unit *unit, const float *keys, struct ahead *ahead, struct seen *seen,
                         float weight[][UNIT], const int group, const int vecs) {
    (void)keys;
    for (int g = 0; g < group; g++) {
        REREAD;
        vec score = dots(seen->query + g * vecs, unit->at, ahead, g, group, vecs);
        weigh(seen, unit, &score, g, vecs);
        store(weight[g], score);
    }
}

#else

/* Keys and values of the next unit, as pieces: one head's keys or values of one slot. They are
 * fetched in the order in which a slot has them, a piece of each stretch in turn, and evenly while
 * this unit is computed: the processor's own fetching follows a few streams of addresses. */
struct ahead {
    const float **piece;       /* [heads][2][UNIT] */
    const float *const *turn; /* those to fetch during this head */
};
#define NEW_AHEAD(name, heads)             \
    const float *pieces_[(heads) * 2 * UNIT]; \
    struct ahead name = {pieces_, pieces_}

INLINE void aim(struct ahead *ahead, const struct call *call, const struct unit *unit,
                const struct unit *next, const struct unit *after_next, int64_t first, int64_t h,
                int64_t heads, const int vecs) {
    (void)unit, (void)after_next;
    ahead->turn = ahead->piece + h * 2 * UNIT;
    if (h) return;
    const float *base = call->k + first * call->head_stride, **piece = ahead->piece;
    for (int row = 0; row < TURN; row++)
        for (int64_t part = 0; part < 2 * heads; part++)
            for (int s = 0; s < STREAMS; s++)
                *piece++ = base + next->at[s * TURN + row] + part * vecs * LANES;
}

/* `count` lines from line `from` on of those whose turn it is: half of them during the keys. */
INLINE void fetch(const struct ahead *ahead, const int values, const int from, const int count, const int vecs) {
    const int lines = vecs * LANES / LINE;
    for (int l = from; l < from + count; l++)
        __builtin_prefetch(ahead->turn[values * UNIT + l / lines] + l % lines * LINE, 0, 2);
}

/* While n vectors of value j are met. */
INLINE void fetch_for_values(const struct ahead *ahead, int j, int from, const int n, const int vecs) {
    const int met = (from / n * UNIT + j) * n * LANES; /* floats, before these */
    fetch(ahead, 1, met / LINE, (met + n * LANES) / LINE - met / LINE, vecs);
}

#define TILE 4 /* keys */

/* In a register: left alone, the compiler loads queries again for each key. */
#ifdef __x86_64__
#define KEEP(v) asm("" : "+x"(v))
#else
#define KEEP(v)
#endif

#if LANES == 8
#define EVERY_OTHER(o) o, o+2, o+8, o+10, o+4, o+6, o+12, o+14
#define FOURTHS(v) ((v) + TURNED(v, 4, 5, 6, 7, 0, 1, 2, 3))
#else
#define EVERY_OTHER(o) o, o+2, o+4, o+6
#define FOURTHS(v) (v)
#endif

/* Scores of `queries` queries and TILE keys from key j on. */
INLINE void score_tile(const struct unit *unit, const float *keys, struct ahead *ahead, const vec *query,
                       int j, float score[][UNIT], const int queries, const int vecs) {
    vec sum[MAX_GROUP][TILE];
    const float *row[TILE];
    for (int t = 0; t < TILE; t++) {
        row[t] = keys + unit->at[j + t];
        for (int g = 0; g < queries; g++) sum[g][t] = (vec){};
    }
    for (int i = 0; i < vecs; i++) {
        const int lines = TILE * LANES / LINE;
        if (ahead) fetch(ahead, 0, (j / TILE * vecs + i) * lines, lines, vecs);
        vec q[MAX_GROUP];
        for (int g = 0; g < queries; g++) {
            q[g] = query[g * vecs + i];
            if (g < 2) KEEP(q[g]); /* the third would be one register too many */
        }
        for (int t = 0; t < TILE; t++) {
            vec key = load(row[t] + i * LANES);
            KEEP(key);
            for (int g = 0; g < queries; g++) sum[g][t] += q[g] * key;
        }
    }
    for (int g = 0; g < queries; g++) {
        const vec two = FOLD(sum[g][0], sum[g][1], EVERY_OTHER, 1);
        const vec others = FOLD(sum[g][2], sum[g][3], EVERY_OTHER, 1);
        const vec four = FOLD(two, others, EVERY_OTHER, 1), scores = FOURTHS(four);
        memcpy(&score[g][j], &scores, TILE * sizeof(float));
    }
}

INLINE void find_weights(const struct unit *unit, const float *keys, struct ahead *ahead, struct seen *seen,
                         float weight[][UNIT], const int group, const int vecs) {
    const int queries = group % 3 == 0 ? 3 : group % 2 == 0 ? 2 : 1;
    for (int j = 0; j < UNIT; j += TILE)
        for (int g = 0; g < group; g += queries)
            score_tile(unit, keys, g ? NULL : ahead, seen->query + g * vecs, j, weight + g, queries, vecs);
    for (int g = 0; g < group; g++) {
        vec score[PARTS];
        for (int p = 0; p < PARTS; p++) score[p] = load(weight[g] + p * LANES);
        weigh(seen, unit, score, g, vecs);
        for (int p = 0; p < PARTS; p++) store(weight[g] + p * LANES, score[p]);
    }
}

#endif

/* Vectors of values that all queries of a group keep sums of at once. */
INLINE int at_once(const int group, const int vecs) {
    int n = SUMS / group >= 8 ? 8 : SUMS / group >= 4 ? 4 : SUMS / group >= 2 ? 2 : 1;
    while (vecs % n) n /= 2;
    return n;
}

/* One KV head of a unit. `group` and `vecs` are constants where it matters. */
INLINE void attend(const struct unit *unit, const float *keys, const float *values, struct ahead *ahead,
                   struct seen *seen, const int group, const int vecs) {
    float weight[MAX_GROUP][UNIT];
    find_weights(unit, keys, ahead, seen, weight, group, vecs);
    const int n = at_once(group, vecs);
    for (int from = 0; from < vecs; from += n) {
        vec sum[MAX_GROUP][8];
        for (int g = 0; g < group; g++)
            for (int i = 0; i < n; i++) sum[g][i] = seen->sum[g * vecs + from + i];
        for (int j = 0; j < UNIT; j++) {
            fetch_for_values(ahead, j, from, n, vecs);
            const float *row = values + unit->at[j] + from * LANES;
            for (int i = 0; i < n; i++) {
                const vec value = load(row + i * LANES);
                for (int g = 0; g < group; g++) sum[g][i] += weight[g][j] * value;
            }
        }
        for (int g = 0; g < group; g++)
            for (int i = 0; i < n; i++) seen->sum[g * vecs + from + i] = sum[g][i];
    }
}

#endif
