/* Attention of single queries over paged keys and values, float32; called by cpu_kernels.py.
 *
 * One call serves every decoding sequence of a step in one layer. A sequence's KV is given as runs
 * of consecutive slots, so it is read where it lies, however scattered its blocks are. Softmax is
 * computed online (Milakov and Gimelshein 2018).
 *
 * What decides is how memory is read: all heads of a slot together (their keys and values are
 * neighbours, kvcache.py), what is read next fetched ahead, and evenly, because in a burst most is
 * dropped or waited for. How far ahead and how often was measured, and differs between processors.
 * A sequence is read as STREAMS stretches side by side, some slots of each in turn: where one
 * stretch comes to the end of a block, the others go on. With AVX-512 lines are asked for two or
 * three times; without, once, in the order of addresses of each stretch.
 *
 *   q, out   [sequences][kv_heads * group][dim], rows `stride` floats apart
 *   k, v     slot s of head h begins at s * slot_stride + h * head_stride
 *   runs     pairs (first slot, length); sequence s owns pairs first_run[s] .. first_run[s+1]-1
 */
#include "cpu_vec.h"

#define UNIT 16 /* keys whose weights are found together */
#ifdef __AVX512F__
#define STREAMS 8
#else
#define STREAMS 2
#endif
#define TURN (UNIT / STREAMS) /* slots of each stretch that make a unit */
#define MAX_GROUP 8
#define MAX_DIM 256
#define MAX_VECS (MAX_DIM / LANES) /* in a head */

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

#include "cpu_attend.h"

/* Heads `first` .. `first + heads` of the sequences of `walk`. */
INLINE void attend_all(const struct call *call, struct walk walk, int64_t first, int64_t heads,
                       const int group, const int vecs) {
    struct unit units[3];
    struct seen seen[heads];
    NEW_AHEAD(ahead, heads);
    next_unit(call, &walk, &units[0]);
    next_unit(call, &walk, &units[1]);
    for (int turn = 0; units[turn].sequence >= 0; turn = (turn + 1) % 3) {
        const struct unit *unit = &units[turn], *next = &units[(turn + 1) % 3];
        const struct unit *after_next = &units[(turn + 2) % 3];
        next_unit(call, &walk, &units[(turn + 2) % 3]);
        if (next->sequence < 0) next = unit;
        if (after_next->sequence < 0) after_next = next;
        if (unit->first)
            for (int64_t h = 0; h < heads; h++) begin(call, unit->sequence, first + h, &seen[h], group, vecs);
        for (int64_t h = 0; h < heads; h++) {
            const int64_t now = (first + h) * call->head_stride;
            aim(&ahead, call, unit, next, after_next, first, h, heads, vecs);
            attend(unit, call->k + now, call->v + now, &ahead, &seen[h], group, vecs);
        }
        if (unit->last)
            for (int64_t h = 0; h < heads; h++) finish(call, unit->sequence, first + h, &seen[h], group, vecs);
    }
}

#define CASE(G, D)                                                                  \
    if (group == (G) && vecs == (D) / LANES) {                                      \
        attend_all(call, walk, first, heads, (G), (D) / LANES);                     \
        return;                                                                     \
    }

static void attend_any(const struct call *call, struct walk walk, int64_t first, int64_t heads, int group,
                       int vecs) {
    CASE(1, 64) CASE(2, 64) CASE(3, 64) CASE(4, 64) CASE(1, 128) CASE(2, 128) CASE(3, 128) CASE(4, 128)
    attend_all(call, walk, first, heads, group, vecs);
}

/* Returns 0, or 1 if the shapes are beyond what is compiled in. One thread reads all sequences as
 * one stream; several share them out, or the heads where there are few. */
int headwater_decode(const float *q, int64_t q_stride, const float *k, const float *v, int64_t slot_stride,
                     int64_t head_stride, const int64_t *runs, const int64_t *first_run, float *out,
                     int64_t out_stride, int64_t sequences, int64_t kv_heads, int64_t group, int64_t dim,
                     float scale, int threads) {
    if (group > MAX_GROUP || dim % 16 || dim > MAX_DIM) return 1;
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
        attend_any(&call, walk, job % parts * heads, heads, (int)group, (int)(dim / LANES));
    }
    return 0;
}
